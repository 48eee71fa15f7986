"""The law of a verification function in rational arithmetic, without a random draw.

A verification function is piecewise constant in its uniforms. Where its value may change is known
in fractions (the acceptance probabilities and the cumulated weights of the rule), so the function
is run once in every cell between these cuts and its results are weighted with the cell's exact
volume. It is run near both ends of each cell as well: a cut that the rule does not know of would
show as a result that changes within a cell.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

Prefix = tuple[int, ...]
Row = Sequence[Fraction]
Law = dict[Prefix, list[Fraction]]  # next-token distribution after each prefix
Emitted = dict[Prefix, Fraction]  # probability of each sequence
ONE = Fraction(1)


@dataclass
class Case:
    """One proposal: its probability, and the cuts of every uniform (the last: the final draw)."""

    chance: Fraction
    cuts: list[set[Fraction]]


def random_law(generator: random.Random, vocab_size: int, depth: int) -> Law:
    """Small integers over their sum, some of them zero, for each prefix below depth."""
    law = {}
    for length in range(depth):
        for prefix in itertools.product(range(vocab_size), repeat=length):
            weights = [generator.randint(0, 4) for _ in range(vocab_size)]
            weights[generator.randrange(vocab_size)] += 1
            law[prefix] = [Fraction(w, sum(weights)) for w in weights]
    return law


def normalised(weights: Row) -> list[Fraction] | None:
    total = sum(weights)
    return [w / total for w in weights] if total else None


def residual(p: Row, q: Row) -> list[Fraction] | None:
    """norm(max(p - q, 0)); None where nothing is left."""
    return normalised([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])


def one_hot(token: int, vocab_size: int) -> list[Fraction]:
    return [Fraction(i == token) for i in range(vocab_size)]


def cumulated(weights: Row | None) -> set[Fraction]:
    """Where a draw from these weights changes its result."""
    return set(itertools.accumulate(weights)) if weights else set()


def extend(law: Emitted, p: Law, prefix: Prefix, mass: Fraction, length: int) -> None:
    """Add what the target makes of a prefix, up to `length` tokens."""
    if not mass:
        return
    if len(prefix) == length:
        law[prefix] += mass
        return
    for token, chance in enumerate(p[prefix]):
        extend(law, p, (*prefix, token), mass * chance, length)


def target_law(p: Law, length: int) -> Emitted:
    law: Emitted = defaultdict(Fraction)
    extend(law, p, (), ONE, length)
    return dict(law)


def emitted_law(
    p: Law,
    length: int,
    cases: list[Case],
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Emitted, Fraction]:
    """Law of the first `length` tokens (one round, then the target goes on), mean of emitted ones.

    Args: as round_law.
    """
    law: Emitted = defaultdict(Fraction)
    mean = Fraction(0)
    for emitted, mass in round_law(cases, run).items():
        mean += mass * len(emitted)
        extend(law, p, emitted[:length], mass, length)
    return dict(law), mean


def round_law(cases: list[Case], run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Emitted:
    """Probability of what one round emits.

    Args:
        run: (case number [N], acceptance uniforms [N, U], final uniforms [N]) -> emitted tokens
            [N, L], -1 behind the last.
    """
    assert sum(case.chance for case in cases) == 1
    numbers, cells, volumes = [], [], []
    for number, case in enumerate(cases):
        edges = [[Fraction(0), *sorted(c for c in cuts if 0 < c < 1), ONE] for cuts in case.cuts]
        spans = [list(itertools.pairwise(edge)) for edge in edges]
        for cell in itertools.product(*spans):
            numbers.append(number)
            cells.append([[float(low), float(high)] for low, high in cell])
            volumes.append(case.chance * prod((high - low for low, high in cell), start=ONE))
    number_N, bounds_NU2 = torch.tensor(numbers), torch.tensor(cells, dtype=torch.float64)
    low_NU, width_NU = bounds_NU2[..., 0], bounds_NU2[..., 1] - bounds_NU2[..., 0]
    generator = torch.Generator().manual_seed(0)
    within = [torch.full_like(low_NU, x) for x in (1e-4, 0.5, 1 - 1e-4)]
    within.append(torch.rand(low_NU.shape, generator=generator, dtype=torch.float64))
    results = []
    for share_NU in within:
        uniforms_NU = low_NU + share_NU * width_NU
        results.append(run(number_N, uniforms_NU[:, :-1], uniforms_NU[:, -1]))
    for other in results[1:]:
        assert torch.equal(results[0], other), "the rule changes its result within a cell"
    sums: Emitted = defaultdict(Fraction)
    for tokens, volume in zip(results[0].tolist(), volumes, strict=True):
        sums[tuple(t for t in tokens if t >= 0)] += volume
    return dict(sums)
