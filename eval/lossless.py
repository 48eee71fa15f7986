"""Did the emitted tokens come from the target? Tests on the tokens of any run.

Sampled: the randomised probability integral transform (PIT) of an emitted token x with the
target's final distribution p is u = F(x-) + U p(x), with F summed in an order fixed before x
was drawn and U uniform and unused so far. It is uniform on [0, 1] if and only if x was drawn
from p, so one Kolmogorov-Smirnov test judges all tokens of a run together.
Greedy: tokens are compared with the target's own.

Dimensions: N emitted tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
            depend on the token. q - p makes the test sharp for token verification; for block
            verification the order may not use q.
    """
    ids_V = torch.arange(p_NV.shape[-1], device=p_NV.device)
    before_NV = ids_V < tokens_N[:, None]
    if order_NV is not None:
        key_N1 = order_NV.gather(-1, tokens_N[:, None])
        before_NV = (order_NV < key_N1) | ((order_NV == key_N1) & before_NV)
    p_NV = p_NV.double()
    p_NV = p_NV / p_NV.sum(dim=-1, keepdim=True)
    mass_before_N = (p_NV * before_NV).sum(dim=-1)
    mass_N = p_NV.gather(-1, tokens_N[:, None])[:, 0]
    return (mass_before_N + uniforms_N.double() * mass_N).clamp(0, 1)


def pit_value(p_V: Tensor, token: int, uniform: float, order_V: Tensor | None = None) -> float:
    """pit_values of one token."""
    uniforms_1 = torch.tensor([uniform], dtype=torch.float64, device=p_V.device)
    tokens_1 = torch.tensor([token], device=p_V.device)
    order_1V = None if order_V is None else order_V[None]
    return float(pit_values(p_V[None], tokens_1, uniforms_1, order_1V))


def ks_p_value(values: Sequence[float]) -> float | None:
    """P-value of the two-sided Kolmogorov-Smirnov test of values against U(0, 1).

    The limiting Kolmogorov distribution, with Stephens' (1970) correction for a finite
    number of values: good to about 0.01 from 20 values on. None for no values.
    """
    n = len(values)
    if n == 0:
        return None
    ordered = sorted(values)
    distance = max(max((i + 1) / n - x, x - i / n) for i, x in enumerate(ordered))
    return _kolmogorov_survival((math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance)


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
