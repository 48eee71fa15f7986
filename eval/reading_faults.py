"""The same weights, read with one mistake: which mistake explains another side's drafts?

Each fault is one that served drafters have had (layer ids off by one, a norm left out or applied
twice, the rotary base of another model, a switch that is not read, a map that was lost). A drafter
is read again with it, and drafts at the same places as the other side did.

Dimensions: S positions, H width, K drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from data.target import Target
from drafters.base import Sampling, TrainedDrafter
from drafters.methods import METHODS

SWITCHES = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Row:
    """A text, the target's states along it and where drafts are made.

    ids: tokens. states: by layer id k = 0..n, [S, H]; "normed" = the last after the final norm.
    anchors: places of the last committed tokens, ascending.
    """

    ids: list[int]
    states: dict[int | str, Tensor]
    anchors: list[int]


@dataclass(frozen=True)
class Reading:
    """A drafter as somebody may have read it.

    cause: layer ids, final norm, RoPE, norm switches, d2t or head. what: in words.
    layers: keys of Row.states that it is given.
    """

    cause: str
    what: str
    drafter: TrainedDrafter
    layers: Sequence[int | str]


@dataclass(frozen=True)
class Explanation:
    """A reading, and the share of the other side's drafts that it makes."""

    reading: Reading
    share: float


def make_row(target: Target, ids: list[int], anchors: Sequence[int]) -> Row:
    """One pass of the target over a text, all layers captured."""
    layers = tuple(range(target.num_layers + 1))
    found = target.forward(torch.tensor([ids], device=target.device), None, layers)
    parts = found.aux_BSF[0].chunk(len(layers), -1)
    states: dict[int | str, Tensor] = dict(zip(layers, parts, strict=True))
    states["normed"] = target.final_norm(states[target.num_layers])
    return Row(ids, states, sorted(anchors))


def drafts_of(reading: Reading, rows: Sequence[Row], num_draft: int) -> list[list[list[int]]]:
    """Greedy drafts [K] behind every anchor of every row."""
    return [_drafts(reading, row, num_draft) for row in rows]


@torch.no_grad()
def _drafts(reading: Reading, row: Row, num_draft: int) -> list[list[int]]:
    drafter = reading.drafter
    if reading.layers:
        aux_SF = torch.cat([row.states[k] for k in reading.layers], -1)
    else:
        aux_SF = row.states[0][:, :0]
    found, done = [], 0
    state = drafter.start([row.ids[: row.anchors[0]]], len(row.ids) + num_draft + 1)
    for anchor in row.anchors:
        next_ids = torch.tensor([row.ids[done + 1 : anchor + 1]], device=aux_SF.device)
        num_B = torch.tensor([anchor - done], device=aux_SF.device)
        drafter.observe(state, next_ids, aux_SF[None, done:anchor], num_B)
        proposal = drafter.propose(state, num_draft, Sampling(), None)
        found.append(proposal.tokens_BK[0].tolist()[: int(proposal.num_proposed_B[0])])
        done = anchor
    return found


def as_read(drafter: TrainedDrafter) -> Reading:
    """The drafter as it is."""
    return Reading("none", "as it is", drafter, list(drafter.aux_layers))


