"""A fresh EAGLE-3 drafter for a target: its shape from target and recipe, its first weights.

Dimension letters: D draft vocabulary, V target vocabulary, H width.
"""

from typing import Any

import torch

from data.target import Target
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.p_eagle import PEagleConfig
from drafters.shape import (
    layer_shape,
    mask_token_of,
    norm_weight,
    require_plain_layer,
    warn_left_out,
)
from recipes.drafter_sections import Eagle3Section, EagleLayers, PEagleSection
from recipes.errors import UserError


def make_config(
    section: Eagle3Section,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> Eagle3Config:
    """The drafter's shape: the recipe's values, else the target's (a transformers config dict)."""
    shape = _eagle_shape(section, target_config, aux_layers, draft_vocab_size)
    return Eagle3Config(**shape, norm_output=section.norm_output)


def make_parallel_config(
    section: PEagleSection,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> PEagleConfig:
    """The shape of a P-EAGLE, likewise."""
    return PEagleConfig(
        **_eagle_shape(section, target_config, aux_layers, draft_vocab_size),
        mask_token_id=mask_token_of(section.mask_token_id, target_config),
        keep_ratio=section.keep_ratio,
        min_keep_ratio=section.min_keep_ratio,
    )


def _eagle_shape(
    section: EagleLayers,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> dict[str, Any]:
    return {
        **layer_shape(section, target_config),
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": aux_layers,
        "norm_before_residual": section.norm_before_residual,
        "norm_before_fc": section.norm_before_fc,
        "fc_norm": section.fc_norm,
    }


def initialize(drafter: Eagle3, section: EagleLayers, target: Target) -> None:
    """First weights that come from the target, over random ones; d2t is set already."""
    if section.head_init == "target":
        drafter.lm_head.weight.copy_(target.head_weight_VH[drafter.draft_ids_D.to(target.device)])
        drafter.norm.weight.copy_(norm_weight(target.decoder.norm))
    if section.init == "target":
        _warm_start(drafter, target)


def _warm_start(drafter: Eagle3, target: Target) -> None:
    """Start as the target's last layer on its last captured state.

    fc passes that state through; the first layer's half for the state is the target's last layer,
    its half for the embedding stays random; deeper layers copy the last layer as it is.
    """
    require_plain_layer(target)
    source = target.layer_weights(-1)
    warn_left_out(drafter.method, drafter.layers, source)
    H = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -H:].copy_(torch.eye(H))
    for index, layer in enumerate(drafter.layers):
        for name, parameter in layer.named_parameters():
            first_norm = index == 0 and name in ("input_layernorm.weight", "hidden_norm.weight")
            values = source.get("input_layernorm.weight" if first_norm else name)
            if name == "input_layernorm.weight" and index == 0:
                continue  # norm of the embedding: ones
            part: torch.Tensor = parameter
            if index == 0 and name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                part = parameter[:, H:]
            if values is None or values.shape != part.shape:
                raise UserError(
                    f"drafter.init 'target': {name} of the drafter has shape {list(part.shape)}, "
                    f"the target's last layer {None if values is None else list(values.shape)}; "
                    "use init: random, or leave the drafter's sizes out"
                )
            part.copy_(values)
