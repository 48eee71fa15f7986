"""The draft vocabulary: the tokens that a drafter's head can propose, and the maps to the target's.

A drafter with D < V outputs has D ids of its own. `d2t` holds offsets, target id = i + d2t[i], the
convention of EAGLE-3 and of the serving engines; `t2d` says which target ids have a draft id.

Dimensions: V target vocabulary, D draft vocabulary.
"""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.conversations import MASK_RULE
from data.files import read_json, stable_hash, write_json
from recipes.errors import UserError

log = logging.getLogger("draftsmith")


@dataclass(frozen=True)
class DraftVocab:
    """Which target ids the drafter proposes.

    ids_D: int64, ascending and distinct: the target id of each draft id.
    vocab_size: V of the target.
    """

    ids_D: Tensor
    vocab_size: int

    @property
    def size(self) -> int:
        """D."""
        return int(self.ids_D.numel())

    @property
    def is_identity(self) -> bool:
        """D == V: draft ids are target ids and no map is needed."""
        return self.size == self.vocab_size

    @property
    def d2t(self) -> Tensor:
        """int64 offsets of length D: target id = draft id + d2t[draft id]."""
        return self.ids_D - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        """Bool of length V: True where the target id has a draft id."""
        mask_V = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask_V[self.ids_D] = True
        return mask_V

    @property
    def draft_ids_V(self) -> Tensor:
        """int64 of length V: the draft id of each target id, -1 where there is none."""
        draft_ids_V = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        draft_ids_V[self.ids_D] = torch.arange(self.size)
        return draft_ids_V

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that have a draft id; NaN when nothing was counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.ids_D].sum()) / total if total else math.nan


def full_vocab(vocab_size: int) -> DraftVocab:
    """The identity: every target id is a draft id."""
    return DraftVocab(torch.arange(vocab_size), vocab_size)


def build_draft_vocab(counts_V: Tensor, size: int | None, special_ids: list[int]) -> DraftVocab:
    """Take the `size` most frequent ids.

    Args:
        counts_V: how often each target id is supervised in the training rows.
        size: D; None keeps the whole vocabulary.
        special_ids: ids that are always in, e.g. the end-of-sequence ids: a drafter without them
            could never propose to stop.

    Returns:
        The special ids, then ids by falling count; equal counts (unseen ids included) by rising id.

    Raises:
        UserError: size above V or below 1, no room beside the special ids, or a special id
            outside the vocabulary.
    """
    vocab_size = int(counts_V.numel())
    if size is None or size == vocab_size:
        return full_vocab(vocab_size)
    special = sorted(set(special_ids))
    if not 1 <= size <= vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size {size} is not within 1 and the target's vocabulary of "
            f"{vocab_size}; give a smaller size, or none for the whole vocabulary"
        )
    if len(special) >= size:
        raise UserError(
            f"drafter.draft_vocab_size {size} has no room beside the {len(special)} "
            "end-of-sequence ids; give a larger size"
        )
    for token_id in special:
        if not 0 <= token_id < vocab_size:
            raise UserError(f"special id {token_id} is outside the vocabulary of {vocab_size}")
    rank_V = counts_V.to(torch.int64).clone()
    rank_V[special] = torch.iinfo(torch.int64).max
    order_V = torch.sort(rank_V, descending=True, stable=True).indices
    return DraftVocab(order_V[:size].sort().values, vocab_size)


def check_map(
    d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int
) -> DraftVocab:
    """Read the maps of a checkpoint or an export.

    Args:
        d2t: offsets of length D, or None.
        t2d: bool of length V, or None.
        draft_vocab_size: D as the config has it.
        vocab_size: V as the config has it.

    Returns:
        The vocabulary they stand for; the identity when there is no map and D == V.

    Raises:
        UserError: a map is missing, of the wrong length, or the two disagree.
    """
    if d2t is None and t2d is None:
        if draft_vocab_size == vocab_size:
            return full_vocab(vocab_size)
        raise UserError(
            f"no d2t and t2d, but draft_vocab_size {draft_vocab_size} is not vocab_size "
            f"{vocab_size}; export the drafter again with its map"
        )
    if d2t is None or t2d is None:
        has, lacks = ("t2d", "d2t") if d2t is None else ("d2t", "t2d")
        raise UserError(f"{has} without {lacks}; export the drafter again with both")
    for name, tensor, wanted in (("d2t", d2t, draft_vocab_size), ("t2d", t2d, vocab_size)):
        if tuple(tensor.shape) != (wanted,):
            raise UserError(
                f"{name} has shape {list(tensor.shape)}, the config asks for [{wanted}]; "
                "weights and config are not of the same export"
            )
    vocab = DraftVocab(d2t.to("cpu", torch.int64) + torch.arange(draft_vocab_size), vocab_size)
    ids_D = vocab.ids_D
    if int(ids_D[0]) < 0 or int(ids_D[-1]) >= vocab_size or bool((ids_D.diff() <= 0).any()):
        raise UserError(
            "d2t is not a map of offsets (i + d2t[i] must rise and stay within the vocabulary of "
            f"{vocab_size}); does it hold absolute ids?"
        )
    if not torch.equal(vocab.t2d, t2d.to("cpu", torch.bool)):
        raise UserError("d2t and t2d name different tokens; export the drafter again")
    return vocab


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that turns a conversation into ids, the chat template included."""
    if not tokenizer.is_fast:
        return stable_hash([tokenizer.get_vocab(), tokenizer.chat_template])
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core.pop("padding", None)  # set by the last call, no part of the tokenizer
    core.pop("truncation", None)
    return stable_hash([core, tokenizer.chat_template])


def corpus_hash(counts_V: Tensor) -> str:
    """Hash of the counts: all that the map depends on besides its size."""
    return hashlib.sha256(counts_V.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


def cache_key(corpus: str, size: int | None, tokenizer: str, special_ids: list[int]) -> str:
    """Key under which a stored map is still the right one.

    Args:
        corpus: hash of the training rows or of their counts.
        size: D, None for the whole vocabulary.
        tokenizer: `tokenizer_hash`.
        special_ids: as given to `build_draft_vocab`.
    """
    return stable_hash([corpus, size, tokenizer, sorted(set(special_ids)), MASK_RULE])


def save_vocab(path: str | Path, vocab: DraftVocab, key: str) -> None:
    """Write the map and the key it was built under."""
    write_json(path, {"key": key, "vocab_size": vocab.vocab_size, "ids": vocab.ids_D.tolist()})


def load_vocab(path: str | Path, key: str) -> DraftVocab | None:
    """The stored map, or None (said aloud) when there is none or it was built under another key."""
    if not Path(path).exists():
        return None
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("key") != key:
        log.info("%s: built from other data, size or tokenizer; building it again", path)
        return None
    return DraftVocab(torch.tensor(stored["ids"], dtype=torch.int64), stored["vocab_size"])
