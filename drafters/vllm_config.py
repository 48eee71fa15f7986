"""config.json of an exported EAGLE-3 drafter: plain HF, speculators and SGLang's form.

Every key that an engine reads is written, also where it has the engine's default: defaults differ
between engines, and a key left out then loads silently as something else. Reading is strict for
the same reason: the keys that decide the computation must be there and agree with each other.

Layer ids are the project's own and vLLM's: k = residual stream after k decoder layers. SGLang's
form (drafters.sglang_format) differs from the plain one in the name of its layer and in how
`eagle_config` counts.
"""

from pathlib import Path
from typing import Any, cast

import torch
import transformers

from drafters import sglang_format
from drafters.base import TrainedDrafter
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.form_reading import build_on_meta, read_dtype, read_shape, require_equal
from recipes.errors import UserError

SPECULATORS_VERSION = "0.5.0"  # of the form that is written here
LAYER_SECTION = "transformer_layer_config"  # where the speculators form keeps the llama keys

# Our name of a tensor: its name in the file, the same in both forms; {i} is an index.
TENSORS = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "input_norm.weight",
    "fc_norm.{i}.weight": "fc_norm.{i}.weight",
    "layers.{i}.self_attn.q_proj.weight": "layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.self_attn.k_proj.weight": "layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.self_attn.v_proj.weight": "layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.self_attn.o_proj.weight": "layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp.gate_proj.weight": "layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down_proj.weight",
    "layers.{i}.input_layernorm.weight": "layers.{i}.input_layernorm.weight",
    "layers.{i}.hidden_norm.weight": "layers.{i}.hidden_norm.weight",
    "layers.{i}.post_attention_layernorm.weight": "layers.{i}.post_attention_layernorm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}

# Our name of a field: its key among the llama keys of both forms.
LAYER_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",  # the target's; the drafter's own is draft_vocab_size
    "rope_parameters": "rope_parameters",
}
# Our name of a field: its key at the top of both forms.
DRAFT_KEYS = {
    "draft_vocab_size": "draft_vocab_size",
    "target_hidden_size": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "aux_layers": "eagle_aux_hidden_state_layer_ids",
}
# What no drafter of ours varies.
CONSTANTS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "logit_scale": 1.0,
}


