"""Did the emitted tokens come from the target? Tests on the tokens of any run.

Sampled: the randomised probability integral transform (PIT) of an emitted token x with the
target's final distribution p is u = F(x-) + U p(x), with F summed in an order fixed before x
was drawn and U uniform and unused so far. It is uniform on [0, 1] if and only if x was drawn
from p, so Kolmogorov-Smirnov tests over all tokens of a run judge the run.

No one order shows every fault, so a token is transformed in three (`pit_columns`):
    ratio: by q / p, where the token was judged against a draft drawn from q. A wrong residual
        or a wrong q makes a law whose ratio to p follows q / p, and this order then collects
        all of its distance to p. Allowed because q is a function of the tokens before, and p is
        the law of a token given those and that the round has got so far. Where every position
        decides for itself that is plain; for block verification, where what was drafted behind
        has a say in it, it follows from two exact laws: if the first i - 1 and the first i tokens
        follow the target, however a round ends and the target goes on behind it, so does the
        i-th among the rounds that have one. At positions without a draft (bonus, the token of the
        prefill) it is the next order.
    probability: the most likely token first. Shows wrong temperatures, positions and argmaxes.
    id: the order in which `data.sampling.sample` draws. Shows random numbers used twice.
The p-value of a run is the smallest of the three, times three (Bonferroni): a right sampler is
below a level at most as often as the level says.

The number of tokens may depend on them (an answer ends at its stop token): each transform is
uniform given those before it, so no rule of when to stop moves their mean.

Greedy: tokens are compared with the target's own.

Dimensions: N emitted tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ORDERS = ("ratio", "probability", "id")
_TINY = 1e-30  # smaller probabilities count as this in a ratio: an order needs no more


class Divergence(NamedTuple):
    """Output `prompt` (an index) first differs at token `position`."""

    prompt: int
    position: int


class GreedyComparison(NamedTuple):
    """num_identical of num_prompts outputs are equal; the others are in divergences."""

    num_identical: int
    num_prompts: int
    divergences: list[Divergence]


def pit_values(
    p_NV: Tensor, tokens_N: Tensor, uniforms_N: Tensor, order_NV: Tensor | None = None
) -> Tensor:
    """PIT of each emitted token, fp64 in [0, 1].

    Args:
        p_NV: the distributions the tokens should have come from, given their prefixes.
        tokens_N: int64.
        uniforms_N: in [0, 1), used for nothing else.
        order_NV: keys by which F is summed, ascending, ties by id; None sums by id. Must not
            depend on the token.
    """
    ids_V = torch.arange(p_NV.shape[-1], device=p_NV.device)
    before_NV = ids_V < tokens_N[:, None]
    if order_NV is not None:
        key_N1 = order_NV.gather(-1, tokens_N[:, None])
        before_NV = (order_NV < key_N1) | ((order_NV == key_N1) & before_NV)
    total_N = p_NV.sum(dim=-1).double()
    mass_before_N = torch.linalg.vecdot(p_NV, before_NV.to(p_NV.dtype)).double() / total_N
    mass_N = p_NV.gather(-1, tokens_N[:, None])[:, 0].double() / total_N
    return (mass_before_N + uniforms_N.double() * mass_N).clamp(0, 1)


def pit_value(p_V: Tensor, token: int, uniform: float, order_V: Tensor | None = None) -> float:
    """pit_values of one token."""
    uniforms_1 = torch.tensor([uniform], dtype=torch.float64, device=p_V.device)
    tokens_1 = torch.tensor([token], device=p_V.device)
    order_1V = None if order_V is None else order_V[None]
    return float(pit_values(p_V[None], tokens_1, uniforms_1, order_1V))


def pit_columns(
    p_NV: Tensor, tokens_N: Tensor, uniforms_N: Tensor, q_NV: Tensor | None = None
) -> Tensor:
    """The transform in each of ORDERS: fp64 [N, 3].

    Args:
        p_NV, tokens_N, uniforms_N: as pit_values.
        q_NV: what the position's candidates were drawn from; rows of zeros where nothing was
            proposed. For candidates chosen outright (argmax, lookup, top-k siblings) 1 at each
            of them. None where nothing was proposed at all.
    """
    by_probability = pit_values(p_NV, tokens_N, uniforms_N, -p_NV)
    by_ratio = by_probability
    if q_NV is not None:
        ratio_NV = q_NV / p_NV.clamp(min=_TINY)
        drafted_N1 = (q_NV > 0).any(dim=-1, keepdim=True)
        by_ratio = pit_values(p_NV, tokens_N, uniforms_N, torch.where(drafted_N1, ratio_NV, -p_NV))
    return torch.stack([by_ratio, by_probability, pit_values(p_NV, tokens_N, uniforms_N)], -1)


def pit_p_value(columns: Sequence[Sequence[float]]) -> float | None:
    """P-value of the triples that pit_columns gave: the smallest of three, times three.

    None for no tokens.
    """
    p_values = [ks_p_value(column) for column in zip(*columns, strict=True)]
    known = [p for p in p_values if p is not None]
    return min(1.0, len(ORDERS) * min(known)) if known else None


def ks_distance(values: Sequence[float]) -> float:
    """Largest distance between the values' distribution function and that of U(0, 1)."""
    ordered_N = torch.tensor(values, dtype=torch.float64).sort().values
    below_N = torch.arange(len(values), dtype=torch.float64) / len(values)
    above_N = below_N + 1 / len(values)
    return float(torch.maximum(above_N - ordered_N, ordered_N - below_N).max())


