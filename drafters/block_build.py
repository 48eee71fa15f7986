"""A fresh DFlash or DSpark for a target: its shape from target and recipe, its first weights.

Dimension letters: D draft vocabulary.
"""

from typing import Any

import torch

from data.target import Target
from drafters.dflash import DFlash, DFlashConfig
from drafters.dspark import DSpark, DSparkConfig
from drafters.shape import layer_shape, mask_token_of
from recipes.drafter_sections import BlockSection, DFlashSection, DSparkSection
from recipes.errors import UserError


def make_dflash_config(
    section: DFlashSection,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> DFlashConfig:
    """The shape: the recipe's values, else the target's (a transformers config dict)."""
    return DFlashConfig(**_block_shape(section, target_config, aux_layers, draft_vocab_size))


def make_dspark_config(
    section: DSparkSection,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> DSparkConfig:
    """The shape of a DSpark, likewise."""
    return DSparkConfig(
        **_block_shape(section, target_config, aux_layers, draft_vocab_size),
        markov_rank=section.markov_rank,
        markov_head_type=section.markov_head_type,
        confidence_head=section.confidence_head,
        confidence_head_with_markov=section.confidence_head_with_markov,
        sample_from_anchor=section.sample_from_anchor,
        confidence_threshold=section.confidence_threshold,
    )


def _block_shape(
    section: BlockSection,
    target_config: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> dict[str, Any]:
    n = int(str(target_config["num_hidden_layers"]))
    if not all(1 <= k < n for k in aux_layers):
        raise UserError(
            f"drafter.aux_layers {list(aux_layers)}: block drafters read states after layers 1 to "
            f"{n - 1} of the target's {n} (engines disagree about those before and behind)"
        )
    shape = layer_shape(section, target_config)
    if section.train_head and draft_vocab_size == shape["vocab_size"]:
        raise UserError(
            f"drafter.train_head: true, but drafter.draft_vocab_size {draft_vocab_size} is the "
            "whole vocabulary, whose head is the target's own; lower it, or set train_head: false"
        )
    return {
        **shape,
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": aux_layers,
        "mask_token_id": mask_token_of(section.mask_token_id, target_config),
        "block_size": section.block_size,
        "causal": section.causal,
        "attention_bias": section.attention_bias,
    }


def initialize(drafter: DFlash, section: BlockSection, target: Target) -> None:
    """Head rows of a reduced vocabulary are the target's; what a step samples is the recipe's."""
    drafter.num_anchors = section.num_anchors
    if drafter.lm_head is not None:
        rows_D = drafter.draft_ids_D.to(target.device)
        drafter.lm_head.weight.copy_(target.head_weight_VH[rows_D])


def initialize_dspark(drafter: DSpark, section: DSparkSection, target: Target) -> None:
    """As above; W1 has rows of length about 1, and W2 is zero: the first drafts are DFlash's."""
    initialize(drafter, section, target)
    drafter.confidence_weight = section.confidence_weight
    drafter.confidence_decay = section.confidence_decay
    head = drafter.markov_head
    torch.nn.init.normal_(head.markov_w1.weight, std=head.rank**-0.5)
    torch.nn.init.zeros_(head.markov_w2.weight)
