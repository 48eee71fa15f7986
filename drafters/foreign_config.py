"""config.json of other people's drafters -> the fields of ours, with the engines' defaults.

Defaults are vLLM's (transformers_utils/configs/speculators/algos.py, models/llama_eagle3.py,
models/qwen3_dflash.py, models/medusa.py, v1/worker/gpu_model_runner.py) and those of transformers'
LlamaConfig and Qwen3Config. Layer ids of the plain EAGLE-3 form: at the top they count as ours; in
`eagle_config` alone they are SpecForge's and SGLang's indices, ours minus one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from drafters.dflash import DFlashConfig
from drafters.dspark import DSparkConfig
from drafters.eagle1 import Eagle1Config
from drafters.eagle3 import Eagle3Config
from drafters.export_info import TargetInfo
from drafters.medusa import MedusaConfig
from drafters.p_eagle import PEagleConfig
from drafters.sglang_format import LAYERS_KEY, layer_ids
from recipes.errors import UserError

REQUIRED = object()
SHAPES: dict[str, Any] = {
    "eagle3": Eagle3Config,
    "p_eagle": PEagleConfig,
    "eagle1": Eagle1Config,
    "medusa": MedusaConfig,
    "dflash": DFlashConfig,
    "dspark": DSparkConfig,
}
SPECULATORS = {"eagle3": "eagle3", "peagle": "p_eagle", "dflash": "dflash", "dspark": "dspark"}
MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
LAYER_SECTION = "transformer_layer_config"
EAGLE3_NAMES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
# What decides nothing of a draft.
IDLE = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "base_model_name_or_path",
        "bos_token_id",
        "chunk_size_feed_forward",
        "draftsmith_method",
        "dspark_bonus_anchor",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_paths",
        "max_window_layers",
        "model_type",
        "num_aux_hidden_states",
        "num_target_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_num_hidden_layers",
        "topk",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "version",
    ]
)


class Read(NamedTuple):
    """Fields of the drafter's shape, and what was assumed for keys that are absent."""

    fields: dict[str, Any]
    notes: list[str]


class Keys:
    """A config.json from which keys are taken one by one, so that what is left is not known."""

    def __init__(self, values: dict[str, Any], where: Path, notes: list[str]) -> None:
        self.left, self.where, self.notes = dict(values), where, notes

    def take(self, key: str, default: Any = REQUIRED, why: str = "") -> Any:
        """The value of a key; `default` where it is absent or null, noted with the reason."""
        value = self.left.pop(key, None)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UserError(f"{self.where}: missing keys: {key}")
        if why:
            self.notes.append(f"{key} is absent: {default!r} ({why})")
        return default

    def only(self, key: str, value: Any) -> None:
        """A key that may be absent, but not have another value than this."""
        found = self.take(key, value)
        if found != value:
            raise UserError(
                f"{self.where}: {key} is {found!r}; drafters are read here with {value!r} only"
            )

    def finish(self) -> None:
        """UserError where a key is left that might decide something."""
        left = sorted(k for k, value in self.left.items() if k not in IDLE and value)
        if left:
            shown = ", ".join(f"{key} = {self.left[key]!r}" for key in left)
            raise UserError(
                f"{self.where}: unknown keys, which may decide what is drafted: {shown}"
            )


def method_of(config: dict[str, Any], where: Path) -> str:
    """The method (drafters.methods) of somebody else's config.json."""
    names, kind = set(config.get("architectures") or []), config.get("speculators_model_type")
    if kind is not None:
        if kind in SPECULATORS:
            return SPECULATORS[kind]
    elif config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    elif names == {"DFlashDraftModel"}:
        return "dflash"
    elif names == {"Qwen3DSparkModel"}:
        return "dspark"
    elif names & EAGLE3_NAMES or (names == {"LlamaForCausalLM"} and "draft_vocab_size" in config):
        return "p_eagle" if config.keys() & set(MASK_KEYS) else "eagle3"
    elif names in ({"LlamaForCausalLM"}, {"LlamaForCausalLMEagle"}, {"EagleLlamaForCausalLM"}):
        return "eagle1"
    raise UserError(
        f"{where}: no drafter that is known here (architectures {sorted(names)}, "
        f"speculators_model_type {kind!r}); known are {', '.join(SHAPES)}"
    )


