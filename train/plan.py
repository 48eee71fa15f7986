"""What a run would do (`--dry-run`): sizes, steps, memory and disk, without touching anything.

Dimension letter: D draft vocabulary.
"""

import math
import os
from dataclasses import dataclass

from data.embedded import config_of
from data.estimate import estimate_data
from data.files import read_json
from data.pipeline import data_dir
from data.state_codec import compute_dtype
from data.target_config import resolve_device, resolve_dtype
from drafters.methods import build_on_meta
from recipes.schema import Recipe
from train.step_memory import Shape, StepMemory, step_memory


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a recipe comes to: rows and steps are upper bounds until its data is prepared.

    num_head: parameters of the drafter's head. step_rows: rows of an optimizer step, all processes
    (at least, where train.batch_tokens counts tokens).
    """

    shape: Shape
    num_head: int
    num_layers: int
    num_rows: int
    step_rows: int
    num_steps: int
    world: int
    memory: StepMemory


def estimates(recipe: Recipe) -> str:
    """What a run comes to (upper bounds where data is not prepared yet).

    Raises:
        UserError: the target's config cannot be read, so there is nothing to say.
    """
    return f"{estimate_data(recipe)}\n{_sizes(recipe)}"


def sizes_of(recipe: Recipe, on_gpu: bool | None = None, num_local: int | None = None) -> Sizes:
    """Sizes by the target's config alone; nothing is loaded.

    Args:
        on_gpu: whether dtype "auto" is bf16; None = as on this machine.
        num_local: processes of a machine, which may share the target; None = as they were launched.
    """
    fields = config_of(recipe.target.model, recipe.target.revision)
    n, vocab = int(fields["num_hidden_layers"]), int(fields["vocab_size"])
    aux = tuple(recipe.drafter.aux_layers or recipe.drafter.default_aux_layers(n))
    D = recipe.drafter.draft_vocab_size or vocab
    drafter = build_on_meta(recipe.drafter, fields, aux, D)
    total = sum(weight.numel() for weight in drafter.parameters())
    head = sum(weight.numel() for weight in drafter.vocabulary_weights())
    section, data = recipe.train, recipe.data
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if num_local is None:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    report = data_dir(recipe) / "report.json"
    rows = (
        read_json(report)["num_train_rows"]
        if report.exists()
        else math.ceil(data.num_prompts * (1 - data.heldout_fraction))
    )
    dtype = recipe.target.dtype
    if dtype == "auto" and on_gpu:
        dtype = "bfloat16"
    layer, ends = _target_parameters(fields)
    target_bytes = resolve_dtype(dtype, resolve_device(recipe.target.device)).itemsize
    cached = data.states == "cached"
    length, batch_rows = data.max_length, section.micro_batch_size
    if section.batch_tokens:
        batch_rows = max(1, section.batch_tokens // length)
    step_rows = batch_rows * section.gradient_accumulation * world
    packed = max(section.batch_tokens or 0, length)
    shape = Shape(
        fields=fields,
        aux_layers=aux,
        draft_vocab_size=D,
        num_parameters=total,
        num_trained=total - (0 if recipe.drafter.trains_head else head),
        target_parameters=layer * n + ends,
        held_parameters=layer * _held_layers(recipe, n, num_local) + ends,
        target_bytes=target_bytes,
        states_bytes=compute_dtype(data.states_dtype).itemsize if cached else target_bytes,
        num_rows=1 if section.packing else batch_rows,
        length=packed if section.packing else length,
        on_gpu=bool(on_gpu) or resolve_device(recipe.target.device).type == "cuda",
    )
    return Sizes(
        shape=shape,
        num_head=head,
        num_layers=n,
        num_rows=rows,
        step_rows=step_rows,
        num_steps=section.max_steps or math.ceil(rows * section.epochs / step_rows),
        world=world,
        memory=step_memory(recipe, shape),
    )


def memory_line(memory: StepMemory) -> str:
    """The parts of a step's peak memory, for a person."""
    return (
        f"memory a process at most, counted on shapes: {memory.peak / 1e9:.2f} GB = drafter and "
        f"optimizer {memory.weights / 1e9:.2f} + target {memory.target / 1e9:.2f} + batches "
        f"{memory.batch / 1e9:.2f} + a step {memory.work / 1e9:.2f}"
    )


def _sizes(recipe: Recipe) -> str:
    sizes, section = sizes_of(recipe), recipe.train
    shape = sizes.shape
    hidden, vocab = shape.fields["hidden_size"], shape.fields["vocab_size"]
    lines = [
        f"target: {shape.target_parameters / 1e6:,.1f}M parameters, {sizes.num_layers} layers, "
        f"hidden {hidden}, vocabulary {vocab}",
        f"drafter: {shape.num_parameters / 1e6:,.2f}M parameters ({shape.num_trained / 1e6:,.2f}M "
        f"trained, head {sizes.num_head / 1e6:,.2f}M), aux layers {list(shape.aux_layers)}, draft "
        f"vocabulary {shape.draft_vocab_size}",
        f"steps: {sizes.num_steps:,} of {sizes.step_rows} rows ({sizes.world} processes), at most"
        + (f"; stops after {section.max_minutes:g} minutes" if section.max_minutes else ""),
        memory_line(sizes.memory),
        f"checkpoints on disk: {(section.keep_checkpoints + 1) * shape.num_trained * 12 / 1e9:.2f} "
        "GB",
    ]
    return "\n".join(lines)


def _held_layers(recipe: Recipe, num_layers: int, num_local: int) -> int:
    """Decoder layers of the target that one process holds, at most."""
    if recipe.target.weights == "ends":
        return 1
    if recipe.target.placement == "sharded" and num_local > 1:
        return min(num_layers, math.ceil(num_layers / num_local) + 2)  # this one and the next
    return num_layers


def _target_parameters(fields: dict[str, object]) -> tuple[int, int]:
    """Weights of a layer, and of all else, of a dense decoder (experts are not counted)."""

    def size(name: str) -> int:
        return int(str(fields.get(name) or 0))

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim") or hidden // heads
    kv_heads = size("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * size("intermediate_size") + 2 * hidden
    embeddings = size("vocab_size") * hidden * (1 if fields.get("tie_word_embeddings") else 2)
    return layer, embeddings + hidden
