"""The exported folder of a P-EAGLE: EAGLE-3's, with the mask token and the learned mask state.

vLLM serves it with method eagle3 and parallel_drafting. Its reader of the speculators form passes
no fc_norm on, so that form refuses it.
"""

from pathlib import Path
from typing import Any

import torch

from drafters import vllm_config
from drafters.base import TrainedDrafter
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.p_eagle import PEagle, PEagleConfig
from recipes.errors import UserError

MASK_KEYS = {"vllm": "ptd_token_id", "speculators": "mask_token_id"}


def form_of(config: dict[str, Any]) -> Form | None:
    """Which of the two forms a config.json has; None: it is no P-EAGLE."""
    if config.get("speculators_model_type") == "peagle":
        return "speculators"
    plain = config.get("architectures") == ["LlamaForCausalLMEagle3"]
    return "vllm" if plain and "ptd_token_id" in config else None


def make_config(
    drafter: PEagle, form: Form, dtype: torch.dtype, target: TargetInfo, num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json."""
    if form == "speculators" and drafter.config.fc_norm:
        raise UserError(
            "drafter.fc_norm: vLLM does not read it from the speculators form of P-EAGLE; use "
            "export.format: vllm"
        )
    config = vllm_config.make_config(drafter, form, dtype, target, num_draft_tokens)
    config[MASK_KEYS[form]] = drafter.config.mask_token_id
    if form == "speculators":
        config |= {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
        config["speculators_config"] |= {"algorithm": "peagle"}
    return config


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The P-EAGLE that a config.json describes (see ExportForm)."""
    form = form_of(config)
    assert form is not None, "the caller has asked form_of"
    if MASK_KEYS[form] not in config:
        raise UserError(f"{where}: missing keys: {MASK_KEYS[form]}")
    extra = {"mask_token_id": config[MASK_KEYS[form]]}
    return vllm_config.read_eagle_config(config, where, form, PEagle, PEagleConfig, extra)


def faults(shape: PEagleConfig) -> list[str]:
    """See ExportForm."""
    found = vllm_config.shape_faults(shape)
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        found.append(f"mask_token_id {shape.mask_token_id} is not within the vocabulary")
    if shape.norm_output:
        found.append("norm_output: one pass drafts all tokens, so no output is handed on")
    return found


FORM = ExportForm(
    title="P-EAGLE",
    tensors=vllm_config.TENSORS | {"mask_hidden": "mask_hidden"},
    forms=("vllm", "speculators"),
    engine={"method": "eagle3", "parallel_drafting": True},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=faults,
    target_faults=vllm_config.target_faults,
)
