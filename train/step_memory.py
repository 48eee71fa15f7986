"""Peak memory of a training step, found by running the step on shapes alone.

Dimension letters: B rows, S positions, A anchors, H hidden width of the target, F captured width, V
vocabulary, D draft vocabulary.

The drafter's own code, the chunked loss and the backward pass run on tensors without memory, while
every storage that an operation makes is counted for as long as it lives. So a change of the code
changes the number. What it leaves out: work space inside kernels, the allocator's rounding, and
what the process weighs before it holds a model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from data.attention import thin_linear
from data.batch import Batch
from data.vocab import DraftVocab
from drafters.anchors import choose_anchors
from drafters.methods import METHODS
from recipes.drafter_sections import BlockSection
from recipes.schema import Recipe
from train.distiller import Distiller, autocasts
from train.linear_loss import BLOCK_NUMBERS
from train.shape_pass import LiveBytes, Shapes

WEIGHT_BYTES = 4
SUMMARY_POSITIONS = 256  # positions whose target logits exist together (data.hidden_states)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one process.

    weights: fp32 weights of the drafter and the optimizer's moments.
    target: the frozen target, with the copy of the head's rows that the loss reads.
    batch: tokens and states of the step, and of those read ahead.
    work: the most that a step needs beside these three (activations, logits of a chunk,
    gradients).
    """

    weights: int
    target: int
    batch: int
    work: int

    @property
    def peak(self) -> int:
        return self.weights + self.target + self.batch + self.work


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the estimate needs to know of drafter, target and batch.

    num_parameters, num_trained: of the drafter. target_bytes, states_bytes: of one number.
    held_parameters: of the target's, those that one process holds.
    on_gpu: there the loss takes a chunk whole, not in blocks.
    """

    fields: dict[str, Any]
    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    num_parameters: int
    num_trained: int
    target_parameters: int
    held_parameters: int
    target_bytes: int
    states_bytes: int
    num_rows: int
    length: int
    on_gpu: bool = False


def step_memory(recipe: Recipe, shape: Shape) -> StepMemory:
    """The estimate for a batch whose every position is supervised: none has larger tensors."""
    section, H = recipe.train, int(shape.fields["hidden_size"])
    vocab_size = int(shape.fields["vocab_size"])
    with Shapes():
        work = _run(recipe, shape)
    positions = shape.num_rows * shape.length
    states = positions * H * (1 + len(shape.aux_layers)) * shape.states_bytes
    ids = positions * 29  # ids, mask, lse, argmax, anchors
    if recipe.data.states == "cached":
        batches = (states + ids) * (1 + section.prefetch) * section.gradient_accumulation
    else:
        work = max(work, SUMMARY_POSITIONS * vocab_size * 4 * 3)
        batches = (states + ids) * section.gradient_accumulation
    moments = 2 if section.optimizer == "adamw8bit" else 8
    head_rows = shape.draft_vocab_size * H if shape.draft_vocab_size != vocab_size else 0
    return StepMemory(
        weights=shape.num_parameters * WEIGHT_BYTES + shape.num_trained * moments,
        target=(shape.held_parameters + head_rows) * shape.target_bytes,
        batch=batches,
        work=work,
    )


class Ends:
    """What a training step reads of the target: embedding, final norm and head, as shapes."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        H, self.vocab_size = int(shape.fields["hidden_size"]), int(shape.fields["vocab_size"])
        self.name, self.dtype = "the target", dtype
        self.embed_weight_VH = torch.empty(self.vocab_size, H, dtype=dtype)
        self.head_weight_VH = self.embed_weight_VH
        if not shape.fields.get("tie_word_embeddings"):
            self.head_weight_VH = torch.empty_like(self.embed_weight_VH)
        self._norm = LlamaRMSNorm(H)
        self._norm.weight = nn.Parameter(torch.empty(H, dtype=dtype), requires_grad=False)

    @torch.no_grad()
    def final_norm(self, hidden_H: Tensor) -> Tensor:
        """See data.target.Target."""
        normed: Tensor = self._norm(hidden_H.to(self.dtype))
        return normed

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """The head of some tokens, for `logits`."""
        return self.head_weight_VH[token_ids]

    @torch.no_grad()
    def logits(self, hidden_H: Tensor, rows_DH: Tensor | None = None) -> Tensor:
        """See data.target.Target."""
        weight_DH = self.head_weight_VH if rows_DH is None else rows_DH
        return thin_linear(self._norm(hidden_H), weight_DH).float() * 1.0


def _run(recipe: Recipe, shape: Shape) -> int:
    """The most that a forward and backward pass keep at once (under Shapes)."""
    section, method = recipe.drafter, METHODS[recipe.drafter.method]
    B, S, D = shape.num_rows, shape.length, shape.draft_vocab_size
    H, V = int(shape.fields["hidden_size"]), int(shape.fields["vocab_size"])
    states_dtype = torch.float32 if shape.states_bytes == 4 else torch.bfloat16
    target: Any = Ends(shape, torch.float32 if shape.target_bytes == 4 else torch.bfloat16)
    config = method.make_config(section, shape.fields, shape.aux_layers, D)
    drafter: Any = method.drafter(config)
    drafter.use_target(target)
    if isinstance(section, BlockSection):
        drafter.num_anchors = section.num_anchors
    for weight in drafter.vocabulary_weights():
        weight.requires_grad_(section.trains_head)
    distiller = Distiller(drafter, recipe.loss, DraftVocab(torch.arange(D), V))
    distiller.use_target(target)
    if recipe.train.activation_checkpointing:
        distiller.recompute_activations()
    chunk = recipe.loss.chunk_size
    # Few blocks a chunk, also where a processor's cache would ask for many: a count takes seconds.
    fits = chunk if shape.on_gpu else BLOCK_NUMBERS // D
    distiller.block_size = min(chunk, max(fits, -(-chunk // 8)))
    mask_BS = torch.ones(B, S, dtype=torch.bool)
    batch = Batch(
        row_ids=[str(b) for b in range(B)],
        ids_BS=torch.zeros(B, S, dtype=torch.int64),
        mask_BS=mask_BS,
        lengths_B=torch.full((B,), S, dtype=torch.int64),
        aux_BSF=torch.empty(B, S, H * len(shape.aux_layers), dtype=states_dtype),
        hidden_BSH=torch.empty(B, S, H, dtype=states_dtype),
        lse_BS=torch.empty(B, S),
        argmax_BS=torch.zeros(B, S, dtype=torch.int32),
        anchors_A=choose_anchors(mask_BS, drafter.num_anchors, 0),
    )
    bf16 = autocasts(recipe.train, torch.device("cuda" if shape.on_gpu else "cpu"))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = distiller(batch)[0]
        loss.backward()
    return live.peak
