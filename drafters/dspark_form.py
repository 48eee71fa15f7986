"""config.json of an exported DSpark: DFlash's, with the keys of its two heads.

The plain form keeps mask token and target layers at the top, as the published checkpoints do. The
threshold and the temperatures of the confidence head are ours: vLLM decides lengths by costs of its
own (enable_adaptive_verification). vLLM serves the vanilla head; the tensors of the others have
names of our own, which it refuses.
"""

import math
from pathlib import Path
from typing import Any

import torch

from drafters import dflash_form
from drafters.base import TrainedDrafter
from drafters.dspark import DSpark, DSparkConfig
from drafters.export_form import ExportForm, Form
from drafters.export_info import TargetInfo
from drafters.form_reading import build_on_meta, read_dtype, read_shape, require_equal
from recipes.errors import UserError

TENSORS = dflash_form.TENSORS | {
    name: name
    for name in (
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "markov_head.gate.weight",
        "markov_head.gate.bias",
        "markov_head.rnn.weight",
        "markov_head.rnn.bias",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    )
}
# Our name of a field: its key at the top of both forms.
HEAD_KEYS = {
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "confidence_head": "enable_confidence_head",
    "confidence_head_with_markov": "confidence_head_with_markov",
    "sample_from_anchor": "sample_from_anchor",
    "confidence_threshold": "confidence_threshold",
}
ARCHITECTURE = "Qwen3DSparkModel"


def draft_keys(drafter: DSpark, form: Form) -> dict[str, Any]:
    """The keys at the top."""
    shape = drafter.config.to_dict()
    keys = dflash_form.draft_keys(drafter, form)
    keys |= {key: shape[ours] for ours, key in HEAD_KEYS.items()}
    if drafter.config.confidence_temperatures is not None:  # else not calibrated
        keys["confidence_temperatures"] = list(drafter.config.confidence_temperatures)
    if form == "vllm":
        keys |= keys.pop("dflash_config")
        keys |= {
            "dspark_bonus_anchor": not shape["sample_from_anchor"],
            "dflash_config": {"causal": shape["causal"]},  # where the engine looks for it
        }
    return keys


def make_config(
    drafter: DSpark, form: Form, dtype: torch.dtype, target: TargetInfo, _num_draft_tokens: int
) -> dict[str, Any]:
    """The whole config.json; a block says itself how many tokens it drafts."""
    if form == "speculators" and drafter.config.causal:
        raise UserError(
            "drafter.causal: engines do not read it from the speculators form of DSpark; use "
            "export.format: vllm"
        )
    draft = draft_keys(drafter, form)
    return dflash_form.whole_config(drafter, form, dtype, target, ARCHITECTURE, "dspark", draft)


def form_of(config: dict[str, Any]) -> Form | None:
    """Which of the two forms a config.json has; None: it is no DSpark."""
    return dflash_form.find_form(config, ARCHITECTURE, "dspark")


def read_config(config: dict[str, Any], where: Path) -> tuple[TrainedDrafter, torch.dtype]:
    """The drafter on the meta device (see ExportForm)."""
    form = form_of(config)
    assert form is not None, "the caller has asked form_of"
    layer, fields = dflash_form.read_fields(config, where, form, None)
    missing = [key for key in HEAD_KEYS.values() if key not in config]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    fields |= {ours: config[key] for ours, key in HEAD_KEYS.items()}
    fields["confidence_temperatures"] = config.get("confidence_temperatures")
    shape = read_shape(DSparkConfig, fields, shape_faults, where)
    drafter = build_on_meta(DSpark, shape, where)
    assert isinstance(drafter, DSpark)
    require_equal(layer, dflash_form.layer_keys(drafter), where)
    require_equal(config, draft_keys(drafter, form), where)
    return drafter, read_dtype(config, where)


def shape_faults(shape: DSparkConfig) -> list[str]:
    """See ExportForm.faults."""
    faults = dflash_form.shape_faults(shape)
    if not 0 <= shape.confidence_threshold <= 1:
        faults.append(f"confidence_threshold {shape.confidence_threshold} is not within 0 and 1")
    temperatures = shape.confidence_temperatures
    if temperatures is not None and (
        len(temperatures) != shape.max_draft or not all(0 < t < math.inf for t in temperatures)
    ):
        faults.append(
            f"confidence_temperatures {list(temperatures)}: needs {shape.max_draft} numbers above 0"
        )
    if shape.confidence_threshold > 0 and not shape.confidence_head:
        faults.append("confidence_threshold needs a confidence head")
    return faults


FORM = ExportForm(
    title="DSpark",
    tensors=TENSORS,
    forms=("vllm", "speculators"),
    engine={"method": "dspark"},
    form_of=form_of,
    make_config=make_config,
    read_config=read_config,
    faults=shape_faults,
    target_faults=dflash_form.target_faults,
    num_tokens=dflash_form.block_tokens,
    engine_note="vLLM serves DSpark with its model runner V2 only, which needs a GPU with Triton",
)
