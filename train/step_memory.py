"""Peak memory of a training step, found by running the step on shapes alone.

Dimension letters: B rows, S positions, N supervised slots, U target positions of a chunk, C slots
of a chunk, H hidden width of the target, F captured width, W width of what the head reads, V
vocabulary, D draft vocabulary.

The drafter's own code, the chunked loss and the backward pass run on tensors without memory, while
every storage that an operation makes is counted for as long as it lives. So a change of the code
changes the number. What it leaves out: work space inside kernels, the allocator's rounding, and
what the process weighs before it holds a model.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.methods import METHODS
from recipes.schema import Recipe
from train.linear_loss import linear_loss
from train.losses import LOSSES, LossOptions

WEIGHT_BYTES = 4
SUMMARY_POSITIONS = 256  # positions whose target logits exist together (data.hidden_states)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make under it: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it returns, if it was not there before."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._note(leaf, new=False)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf, new=True)
        return out

    def _note(self, tensor: Tensor, new: bool) -> None:
        """Remember a tensor's storage until it dies; count it if an operation made it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key in self._known:
            return

        def forget(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one process.

    weights: fp32 weights of the drafter and the optimizer's moments.
    target: the frozen target, with the copy of the head's rows that the loss reads.
    batch: tokens and states of the step, and of those read ahead.
    work: the most that a step needs beside these three (activations, logits of a chunk,
    gradients); rough where `counted` is False.
    """

    weights: int
    target: int
    batch: int
    work: int
    counted: bool

    @property
    def peak(self) -> int:
        return self.weights + self.target + self.batch + self.work


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the estimate needs to know of drafter, target and batch.

    num_parameters, num_trained: of the drafter. target_bytes, states_bytes: of one number.
    on_gpu: there the loss takes a chunk whole, not in blocks.
    """

    fields: dict[str, Any]
    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    num_parameters: int
    num_trained: int
    target_parameters: int
    target_bytes: int
    states_bytes: int
    num_rows: int
    length: int
    on_gpu: bool = False


def step_memory(recipe: Recipe, shape: Shape) -> StepMemory:
    """The estimate for a batch whose every position is supervised, hence an upper bound.

    EAGLE-3 is counted; of the other methods the activations are a rough formula.
    """
    section, H = recipe.train, int(shape.fields["hidden_size"])
    vocab_size = int(shape.fields["vocab_size"])
    # MTP, EAGLE-1 and small models borrow or load modules that are not there.
    counted = recipe.drafter.method == "eagle3"
    if counted:
        with FakeTensorMode():
            work = _run(recipe, shape)
    else:
        work = _formula(recipe, shape)
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
        target=(shape.target_parameters + head_rows) * shape.target_bytes,
        batch=batches,
        work=work,
        counted=counted,
    )


def _run(recipe: Recipe, shape: Shape) -> int:
    """The most that a forward and backward pass keep at once (under a FakeTensorMode)."""
    method = METHODS[recipe.drafter.method]
    drafter: Any = method.drafter(
        method.make_config(recipe.drafter, shape.fields, shape.aux_layers, shape.draft_vocab_size)
    )
    drafter.lm_head.requires_grad_(recipe.drafter.trains_head)
    B, S, D = shape.num_rows, shape.length, shape.draft_vocab_size
    H, V = int(shape.fields["hidden_size"]), int(shape.fields["vocab_size"])
    num_depths = recipe.loss.num_steps
    states_dtype = torch.float32 if shape.states_bytes == 4 else torch.bfloat16
    target_dtype = torch.float32 if shape.target_bytes == 4 else torch.bfloat16
    bf16 = recipe.train.mixed_precision == "bf16"
    drafter.recompute = recipe.train.activation_checkpointing
    drafter.use_embeddings(torch.empty(V, H, dtype=target_dtype))
    head_DH = torch.empty(D, H, dtype=target_dtype)
    hidden_PH = torch.empty(B * S, H, dtype=states_dtype)
    aux_BSF = torch.empty(B, S, H * len(shape.aux_layers), dtype=states_dtype)
    ids_BS = torch.empty(B, S, dtype=torch.int64)

    def teacher(rows: slice) -> tuple[Tensor, Tensor]:
        C = rows.stop - rows.start
        U = min(C, C // num_depths + 2)
        logits_UD = (hidden_PH[:U].to(target_dtype) @ head_DH.T).float() * 1.0
        p_UD = logits_UD.sub_(logits_UD[:, :1]).exp_()
        picked_CD = p_UD.index_select(0, torch.empty(C, dtype=torch.int64))
        return picked_CD, torch.empty(C, dtype=torch.int64)

    def gathered() -> Tensor:
        heads = drafter.rollout(ids_BS, aux_BSF, num_depths)
        parts = [
            head.flatten(0, 1)[torch.empty(B * max(0, S - 2 - k), dtype=torch.int64)]
            for k, head in enumerate(heads)
        ]
        return torch.cat(parts)

    def loss_of_step() -> Tensor:  # as Distiller.forward, whose tensors die with it
        slots_NW = gathered()
        N = len(slots_NW)
        return linear_loss(
            slots_NW[torch.empty(N, dtype=torch.int64)],
            drafter.head_weights()[0],
            teacher,
            LOSSES[recipe.loss.name],
            LossOptions(renormalize=recipe.loss.renormalize, ce_share=recipe.loss.ce_share),
            recipe.loss.chunk_size,
            torch.empty(N),
            torch.empty(N, dtype=torch.int64),
            num_depths,
            recipe.loss.chunk_size if shape.on_gpu else None,
        )[0]

    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of_step()
        loss.backward()
    return live.peak


def _formula(recipe: Recipe, shape: Shape) -> int:
    """Rough: what a decoder layer keeps of each place that a draft is made at, and one chunk."""
    width = 2 if recipe.train.mixed_precision == "bf16" else 4
    H, inner = int(shape.fields["hidden_size"]), int(shape.fields["intermediate_size"])
    places = shape.num_rows * shape.length * recipe.loss.num_steps
    kept = 8 * H + (0 if recipe.train.activation_checkpointing else 4 * inner)
    chunk = recipe.loss.chunk_size * shape.draft_vocab_size * 4 * 6
    return places * kept * width + chunk
