"""The exported folder of an EAGLE-1, for vLLM's method eagle (its models/llama_eagle.py).

The head, the final norm and the first layer's input norm must be absent there; the head and the
embedding are the target's.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from data.target import Target
from drafters import vllm_config
from drafters.base import TrainedDrafter
from drafters.eagle1 import Eagle1, Eagle1Config
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.form_reading import build_on_meta, read_dtype, read_shape, require_equal
from drafters.shape import layer_shape, require_plain_layer, warn_left_out
from recipes.drafter_sections import Eagle1Section
from recipes.errors import UserError

MARK = "draftsmith_method"  # other drafters too call themselves LlamaForCausalLM


def make_shape(
    section: Eagle1Section,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> Eagle1Config:
    """The shape that a recipe asks for."""
    return Eagle1Config(
        **layer_shape(section, target_config),
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        feature_weight=section.feature_weight,
        noise=section.noise,
    )


def initialize(drafter: Eagle1, section: Eagle1Section, target: Target) -> None:
    """First weights: random, or the target's last layer fed by the feature alone."""
    if section.init != "target":
        return
    require_plain_layer(target)
    source = target.layer_weights(-1)
    warn_left_out(drafter.method, drafter.layers, source)
    H = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, H:].copy_(torch.eye(H))
    for layer in drafter.layers:
        for name, parameter in layer.named_parameters():
            values = source.get(name)
            if values is None or values.shape != parameter.shape:
                raise UserError(
                    f"drafter.init 'target': {name} of the drafter has shape "
                    f"{list(parameter.shape)}, the target's last layer "
                    f"{None if values is None else list(values.shape)}; use init: random, or leave "
                    "the drafter's sizes out"
                )
            parameter.copy_(values)


def form_of(config: dict[str, Any]) -> Form | None:
    """Its one form, or None."""
    return "vllm" if config.get(MARK) == "eagle1" else None


def make_config(
    drafter: Eagle1, _form: Form, dtype: torch.dtype, target: TargetInfo, _num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        **_keys(drafter),
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "target_num_hidden_layers": target.num_layers,
        MARK: "eagle1",
        "dtype": name,
        "torch_dtype": name,
        "transformers_version": transformers.__version__,
    }


def _keys(drafter: Eagle1) -> dict[str, Any]:
    keys = vllm_config.layer_keys(drafter)
    del keys["num_aux_hidden_states"]
    return keys


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The drafter that a config.json describes (see ExportForm)."""
    wanted = (*vllm_config.LAYER_KEYS.values(), "target_num_hidden_layers", "dtype")
    missing = [key for key in wanted if key not in config]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    fields = {ours: config[key] for ours, key in vllm_config.LAYER_KEYS.items()}
    fields |= {
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "aux_layers": (config["target_num_hidden_layers"],),
    }
    shape = read_shape(Eagle1Config, fields, faults, where)
    drafter = build_on_meta(Eagle1, shape, where)
    require_equal(config, _keys(drafter), where)
    return drafter, read_dtype(config, where)


def faults(shape: Eagle1Config) -> list[str]:
    """See ExportForm."""
    found = vllm_config.shape_faults(shape)
    if shape.draft_vocab_size != shape.vocab_size:
        found.append(
            f"draft_vocab_size {shape.draft_vocab_size}: EAGLE-1 drafts through the target's whole "
            "head; leave drafter.draft_vocab_size out"
        )
    return found


def target_faults(shape: Eagle1Config, target: TargetInfo) -> list[str]:
    """See ExportForm."""
    found = vllm_config.target_faults(shape, target)
    if shape.aux_layers != (target.num_layers,):
        found.append(
            f"target_num_hidden_layers is {list(shape.aux_layers)}, that of the target "
            f"{target.name} is {target.num_layers}"
        )
    return found


FORM = ExportForm(
    title="EAGLE-1",
    tensors={
        ours: theirs
        for ours, theirs in vllm_config.TENSORS.items()
        if ours == "fc.weight" or (ours.startswith("layers.") and "hidden_norm" not in ours)
    },
    forms=("vllm",),
    engine={"method": "eagle"},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=faults,
    target_faults=target_faults,
)
