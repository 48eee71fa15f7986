"""What is read from a target's config, its folder and the machine before any weight is."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from data import embedded
from data.cache import KVCache
from data.files import stable_hash
from recipes.errors import UserError
from recipes.schema import TargetSection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device that "auto" stands for, or the named one if it is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("target.device is 'cuda', but torch sees no CUDA device; use 'auto'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it (CUDA, CPUs with AVX512-BF16), else fp32.

    Without those instructions a bf16 product on a CPU costs as much as its rows one by one, so
    nothing would be gained from verifying several tokens in one pass.
    """
    if name != "auto":
        return DTYPES[name]
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def cache_for(
    config: PreTrainedConfig,
    batch_size: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed_width: bool = False,
) -> KVCache:
    """An empty cache of the shape that a text model's config asks for."""
    heads = int(config.num_attention_heads)
    return KVCache(
        int(config.num_hidden_layers),
        batch_size,
        max_length,
        int(config.num_key_value_heads or heads),
        int(config.to_dict().get("head_dim") or config.hidden_size // heads),
        dtype,
        device,
        fixed_width,
    )


def head_scale(fields: dict[str, Any]) -> tuple[float, float | None]:
    """What a text model's config says of its logits: their factor, and where they are capped."""
    scale = fields.get("logit_scale") or 1.0 / (fields.get("logits_scaling") or 1.0)
    return float(scale), fields.get("final_logit_softcapping")


def check_layers(name: str, config: PreTrainedConfig, stateful: bool) -> None:
    """Refuse layers that keep no keys and values by position, and kinds of attention not known.

    Args:
        config: of the text model.
        stateful: transformers' own mark of models with a recurrent state.

    Raises:
        UserError: rejected tokens could not be taken back, or would be masked wrongly.
    """
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    recurrent = [kind for kind in unknown if not kind.endswith("attention")]
    if stateful or recurrent or "linear_attention" in unknown:
        layers = f" ({', '.join(unknown)} layers)" if unknown else ""
        raise UserError(
            f"target.model {name}: {config.model_type} keeps a recurrent state{layers}, which "
            "cannot be rolled back when drafted tokens are rejected; choose a target whose layers "
            "are all full or sliding attention"
        )
    if unknown:
        raise UserError(
            f"target.model {name}: {config.model_type} has {', '.join(unknown)} layers, which are "
            "not supported yet; choose a target with full or sliding attention"
        )


def find_revision(section: TargetSection) -> str:
    """What `revision_of` says of a target before it is loaded; its config alone is read.

    Raises:
        UserError: no such target, or no config there.
    """
    config = embedded.read_config(section.model, section.revision, section.trust_remote_code)
    return revision_of(embedded.resolve(section.model), config)


def revision_of(path: str, config: Any) -> str:
    """The hub commit, or a hash of a local folder's config and weight sizes."""
    folder = Path(path)
    if not folder.is_dir():
        return str(config._commit_hash)
    sizes = {f.name: f.stat().st_size for f in sorted(folder.glob("*.safetensors"))}
    return stable_hash([json.loads((folder / "config.json").read_text()), sizes])
