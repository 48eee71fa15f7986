"""From a recipe to training rows: prompts, the target's own answers, rows, vocabulary, states.

Everything lies in RUN/data and is made once; a second call finds it, a killed one goes on.

    prompts.jsonl     what was asked (the target's own prompts included)
    responses.jsonl   prompt ids and answer ids, exactly as the target saw and wrote them
    rows.jsonl        ids, supervised spans, split ("train" | "heldout"), messages
    vocab.json        the draft vocabulary
    states/           target states (states: cached)
    manifest.json     what the answers were made from; report.json: counts
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import vocab as vocabulary
from data.batch import Row
from data.benchmarks import benchmark_ngrams
from data.conversations import BadRow, check_mask_share, render, render_prompt
from data.files import read_json, require_disk, stable_hash, write_json, write_text
from data.hidden_states import StateStore, bytes_per_token, capture_pass, manifest_of
from data.progress import progress
from data.prompt_rows import Prompt, make_prompt, prompt_ngrams
from data.prompts import load_prompts, magpie_count, split_heldout
from data.regenerate import Answer, Request, generate, magpie_prefix
from data.target import DTYPES, Target
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger("draftsmith")

MAGPIE_TOKENS = 96  # longest prompt that the target writes


@dataclass
class Prepared:
    """What training and validation need. store is None when states are computed online."""

    train: list[Row]
    heldout: list[Row]
    heldout_prompts: list[list[int]]
    vocab: vocabulary.DraftVocab
    store: StateStore | None
    report: dict[str, Any]


def data_dir(recipe: Recipe) -> Path:
    """RUN/data."""
    return recipe.run_dir / "data"


def aux_layers_of(recipe: Recipe, target: Target) -> tuple[int, ...]:
    """The recipe's layers, or the default ones; checked against the target's depth."""
    layers = tuple(recipe.drafter.aux_layers or target.default_aux_layers())
    if sorted(set(layers)) != list(layers) or layers[-1] > target.num_layers:
        raise UserError(
            f"drafter.aux_layers {list(layers)}: give ascending distinct ids within "
            f"0..{target.num_layers} (k = the residual stream after k decoder layers)"
        )
    return layers


def prepare(recipe: Recipe, target: Target) -> Prepared:
    """Make what is missing in RUN/data and load it."""
    folder, section = data_dir(recipe), recipe.data
    folder.mkdir(parents=True, exist_ok=True)
    aux_layers = aux_layers_of(recipe, target)
    store = None
    if section.states == "cached":
        manifest = manifest_of(target, aux_layers, section.states_dtype)
        store = StateStore(folder / "states", manifest)
    if section.chat_template is not None:
        target.tokenizer.chat_template = section.chat_template.read_text()
    if section.regenerate:
        _answer_prompts(recipe, target, aux_layers, store)
        rows = _rows_from_responses(folder, section.keep_truncated)
    else:
        rows = _rows_from_conversations(recipe, target)
    if not rows:
        raise UserError(f"{folder}: no rows; look at data.sources and data.max_prompt_tokens")
    train_ids, _ = split_heldout([r["id"] for r in rows], section.heldout_fraction)
    for row in rows:
        row["split"] = "train" if row["id"] in train_ids else "heldout"
    write_text(folder / "rows.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    tensors = {r["id"]: _to_row(r) for r in rows}
    train = [tensors[r["id"]] for r in rows if r["split"] == "train"]
    heldout = [tensors[r["id"]] for r in rows if r["split"] == "heldout"]

    counts_V = count_supervised(train, target.vocab_size)
    vocab = _vocab(recipe, target, counts_V)
    if store is not None:
        late = store.missing([row.id for row in train])
        if late:
            tokens = sum(len(tensors[i].ids_S) for i in late)
            size = tokens * bytes_per_token(
                len(aux_layers), target.hidden_size, section.states_dtype
            )
            log.info("states of %d rows (%d tokens) need %.2f GB", len(late), tokens, size / 1e9)
            require_disk(folder, size, "target states")
            with progress(len(late), "states") as advance:
                capture_pass(target, [tensors[i] for i in late], aux_layers, store, advance)
    num_tokens = sum(len(row.ids_S) for row in train)
    num_supervised = sum(int(row.mask_S.sum()) for row in train)
    share = check_mask_share(num_supervised, num_tokens, section.min_supervised_share, target.name)
    report = {
        "num_train_rows": len(train),
        "num_heldout_rows": len(heldout),
        "num_train_tokens": num_tokens,
        "num_supervised_tokens": num_supervised,
        "supervised_share": share,
        "num_truncated": sum(r["finish"] == "length" for r in rows),
        "draft_vocab_size": vocab.size,
        "draft_vocab_coverage_train": vocab.coverage(counts_V),
        "draft_vocab_coverage_heldout": (
            vocab.coverage(count_supervised(heldout, target.vocab_size)) if heldout else None
        ),
    }
    write_json(folder / "report.json", report)
    log.info(
        "%d train rows, %d held out; %d of %d tokens supervised (%.1f%%); draft vocabulary %d "
        "covers %.2f%% of them",
        len(train),
        len(heldout),
        num_supervised,
        num_tokens,
        100 * share,
        vocab.size,
        100 * report["draft_vocab_coverage_train"],
    )
    prompts = [r["ids"][: r["spans"][0][0]] for r in rows if r["split"] == "heldout"]
    return Prepared(train, heldout, prompts, vocab, store, report)


def count_supervised(rows: Iterable[Row], vocab_size: int) -> Tensor:
    """How often each token is supervised, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        counts_V += torch.bincount(row.ids_S[row.mask_S], minlength=vocab_size)
    return counts_V


