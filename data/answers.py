"""Prompts to answers: what is asked, and what the target writes (RUN/data/*.jsonl).

Resumable by row id after a kill; when what the answers were made from changes, they and the states
captured with them are made again, which is said.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.benchmarks import benchmark_ngrams
from data.conversations import render_prompt
from data.files import read_json, require_disk, stable_hash, write_json, write_text
from data.hidden_states import StateStore, bytes_per_token
from data.progress import progress
from data.prompt_rows import Prompt, make_prompt, prompt_ngrams
from data.prompts import load_prompts, magpie_count
from data.regenerate import Answer, Request, generate, magpie_prefix
from data.target import DTYPES, Target
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger("draftsmith")

MAGPIE_TOKENS = 96  # longest prompt that the target writes


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file; a last line that a kill cut short is dropped from the file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        log.warning("%s: the last line was cut short by a kill and is dropped", path)
        write_text(path, whole)
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}; delete that line") from error
    if not all(isinstance(row, dict) and "id" in row for row in rows):
        raise UserError(f"{path} is damaged: a line is no object with an id; delete that line")
    return rows


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
        "greedy_share",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "decontaminate",
        "template_kwargs",
    )
    section = recipe.data.model_dump(mode="json")
    return {
        "target": target.name,
        "target_revision": target.revision,
        "dtype": str(target.dtype),
        "template": stable_hash(target.tokenizer.chat_template),
        **{name: section[name] for name in fields},
    }


def _read_manifest(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    stored = read_json(path)
    if not (isinstance(stored, dict) and {"key", "done"} <= stored.keys()):
        raise UserError(f"{path} is damaged; delete it, the answers beside it are kept")
    return stored


def answer_prompts(
    recipe: Recipe,
    target: Target,
    aux_layers: tuple[int, ...],
    store: StateStore | None,
) -> None:
    """Fill responses.jsonl (and the states, with capture: generate) until done or out of time."""
    folder, section = recipe.run_dir / "data", recipe.data
    manifest, key = folder / "manifest.json", _answers_key(recipe, target)
    stored = _read_manifest(manifest)
    if stored is not None and stored["key"] != key:
        changed = [k for k in key if stored["key"].get(k) != key[k]]
        # A source or template that cannot be read fails here, before anything is deleted.
        wanted, _ = load_prompts(section, benchmark_ngrams(section.decontaminate))
        _requests(recipe, target, wanted[:1])
        log.warning("%s: made with other %s; building it again", folder, ", ".join(changed))
        for name in ("prompts.jsonl", "responses.jsonl"):
            (folder / name).unlink(missing_ok=True)
        if store is not None:
            store.clear()
        stored = None
    if stored is not None and stored["done"]:
        return
    write_json(manifest, {"key": key, "done": False})
    started = time.monotonic()

    def out_of_time() -> bool:
        limit = section.max_minutes
        return limit is not None and time.monotonic() - started > 60 * limit

    prompts = _prompts(recipe, target, out_of_time)
    path = folder / "responses.jsonl"
    done = {r["id"] for r in read_jsonl(path)}
    requests = _requests(recipe, target, [p for p in prompts if p["id"] not in done])
    by_id = {p["id"]: p for p in prompts}
    capture = aux_layers if store is not None and section.capture == "generate" else None
    if capture is not None:
        tokens = sum(len(r.prompt_ids) + r.max_new_tokens for r in requests)
        size = tokens * bytes_per_token(len(capture), target.hidden_size, section.states_dtype)
        log.info("states of %d answers need at most %.2f GB", len(requests), size / 1e9)
        require_disk(folder, size, "target states")
    num_tokens, begun = 0, time.monotonic()
    with progress(len(requests), "answers") as advance, path.open("a", encoding="utf-8") as file:
        for answer in generate(
            target,
            requests,
            section.batch_size,
            section.max_length,
            capture,
            DTYPES[section.states_dtype],
            stop_taking=out_of_time,
        ):
            num_tokens += len(answer.ids)
            if store is not None and answer.states is not None:
                store.add(answer.request.id, answer.states)
            file.write(json.dumps(_response(answer, by_id[answer.request.id], target)) + "\n")
            file.flush()
            advance(1)
    if store is not None:
        store.flush()
    seconds = time.monotonic() - begun
    log.info("%d tokens written, %.0f tokens/s", num_tokens, num_tokens / max(seconds, 1e-9))
    write_json(manifest, {"key": key, "done": True, "tokens_per_second": num_tokens / seconds})


def _response(answer: Answer, prompt: Prompt, target: Target) -> dict[str, Any]:
    text = target.tokenizer.decode(answer.ids, skip_special_tokens=True)
    messages = [*prompt["messages"], {"role": "assistant", "content": text}]
    return {
        "id": answer.request.id,
        "source": prompt["source"],
        "messages": messages,
        "prompt_ids": answer.request.prompt_ids,
        "answer_ids": answer.ids,
        "finish": answer.finish,
        "temperature": answer.request.temperature,
    }


def _requests(recipe: Recipe, target: Target, prompts: list[Prompt]) -> list[Request]:
    """Prompts as requests; too long ones are left out, with their count."""
    section, requests, num_long = recipe.data, [], 0
    for prompt in prompts:
        ids = render_prompt(
            target.tokenizer, prompt["messages"], prompt.get("tools"), section.template_kwargs
        )
        room = section.max_length - len(ids)
        if len(ids) > section.max_prompt_tokens or room < 1:
            num_long += 1
            continue
        number = int(stable_hash([prompt["id"], section.seed]), 16)
        greedy = number % 10_000 < 10_000 * section.greedy_share
        requests.append(
            Request(
                id=prompt["id"],
                prompt_ids=ids,
                max_new_tokens=min(section.max_new_tokens, room),
                temperature=0.0 if greedy else section.temperature,
                top_p=section.top_p,
                top_k=section.top_k,
                seed=number % 2**62,
            )
        )
    if num_long:
        log.info("%d prompts are longer than data.max_prompt_tokens and are left out", num_long)
    return requests


def _prompts(recipe: Recipe, target: Target, out_of_time: Callable[[], bool]) -> list[Prompt]:
    """prompts.jsonl, made if it is not there: from the sources, and by the target itself."""
    path = recipe.run_dir / "data" / "prompts.jsonl"
    if path.exists():
        return read_jsonl(path)  # type: ignore[return-value]
    blocked = benchmark_ngrams(recipe.data.decontaminate)
    prompts, report = load_prompts(recipe.data, blocked)
    wanted = magpie_count(recipe.data)
    if wanted:
        own = _magpie(recipe, target, wanted, blocked, out_of_time)
        prompts = _spread(prompts, [p for p in own if p["id"] not in {q["id"] for q in prompts}])
    write_text(path, "".join(json.dumps(p) + "\n" for p in prompts))
    write_json(
        path.with_name("prompts_report.json"),
        {**report.as_json(), "magpie": wanted},
    )
    return prompts


def _spread(prompts: list[Prompt], own: list[Prompt]) -> list[Prompt]:
    """Spread the shorter list evenly over the longer, so that a run cut short has both."""
    merged = [(i / max(len(part), 1), p) for part in (prompts, own) for i, p in enumerate(part)]
    return [p for _, p in sorted(merged, key=lambda pair: pair[0])]


def _magpie(
    recipe: Recipe,
    target: Target,
    wanted: int,
    blocked: set[str],
    out_of_time: Callable[[], bool],
) -> list[Prompt]:
    """Prompts that the target writes at temperature 1; unfinished, overlapping ones are dropped."""
    prefix = magpie_prefix(target, recipe.data.template_kwargs)
    requests = [
        Request(
            id=f"magpie-{i}",
            prompt_ids=prefix,
            max_new_tokens=MAGPIE_TOKENS,
            temperature=1.0,
            seed=recipe.data.seed * 1_000_003 + i,
        )
        for i in range(wanted)
    ]
    length, found = len(prefix) + MAGPIE_TOKENS, {}
    with progress(wanted, "prompts by the target") as advance:
        for answer in generate(
            target, requests, recipe.data.batch_size, length, stop_taking=out_of_time
        ):
            text = str(target.tokenizer.decode(answer.ids, skip_special_tokens=True)).strip()
            prompt = make_prompt("magpie", text, category="magpie")
            whole = answer.finish == "stop" and len(text.split()) >= 3
            if whole and not prompt_ngrams(prompt) & blocked:
                found[prompt["id"]] = prompt
            advance(1)
    log.info("%d of %d prompts by the target kept", len(found), wanted)
    return sorted(found.values(), key=lambda p: p["id"])
