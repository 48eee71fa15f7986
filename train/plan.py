"""What a run would do (`--dry-run`): sizes, steps, memory and disk, without touching anything.

Dimension letters: C positions of a chunk, D draft vocabulary.
"""

import math
import os

from data.embedded import config_of
from data.estimate import estimate_data
from data.files import read_json
from data.pipeline import data_dir
from drafters.methods import build_on_meta
from recipes.errors import UserError
from recipes.schema import Recipe, dump_recipe

ADAM_BYTES = 16  # fp32 weight, gradient and two moments of a trained parameter
CHUNK_COPIES = 6  # logits, probabilities of both sides, gradient and work space


def describe(recipe: Recipe) -> str:
    """The resolved recipe, then the estimates (upper bounds where data is not prepared yet)."""
    parts = [dump_recipe(recipe).rstrip(), ""]
    try:
        parts += [estimate_data(recipe), _sizes(recipe)]
    except UserError as error:
        parts.append(f"no estimates: {error}")
    return "\n".join(parts)


def _sizes(recipe: Recipe) -> str:
    fields = config_of(recipe.target.model, recipe.target.revision)
    n, hidden, vocab = (int(fields[k]) for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
    aux = tuple(recipe.drafter.aux_layers or recipe.drafter.default_aux_layers(n))
    D = recipe.drafter.draft_vocab_size or vocab
    drafter = build_on_meta(recipe.drafter, fields, aux, D)
    counts = {name: p.numel() for name, p in drafter.named_parameters()}
    total, head = sum(counts.values()), counts.get("lm_head.weight", 0)
    trained = total - (0 if recipe.drafter.trains_head else head)
    target = _target_parameters(fields)
    section, world = recipe.train, int(os.environ.get("WORLD_SIZE", "1"))
    report = data_dir(recipe) / "report.json"
    rows = (
        read_json(report)["num_train_rows"]
        if report.exists()
        else math.ceil(recipe.data.num_prompts * (1 - recipe.data.heldout_fraction))
    )
    step_rows = section.micro_batch_size * section.gradient_accumulation * world
    steps = section.max_steps or math.ceil(rows * section.epochs / step_rows)
    width = 2 if section.mixed_precision == "bf16" else 4
    positions = section.micro_batch_size * recipe.data.max_length
    chunk = recipe.loss.chunk_size * D * 4 * CHUNK_COPIES
    layer_width = 8 * hidden + 3 * int(fields["intermediate_size"])
    activations = positions * recipe.loss.num_steps * layer_width * width
    target_bytes = target * (4 if recipe.target.dtype == "float32" else 2)
    memory = trained * ADAM_BYTES + target_bytes + chunk + activations
    lines = [
        f"target: {target / 1e6:,.1f}M parameters, {n} layers, hidden {hidden}, vocabulary {vocab}",
        f"drafter: {total / 1e6:,.2f}M parameters ({trained / 1e6:,.2f}M trained, head "
        f"{head / 1e6:,.2f}M), aux layers {list(aux)}, draft vocabulary {D}",
        f"steps: {steps:,} of {step_rows} rows ({world} processes), at most"
        + (f"; stops after {section.max_minutes:g} minutes" if section.max_minutes else ""),
        f"memory a process, roughly: {memory / 1e9:.2f} GB = optimizer "
        f"{trained * ADAM_BYTES / 1e9:.2f} + target {target_bytes / 1e9:.2f} + logits of a chunk "
        f"{chunk / 1e9:.2f} + activations {activations / 1e9:.2f}",
        f"checkpoints on disk: {(section.keep_checkpoints + 1) * trained * 12 / 1e9:.2f} GB",
    ]
    return "\n".join(lines)


def _target_parameters(fields: dict[str, object]) -> int:
    """Weights of a dense decoder of this shape (experts are not counted)."""

    def size(name: str) -> int:
        return int(str(fields.get(name) or 0))

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim") or hidden // heads
    kv_heads = size("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * size("intermediate_size") + 2 * hidden
    embeddings = size("vocab_size") * hidden * (1 if fields.get("tie_word_embeddings") else 2)
    return layer * size("num_hidden_layers") + embeddings + hidden