def ks_p_value(values: Sequence[float]) -> float | None:
    """P-value of the two-sided Kolmogorov-Smirnov test of values against U(0, 1).

    The limiting Kolmogorov distribution, with Stephens' (1970) correction for a finite
    number of values: good to about 0.01 from 20 values on. None for no values.
    """
    n = len(values)
    if n == 0:
        return None
    scale = math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)
    return _kolmogorov_survival(scale * ks_distance(values))


def tokens_needed(distance: float, level: float = 1e-3, num_tests: int = len(ORDERS)) -> int:
    """Tokens at which a law at this KS distance is rejected in at least 95% of runs.

    n = ((K + Z / 2) / D)^2, with K = sqrt(ln(2 num_tests / level) / 2) the level's quantile of the
    Kolmogorov distribution (first term of its series) and Z = 1.645. Where the two functions are
    furthest apart, D, the one of n tokens has a standard deviation of at most 1 / (2 sqrt n); so
    it stays below the K / sqrt(n) that rejects with a probability of at most 5%. At the
    default level of 1e-3 in three orders n = 8.46 / D^2.
    """
    quantile = math.sqrt(math.log(2 * num_tests / level) / 2)
    return math.ceil(((quantile + 1.645 / 2) / distance) ** 2)


def _kolmogorov_survival(x: float) -> float:
    """P(K > x) of the Kolmogorov distribution, by whichever of its two series is short."""
    if x <= 0:
        return 1.0
    if x < 1:
        terms = (math.exp(-(((2 * k - 1) * math.pi / x) ** 2) / 8) for k in range(1, 6))
        return 1 - math.sqrt(2 * math.pi) / x * sum(terms)
    signs = (1, -1, 1, -1, 1)
    return 2 * sum(sign * math.exp(-2 * (k * x) ** 2) for k, sign in enumerate(signs, start=1))


def greedy_identical(
    outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> GreedyComparison:
    """Compare token ids prompt by prompt; where one output is a prefix, it differs at its end.

    Raises:
        ValueError: the two hold different numbers of outputs.
    """
    divergences = []
    for prompt, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        if list(ours) != list(theirs):
            equal = [a == b for a, b in zip(ours, theirs, strict=False)]
            position = equal.index(False) if False in equal else len(equal)
            divergences.append(Divergence(prompt, position))
    num_prompts = len(expected)
    return GreedyComparison(num_prompts - len(divergences), num_prompts, divergences)