def agreement(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> float:
    """Share of drafts, tokens for tokens, that are the same; the shorter of two counts."""
    pairs = [
        (a, b)
        for row, other in zip(ours, theirs, strict=True)
        for a, b in zip(row, other, strict=True)
    ]
    same = [a[: len(b)] == b[: len(a)] for a, b in pairs]
    return sum(same) / max(1, len(same))


def explain(
    drafter: TrainedDrafter,
    target: Target,
    rows: Sequence[Row],
    theirs: list[list[list[int]]],
    num_draft: int,
) -> list[Explanation]:
    """Readings that make more of the other side's drafts than the drafter as it is; best first.

    Those that come as near as the best are all named: texts can be too short to tell them apart.
    """
    base = agreement(drafts_of(as_read(drafter), rows, num_draft), theirs)
    found = [
        Explanation(reading, agreement(drafts_of(reading, rows, num_draft), theirs))
        for reading in readings(drafter, target)
    ]
    best = max([e.share for e in found], default=0.0)
    return [e for e in found if e.share == best and best > base]


def readings(drafter: TrainedDrafter, target: Target) -> list[Reading]:
    """Every way to misread a drafter that its shape allows."""
    return [
        *_layer_readings(drafter, target),
        *_norm_readings(drafter, target),
        *_rope_readings(drafter, target),
        *_switch_readings(drafter, target),
        *_map_readings(drafter, target),
    ]


def _layer_readings(drafter: TrainedDrafter, target: Target) -> list[Reading]:
    aux, n = list(drafter.aux_layers), target.num_layers
    found: list[tuple[str, list[int]]] = []
    if aux and min(aux) > 0:
        found.append(("one layer too early", [k - 1 for k in aux]))
    if aux and max(aux) < n:
        found.append(("one layer too late", [k + 1 for k in aux]))
    if len(aux) > 1:
        found.append(("in reverse order", aux[::-1]))
    return [Reading("layer ids", what, drafter, list(ids)) for what, ids in found]


def _norm_readings(drafter: TrainedDrafter, target: Target) -> list[Reading]:
    aux, n = drafter.aux_layers, target.num_layers
    found = []
    if n in aux and drafter.method not in ("eagle1", "medusa"):
        layers: list[int | str] = ["normed" if k == n else k for k in aux]
        found.append(
            Reading("final norm", "the last state is read behind the final norm", drafter, layers)
        )
    if "norm.weight" in drafter.state_dict():
        lost = _again(drafter, target, {"norm.weight": lambda t: torch.ones_like(t)})
        found.append(Reading("final norm", "its weights are lost", lost, list(aux)))
    elif n in aux:  # the features of EAGLE-1 and Medusa: their own norm is applied once more
        found.append(
            Reading("final norm", "features are normed twice", drafter, ["normed"] * len(aux))
        )
    return found


def _rope_readings(drafter: TrainedDrafter, target: Target) -> list[Reading]:
    if "rope_parameters" not in _fields(drafter):
        return []
    own = {**DEFAULT_ROPE, **drafter.config.rope_parameters}
    theirs = target.config.to_dict().get("rope_parameters") or {}
    tried = {
        "its base is reset to 10000": {**own, "rope_theta": 10000.0},
        "its scaling is dropped": {**DEFAULT_ROPE, "rope_theta": own["rope_theta"]},
        "it is all defaults": DEFAULT_ROPE,
    }
    if "rope_theta" in theirs:
        tried["it is the target's"] = {**DEFAULT_ROPE, **theirs}
    found: list[Reading] = []
    seen = [own]
    for what, rope in tried.items():
        if rope not in seen:
            seen.append(rope)
            other = _again(drafter, target, {}, rope_parameters=rope)
            found.append(Reading("RoPE", what, other, list(drafter.aux_layers)))
    return found


def _switch_readings(drafter: TrainedDrafter, target: Target) -> list[Reading]:
    present = [name for name in SWITCHES if name in _fields(drafter)]
    if drafter.method == "eagle1":
        present = []  # the fields are EAGLE-3's, the module has no such switch
    if drafter.method == "p_eagle":
        present.remove("norm_output")
    found = []
    for name in present:
        value = bool(drafter.config.to_dict()[name])
        other = _again(drafter, target, {}, **{name: not value})
        what = f"{name} is read as {str(not value).lower()}"
        found.append(Reading("norm switches", what, other, list(drafter.aux_layers)))
    return found


def _map_readings(drafter: TrainedDrafter, target: Target) -> list[Reading]:
    shape, aux = drafter.config, list(drafter.aux_layers)
    if shape.draft_vocab_size == shape.vocab_size:
        return []
    offsets = torch.arange(shape.draft_vocab_size)
    zeros = _again(drafter, target, {"d2t": lambda t: torch.zeros_like(t)})
    absolute = _again(drafter, target, {"d2t": lambda t: t - offsets.to(t.device)})
    found = [
        Reading("d2t", "it is lost, so draft ids stand for the first target ids", zeros, aux),
        Reading("d2t", "offsets are read as ids", absolute, aux),
    ]
    if "lm_head.weight" in drafter.state_dict():
        rows = target.head_weight_VH[: shape.draft_vocab_size]
        other = _again(drafter, target, {"lm_head.weight": lambda t: rows.to(t.dtype).clone()})
        found.append(Reading("head", "the first rows of the target's are taken", other, aux))
    return found


def _fields(drafter: TrainedDrafter) -> set[str]:
    return {field.name for field in fields(drafter.config)}


def _again(
    drafter: TrainedDrafter,
    target: Target,
    tensors: dict[str, Callable[[Tensor], Tensor]],
    **changes: Any,
) -> TrainedDrafter:
    """The drafter with other tensors or another shape; new norms begin as the identity."""
    other = METHODS[drafter.method].drafter(replace(drafter.config, **changes))
    state = {**other.state_dict(), **drafter.state_dict()}
    for name, change in tensors.items():
        state[name] = change(state[name])
    other.load_state_dict({name: state[name] for name in other.state_dict()})
    other.to(target.device, torch.float32).eval()
    other.use_target(target)
    return other