def _to_row(record: dict[str, Any]) -> Row:
    mask_S = torch.zeros(len(record["ids"]), dtype=torch.bool)
    for start, end in record["spans"]:
        mask_S[start:end] = True
    return Row(id=record["id"], ids_S=torch.tensor(record["ids"]), mask_S=mask_S)


def _vocab(recipe: Recipe, target: Target, counts_V: Tensor) -> vocabulary.DraftVocab:
    size = recipe.drafter.draft_vocab_size
    path = data_dir(recipe) / "vocab.json"
    key = vocabulary.cache_key(
        vocabulary.corpus_hash(counts_V),
        size,
        vocabulary.tokenizer_hash(target.tokenizer),
        target.eos_ids,
    )
    vocab = vocabulary.load_vocab(path, key)
    if vocab is None:
        vocab = vocabulary.build_draft_vocab(counts_V, size, target.eos_ids)
        vocabulary.save_vocab(path, vocab, key)
    return vocab


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file; a last line that a kill cut short is dropped from the file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        log.warning("%s: the last line was cut short by a kill and is dropped", path)
        write_text(path, whole)
    return [json.loads(line) for line in whole.splitlines()]


def _answers_key(recipe: Recipe, target: Target) -> dict[str, Any]:
    fields = (
        "sources",
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


def _answer_prompts(
    recipe: Recipe,
    target: Target,
    aux_layers: tuple[int, ...],
    store: StateStore | None,
) -> None:
    """Fill responses.jsonl (and the states, with capture: generate) until done or out of time."""
    folder, section = data_dir(recipe), recipe.data
    manifest, key = folder / "manifest.json", _answers_key(recipe, target)
    stored = read_json(manifest) if manifest.exists() else None
    if stored is not None and stored["key"] != key:
        changed = [k for k in key if stored["key"].get(k) != key[k]]
        log.warning("%s: made with other %s; building it again", folder, ", ".join(changed))
        for name in ("prompts.jsonl", "responses.jsonl"):
            (folder / name).unlink(missing_ok=True)
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
    done = {r["id"] for r in _read_jsonl(path)}
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
    path = data_dir(recipe) / "prompts.jsonl"
    if path.exists():
        return _read_jsonl(path)  # type: ignore[return-value]
    blocked = benchmark_ngrams(recipe.data.decontaminate)
    prompts, report = load_prompts(recipe.data, blocked)
    wanted = magpie_count(recipe.data)
    if wanted:
        own = _magpie(recipe, target, wanted, blocked, out_of_time)
        prompts = _spread(prompts, [p for p in own if p["id"] not in {q["id"] for q in prompts}])
    write_text(path, "".join(json.dumps(p) + "\n" for p in prompts))
    write_json(
        path.with_name("prompts_report.json"),
        {
            "read": report.read,
            "kept": report.kept,
            "drops": report.drops,
            "magpie": wanted,
        },
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
            text = target.tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
            prompt = make_prompt("magpie", text, category="magpie")
            whole = answer.finish == "stop" and len(text.split()) >= 3
            if whole and not prompt_ngrams(prompt) & blocked:
                found[prompt["id"]] = prompt
            advance(1)
    log.info("%d of %d prompts by the target kept", len(found), wanted)
    return sorted(found.values(), key=lambda p: p["id"])


def _rows_from_responses(folder: Path, keep_truncated: bool) -> list[dict[str, Any]]:
    rows = []
    for r in sorted(_read_jsonl(folder / "responses.jsonl"), key=lambda r: r["id"]):
        if r["finish"] == "length" and not keep_truncated:
            continue
        start, ids = len(r["prompt_ids"]), r["prompt_ids"] + r["answer_ids"]
        rows.append(
            {
                "id": r["id"],
                "ids": ids,
                "spans": [[start, len(ids)]],
                "finish": r["finish"],
                "messages": r["messages"],
            }
        )
    return rows


def _rows_from_conversations(recipe: Recipe, target: Target) -> list[dict[str, Any]]:
    """Rows with the answers of the source itself (regenerate: false)."""
    section, rows, drops = recipe.data, [], {}
    conversations, _ = load_prompts(section, benchmark_ngrams(section.decontaminate))
    for c in conversations:
        try:
            row = render(
                target.tokenizer,
                c["messages"],
                c.get("tools"),
                section.template_kwargs,
                section.max_length,
            )
        except BadRow as bad:
            drops[bad.reason] = drops.get(bad.reason, 0) + 1
            continue
        if not any(row.mask):
            drops["no supervised token"] = drops.get("no supervised token", 0) + 1
            continue
        edges = [i for i in range(len(row.mask) + 1) if _bit(row.mask, i - 1) != _bit(row.mask, i)]
        spans = [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
        rows.append(
            {
                "id": c["id"],
                "ids": row.ids,
                "spans": spans,
                "finish": "stop",
                "messages": c["messages"],
            }
        )
    if drops:
        log.warning("rows dropped: %s", "; ".join(f"{n} {reason}" for reason, n in drops.items()))
    if not rows:
        raise UserError(f"no row of data.sources {section.sources} can be used: {drops}")
    return rows


def _bit(mask: list[int], i: int) -> int:
    return mask[i] if 0 <= i < len(mask) else 0
