"""Our half of the comparison: targets, drafters that accept, their exports, our greedy loop.

A drafter with random weights accepts nothing, so counters would agree whatever they mean. Each one
is therefore trained for some seconds on the target's own greedy answers to the test's prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data.batch import Row, collate
from data.target import Target
from data.vocab import DraftVocab, full_vocab
from drafters.anchors import choose_anchors
from drafters.base import DecodingDrafter
from drafters.export_form import Form
from drafters.export_info import WITH_TARGET
from drafters.lookup import Lookup, _Row
from drafters.methods import METHODS, build_drafter
from drafters.mtp_stitch import stitch
from drafters.vllm_format import TargetInfo, save
from eval.decode import Decoded, DecodeSettings, decode
from recipes.schema import LossSection
from tests.tiny_exports import ORIGIN
from tests.tiny_targets import tiny_target
from train.distiller import Distiller
from train.loop import with_states

NUM_PROMPTS, PROMPT_LENGTH = 4, 24
MAX_TOKENS = 32  # the engine's cap
NUM_DRAFT = 3
MAX_MODEL_LEN = 256
TRAIN_STEPS, LEARNING_RATE = 100, 3e-3
VOCAB_SIZE = 320
# 8 layers, so that the captured ones differ; a width that the engine's CPU attention takes.
TARGET_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.15,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    "qwen3": {},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: a drafter of ours and how the engine is told of it.

    make: (target, its own answers) -> a drafter, trained or without weights.
    save: (drafter, folder, target) -> None, for a drafter that has a folder.
    config: the engine's speculative config, without model and number of tokens.
    target: one of TARGETS.
    joined: the engine finds the drafter in a copy of the target, FOLDER-with-target.
    """

    make: Callable[[Target, list[Row]], DecodingDrafter]
    save: Callable[[Any, Path, Target], None] | None
    config: dict[str, Any]
    target: str = "llama"
    num_draft: int = NUM_DRAFT
    joined: bool = False


@dataclass
class Ours:
    """What our side did: answers with their rounds, and the greedy tokens of the target alone."""

    case: Case
    target: Target
    drafter: DecodingDrafter
    folder: Path
    answers: list[Decoded]
    plain: list[list[int]]


def trained(section: Any, form: Form = "vllm", target: str = "llama") -> Case:
    """A drafter of drafters.methods by its section of a recipe, exported in a form of its method.

    The engine's config is the one that the method's export form names, as in `vllm serve` lines.
    """

    def make(loaded: Target, rows: list[Row]) -> DecodingDrafter:
        whole = section.draft_vocab_size is None
        vocab = full_vocab(VOCAB_SIZE) if whole else vocab_of(rows)
        aux_layers = tuple(section.aux_layers or section.default_aux_layers(loaded.num_layers))
        drafter = build_drafter(section, loaded, aux_layers, vocab, seed=0)
        return train(drafter, loaded, vocab, rows)

    def write(drafter: Any, folder: Path, loaded: Target) -> None:
        save(drafter, folder, form, torch.float32, TargetInfo.of(loaded), ORIGIN)
        if joined:
            stitch(Path(loaded.name), folder, folder.with_name(folder.name + WITH_TARGET))

    config, joined = METHODS[section.method].form.engine, section.method == "mtp"
    return Case(make=make, save=write, config=config, target=target, joined=joined)


class _EarliestRow(_Row):
    """The first occurrence of an n-gram counts, where ours takes the latest."""

    def push(self, token: int, sizes: range) -> None:
        seen = dict(self.after)
        super().push(token, sizes)
        self.after |= seen


class EarliestLookup(Lookup):
    """Prompt lookup as vLLM does it (v1/spec_decode/ngram_proposer.py)."""

    def start(self, prompts: list[list[int]], max_length: int) -> list[_Row]:
        rows: list[_Row] = [_EarliestRow() for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.push(prompt[0], self.sizes)
        return rows


def ngram() -> Case:
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return Case(make=lambda _target, _rows: EarliestLookup(1, 3), save=None, config=config)


def make_target(kind: str, folder: Path) -> Target:
    """A random target, saved where the engine reads it. It never stops: no token ends an answer.

    The engine is told the same (ignore_eos), so that answers have their full length.
    """
    target = tiny_target(kind, **(TARGET_SHAPE | TARGETS[kind]))
    target.model.save_pretrained(folder)
    target.eos_ids, target.name = [], str(folder)
    return target


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 256, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)
    return ids.tolist()


def decode_all(
    target: Target,
    drafter: DecodingDrafter | None,
    num_tokens: int,
    num_draft: int = 0,
    prompts: list[list[int]] | None = None,
) -> list[Decoded]:
    """One prompt after the other, as the engine runs them."""
    settings = DecodeSettings(max_new_tokens=num_tokens, num_draft=num_draft)
    return [decode(target, drafter, [p], settings)[0][0] for p in prompts or make_prompts()]


def rows_of(target: Target, prompts: list[list[int]]) -> list[Row]:
    """Prompts with the target's own answers."""
    answers = decode_all(target, None, MAX_TOKENS + 2 * NUM_DRAFT + 2, prompts=prompts)
    rows = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids_S = torch.tensor(prompt + answer.ids)
        mask_S = torch.arange(len(ids_S)) >= len(prompt)
        rows.append(Row(id=str(i), ids_S=ids_S, mask_S=mask_S))
    return rows


def vocab_of(rows: list[Row]) -> DraftVocab:
    """Most of what the target says and some more: a map in which no id stands for itself."""
    said = {int(i) for row in rows for i in row.ids_S[row.mask_S]}
    kept = sorted(said - {min(said)} | set(range(40, 100, 2)) - {0})
    return DraftVocab(torch.tensor(kept), VOCAB_SIZE)


def train(drafter: Any, target: Target, vocab: DraftVocab, rows: list[Row]) -> DecodingDrafter:
    """Some seconds of our own training pass; random norms first, so that a lost one shows."""
    torch.manual_seed(1)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
    distiller = Distiller(drafter, LossSection(num_steps=NUM_DRAFT), vocab)
    distiller.use_target(target)
    batch = with_states(target, collate(rows), drafter.aux_layers)
    parameters = [p for p in distiller.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    for step in range(TRAIN_STEPS):
        anchors_A = choose_anchors(batch.mask_BS, drafter.num_anchors, step)
        optimizer.zero_grad()
        loss, _sums = distiller(replace(batch, anchors_A=anchors_A, seed=step))
        (loss / batch.mask_BS.sum()).backward()
        optimizer.step()
    return drafter.eval()
