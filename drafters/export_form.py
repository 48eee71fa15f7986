"""What an exported folder of one architecture looks like, to the code that writes and reads it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from drafters.base import TrainedDrafter
from drafters.export_info import TargetInfo

Form = Literal["vllm", "speculators", "sglang"]


def not_for_sglang(_shape: Any, _form: Form, _num_draft_tokens: int) -> list[str] | None:
    """SGLang serves no such drafter."""
    return None


def as_wanted(_shape: Any, num_draft_tokens: int) -> int:
    """Any number of tokens can be drafted."""
    return num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """Names and keys of one architecture's folder.

    title: of the architecture, for people.
    tensors: our name of a tensor: its name in the file; {i}, then {j}, stand for indices. The map
        of the draft vocabulary (d2t, t2d) is not among them.
    renamed: those that one of the forms names otherwise.
    own_names: a prefix of ours; tensors that have it are named in the file as the module names
        them, without it. Empty = every name is in the table.
    forms: those it can be written in.
    engine: keys of vLLM's --speculative-config beside model and number of tokens.
    form_of: the form that a config.json has, None where it is of another architecture.
    make_config: (drafter, form, dtype, target, num_draft_tokens) -> config.json.
    read_config: (config.json, its path) -> the drafter on the meta device, dtype of its weights;
        raises UserError on anything missing, impossible or contradictory.
    faults: what is impossible in a shape (the drafter's config), or would load silently as
        something else.
    target_faults: where a shape does not fit its target.
    sglang: (shape, form, number of draft tokens) -> options of sglang.launch_server beside the two
        models; None where SGLang does not serve that.
    num_tokens: (shape, wanted number of draft tokens) -> the number that an engine must be told.
    engine_note: what vLLM needs to serve this beyond what every drafter needs; empty = nothing.
    """

    title: str
    tensors: dict[str, str]
    forms: tuple[Form, ...]
    engine: dict[str, Any]
    form_of: Callable[[dict[str, Any]], Form | None]
    make_config: Callable[[Any, Form, torch.dtype, TargetInfo, int], dict[str, Any]]
    read_config: Callable[[dict[str, Any], Path], tuple[TrainedDrafter, torch.dtype]]
    faults: Callable[[Any], list[str]]
    target_faults: Callable[[Any, TargetInfo], list[str]]
    own_names: str = ""
    renamed: dict[Form, dict[str, str]] = field(default_factory=dict)
    sglang: Callable[[Any, Form, int], list[str] | None] = not_for_sglang
    num_tokens: Callable[[Any, int], int] = as_wanted
    engine_note: str = ""

    def names_of(self, form: Form) -> dict[str, str]:
        """The table of one form."""
        return self.tensors | self.renamed.get(form, {})
