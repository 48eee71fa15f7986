"""The ends of a target: embedding, last layer, final norm and head, without what lies between.

What training on stored states needs. The other tensors of the checkpoint are neither read nor, from
a hub, downloaded where whole files hold nothing else.
"""

import json
import re
from collections import defaultdict
from contextlib import suppress
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers.utils.hub import cached_file

from recipes.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"\blayers\.(\d+)\.")


def load_ends(
    path: str, config: Any, dtype: torch.dtype, revision: str | None
) -> tuple[Any, dict[str, Any]]:
    """The model with its last layer alone, and transformers' report of the loading.

    Args:
        path: folder or hub id of a checkpoint in safetensors.
        config: of the whole model; cut down to one layer here.
        dtype: of the weights.
        revision: of a hub id.

    Raises:
        UserError: no safetensors there. OSError, ValueError: as transformers' own loading.
    """
    text = config.get_text_config()
    last, types = int(text.num_hidden_layers) - 1, text.to_dict().get("layer_types")
    text.num_hidden_layers = 1
    if types:
        text.layer_types = types[-1:]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"target.model {path!r}: {config.model_type} is none of transformers' own models, "
            "whose layers target.weights: ends knows; set target.weights: whole"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded: Any = model_class.from_pretrained(
        None,
        config=config,
        state_dict=_tensors(path, last, revision),
        dtype=dtype,
        output_loading_info=True,
    )
    model, report = loaded
    with suppress(OSError):  # many models have none
        model.generation_config = GenerationConfig.from_pretrained(
            path, revision=revision or "main"
        )
    return model, report


def _tensors(path: str, last: int, revision: str | None) -> dict[str, Tensor]:
    """Tensors of the ends by the names of a model with one layer."""
    names_by_file: dict[str, list[str]] = defaultdict(list)
    index = _file(path, INDEX, revision)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            for name, where in json.load(file)["weight_map"].items():
                if _is_end(name, last):
                    names_by_file[where].append(name)
    elif (single := _file(path, SINGLE, revision)) is not None:
        with safe_open(single, framework="pt") as tensors:
            names = list(tensors.keys())
        names_by_file[SINGLE] = [name for name in names if _is_end(name, last)]
    found: dict[str, Tensor] = {}
    for where, names in names_by_file.items():
        file_path = _file(path, where, revision)
        if file_path is None:
            raise UserError(f"target.model {path!r}: its file {where} is missing")
        with safe_open(file_path, framework="pt") as tensors:
            for name in names:
                found[LAYER.sub("layers.0.", name)] = tensors.get_tensor(name)
    if not found:
        raise UserError(
            f"target.model {path!r}: neither {SINGLE} nor {INDEX} there, which target.weights: "
            "ends reads; save the checkpoint as safetensors, or set target.weights: whole"
        )
    return found


def _is_end(name: str, last: int) -> bool:
    layer = LAYER.search(name)
    return layer is None or int(layer[1]) == last


def _file(path: str, name: str, revision: str | None) -> str | None:
    found: str | None = cached_file(
        path, name, revision=revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return found
