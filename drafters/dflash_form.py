"""config.json of an exported DFlash: the plain HF form (z-lab) and the speculators form.

As in drafters.vllm_config, every key that decides the computation is written, and reading is
strict. Both forms know target layers by 0-based index, or by the same plus one, which is ours:

    plain HF     dflash_config.target_layer_ids      index of a decoder layer: ours - 1
    speculators  aux_hidden_state_layer_ids          residual stream after k layers: ours

vLLM runs one query for the anchor and one a token to be drafted, so it drafts what was trained
where its number of speculative tokens is that of the block. SGLang reads the plain form, with the
target's number of layers (drafters.sglang_format). Functions here also serve DSpark, whose folder
has more keys.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from drafters import sglang_format
from drafters.base import TrainedDrafter
from drafters.dflash import DFlash, DFlashConfig
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.form_reading import build_on_meta, read_dtype, read_shape, require_equal
from drafters.vllm_config import LAYER_KEYS, LAYER_SECTION, SPECULATORS_VERSION
from recipes.errors import UserError

TENSORS = {
    name: name
    for name in (
        "fc.weight",
        "hidden_norm.weight",
        *(f"layers.{{i}}.self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
        *(f"layers.{{i}}.self_attn.{p}_norm.weight" for p in "qk"),
        *(f"layers.{{i}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "layers.{i}.input_layernorm.weight",
        "layers.{i}.post_attention_layernorm.weight",
        "norm.weight",
        "lm_head.weight",
    )
}
# What no block drafter of ours varies.
CONSTANTS = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "logit_scale": 1.0,
}
TOP_KEYS = ("draft_vocab_size", "target_hidden_size", "block_size")
ARCHITECTURE = "DFlashDraftModel"


def layer_keys(drafter: DFlash) -> dict[str, Any]:
    """The keys of a Qwen3 model: at the top, or in the speculators form's own section."""
    shape = drafter.config.to_dict()
    rope = {"rope_type": "default", **shape["rope_parameters"]}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        **CONSTANTS,
        **{key: shape[ours] for ours, key in LAYER_KEYS.items()},
        "attention_bias": shape["attention_bias"],
        "layer_types": ["full_attention"] * shape["num_layers"],
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # these two: the spelling of transformers 4
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def draft_keys(drafter: DFlash, form: Form) -> dict[str, Any]:
    """The keys at the top that say what kind of block is drafted."""
    shape = drafter.config.to_dict()
    keys = {key: shape[key] for key in TOP_KEYS}
    if form == "vllm":
        return keys | {"dflash_config": plain_keys(drafter)}
    return keys | {
        "mask_token_id": shape["mask_token_id"],
        "aux_hidden_state_layer_ids": shape["aux_layers"],
        "sliding_window_non_causal": not shape["causal"],
        "sample_from_anchor": False,
    }


def plain_keys(drafter: DFlash) -> dict[str, Any]:
    """The section `dflash_config` of the plain form."""
    return {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": [k - 1 for k in drafter.config.aux_layers],
        "causal": drafter.config.causal,
        "use_aux_hidden_state": True,
    }


