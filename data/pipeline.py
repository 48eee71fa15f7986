"""From a recipe to training rows: prompts, the target's own answers, rows, vocabulary, states.

Everything lies in RUN/data and is made once; a second call finds it, a killed one goes on.

    prompts.jsonl     what was asked (the target's own prompts included)
    responses.jsonl   conversations; prompt ids and answer ids as the target saw and wrote them
    rows.jsonl        ids, supervised spans, split ("train" | "heldout"), messages
    vocab.json        the draft vocabulary
    states/           target states (states: cached)
    manifest.json     what the answers were made from; report.json: counts
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data import vocab as vocabulary
from data.answers import answer_prompts
from data.batch import num_places, plan_batches
from data.conversations import MASK_RULE, check_mask_share
from data.files import make_folder, read_json, require_disk, stable_hash, write_json
from data.hidden_states import StateStore, bytes_per_token, capture_pass, manifest_of
from data.progress import progress
from data.prompts import PromptReport
from data.row_file import RowFile, join, write_rows
from data.row_splits import rows_of_responses, split_rows
from data.served_states import fetch_states
from data.source_rows import rows_of_source, set_template
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.train_section import TrainSection

log = logging.getLogger("draftsmith")

HELDOUT_PROMPTS = 1000  # of the held-out rows, at most: nothing decodes more
VALIDATION_ROWS = 64  # held-out rows of the teacher-forced metrics; their states are cached too


@dataclass
class Prepared:
    """What training and validation need. store is None when states are computed online."""

    train: RowFile
    heldout: RowFile
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


def prepare(recipe: Recipe, target: Target, rank: int = 0, world: int = 1) -> Prepared:
    """Make what is missing in RUN/data and load it.

    Args:
        recipe: of the run.
        target: loaded.
        rank: of this process among `world`; the first must be through before the others begin.
        world: with more than one, states are left to `capture_states`, which all of them call.
    """
    folder, section = data_dir(recipe), recipe.data
    make_folder(folder)
    aux_layers = aux_layers_of(recipe, target)
    set_template(target.tokenizer, section)
    store = None
    if section.states == "cached":
        store = StateStore(folder / "states", _states_manifest(recipe, target, aux_layers), rank)
    path, dropped = folder / "rows.jsonl", Counter[str]()
    if section.regenerate:
        if rank == 0:
            answer_prompts(recipe, target, store)
        rows = rows_of_responses(folder, section, target.tokenizer, dropped)
        parts = write_rows(path, rows, target.vocab_size)
        dropped.update(read_json(folder / "manifest.json")["left_out"])
        read = read_json(folder / "prompts_report.json")
        write_json(folder / "prompts_report.json", read | {"left_out": dict(dropped)})
    else:
        report = PromptReport()
        rows = split_rows(folder, rows_of_source(section, target.tokenizer, report), section)
        parts = write_rows(path, rows, target.vocab_size)
        write_json(folder / "prompts_report.json", report.as_json())
    (train, sums), (heldout, heldout_sums) = parts["train"], parts["heldout"]
    if not train:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise UserError(
            f"{folder}: no rows{': ' if reasons else ''}{reasons}; look at data.sources, "
            "data.max_prompt_tokens and data.keep_truncated"
        )
    vocab = _vocab(recipe, target, sums.counts_V)
    share = check_mask_share(
        sums.num_supervised, sums.num_tokens, section.min_supervised_share, target.name
    )
    numbers: dict[str, Any] = {
        "num_train_rows": len(train),
        "num_heldout_rows": len(heldout),
        "num_train_tokens": sums.num_tokens,
        "num_supervised_tokens": sums.num_supervised,
        "supervised_share": share,
        "padding_share": padding_share(recipe.train, train.lengths),
        "num_truncated": sums.num_truncated + heldout_sums.num_truncated,
        "num_left_out": dict(dropped),
        "draft_vocab_size": vocab.size,
        "draft_vocab_coverage_train": vocab.coverage(sums.counts_V),
        "draft_vocab_coverage_heldout": (
            vocab.coverage(heldout_sums.counts_V) if heldout else None
        ),
    }
    write_json(folder / "report.json", numbers)
    log.info(
        "%d train rows, %d held out; %d of %d tokens supervised (%.1f%%); draft vocabulary %d "
        "covers %.2f%% of them; %.1f%% of the training batches is padding",
        len(train),
        len(heldout),
        sums.num_supervised,
        sums.num_tokens,
        100 * share,
        vocab.size,
        100 * numbers["draft_vocab_coverage_train"],
        100 * numbers["padding_share"],
    )
    firsts = (heldout.record(i) for i in range(min(len(heldout), HELDOUT_PROMPTS)))
    prompts = [record["ids"][: record["spans"][0][0]] for record in firsts]
    prepared = Prepared(train, heldout, prompts, vocab, store, numbers)
    if world == 1:
        capture_states(recipe, target, prepared)
    return prepared


def prepare_together(
    recipe: Recipe, target: Target, rank: int, world: int, wait: Callable[[], None]
) -> Prepared:
    """`prepare` by several processes: rows by the first, states by all. All of them call it.

    Args:
        wait: returns when every process has called it.
    """
    if world == 1:
        return prepare(recipe, target)
    with target.uneven():
        first = prepare(recipe, target, rank, world) if rank == 0 else None
    wait()
    prepared = first or prepare(recipe, target, rank, world)
    if prepared.store is not None:
        with target.uneven():
            capture_states(recipe, target, prepared, rank, world)
        wait()
        prepared.store.refresh()
    return prepared


def padding_share(section: TrainSection, lengths: Sequence[int]) -> float:
    """Share of padding in the micro-batches of the first epoch; 0 where rows are packed."""
    plan = plan_batches(
        lengths, section.batch_tokens, section.micro_batch_size, section.seed, 0, section.packing
    )
    return 1 - sum(lengths) / num_places(plan, lengths, section.packing)


def _states_manifest(recipe: Recipe, target: Target, aux_layers: tuple[int, ...]) -> dict[str, Any]:
    section = recipe.data
    manifest = manifest_of(target, aux_layers, section.states_dtype)
    if section.states_server is not None:
        manifest["computed_in"] = f"server {section.states_server.model or ''}".rstrip()
    by_text = section.server is not None and section.server.api == "chat"
    if by_text or not section.regenerate:  # the same id stands for tokens that depend on these
        rendering = [
            section.max_length,
            section.template_kwargs,
            section.supervise,
            section.train_on_thinking,
            target.tokenizer.chat_template,
            MASK_RULE,
        ]
        manifest["rows_of_the_source"] = stable_hash(rendering)
    return manifest


def capture_states(
    recipe: Recipe, target: Target, prepared: Prepared, rank: int = 0, world: int = 1
) -> None:
    """Store the states of rows that lack them: this rank's share, in shards of its own.

    Those are the training rows and the held-out rows of the teacher-forced metrics. With several
    ranks call `prepared.store.refresh()` once all are done.

    Raises:
        UserError: nothing can give them: the target is without its layers, and there is no server.
    """
    store, section = prepared.store, recipe.data
    if store is None:
        return
    late = join(
        [
            rows.only([i for i, row_id in enumerate(rows.ids) if row_id not in store])
            for rows in (prepared.train, prepared.heldout[:VALIDATION_ROWS])
        ]
    )
    part = late.only(range(rank, len(late), world))
    if not part:
        return
    server = section.states_server
    if server is None and not target.whole:
        raise UserError(
            f"{store.folder}: states of {len(part)} rows are not there, and target.weights: ends "
            "cannot make them; run data/prepare.py with target.weights=whole on a machine where "
            "the target fits, or set data.states_server"
        )
    tokens = sum(part.lengths)
    size = tokens * bytes_per_token(len(store.aux_layers), target.hidden_size, section.states_dtype)
    log.info("states of %d rows (%d tokens) need %.2f GB", len(part), tokens, size / 1e9)
    require_disk(data_dir(recipe), size * world, "target states")
    with progress(len(part), "states") as advance:
        if server is None:
            capture_pass(target, part, part.lengths, store.aux_layers, store, advance)
        else:
            fetch_states(server, target, part, part.lengths, store.aux_layers, store, advance)


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
