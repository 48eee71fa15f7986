"""How a small LM is shaped, made and exported: a folder that transformers and vLLM load as it is.

vLLM serves it with method draft_model; the parallel form, whose config.json names its pard_token,
with parallel_drafting too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data import embedded
from data.target import Target
from data.target_config import DTYPES, check_layers
from data.target_parts import whole_tensor
from drafters.base import TrainedDrafter
from drafters.eagle1_form import MARK
from drafters.export_form import ExportForm, Form
from drafters.export_info import INFO, TargetInfo, load_info
from drafters.shape import mask_token_of
from drafters.small_lm import Pard, PardConfig, SmallLM, SmallLMConfig, model_config
from recipes.errors import UserError
from recipes.lm_sections import LanguageModelSection, PardSection, SmallLMSection

LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types")  # one entry a layer
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
PREFIX = "lm."


def make_shape(
    section: SmallLMSection,
    target_config: dict[str, Any],
    _aux_layers: tuple[int, ...],
    _draft_vocab_size: int,
) -> SmallLMConfig:
    """The shape that a recipe asks for."""
    return SmallLMConfig(model=_model_fields(section, target_config))


def make_pard_shape(
    section: PardSection,
    target_config: dict[str, Any],
    _aux_layers: tuple[int, ...],
    _draft_vocab_size: int,
) -> PardConfig:
    """The same, of the parallel form."""
    return PardConfig(
        model=_model_fields(section, target_config),
        mask_token_id=mask_token_of(section.mask_token_id, target_config),
        keep_ratio=section.keep_ratio,
        min_keep_ratio=section.min_keep_ratio,
        num_anchors=section.num_anchors,
    )


def layers_kept(section: LanguageModelSection, num_target_layers: int) -> list[int]:
    """Which of the target's layers, counted from 0: as named, or evenly from first to last."""
    n = num_target_layers
    if section.keep_layers is not None:
        if section.keep_layers[-1] >= n:
            raise UserError(
                f"drafter.keep_layers {section.keep_layers}: the target's layers are 0..{n - 1}"
            )
        return section.keep_layers
    num = section.num_layers or max(1, n // 4)
    if num > n:
        raise UserError(f"drafter.num_layers {num}: the target has {n} layers to take from")
    return [0] if num == 1 else [round(i * (n - 1) / (num - 1)) for i in range(num)]


def _model_fields(section: LanguageModelSection, target_config: dict[str, Any]) -> dict[str, Any]:
    """The model's own config, with as many rows in its vocabulary as the target has."""
    n = int(target_config["num_hidden_layers"])
    if section.init == "checkpoint":
        fields = _checkpoint_config(section).to_dict()
        return fields | {"vocab_size": target_config["vocab_size"]}
    num = section.num_layers or max(1, n // 4)
    kept = layers_kept(section, n) if section.init == "layers" else [i % n for i in range(num)]
    fields = target_config | {"num_hidden_layers": len(kept)}
    for name in LAYER_LISTS:
        if isinstance(fields.get(name), list) and len(fields[name]) == n:
            fields[name] = [fields[name][i] for i in kept]
    sizes = section.model_dump(include=set(SIZES))
    fields |= {name: value for name, value in sizes.items() if value is not None}
    heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise UserError(
            f"drafter.num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    hidden = fields["hidden_size"]
    if not fields.get("head_dim") and (hidden % heads or hidden // heads % 2):
        raise UserError(
            f"drafter.hidden_size {hidden} gives {heads} heads no even whole width; set "
            "drafter.head_dim or drafter.num_attention_heads"
        )
    return fields


def _checkpoint_config(section: LanguageModelSection) -> Any:
    assert section.model is not None, "the section has checked it"
    try:
        config = AutoConfig.from_pretrained(
            embedded.resolve(section.model, "drafter.model"), revision=section.revision
        )
    except (OSError, ValueError) as error:
        raise UserError(f"drafter.model {section.model!r} cannot be read: {error}") from error
    return config.get_text_config()


def initialize(drafter: SmallLM, section: LanguageModelSection, target: Target) -> None:
    """First weights: the target's own layers, a checkpoint's, or those of chance."""
    check_layers("(drafter)", drafter.lm.config, bool(drafter.lm._is_stateful))
    if section.init == "layers":
        _take(drafter, target.model.state_dict(), "target", _source_name(section, target))
    elif section.init == "checkpoint":
        _take_checkpoint(drafter, section, target)


def _source_name(section: LanguageModelSection, target: Target) -> Callable[[str], str]:
    """Our name of a tensor -> the target's: layer i is its layer kept[i]."""
    kept = layers_kept(section, target.num_layers)

    def name(ours: str) -> str:
        before, mark, after = ours.partition(".layers.")
        if not mark:
            return ours
        index, rest = after.split(".", 1)
        return f"{before}.layers.{kept[int(index)]}.{rest}"

    return name


def _take(
    drafter: SmallLM, source: dict[str, Tensor], what: str, name_of: Callable[[str], str]
) -> None:
    """Copy every weight; the rows of a vocabulary are cut, or filled up with zeros."""
    for ours, weight in drafter.lm.named_parameters():
        values = source.get(name_of(ours))
        rows = values is not None and values.shape[1:] == weight.shape[1:]
        per_token = len(weight) == drafter.config.vocab_size
        if values is None or not (values.shape == weight.shape or (rows and per_token)):
            found = "is missing" if values is None else f"has shape {list(values.shape)}"
            raise UserError(
                f"drafter.init: {name_of(ours)} of the {what} {found}, the drafter needs "
                f"{list(weight.shape)}; use another drafter.init"
            )
        num = min(len(weight), len(values))
        weight.zero_()
        weight[:num].copy_(whole_tensor(values)[:num])


def _take_checkpoint(drafter: SmallLM, section: LanguageModelSection, target: Target) -> None:
    assert section.model is not None, "the section has checked it"
    path = embedded.resolve(section.model, "drafter.model")
    try:
        vocabulary = _vocabulary(path, section, target)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, revision=section.revision, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"drafter.model {section.model!r} cannot be loaded: {error}") from error
    check_vocabulary(section.model, vocabulary, target.tokenizer.get_vocab())
    num_rows = len(model.get_input_embeddings().weight)
    if num_rows < len(target.tokenizer):
        raise UserError(
            f"drafter.model {section.model!r} has {num_rows} rows for the target's "
            f"{len(target.tokenizer)} tokens"
        )
    _take(drafter, model.state_dict(), "checkpoint", lambda name: name)
    ids_BS = torch.arange(8)[None] % num_rows
    expected = model.eval()(input_ids=ids_BS, use_cache=False).logits
    ours = drafter.head_logits(drafter.states(ids_BS))
    num = min(expected.shape[-1], ours.shape[-1])
    worst = float((ours[..., :num] - expected[..., :num]).abs().max())
    if not worst <= 1e-3 * float(expected.abs().max()):
        raise UserError(
            f"drafter.model {section.model!r}: logits differ from its own by {worst:.3g}; this "
            f"architecture ({drafter.lm.config.model_type}) is not supported yet"
        )


def _vocabulary(path: str, section: LanguageModelSection, target: Target) -> dict[str, int]:
    """Tokens of the checkpoint; an export of ours holds no tokenizer: it reads its target's."""
    if not (Path(path) / INFO).is_file():
        tokenizer = AutoTokenizer.from_pretrained(path, revision=section.revision)
        return dict(tokenizer.get_vocab())
    info = load_info(path)
    of, method = info["target"]["name"], info["method"]
    if method not in ("small_lm", "pard") or of != target.name:
        raise UserError(
            f"drafter.model {section.model!r} is a {method} drafter of {of}; name a language "
            f"model, or a small_lm or pard drafter of {target.name}"
        )
    return dict(target.tokenizer.get_vocab())


def check_vocabulary(name: str, drafts: dict[str, int], targets: dict[str, int]) -> None:
    """Refuse a tokenizer whose tokens do not stand for the same ids."""
    if drafts == targets:
        return
    differing = sorted(
        (token for token in drafts.keys() | targets if drafts.get(token) != targets.get(token)),
        key=lambda token: (targets.get(token, len(targets)), token),
    )
    token = differing[0]
    raise UserError(
        f"drafter.model {name!r} has another vocabulary than the target: {len(differing)} tokens "
        f"differ, such as {token!r} ({drafts.get(token)} there, {targets.get(token)} in the "
        "target); a small LM needs the target's tokenizer"
    )


def _form_of(method: str) -> Callable[[dict[str, Any]], Form | None]:
    return lambda config: "vllm" if config.get(MARK) == method else None


def make_config(
    drafter: SmallLM, _form: Form, dtype: torch.dtype, target: TargetInfo, _num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json: the model's own, and what marks it as ours."""
    name = str(dtype).removeprefix("torch.")
    fields = drafter.config.model | {
        "architectures": [type(drafter.lm).__name__],
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        MARK: drafter.method,
        "dtype": name,
        "torch_dtype": name,
        "transformers_version": transformers.__version__,
    }
    if isinstance(drafter.config, PardConfig):
        fields["pard_token"] = drafter.config.mask_token_id
    return fields


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The drafter that a config.json describes (see ExportForm)."""
    wanted = ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "dtype"]
    if config[MARK] == Pard.method:
        wanted.append("pard_token")
    missing = [key for key in wanted if key not in config]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    if config["dtype"] not in DTYPES:
        raise UserError(f"{where}: dtype {config['dtype']!r} is none of {', '.join(DTYPES)}")
    ours = (MARK, "pard_token", "torch_dtype", "transformers_version", "architectures")
    fields = {name: value for name, value in config.items() if name not in ours}
    try:
        fields = model_config(fields).to_dict()
        # Buffers that no file holds (rotary tables) are computed; weights take no memory.
        with init_empty_weights(include_buffers=False):
            drafter: SmallLM
            if config[MARK] == Pard.method:
                drafter = Pard(PardConfig(model=fields, mask_token_id=config["pard_token"]))
            else:
                drafter = SmallLM(SmallLMConfig(model=fields))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: no language model has this shape: {error!r}") from error
    found = faults(drafter.config)
    if found:
        raise UserError(f"{where}: {'; '.join(found)}")
    if type(drafter.lm).__name__ not in config.get("architectures", []):
        raise UserError(
            f"{where}: architectures is {config.get('architectures')!r}, model_type "
            f"{fields['model_type']!r} is a {type(drafter.lm).__name__}"
        )
    return drafter, DTYPES[config["dtype"]]


def faults(shape: SmallLMConfig) -> list[str]:
    """See ExportForm."""
    if not isinstance(shape, PardConfig):
        return []
    token = shape.mask_token_id
    if type(token) is not int or not 0 <= token < shape.vocab_size:
        return [f"pard_token {token!r} is not within the vocabulary"]
    return []


def target_faults(shape: SmallLMConfig, target: TargetInfo) -> list[str]:
    """See ExportForm."""
    if shape.vocab_size == target.vocab_size:
        return []
    return [
        f"vocab_size is {shape.vocab_size}, that of the target {target.name} is {target.vocab_size}"
    ]


FORM = ExportForm(
    title="Small LM",
    tensors={},
    own_names=PREFIX,
    forms=("vllm",),
    engine={"method": "draft_model"},
    form_of=_form_of(SmallLM.method),
    make_config=make_config,
    read_config=read_config,
    faults=faults,
    target_faults=target_faults,
)
PARD_FORM = ExportForm(
    title="PARD",
    tensors={},
    own_names=PREFIX,
    forms=("vllm",),
    engine={"method": "draft_model", "parallel_drafting": True},
    form_of=_form_of(Pard.method),
    make_config=make_config,
    read_config=read_config,
    faults=faults,
    target_faults=target_faults,
)
