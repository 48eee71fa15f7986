"""Prompts to answers: what is asked, and what the target writes (RUN/data/*.jsonl).

Resumable by conversation after a kill; when what the answers were made from changes, they and the
states captured with them are made again, which is said.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from data.files import read_json, require_disk, stable_hash, write_json
from data.hidden_states import StateStore, bytes_per_token
from data.json_lines import cut_last_line, read_lines
from data.progress import progress
from data.prompt_rows import Prompt
from data.prompt_store import first_prompt, make_prompts
from data.regenerate import generate
from data.served_answers import NO_ANSWER, ask_server
from data.talks import Talk, TalkQueue, start
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger("draftsmith")

SAMPLED = 500  # prompts whose mean length stands for all in the estimate of the disk


def _answers_key(recipe: Recipe, target: Target) -> dict[str, Any]:
    fields = (
        "sources",
        "columns",
        "num_prompts",
        "magpie_share",
        "max_prompt_tokens",
        "max_new_tokens",
        "max_length",
        "max_minutes",
        "max_turns",
        "greedy_share",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "decontaminate",
        "template_kwargs",
    )
    section = recipe.data.model_dump(mode="json")
    server = recipe.data.server
    return {
        "format": 2,
        "target": target.name,
        "target_revision": target.revision,
        "dtype": str(target.dtype),
        "template": stable_hash(target.tokenizer.chat_template),
        "server": None if server is None else [server.api, server.model],
        **{name: section[name] for name in fields},
    }


def _read_manifest(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    stored = read_json(path)
    if not (isinstance(stored, dict) and {"key", "done"} <= stored.keys()):
        raise UserError(f"{path} is damaged; delete it, the answers beside it are kept")
    return stored


@dataclass
class Tally:
    """What one call answered. left_out: prompts without an answer, by reason."""

    num_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def _delete_if_stale(
    recipe: Recipe, target: Target, store: StateStore | None, key: dict[str, Any]
) -> dict[str, Any] | None:
    """The manifest, if it is of this recipe; else what was made from another one goes."""
    folder, section = recipe.run_dir / "data", recipe.data
    stored = _read_manifest(folder / "manifest.json")
    if stored is None or stored["key"] == key:
        return stored
    changed = [k for k in key if stored["key"].get(k) != key[k]]
    # A source or template that cannot be read fails here, before anything is deleted.
    for prompt in first_prompt(section):
        start(prompt, section).request(target.tokenizer, section)
    log.warning("%s: made with other %s; building it again", folder, ", ".join(changed))
    for name in ("prompts.jsonl", "magpie.jsonl", "responses.jsonl"):
        (folder / name).unlink(missing_ok=True)
    if store is not None:
        store.clear()
    return None


def _answered(path: Path, stored: dict[str, Any] | None) -> tuple[set[str], bool]:
    """Ids of the conversations in responses.jsonl, and whether they are all there will be."""
    if cut_last_line(path):
        log.warning("%s: the last line was cut short by a kill and is dropped", path)
    done = {row["id"] for row in read_lines(path)}
    if stored is None or not stored["done"]:
        return done, False
    if len(done) != stored["num_answers"]:
        log.warning(
            "%s holds %d answers, manifest.json says %d: what is missing is answered again",
            path,
            len(done),
            stored["num_answers"],
        )
        return done, False
    return done, True


def answer_prompts(recipe: Recipe, target: Target, store: StateStore | None) -> None:
    """Fill responses.jsonl (and the states, with capture: generate) until done or out of time."""
    folder, section = recipe.run_dir / "data", recipe.data
    manifest, key = folder / "manifest.json", _answers_key(recipe, target)
    path = folder / "responses.jsonl"
    done, complete = _answered(path, _delete_if_stale(recipe, target, store, key))
    if complete:
        return
    write_json(manifest, {"key": key, "done": False})
    started = time.monotonic()

    def out_of_time() -> bool:
        limit = section.max_minutes
        return limit is not None and time.monotonic() - started > 60 * limit

    num_prompts = make_prompts(recipe, target, out_of_time)
    prompts = (p for p in read_prompts(folder) if p["id"] not in done)
    total, begun = num_prompts - len(done), time.monotonic()
    with progress(total, "answers") as advance, path.open("a", encoding="utf-8") as file:

        def write(talk: Talk) -> None:
            file.write(json.dumps(talk.record()) + "\n")
            file.flush()
            done.add(talk.id)
            advance(1)

        if section.server is not None:
            tally = Tally()
            tally.num_tokens = ask_server(
                section, target.tokenizer, prompts, tally.left_out, write, out_of_time
            )
        else:
            tally = _answer_here(recipe, target, prompts, total, store, write, out_of_time)
    seconds = time.monotonic() - begun
    log.info(
        "%d tokens written, %.0f tokens/s", tally.num_tokens, tally.num_tokens / max(seconds, 1e-9)
    )
    for reason, count in tally.left_out.items():
        log.warning("%d prompts have no answer: %s", count, reason)
    write_json(
        manifest,
        {
            "key": key,
            "done": not tally.left_out[NO_ANSWER],  # those are asked again next time
            "num_answers": len(done),
            "left_out": dict(tally.left_out),
            "tokens_per_second": tally.num_tokens / seconds,
        },
    )


def read_prompts(folder: Path) -> Iterator[Prompt]:
    """The prompts of RUN/data, one after another."""
    yield from read_lines(folder / "prompts.jsonl")  # type: ignore[misc]


def _answer_here(
    recipe: Recipe,
    target: Target,
    prompts: Iterator[Prompt],
    num_prompts: int,
    store: StateStore | None,
    write: Callable[[Talk], None],
    out_of_time: Callable[[], bool],
) -> Tally:
    """Answers by the target in this process.

    States are kept of conversations with one answer; those of longer ones are captured later, in a
    pass over the whole row.
    """
    section, tally = recipe.data, Tally()
    capture = None
    if store is not None and section.capture == "generate":
        capture = store.aux_layers
    if capture is not None:
        size = _bytes_of_states(recipe, target, num_prompts, len(capture))
        log.info("states of %d answers need at most %.2f GB", num_prompts, size / 1e9)
        require_disk(recipe.run_dir / "data", size, "target states")
    queue = TalkQueue(prompts, target.tokenizer, section, tally.left_out)
    for answer in generate(
        target,
        queue,
        section.batch_size,
        section.max_length,
        capture,
        None if store is None else store.compute_dtype,
        stop_taking=out_of_time,
    ):
        tally.num_tokens += len(answer.ids)
        text = str(target.tokenizer.decode(answer.ids, skip_special_tokens=True))
        talk = queue.take(
            answer.request.id,
            {"role": "assistant", "content": text},
            {
                "prompt_ids": answer.request.prompt_ids,
                "answer_ids": answer.ids,
                "finish": answer.finish,
            },
        )
        if talk is not None:
            if store is not None and answer.states is not None and len(talk.answers) == 1:
                store.add(talk.id, answer.states)
            write(talk)
    for talk in queue.unfinished():
        write(talk)
    if store is not None:
        store.flush()
    return tally


def _bytes_of_states(recipe: Recipe, target: Target, num_prompts: int, num_aux: int) -> int:
    """Disk for the states of answers to come; prompts by the mean length of the first SAMPLED."""
    section, lengths = recipe.data, []
    sample = islice(read_prompts(recipe.run_dir / "data"), SAMPLED)
    queue = TalkQueue(sample, target.tokenizer, section, Counter())
    while (request := next(queue, None)) is not None:
        lengths.append(len(request.prompt_ids) + request.max_new_tokens)
    mean = sum(lengths) / max(len(lengths), 1)
    one = bytes_per_token(num_aux, target.hidden_size, section.states_dtype)
    return round(num_prompts * mean * one)