def make_config(
    drafter: DFlash, form: Form, dtype: torch.dtype, target: TargetInfo, _num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json; a block says itself how many tokens it drafts."""
    return whole_config(
        drafter, form, dtype, target, ARCHITECTURE, "dflash", draft_keys(drafter, form)
    )


def whole_config(
    drafter: DFlash,
    form: Form,
    dtype: torch.dtype,
    target: TargetInfo,
    architecture: str,
    algorithm: str,
    draft: dict[str, Any],
) -> dict[str, Any]:
    """Layer keys, those of the draft, and what an engine wants to know of the target."""
    name = str(dtype).removeprefix("torch.")
    ids = {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
    }
    common = {"dtype": name, "torch_dtype": name, "transformers_version": transformers.__version__}
    head = {"architectures": [architecture]}
    if form == "vllm":
        layers = {"num_target_layers": target.num_layers}
        return {**head, **layer_keys(drafter), **draft, **layers, **ids, **common}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.config.max_draft,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **head,
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        **draft,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.path, "architectures": target.architectures},
        },
        LAYER_SECTION: {**layer_keys(drafter), **ids, "dtype": name, "torch_dtype": name},
        **common,
    }


def form_of(config: dict[str, Any]) -> Form | None:
    """Which of the two forms a config.json has; None: it is no DFlash."""
    return find_form(config, ARCHITECTURE, "dflash")


def find_form(config: dict[str, Any], architecture: str, algorithm: str) -> Form | None:
    """The form, where the names are those of one architecture."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return "speculators" if kind == algorithm else None
    return "vllm" if config.get("architectures") == [architecture] else None


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The drafter on the meta device (see ExportForm)."""
    form = form_of(config)
    assert form is not None, "the caller has asked form_of"
    layer, fields = read_fields(config, where, form, "dflash_config")
    shape = read_shape(DFlashConfig, fields, shape_faults, where)
    drafter = build_on_meta(DFlash, shape, where)
    require_equal(layer, layer_keys(drafter), where)
    require_equal(config, draft_keys(drafter, form), where)
    return drafter, read_dtype(config, where)


def read_fields(
    config: dict[str, Any], where: Path, form: Form, plain_section: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layer keys as they stand, and fields of a DFlashConfig.

    Args:
        plain_section: where the plain form keeps the mask token and layers; None = at the top.
    """
    layer = config if form == "vllm" else config.get(LAYER_SECTION)
    if not isinstance(layer, dict):
        raise UserError(f"{where}: {LAYER_SECTION} is missing")
    draft: Any = config
    layers_key = "aux_hidden_state_layer_ids"
    if form == "vllm":
        layers_key = "target_layer_ids"
        draft = config if plain_section is None else config.get(plain_section)
        if not isinstance(draft, dict):
            raise UserError(f"{where}: missing keys: {plain_section}")
    missing = [key for key in (*LAYER_KEYS.values(), "attention_bias") if key not in layer]
    missing += [key for key in (*TOP_KEYS, "dtype") if key not in config]
    missing += [key for key in ("mask_token_id", layers_key) if key not in draft]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    layer_ids = draft[layers_key]
    if form == "vllm" and isinstance(layer_ids, list):
        layer_ids = [k + 1 if isinstance(k, int) else k for k in layer_ids]
    fields = {ours: layer[key] for ours, key in LAYER_KEYS.items()}
    fields |= {key: config[key] for key in TOP_KEYS}
    fields |= {
        "attention_bias": layer["attention_bias"],
        "mask_token_id": draft["mask_token_id"],
        "aux_layers": layer_ids,
        "causal": draft.get("causal", False)
        if form == "vllm"
        else not config.get("sliding_window_non_causal", True),
    }
    return layer, fields


def shape_faults(shape: DFlashConfig) -> list[str]:
    """See ExportForm.faults."""
    faults = [
        f"{name} is {value}, not at least 1"
        for name, value in shape.to_dict().items()
        if type(value) is int and value < 1 and name != "mask_token_id"
    ]
    if faults:
        return faults
    heads, kv_heads, aux = shape.num_attention_heads, shape.num_key_value_heads, shape.aux_layers
    if heads % kv_heads or shape.head_dim % 2:
        faults.append(
            f"{heads} heads, {kv_heads} kv heads, head_dim {shape.head_dim} do not fit: the heads "
            "must be a multiple of the kv heads, and head_dim even"
        )
    if shape.hidden_size != shape.target_hidden_size:
        faults.append(
            f"hidden_size {shape.hidden_size} is not target_hidden_size "
            f"{shape.target_hidden_size}, but the drafter reads the target's embedding and head"
        )
    if shape.draft_vocab_size > shape.vocab_size:
        faults.append(
            f"draft_vocab_size {shape.draft_vocab_size} is above vocab_size {shape.vocab_size}"
        )
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        faults.append(
            f"mask_token_id {shape.mask_token_id} is no token of the target's {shape.vocab_size}"
        )
    if "rope_theta" not in shape.rope_parameters:
        faults.append(f"rope_parameters {shape.rope_parameters} names no rope_theta")
    if shape.max_draft < 1:
        faults.append(f"block_size {shape.block_size} leaves no slot to draft with")
    if list(aux) != sorted(set(aux)) or not aux or aux[0] < 1:
        faults.append(
            f"aux layers {list(aux)} must be ascending and distinct, from 1 on: engines sort them, "
            "drop repeats and cannot name the embeddings"
        )
    return faults


def target_faults(shape: DFlashConfig, target: TargetInfo) -> list[str]:
    """See ExportForm.target_faults."""
    pairs = {
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "target_hidden_size": (shape.target_hidden_size, target.hidden_size),
        "max_position_embeddings": (shape.max_position_embeddings, target.max_position_embeddings),
    }
    faults = [
        f"{key} is {own}, that of the target {target.name} is {wanted}"
        for key, (own, wanted) in pairs.items()
        if own != wanted
    ]
    if max(shape.aux_layers, default=0) >= target.num_layers:
        faults.append(
            f"aux layers {list(shape.aux_layers)} are not below {target.num_layers}, the layers of "
            f"the target {target.name}"
        )
    return faults


def block_tokens(shape: DFlashConfig, _wanted: int) -> int:
    """See ExportForm.num_tokens: a block of another length drafts otherwise."""
    return shape.max_draft


FORM = ExportForm(
    title="DFlash",
    tensors=TENSORS,
    forms=("vllm", "speculators"),
    engine={"method": "dflash"},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=shape_faults,
    target_faults=target_faults,
    sglang=sglang_format.dflash_options,
    num_tokens=block_tokens,
)
