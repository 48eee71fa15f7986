"""One drafter of each method for one tiny target, exported once and copied where it is damaged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.target import Target
from data.vocab import DraftVocab
from drafters.base import TrainedDrafter
from drafters.export_info import TargetInfo
from drafters.methods import METHODS, build_drafter
from drafters.vllm_format import save
from recipes.drafter_sections import (
    DFlashSection,
    DrafterSection,
    DSparkSection,
    Eagle1Section,
    Eagle3Section,
    MedusaSection,
    PEagleSection,
)
from tests.tiny_exports import ORIGIN
from tests.tiny_targets import tiny_target

NUM_DRAFT = 3
SIZES: dict[str, Any] = {"draft_vocab_size": 132, "aux_layers": [1, 2, 3]}
BLOCK: dict[str, Any] = {**SIZES, "num_layers": 2, "mask_token_id": 3, "block_size": 4}
SECTIONS: dict[str, DrafterSection] = {
    "eagle3": Eagle3Section(**SIZES),
    "p_eagle": PEagleSection(**SIZES, mask_token_id=3),
    "eagle1": Eagle1Section(num_layers=2),
    "medusa": MedusaSection(num_heads=NUM_DRAFT, shared_head=False),
    "dflash": DFlashSection(**BLOCK),
    "dspark": DSparkSection(**BLOCK, markov_rank=8),
}
FORMS = [(m, form) for m in SECTIONS for form in METHODS[m].form.forms]
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip


def four_layer_target(folder: Path | None = None, **changes: Any) -> Target:
    """A Llama of 4 layers whose head_dim is not hidden_size / heads, with a scaled RoPE.

    With a folder, it is saved there and named by it, so that a check finds it.
    """
    shape = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "mlp_bias": False,
    }
    target = tiny_target(**(shape | changes))
    with torch.no_grad():  # with weights of one, a norm taken twice would be a norm taken once
        weight_H = target.decoder.norm.weight
        weight_H.copy_(torch.linspace(0.3, 2.0, len(weight_H)))
    if folder is not None:
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
        target.name = str(folder)
    return target


def make(method: str, target: Target, **changes: Any) -> TrainedDrafter:
    """Random weights, no norm the identity; `changes` of the recipe's section."""
    section = SECTIONS[method].model_copy(update=changes)
    size = section.draft_vocab_size or target.vocab_size
    ids_D = torch.arange(target.vocab_size)[:: target.vocab_size // size]
    aux = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    vocab = DraftVocab(ids_D + (size < target.vocab_size), target.vocab_size)
    drafter = build_drafter(section, target, aux, vocab, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.5 * noise if "norm" in name else 0.25 * noise)
    return drafter.eval()


def export(
    drafter: TrainedDrafter, target: Target, folder: Path, form: Any = "vllm", dtype=torch.float32
) -> Path:
    origin = replace(ORIGIN, num_draft_tokens=NUM_DRAFT)
    save(drafter, folder, form, dtype, TargetInfo.of(target), origin)
    return folder


def foreign(folder: Path, to: Path) -> Path:
    """A copy as somebody else would publish it: without draftsmith.json."""
    shutil.copytree(folder, to)
    (to / "draftsmith.json").unlink()
    return to


def leaves(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key of a config.json, those of sections too."""
    found = []
    for key, value in config.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += leaves(value, (*before, key))
    return found


def set_leaf(folder: Path, path: tuple[str, ...], change: Any) -> None:
    """Replace a key's value by change(value); None removes the key."""
    config = json.loads((folder / "config.json").read_text())
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if change is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = change(inner[path[-1]])
    (folder / "config.json").write_text(json.dumps(config))
