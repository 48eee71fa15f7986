"""RUN/data/prompts.jsonl: prompts from the sources and, Magpie style, by the target itself."""

import json
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from data.benchmarks import benchmark_ngrams
from data.files import write_json
from data.json_lines import cut_last_line, read_lines, write_lines
from data.progress import progress
from data.prompt_rows import Prompt, make_prompt, prompt_ngrams
from data.prompts import PromptReport, magpie_count, stream_prompts
from data.regenerate import Request, generate, magpie_prompt
from data.target import Target
from recipes.data_section import DataSection
from recipes.schema import Recipe

log = logging.getLogger("draftsmith")

MAGPIE_TOKENS = 96  # longest prompt that the target writes


def first_prompt(section: DataSection) -> Iterator[Prompt]:
    """One prompt of the sources, to see that they can be read; none where all are the target's."""
    prompts = stream_prompts(section, benchmark_ngrams(section.decontaminate), PromptReport())
    return islice(prompts, 1)


def make_prompts(recipe: Recipe, target: Target, out_of_time: Callable[[], bool]) -> int:
    """Write prompts.jsonl if it is not there; returns how many prompts it holds."""
    folder, section = recipe.run_dir / "data", recipe.data
    path = folder / "prompts.jsonl"
    if path.exists():
        return sum(1 for _ in read_lines(path))
    blocked, report = benchmark_ngrams(section.decontaminate), PromptReport()
    wanted = magpie_count(section)
    prompts = stream_prompts(section, blocked, report)
    if wanted:
        own = _magpie(recipe, target, wanted, blocked, out_of_time, folder / "magpie.jsonl")
        prompts = _mixed(prompts, own, section.magpie_share)
    count = write_lines(path, prompts)
    write_json(
        path.with_name("prompts_report.json"),
        {**report.as_json(), "magpie": wanted},
    )
    return count


def _mixed(prompts: Iterator[Prompt], own: Iterator[Prompt], own_share: float) -> Iterator[Prompt]:
    """Both kinds by their shares from the start, so that a run cut short has both; none twice."""
    sources, seen, owed = {True: own, False: prompts}, set[str](), 0.0
    while sources:
        owed += own_share
        use_own = True in sources and (owed >= 1 or False not in sources)
        prompt = next(sources[use_own], None)
        if prompt is None:
            del sources[use_own]
            continue
        owed -= use_own
        if prompt["id"] not in seen:
            seen.add(prompt["id"])
            yield prompt


def _magpie(
    recipe: Recipe,
    target: Target,
    wanted: int,
    blocked: set[str],
    out_of_time: Callable[[], bool],
    path: Path,
) -> Iterator[Prompt]:
    """Prompts that the target writes at temperature 1; unfinished, overlapping ones are dropped.

    What it writes is kept in magpie.jsonl as it comes, so that a killed run goes on.
    """
    asked = magpie_prompt(target, recipe.data.template_kwargs)
    cut_last_line(path)
    done = {row["id"] for row in read_lines(path)}
    requests = (
        Request(
            id=f"magpie-{i}",
            prompt_ids=asked.ids,
            max_new_tokens=MAGPIE_TOKENS,
            temperature=1.0,
            seed=recipe.data.seed * 1_000_003 + i,
            stop_ids=asked.stop_ids,
        )
        for i in range(wanted)
        if f"magpie-{i}" not in done
    )
    length, kept = len(asked.ids) + MAGPIE_TOKENS, 0
    with (
        progress(wanted - len(done), "prompts by the target") as advance,
        path.open("a", encoding="utf-8") as file,
    ):
        for answer in generate(
            target, requests, recipe.data.batch_size, length, stop_taking=out_of_time
        ):
            text = str(target.tokenizer.decode(answer.ids, skip_special_tokens=True))
            text, whole = asked.cut(text, answer.finish == "stop")
            prompt = make_prompt("magpie", text, category="magpie")
            fit = whole and len(text.split()) >= 3 and not prompt_ngrams(prompt) & blocked
            line = {"id": answer.request.id, "prompt": prompt if fit else None}
            file.write(json.dumps(line) + "\n")
            file.flush()
            advance(1)
    order = sorted(read_lines(path), key=lambda row: int(row["id"].partition("-")[2]))
    for row in order:
        if row["prompt"] is not None:
            kept += 1
            yield row["prompt"]
    log.info("%d of %d prompts by the target kept", kept, wanted)
