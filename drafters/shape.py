"""Sizes of a drafter that follow from its target unless the recipe says otherwise."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data.target import Target
from recipes.drafter_sections import LayeredSection
from recipes.errors import UserError

log = logging.getLogger("draftsmith")


def layer_shape(section: LayeredSection, target_config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that every drafter made of decoder layers takes.

    Args:
        section: the recipe's values; None = the target's.
        target_config: `config.to_dict()` of the target's text model.

    Raises:
        UserError: sizes that do not fit together.
    """
    fields = target_config
    heads = section.num_attention_heads or _int(fields["num_attention_heads"])
    hidden = section.hidden_size or _int(fields["hidden_size"])
    if hidden != _int(fields["hidden_size"]):
        raise UserError(
            f"drafter.hidden_size {hidden}: the drafter shares the target's embedding, so it must "
            f"be {fields['hidden_size']} or left out"
        )
    kv_heads = section.num_key_value_heads or _int(fields.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UserError(
            f"drafter.num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _int(fields.get("head_dim") or 0)
    if not head_dim:
        if hidden % heads:
            raise UserError(
                f"hidden_size {hidden} is no multiple of {heads} heads and the target names no "
                "head_dim; set drafter.num_attention_heads"
            )
        head_dim = hidden // heads
    rope = fields.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
    assert isinstance(rope, dict)
    if "rope_theta" not in rope:  # one set for each layer type: the drafter's layers are global
        rope = rope["full_attention"]
    return {
        "target_hidden_size": _int(fields["hidden_size"]),
        "hidden_size": hidden,
        "intermediate_size": section.intermediate_size or _int(fields["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_layers": section.num_layers,
        "vocab_size": _int(fields["vocab_size"]),
        "rms_norm_eps": float(str(fields.get("rms_norm_eps") or 1e-6)),
        "rope_parameters": dict(rope),
        "max_position_embeddings": _int(fields.get("max_position_embeddings") or 2048),
    }


def norm_weight(norm: nn.Module) -> Tensor:
    """The factors that one of the target's norms applies.

    Gemma stores them less one; what the norm makes of ones shows which way its target has.
    """
    weight = norm.get_parameter("weight")
    offset = (norm(torch.ones_like(weight)) - weight).float().mean().round()
    return weight + offset.to(weight.dtype)


def require_plain_layer(target: Target) -> None:
    """UserError where the target's layers hold norms that a drafter's layer has no place for."""
    names = [name for name, _ in target.decoder.layers[-1].named_parameters()]
    if "pre_feedforward_layernorm.weight" in names:
        raise UserError(
            f"drafter.init 'target': the layers of {target.name} ({target.config.model_type}) have "
            "norms behind attention and MLP, the drafter's have none; use init: random"
        )


def mask_token_of(token_id: int | None, target_config: dict[str, Any]) -> int:
    """The token that stands where a parallel drafter does not know one yet.

    Any id serves, since the drafter learns what it means; it should be one that text does not
    hold. None = the target's padding token, else its first end token.
    """
    if token_id is None:
        token_id = target_config.get("pad_token_id")
        if token_id is None:
            ends: Any = target_config.get("eos_token_id")
            token_id = ends[0] if isinstance(ends, list) else ends
    vocab_size = _int(target_config["vocab_size"])
    if token_id is None or not 0 <= token_id < vocab_size:
        raise UserError(
            f"drafter.mask_token_id: {token_id} is no token of the target; name one within "
            f"0..{vocab_size - 1} that its text does not use"
        )
    return token_id


def _int(value: object) -> int:
    return int(str(value))


def warn_left_out(method: str, layers: nn.Module, source: Mapping[str, Tensor]) -> None:
    """Say what of the target's layer a drafter that starts from it has no place for."""
    own = {name for layer in layers.children() for name, _ in layer.named_parameters()}
    if left := sorted(source.keys() - own):
        log.warning(
            "drafter.init target: a %s layer has no place for the target's %s; it starts without",
            method,
            ", ".join(left),
        )