def _layer_fields(keys: Keys, target: TargetInfo, model_type: str) -> dict[str, Any]:
    """The keys of a Llama or Qwen3 model."""
    found = keys.left.get("model_type", model_type)
    if found != model_type:
        raise UserError(
            f"{keys.where}: model_type is {found!r}; its layers are read as {model_type}'s only"
        )
    hidden, heads = keys.take("hidden_size"), keys.take("num_attention_heads")
    whole = hidden // heads if type(hidden) is int and type(heads) is int and heads else None
    usual = whole if model_type == "llama" else 128
    longest = keys.take("max_position_embeddings", target.max_position_embeddings)
    if longest != target.max_position_embeddings:
        keys.notes.append(
            f"max_position_embeddings {longest}: {target.max_position_embeddings}, the target's, "
            "as vLLM does"
        )
    fields = {
        "hidden_size": hidden,
        "intermediate_size": keys.take("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("num_key_value_heads", heads, "transformers"),
        "head_dim": keys.take("head_dim", usual, "transformers"),
        "num_layers": keys.take("num_hidden_layers", 1, "one layer"),
        "rms_norm_eps": keys.take("rms_norm_eps", 1e-6, "transformers"),
        "vocab_size": keys.take("vocab_size"),
        "rope_parameters": _rope(keys),
        "max_position_embeddings": target.max_position_embeddings,
    }
    for key, value in (("hidden_act", "silu"), ("mlp_bias", False), ("logit_scale", 1.0)):
        keys.only(key, value)
    keys.take("tie_word_embeddings", False)  # whether the folder has a head decides, as in vLLM
    types = keys.take("layer_types", [])
    window = keys.take("sliding_window", None)
    if keys.take("use_sliding_window", window is not None) or set(types) - {"full_attention"}:
        raise UserError(
            f"{keys.where}: sliding_window {window!r}, layer_types {types}: windows are not read"
        )
    return fields


def _rope(keys: Keys) -> dict[str, Any]:
    """Both spellings: rope_parameters, or rope_theta with rope_scaling (transformers 4)."""
    rope, scaling = keys.take("rope_parameters", None), keys.take("rope_scaling", None)
    theta = keys.left.pop("rope_theta", None)
    if rope is None:
        if theta is None:
            keys.notes.append("rope_theta is absent: 10000.0 (transformers)")
        rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta or 10000.0}
        rope["rope_type"] = rope.pop("type", rope["rope_type"])
        return rope
    if not isinstance(rope, dict):
        raise UserError(f"{keys.where}: rope_parameters is {rope!r}")
    rope = {"rope_type": "default", "rope_theta": theta or 10000.0, **rope}
    plain = {k: v for k, v in rope.items() if k != "rope_theta"}
    if theta not in (None, rope["rope_theta"]) or (scaling or plain) != plain:
        raise UserError(
            f"{keys.where}: rope_parameters {rope} contradict rope_theta {theta}, rope_scaling "
            f"{scaling}"
        )
    return rope


def _sections(config: dict[str, Any], where: Path, notes: list[str]) -> tuple[Keys, Keys]:
    """The keys at the top and those of the layers: the same, but in the speculators form."""
    if "speculators_model_type" not in config:
        keys = Keys(config, where, notes)
        return keys, keys
    top = Keys(config, where, notes)
    section = top.take(LAYER_SECTION)
    if not isinstance(section, dict):
        raise UserError(f"{where}: {LAYER_SECTION} is {section!r}")
    top.take("tie_word_embeddings", False)
    return top, Keys(section, where, notes)


def _finish(top: Keys, layer: Keys) -> None:
    top.finish()
    if layer is not top:
        layer.finish()


def _read_eagle(config: dict[str, Any], target: TargetInfo, where: Path, method: str) -> Read:
    notes: list[str] = []
    top, layer = _sections(config, where, notes)
    fields = _layer_fields(layer, target, "llama")
    layer.only("attention_bias", False)
    is_spec = "speculators_model_type" in config
    usual = is_spec and method == "eagle3"
    eagle = dict(top.take("eagle_config", {}))
    before = top.take("norm_before_fc", eagle.pop("norm_before_fc", None))
    fields |= {
        "draft_vocab_size": top.take("draft_vocab_size", fields["vocab_size"], "whole"),
        "target_hidden_size": top.take("target_hidden_size", fields["hidden_size"], "its own"),
        "norm_before_residual": top.take("norm_before_residual", usual, "vLLM"),
        "norm_before_fc": bool(before),
        "fc_norm": top.take("fc_norm", False, "vLLM"),
        "norm_output": top.take("norm_output", False, "vLLM"),
        "aux_layers": _eagle_layers(top, eagle, target),
    }
    top.only("bias", False)
    top.only("embed_requires_grad", False)
    if eagle.pop("use_aux_hidden_state", True) is not True or any(eagle.values()):
        raise UserError(f"{where}: eagle_config: unknown keys or values: {eagle}")
    if method == "p_eagle":
        masks = {key: top.left.pop(key) for key in MASK_KEYS if key in top.left}
        if len(set(masks.values())) != 1:
            raise UserError(f"{where}: the mask token must be one: {masks}")
        fields["mask_token_id"] = next(iter(masks.values()))
    _finish(top, layer)
    return Read(fields, notes)


