"""What acceptance and costs predict: tokens a round, speedup, the best number of draft tokens.

Formulas: Leviathan et al. 2211.17192, with the costs of a real loop added: verifying k + 1
positions costs what it costs, not what one costs. Times are in any one unit (milliseconds in the
result record). K: the number of draft tokens; r: positions of a verification, K + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recipes.errors import UserError


class Point(NamedTuple):
    """The prediction for one number of draft tokens.

    tau: tokens a round. speedup: over plain decoding. oracle_speedup: of a drafter with the same
    costs whose every token is accepted. oracle_share: speedup / oracle_speedup. extrapolated: the
    acceptance of the last positions was not measured.
    """

    num_draft_tokens: int
    tau: float
    draft_ms: float
    verify_ms: float
    loop_ms: float
    speedup: float
    oracle_speedup: float
    oracle_share: float
    extrapolated: bool


@dataclass(frozen=True)
class Costs:
    """Measured times of the parts of a round, by size; between two sizes they are interpolated.

    verify_ms: {r: a pass of the target over r positions a row}; 1 must be there.
    draft_ms: {K: drafting K tokens, and the drafter's reading of what was committed}.
    loop_ms: {K: sampling and bookkeeping}; 0 (plain decoding) must be there.
    """

    verify_ms: dict[int, float]
    draft_ms: dict[int, float]
    loop_ms: dict[int, float]

    @property
    def plain_ms(self) -> float:
        """Time of one token without a drafter."""
        return self.verify_ms[1] + self.loop_ms[0]

    def verify(self, num_positions: int) -> float:
        """A pass of the target over some positions of every row."""
        return interpolate(self.verify_ms, num_positions)

    def draft(self, num_draft_tokens: int) -> float:
        """All passes of the drafter in a round."""
        return interpolate(self.draft_ms, num_draft_tokens)

    def loop(self, num_draft_tokens: int) -> float:
        """What is neither the target's nor the drafter's; never less than was measured anywhere."""
        return max(interpolate(self.loop_ms, num_draft_tokens), min(self.loop_ms.values()))

    @property
    def cost_ratio(self) -> float:
        """c: the time of one more draft token over that of a plain token."""
        sizes = sorted(self.draft_ms)
        low, high = sizes[0], sizes[-1]
        if low == high:
            return self.draft_ms[low] / low / self.plain_ms
        return (self.draft_ms[high] - self.draft_ms[low]) / (high - low) / self.plain_ms


def interpolate(points: dict[int, float], x: int) -> float:
    """The piecewise linear function through the points; outside them it goes on as at the end.

    Raises:
        UserError: there are no points.
    """
    if x in points:
        return points[x]
    xs = sorted(points)
    if not xs:
        raise UserError("no costs were measured, so nothing can be predicted")
    if len(xs) == 1:
        return points[xs[0]]
    high = next((i for i, known in enumerate(xs) if known > x), len(xs) - 1)
    a, b = xs[max(high - 1, 0)], xs[max(high, 1)]
    return points[a] + (points[b] - points[a]) * (x - a) / (b - a)


def brought_to(times: dict[int, float], known: dict[int, float]) -> dict[int, float]:
    """Times by size, multiplied so that they pass through those known at some sizes, if any.

    The factor is interpolated between two known sizes and stays as it is beyond them. So the sizes
    keep their proportions, and the level is that of the place where `known` was measured. A time
    of 0 has no proportion to any other: it stays.
    """
    if not known:
        return times
    at = {x: interpolate(times, x) for x in known}
    factors = {x: known[x] / at[x] if at[x] > 0 else 1.0 for x in known}
    low, high = min(known), max(known)
    brought = {x: t * interpolate(factors, min(max(x, low), high)) for x, t in times.items()}
    return brought | known


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Tokens a round, bonus included, if each position accepts with probability alpha.

    1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha).
    """
    return expected_tokens_from_conditional([alpha] * num_draft_tokens)


def expected_tokens_from_conditional(conditional: Sequence[float | None]) -> float:
    """Tokens a round, bonus included, from c_i = P(accept i | i - 1 accepted).

    1 + sum_k prod_(i<=k) c_i. A None (position never reached) ends the sum, since the product
    is 0 from there on.
    """
    tokens, survival = 1.0, 1.0
    for c in conditional:
        if c is None:
            break
        survival *= c
        tokens += survival
    return tokens


def extend_conditional(survival: Sequence[float], num_positions: int) -> list[float]:
    """c_1 .. c_n from s_1 .. s_m, also for n > m.

    Beyond m every position gets the pooled acceptance of positions 2..m (of position 1 where m
    is 1), which few rounds move less than the last c_i alone.
    """
    if not survival:
        return [0.0] * num_positions
    before = [1.0, *survival[:-1]]
    c = [s / b if b else 0.0 for s, b in zip(survival, before, strict=True)]
    rest = sum(before[1:])
    tail = sum(survival[1:]) / rest if rest else (c[0] if len(c) == 1 else 0.0)
    return (c + [tail] * num_positions)[:num_positions]


def predicted_speedup(
    tau: float, t_draft: float, t_verify: float, t_other: float, t_ar: float
) -> float:
    """Time of plain decoding over time of speculative decoding, for the same tokens.

    Args:
        tau: tokens a round, bonus included.
        t_draft, t_verify, t_other: time of each part of a round.
        t_ar: time of one token without a drafter.
    """
    return tau * t_ar / (t_draft + t_verify + t_other)


def predict(costs: Costs, survival: Sequence[float], max_draft_tokens: int = 16) -> list[Point]:
    """The prediction for 1 .. max_draft_tokens draft tokens.

    Args:
        survival: measured s_i = P(at least i accepted), i = 1 .. m; see `extend_conditional`.
    """
    conditional = extend_conditional(survival, max_draft_tokens)
    points = []
    for K in range(1, max_draft_tokens + 1):
        tau = expected_tokens_from_conditional(conditional[:K])
        parts = costs.draft(K), costs.verify(K + 1), costs.loop(K)
        speedup = predicted_speedup(tau, *parts, costs.plain_ms)
        perfect = predicted_speedup(K + 1.0, *parts, costs.plain_ms)
        share, beyond = speedup / perfect, len(survival) < K
        points.append(Point(K, tau, *parts, speedup, perfect, share, beyond))
    return points


def best_point(points: Sequence[Point]) -> Point | None:
    """The fastest, the smaller number where two are equal; None where none beats plain decoding.

    A round of one token gains nothing, whatever the clock said.
    """
    gains = [point for point in points if point.speedup > 1 and point.tau > 1]
    return max(gains, key=lambda point: point.speedup, default=None)


def best_num_draft_tokens(
    alpha: float,
    t_draft: float,
    t_verify: float,
    t_other: float,
    t_ar: float,
    max_draft_tokens: int = 64,
    parallel: bool = False,
) -> tuple[int, float]:
    """The number of draft tokens with the largest predicted speedup, and that speedup.

    Verification is taken to cost the same for any number, as it does while the target is
    bound by memory bandwidth.

    Args:
        alpha: acceptance of each position.
        t_draft: time of one draft token, or of the whole draft where parallel.
        parallel: the drafter proposes all tokens in one pass.
        t_verify, t_other, t_ar: as in predicted_speedup.

    Returns:
        (0, 1.0) where no number beats plain decoding.
    """
    best = (0, 1.0)
    for num_draft_tokens in range(1, max_draft_tokens + 1):
        tau = expected_tokens(alpha, num_draft_tokens)
        draft = t_draft if parallel else t_draft * num_draft_tokens
        speedup = predicted_speedup(tau, draft, t_verify, t_other, t_ar)
        if speedup > best[1]:
            best = (num_draft_tokens, speedup)
    return best