def make_config(
    drafter: Eagle3, form: Form, dtype: torch.dtype, target: TargetInfo, num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json. `num_draft_tokens` is the default of the speculators form."""
    if form == "sglang" and (found := sglang_format.faults(drafter.config, target.num_layers)):
        raise UserError(f"export.format sglang: {'; '.join(found)}; use export.format: vllm")
    name = str(dtype).removeprefix("torch.")
    ids = {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
    }
    common = {"dtype": name, "torch_dtype": name, "transformers_version": transformers.__version__}
    layer, draft = layer_keys(drafter), _draft_keys(drafter, form)
    if form != "speculators":
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **draft, **ids, **common}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **draft,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.path, "architectures": target.architectures},
        },
        LAYER_SECTION: {**layer, **ids, "dtype": name, "torch_dtype": name},
        **common,
    }


def form_of(config: dict[str, Any]) -> Form | None:
    """Which of the forms a config.json has; None: it is no EAGLE-3."""
    if config.get("speculators_model_type") == "eagle3":
        return "speculators"
    plain = config.get("architectures") == ["LlamaForCausalLMEagle3"]
    parallel = config.keys() & {"ptd_token_id", "pard_token", "mask_token_id"}
    if not plain or parallel or "speculators_model_type" in config:
        return None
    return "sglang" if sglang_format.counts_layers(config) else "vllm"


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The EAGLE-3 that a config.json describes (see ExportForm)."""
    form = form_of(config)
    assert form is not None, "the caller has asked form_of"
    return read_eagle_config(config, where, form, Eagle3, Eagle3Config, {})


def read_eagle_config(
    config: dict[str, Any],
    where: Path,
    form: Form,
    drafter_type: type[Eagle3],
    shape_type: type[Eagle3Config],
    extra: dict[str, Any],
) -> tuple[TrainedDrafter, torch.dtype]:
    """The drafter that a config.json describes, on the meta device, and the dtype of its weights.

    Args:
        config: content of config.json, in either form.
        where: its path, for messages.
        extra: fields of the shape that the caller has read.

    Raises:
        UserError: a missing key, an impossible value, or keys that contradict each other.
    """
    layer = config.get(LAYER_SECTION) if form == "speculators" else config
    if not isinstance(layer, dict):
        raise UserError(f"{where}: {LAYER_SECTION} is missing")
    fields = {ours: layer.get(key) for ours, key in LAYER_KEYS.items()}
    fields |= {ours: config.get(key) for ours, key in DRAFT_KEYS.items()}
    missing = [key for key in LAYER_KEYS.values() if key not in layer]
    missing += [key for key in (*DRAFT_KEYS.values(), "dtype") if key not in config]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    shape = read_shape(shape_type, fields | extra, shape_faults, where)
    drafter = build_on_meta(drafter_type, shape, where)
    require_equal(layer, layer_keys(drafter), where)
    require_equal(config, _draft_keys(drafter, form), where)
    return drafter, read_dtype(config, where)


def shape_faults(shape: Eagle3Config) -> list[str]:
    """What is impossible, or would load silently as something else, whatever the target."""
    faults = [
        f"{name} is {value}, not at least 1"
        for name, value in shape.to_dict().items()
        if type(value) is int and value < 1
    ]
    if faults:
        return faults
    heads, aux = shape.num_attention_heads, list(shape.aux_layers)
    if shape.hidden_size % heads or heads % shape.num_key_value_heads or shape.head_dim % 2:
        faults.append(
            f"hidden_size {shape.hidden_size}, {heads} heads, {shape.num_key_value_heads} kv "
            f"heads, head_dim {shape.head_dim} do not fit: hidden_size must be a multiple of the "
            "heads, these one of the kv heads, and head_dim even"
        )
    if shape.hidden_size != shape.target_hidden_size:
        faults.append(
            f"hidden_size {shape.hidden_size} is not target_hidden_size "
            f"{shape.target_hidden_size}, but the drafter reads the target's embedding and holds "
            "none of its own"
        )
    if shape.draft_vocab_size > shape.vocab_size:
        faults.append(
            f"draft_vocab_size {shape.draft_vocab_size} is above vocab_size {shape.vocab_size}"
        )
    if not aux or aux != sorted(set(aux)) or aux[0] < 0:
        faults.append(
            f"aux layers {aux} must be ascending and distinct, from 0 on: engines sort them and "
            "drop repeats, the weights of fc do not follow"
        )
    return faults


def target_faults(shape: Eagle3Config, target: TargetInfo) -> list[str]:
    """Where a drafter does not fit its target."""
    pairs = {
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "target_hidden_size": (shape.target_hidden_size, target.hidden_size),
        "max_position_embeddings": (
            shape.max_position_embeddings,
            target.max_position_embeddings,
        ),
    }
    faults = [
        f"{key} is {own}, that of the target {target.name} is {wanted}"
        for key, (own, wanted) in pairs.items()
        if own != wanted
    ]
    if max(shape.aux_layers, default=0) > target.num_layers:
        faults.append(
            f"aux layers {list(shape.aux_layers)} are not within 0..{target.num_layers}, the "
            f"layers of the target {target.name}"
        )
    return faults


def layer_keys(drafter: Eagle3) -> dict[str, Any]:
    """The keys of a Llama model, of both forms."""
    shape = drafter.config.to_dict()
    # As the rotary table was made from it: with the type written out.
    rope = {"rope_type": "default", **cast(dict[str, Any], drafter.rope.config.rope_parameters)}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        **CONSTANTS,
        **{key: shape[ours] for ours, key in LAYER_KEYS.items()},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # these two: the spelling of transformers 4
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "num_aux_hidden_states": len(shape["aux_layers"]),
    }


def _draft_keys(drafter: Eagle3, form: Form) -> dict[str, Any]:
    shape = drafter.config.to_dict()
    keys = {key: shape[ours] for ours, key in DRAFT_KEYS.items()}
    if form == "speculators":
        return keys
    eagle = {
        "use_aux_hidden_state": True,
        sglang_format.LAYERS_KEY: (
            sglang_format.layer_ids(shape["aux_layers"])
            if form == "sglang"
            else shape["aux_layers"]
        ),
        "norm_before_fc": shape["norm_before_fc"],
    }
    return {**keys, "eagle_config": eagle}


FORM = ExportForm(
    title="EAGLE-3",
    tensors=TENSORS,
    forms=("vllm", "speculators", "sglang"),
    engine={"method": "eagle3"},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=shape_faults,
    target_faults=target_faults,
    renamed={"sglang": sglang_format.renamed(TENSORS)},
    sglang=sglang_format.eagle3_options,
)