def _eagle_layers(top: Keys, eagle: dict[str, Any], target: TargetInfo) -> list[int]:
    ours, theirs = top.take(LAYERS_KEY, None), eagle.pop(LAYERS_KEY, None) or None
    for ids in (ours, theirs):
        if ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
            raise UserError(f"{top.where}: {LAYERS_KEY} is {ids!r}, not a list of numbers")
    if ours is not None:
        if theirs not in (None, ours, layer_ids(ours)):
            raise UserError(
                f"{top.where}: {LAYERS_KEY} is {ours}, in eagle_config {theirs}: neither the same "
                "nor indices of layers"
            )
        return ours
    if theirs is not None:
        found = [k + 1 for k in theirs]
        top.notes.append(f"{LAYERS_KEY} of eagle_config are indices: residual streams {found}")
        return found
    n = target.num_layers
    found = [2, n // 2, n - 3]
    top.notes.append(f"{LAYERS_KEY} is absent: {found} (all engines)")
    return found


def read_eagle3(config: dict[str, Any], target: TargetInfo, where: Path) -> Read:
    """EAGLE-3: speculators, plain (vLLM, SGLang, SpecForge) or as the authors published it."""
    return _read_eagle(config, target, where, "eagle3")


def read_p_eagle(config: dict[str, Any], target: TargetInfo, where: Path) -> Read:
    """P-EAGLE, speculators or plain."""
    return _read_eagle(config, target, where, "p_eagle")


def read_eagle1(config: dict[str, Any], target: TargetInfo, where: Path) -> Read:
    """EAGLE-1 and -2: the config of the target, with fewer layers."""
    notes: list[str] = []
    keys = Keys(config, where, notes)
    fields = _layer_fields(keys, target, "llama")
    keys.only("attention_bias", False)
    keys.take("bias", False)  # of fc: its tensor decides
    keys.finish()
    fields |= {
        "draft_vocab_size": fields["vocab_size"],
        "target_hidden_size": fields["hidden_size"],
        "aux_layers": [target.num_layers],
    }
    return Read(fields, notes)


def _block_fields(
    top: Keys, layer: Keys, draft: Keys, target: TargetInfo, is_spec: bool
) -> dict[str, Any]:
    """What DFlash and DSpark have in common; `draft` holds the mask token and target layers."""
    fields = _layer_fields(layer, target, "qwen3")
    fields |= {
        "attention_bias": layer.take("attention_bias", False),
        "draft_vocab_size": top.take("draft_vocab_size", fields["vocab_size"], "whole"),
        "target_hidden_size": top.take("target_hidden_size", fields["hidden_size"], "its own"),
        "mask_token_id": draft.take("mask_token_id"),
    }
    if is_spec:
        fields["aux_layers"] = draft.take("aux_hidden_state_layer_ids")
        fields["causal"] = not top.take("sliding_window_non_causal", True)
    else:
        indices = draft.take("target_layer_ids")
        if not isinstance(indices, list) or not all(type(k) is int for k in indices):
            raise UserError(f"{top.where}: target_layer_ids is {indices!r}")
        fields["aux_layers"] = [k + 1 for k in indices]
    return fields


def read_dflash(config: dict[str, Any], target: TargetInfo, where: Path) -> Read:
    """DFlash: speculators, or the plain form of z-lab and SpecForge."""
    notes: list[str] = []
    top, layer = _sections(config, where, notes)
    is_spec = layer is not top
    draft = top if is_spec else Keys(top.take("dflash_config"), where, notes)
    fields = _block_fields(top, layer, draft, target, is_spec)
    usual = draft.left.pop("block_size", None)
    fields["block_size"] = top.take("block_size", usual if usual else REQUIRED)
    if not is_spec:
        is_causal, causal = top.take("is_causal", None), draft.take("causal", False)
        fields["causal"] = causal if is_causal is None else is_causal
    top.only("sample_from_anchor", False)
    draft.only("sample_from_anchor", False)
    draft.only("use_aux_hidden_state", True)
    draft.only("use_swa", False)
    draft.finish()
    _finish(top, layer)
    return Read(fields, notes)


def read_dspark(config: dict[str, Any], target: TargetInfo, where: Path) -> Read:
    """DSpark: speculators, or the plain form of DeepSeek."""
    notes: list[str] = []
    top, layer = _sections(config, where, notes)
    is_spec = layer is not top
    fields = _block_fields(top, layer, top, target, is_spec)
    rank = "enable_confidence_head"
    fields |= {
        "block_size": top.take("block_size"),
        "markov_rank": top.take("markov_rank"),
        "markov_head_type": top.take("markov_head_type", "vanilla", "vLLM"),
        "confidence_head": top.take(rank, False, "vLLM"),
        "confidence_head_with_markov": top.take("confidence_head_with_markov", False),
        "sample_from_anchor": top.take("sample_from_anchor", not is_spec, "vLLM"),
        "confidence_threshold": top.take("confidence_threshold", 0.0),
    }
    if not is_spec:
        inner = Keys(top.take("dflash_config", {}), where, notes)
        fields["causal"] = inner.take("causal", False)
        inner.finish()
    top.only("use_aux_hidden_state", True)
    _finish(top, layer)
    return Read(fields, notes)


READERS: dict[str, Callable[[dict[str, Any], TargetInfo, Path], Read]] = {
    "eagle3": read_eagle3,
    "p_eagle": read_p_eagle,
    "eagle1": read_eagle1,
    "dflash": read_dflash,
    "dspark": read_dspark,
}
