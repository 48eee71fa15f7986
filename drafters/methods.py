"""Every drafter with weights: how it is shaped, made and exported. A new one is an entry here.

Dimension letters: D draft vocabulary, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from data.target import Target
from data.vocab import DraftVocab
from drafters import (
    block_build,
    dflash_form,
    dspark_form,
    eagle1_form,
    eagle3_build,
    medusa_form,
    mtp_form,
    p_eagle_form,
    small_lm_form,
    vllm_config,
)
from drafters.base import TrainedDrafter
from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle1 import Eagle1
from drafters.eagle3 import Eagle3
from drafters.export_form import ExportForm
from drafters.medusa import Medusa
from drafters.mtp import MTP
from drafters.p_eagle import PEagle
from drafters.small_lm import Pard, SmallLM
from recipes.drafter_sections import DrafterSection

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Method:
    """What the project needs to know of an architecture.

    drafter: the module's class, made from its config alone.
    make_config: (section, the target's config dict, aux layers, D) -> the module's config.
    initialize: (drafter, section, target) puts weights over the random ones, under no_grad.
    form: names and keys of its exported folder.
    """

    drafter: Callable[[Any], TrainedDrafter]
    make_config: Callable[[Any, dict[str, Any], tuple[int, ...], int], Any]
    initialize: Callable[[Any, Any, Target], None]
    form: ExportForm


METHODS: dict[str, Method] = {
    "eagle3": Method(
        drafter=Eagle3,
        make_config=eagle3_build.make_config,
        initialize=eagle3_build.initialize,
        form=vllm_config.FORM,
    ),
    "p_eagle": Method(
        drafter=PEagle,
        make_config=eagle3_build.make_parallel_config,
        initialize=eagle3_build.initialize,
        form=p_eagle_form.FORM,
    ),
    "eagle1": Method(
        drafter=Eagle1,
        make_config=eagle1_form.make_shape,
        initialize=eagle1_form.initialize,
        form=eagle1_form.FORM,
    ),
    "medusa": Method(
        drafter=Medusa,
        make_config=medusa_form.make_shape,
        initialize=medusa_form.initialize,
        form=medusa_form.FORM,
    ),
    "mtp": Method(
        drafter=MTP,
        make_config=mtp_form.make_shape,
        initialize=mtp_form.initialize,
        form=mtp_form.FORM,
    ),
    "dflash": Method(
        drafter=DFlash,
        make_config=block_build.make_dflash_config,
        initialize=block_build.initialize,
        form=dflash_form.FORM,
    ),
    "dspark": Method(
        drafter=DSpark,
        make_config=block_build.make_dspark_config,
        initialize=block_build.initialize_dspark,
        form=dspark_form.FORM,
    ),
    "small_lm": Method(
        drafter=SmallLM,
        make_config=small_lm_form.make_shape,
        initialize=small_lm_form.initialize,
        form=small_lm_form.FORM,
    ),
    "pard": Method(
        drafter=Pard,
        make_config=small_lm_form.make_pard_shape,
        initialize=small_lm_form.initialize,
        form=small_lm_form.PARD_FORM,
    ),
}


def build_on_meta(
    section: DrafterSection, target_config: dict[str, Any], aux_layers: tuple[int, ...], D: int
) -> TrainedDrafter:
    """The drafter that a recipe asks for, without memory: shapes only."""
    method = METHODS[section.method]
    with torch.device("meta"):
        return method.drafter(method.make_config(section, target_config, aux_layers, D))


def build_drafter(
    section: DrafterSection,
    target: Target,
    aux_layers: tuple[int, ...],
    vocab: DraftVocab,
    seed: int,
) -> TrainedDrafter:
    """A drafter in fp32 on the target's device; its first weights by `seed` or from the target."""
    method = METHODS[section.method]
    config = method.make_config(section, target.config.to_dict(), aux_layers, vocab.size)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drafter = method.drafter(config)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        drafter.d2t.copy_(vocab.d2t)
        method.initialize(drafter, section, target)
    for weight in drafter.vocabulary_weights():
        weight.requires_grad_(section.trains_head)
    drafter.to(target.device).use_target(target)
    return drafter
