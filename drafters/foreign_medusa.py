"""Other people's Medusa heads: the authors' names and vLLM's (its models/medusa.py knows both).

The authors' config names neither sizes nor, always, the number of heads that the file holds (the
one for Vicuna 7B says 2, its file has 5), so the tensors decide.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.export_info import TargetInfo
from drafters.foreign_config import Keys, Read
from recipes.errors import UserError


def vllm_name(name: str, num_layers: int) -> str:
    """The authors' name of a tensor (HEAD.LAYER.linear.weight) -> vLLM's; vLLM's as they are."""
    name = name.removeprefix("medusa_head.")
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(rf"(\d+)\.{num_layers}\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


def read_medusa(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetInfo, where: Path
) -> Read:
    """Medusa: by the tensors, since the authors' configs name neither sizes nor all heads."""
    notes: list[str] = []
    keys = Keys(config, where, notes)
    num_layers = keys.take("medusa_num_layers", keys.take("num_hidden_layers", 1))
    first = [
        t for n, t in tensors.items()
        if n.removeprefix("medusa_head.") in ("0.0.linear.weight", "blocks.0.layers.0.weight")
    ]  # fmt: skip
    heads = {
        n.removeprefix("medusa_head.").removeprefix("blocks.").split(".")[0]
        for n in tensors
        if n.endswith((".0.linear.weight", ".layers.0.weight"))
    }
    if not first:
        raise UserError(f"{where}: the weights have no block of a first head")
    said = keys.take("medusa_num_heads", keys.take("num_heads", len(heads)))
    if said != len(heads):
        notes.append(f"the config names {said} heads, the weights hold {len(heads)}: these count")
    shared = "lm_head.weight" in tensors
    sizes = [
        t.shape[0]
        for n, t in tensors.items()
        if n == "lm_head.weight" or n.endswith(f"0.{num_layers}.weight") or n == "lm_heads.0.weight"
    ]
    if not sizes:
        raise UserError(f"{where}: the weights have no output head")
    fields = {
        "hidden_size": keys.take("hidden_size", first[0].shape[1]),
        "vocab_size": keys.take("vocab_size", sizes[0]),
        "num_heads": len(heads),
        "num_layers": num_layers,
        "bias": any(n.endswith((".0.linear.bias", ".layers.0.bias")) for n in tensors),
        "shared_head": shared,
        "aux_layers": [keys.take("target_depth", target.num_layers)],
    }
    keys.take("medusa_fc_bias", False)  # the tensors decide
    keys.take("original_lm_head", shared)
    keys.only("truncated_vocab_size", fields["vocab_size"])
    keys.only("logit_scale", 1.0)
    keys.finish()
    return Read(fields, notes)
