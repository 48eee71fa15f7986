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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import vocab as vocabulary
from data.answers import answer_prompts, read_jsonl
from data.batch import Row
from data.conversations import MASK_RULE, check_mask_share
from data.files import make_folder, require_disk, stable_hash, write_json, write_text
from data.hidden_states import StateStore, bytes_per_token, capture_pass, manifest_of
from data.progress import progress
from data.prompts import split_heldout
from data.source_rows import rows_of_source, set_template
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe

log = logging.getLogger("draftsmith")


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
    section = recipe.drafter
    layers = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    if sorted(set(layers)) != list(layers) or max(layers, default=0) > target.num_layers:
        raise UserError(
            f"drafter.aux_layers {list(layers)}: give ascending distinct ids within "
            f"0..{target.num_layers} (k = the residual stream after k decoder layers)"
        )
    return layers


def prepare(recipe: Recipe, target: Target) -> Prepared:
    """Make what is missing in RUN/data and load it."""
    folder, section = data_dir(recipe), recipe.data
    make_folder(folder)
    aux_layers = aux_layers_of(recipe, target)
    set_template(target.tokenizer, section)
    store = None
    if section.states == "cached":
        manifest = manifest_of(target, aux_layers, section.states_dtype)
        if not section.regenerate:  # the same id then stands for tokens that depend on these
            rendering = [
                section.max_length,
                section.template_kwargs,
                section.supervise,
                section.train_on_thinking,
                target.tokenizer.chat_template,
                MASK_RULE,
            ]
            manifest["rows_of_the_source"] = stable_hash(rendering)
        store = StateStore(folder / "states", manifest)
    if section.regenerate:
        answer_prompts(recipe, target, aux_layers, store)
        rows = _rows_from_responses(folder, section.keep_truncated)
    else:
        rows, read = rows_of_source(section, target.tokenizer)
        write_json(folder / "prompts_report.json", read.as_json())
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


def _rows_from_responses(folder: Path, keep_truncated: bool) -> list[dict[str, Any]]:
    rows = []
    for r in sorted(read_jsonl(folder / "responses.jsonl"), key=lambda r: r["id"]):
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
