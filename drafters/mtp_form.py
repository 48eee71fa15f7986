"""The exported folder of an MTP layer: MiMo's names (vllm/model_executor/models/mimo_mtp.py).

No engine loads this folder by itself: the tensors bear the names that they have among the target's
own, and `mtp_stitch.stitch` joins the two.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from data.target import Target
from drafters import mtp_stitch, vllm_config
from drafters.base import TrainedDrafter
from drafters.eagle1_form import MARK
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.form_reading import build_on_meta, read_dtype, read_shape, require_equal
from drafters.mtp import MTP, MTPConfig
from drafters.shape import layer_shape, norm_weight, require_plain_layer, warn_left_out
from recipes.drafter_sections import MTPSection
from recipes.errors import UserError

BIASED = ("qwen2", "mimo")  # biases of queries, keys and values that no key of theirs names
NORMED = ("qwen3", "gemma3_text")  # norms of queries and keys, likewise
SWITCHES = {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"}  # our name: its key
LAYER = "model.mtp_layers.{i}."


def make_shape(
    section: MTPSection,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> MTPConfig:
    """The target's own sizes: the layer is read by its config."""
    kind = target_config.get("model_type")
    return MTPConfig(
        **layer_shape(section, target_config),
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        qkv_bias=kind in BIASED or bool(target_config.get("attention_bias")),
        qk_norm=kind in NORMED,
    )


def initialize(drafter: MTP, section: MTPSection, target: Target) -> None:
    """First weights: random, the target's last layer, or the MTP layer that the target brings."""
    if section.init == "target":
        _from_last_layer(drafter, target)
    elif section.init == "native":
        wanted = {ours: FORM.tensors[_pattern(ours)].format(i=0) for ours in _names(drafter)}
        found = mtp_stitch.read_native(target.name, target.revision, list(wanted.values()))
        for ours, name in wanted.items():
            _copy(drafter.get_parameter(ours), found[name], name)


def _names(drafter: MTP) -> list[str]:
    return [name for name, _ in drafter.named_parameters()]


def _pattern(name: str) -> str:
    return name.replace("layers.0.", "layers.{i}.")


def _from_last_layer(drafter: MTP, target: Target) -> None:
    """The target's last layer, which reads the state alone; both its norms are the target's."""
    require_plain_layer(target)
    source = target.layer_weights(-1)
    warn_left_out(drafter.method, drafter.layers, source)
    H = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, :H].copy_(torch.eye(H))
    for norm in (drafter.hidden_norm, drafter.norm):
        norm.weight.copy_(norm_weight(target.decoder.norm))
    for name, parameter in drafter.layers[0].named_parameters():
        _copy(parameter, source.get(name), f"{name} of the target's last layer")


def _copy(parameter: torch.Tensor, values: torch.Tensor | None, name: str) -> None:
    if values is None or values.shape != parameter.shape:
        raise UserError(
            f"drafter.init: {name} has shape {None if values is None else list(values.shape)}, "
            f"the drafter needs {list(parameter.shape)}; use init: random"
        )
    parameter.copy_(values)


def form_of(config: dict[str, Any]) -> Form | None:
    """Its one form, or None."""
    return "vllm" if config.get(MARK) == "mtp" else None


def make_config(
    drafter: MTP, _form: Form, dtype: torch.dtype, target: TargetInfo, _num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["MiMoMTPModel"],
        **_keys(drafter),
        "num_nextn_predict_layers": 1,
        "target_num_hidden_layers": target.num_layers,
        MARK: "mtp",
        "dtype": name,
        "torch_dtype": name,
        "transformers_version": transformers.__version__,
    }


def _keys(drafter: MTP) -> dict[str, Any]:
    shape = drafter.config.to_dict()
    keys = vllm_config.layer_keys(drafter)
    del keys["num_aux_hidden_states"]
    switches = {key: shape[ours] for ours, key in SWITCHES.items()}
    return {**keys, "model_type": "mimo_mtp", **switches}


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The layer that a config.json describes (see ExportForm)."""
    names = vllm_config.LAYER_KEYS | SWITCHES
    missing = [
        key for key in (*names.values(), "target_num_hidden_layers", "dtype") if key not in config
    ]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    fields = {ours: config[key] for ours, key in names.items()}
    fields |= {
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "aux_layers": (config["target_num_hidden_layers"],),
    }
    shape = read_shape(MTPConfig, fields, faults, where)
    drafter = build_on_meta(MTP, shape, where)
    require_equal(config, _keys(drafter), where)
    return drafter, read_dtype(config, where)


def faults(shape: MTPConfig) -> list[str]:
    """See ExportForm."""
    found = vllm_config.shape_faults(shape)
    if shape.draft_vocab_size != shape.vocab_size:
        found.append(
            f"draft_vocab_size {shape.draft_vocab_size}: an MTP layer drafts through the target's "
            "whole head; leave drafter.draft_vocab_size out"
        )
    if shape.num_layers != 1:
        found.append(f"num_hidden_layers {shape.num_layers}: one MTP layer is written and read")
    return found


def target_faults(shape: MTPConfig, target: TargetInfo) -> list[str]:
    """See ExportForm."""
    found = vllm_config.target_faults(shape, target)
    if shape.aux_layers != (target.num_layers,):
        found.append(
            f"target_num_hidden_layers is {list(shape.aux_layers)}, that of the target "
            f"{target.name} is {target.num_layers}"
        )
    return found


BLOCK = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)

FORM = ExportForm(
    title="MTP",
    tensors={
        "embed_norm.weight": "model.mtp_layers.0.token_layernorm.weight",
        "hidden_norm.weight": "model.mtp_layers.0.hidden_layernorm.weight",
        "fc.weight": "model.mtp_layers.0.input_proj.weight",
        "norm.weight": "model.mtp_layers.0.final_layernorm.weight",
        **{f"layers.{{i}}.{name}": LAYER + name for name in BLOCK},
    },
    forms=("vllm",),
    engine={"method": "mtp"},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=faults,
    target_faults=target_faults,
)
