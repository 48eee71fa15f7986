"""The exported folder of Medusa heads: vLLM's own names (vllm/model_executor/models/medusa.py).

Tensors that it does not know are skipped there without a word, so reading here is strict.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from data.target import Target
from data.target_config import DTYPES
from drafters.base import TrainedDrafter
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.medusa import Medusa, MedusaConfig
from recipes.drafter_sections import MedusaSection
from recipes.errors import UserError

# Our name of a field: its key.
KEYS = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_heads": "num_heads",
    "num_layers": "num_hidden_layers",
    "bias": "medusa_fc_bias",
    "shared_head": "original_lm_head",
}
KINDS = {"bias": bool, "shared_head": bool}


def make_shape(
    section: MedusaSection,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    _draft_vocab_size: int,
) -> MedusaConfig:
    """The shape of the heads that a recipe asks for."""
    return MedusaConfig(
        hidden_size=int(target_config["hidden_size"]),
        vocab_size=int(target_config["vocab_size"]),
        num_heads=section.num_heads,
        num_layers=section.num_layers,
        bias=section.bias,
        shared_head=section.shared_head,
        aux_layers=aux_layers,
    )


def initialize(drafter: Medusa, _section: MedusaSection, target: Target) -> None:
    """Every head starts as the target's own next-token head (section 2.2 of the paper)."""
    for name, weight in drafter.named_parameters():
        if name.startswith("blocks."):
            weight.zero_()
        elif not drafter.config.shared_head:
            weight.copy_(target.head_weight_VH)


def form_of(config: dict[str, Any]) -> Form | None:
    """Its one form, or None."""
    return "vllm" if config.get("model_type") == "medusa" else None


def make_config(
    drafter: Medusa, _form: Form, dtype: torch.dtype, target: TargetInfo, _num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json."""
    name = str(dtype).removeprefix("torch.")
    shape = drafter.config.to_dict()
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        **{key: shape[ours] for ours, key in KEYS.items()},
        "truncated_vocab_size": shape["vocab_size"],
        "max_paths": 64,  # of its tree, which a chain does not use
        "topk": 10,
        # Not called num..layers: vLLM takes any such key for the number of blocks.
        "target_depth": target.num_layers,
        "dtype": name,
        "torch_dtype": name,
        "transformers_version": transformers.__version__,
    }


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The heads that a config.json describes (see ExportForm)."""
    wanted = ("architectures", *KEYS.values(), "truncated_vocab_size", "target_depth", "dtype")
    missing = [key for key in wanted if key not in config]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    for ours, key in KEYS.items():
        kind = KINDS.get(ours, int)
        if type(config[key]) is not kind:
            raise UserError(f"{where}: {key} is {config[key]!r}, not {kind.__name__}")
    if config["architectures"] != ["MedusaModel"]:
        raise UserError(f"{where}: architectures is {config['architectures']!r}")
    if config["truncated_vocab_size"] != config["vocab_size"]:
        raise UserError(
            f"{where}: truncated_vocab_size {config['truncated_vocab_size']}: a reduced vocabulary "
            f"is not served; it must be vocab_size, {config['vocab_size']}"
        )
    if config["dtype"] not in DTYPES:
        raise UserError(f"{where}: dtype {config['dtype']!r} is none of {', '.join(DTYPES)}")
    fields = {ours: config[key] for ours, key in KEYS.items()}
    shape = MedusaConfig(**fields, aux_layers=(config["target_depth"],))
    found = faults(shape)
    if found:
        raise UserError(f"{where}: {'; '.join(found)}")
    with torch.device("meta"):
        return Medusa(shape), DTYPES[config["dtype"]]


def faults(shape: MedusaConfig) -> list[str]:
    """See ExportForm."""
    return [
        f"{name} is {value}, not at least 1"
        for name, value in shape.to_dict().items()
        if type(value) is int and value < 1
    ]


def target_faults(shape: MedusaConfig, target: TargetInfo) -> list[str]:
    """See ExportForm."""
    pairs = {
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "hidden_size": (shape.hidden_size, target.hidden_size),
        "target_depth": (shape.aux_layers[0], target.num_layers),
    }
    return [
        f"{key} is {own}, that of the target {target.name} is {wanted}"
        for key, (own, wanted) in pairs.items()
        if own != wanted
    ]


def num_tokens(shape: MedusaConfig, wanted: int) -> int:
    """See ExportForm: a head drafts one token."""
    return min(shape.num_heads, wanted)


FORM = ExportForm(
    title="Medusa",
    tensors={
        "blocks.{i}.layers.{j}.weight": "blocks.{i}.layers.{j}.weight",
        "blocks.{i}.layers.{j}.bias": "blocks.{i}.layers.{j}.bias",
        "lm_heads.{i}.weight": "lm_heads.{i}.weight",
        "lm_head.weight": "lm_head.weight",
    },
    forms=("vllm",),
    engine={"method": "medusa"},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=faults,
    target_faults=target_faults,
    num_tokens=num_tokens,
)
