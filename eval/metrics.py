"""Acceptance and speed from per-round counts. All sums are pooled before any division.

A round is one verification. It proposes K tokens, accepts A of them and emits A + 1 (the
correction or the bonus), or A where it ends inside the draft at the end token. What cannot be
known is None, never 0 or 1.

Dimensions: C prompts (clusters: all turns of a conversation), R bootstrap resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.record import AcceptanceResult, CategoryResult, TurnResult
from recipes.errors import UserError

NUM_RESAMPLES = 2000


@dataclass
class PromptRecord:
    """What one decoded turn of one prompt left behind; records of all ranks simply add up.

    proposed, accepted: one entry a round, both None where the engine gives no counters. A
        round that stops at an end token counts accepted tokens up to and with that token.
    num_tokens: generated ids after truncation at the end token and at max_new_tokens, without
        the one that the prefill gave (its time is not in seconds either). Never counted from text.
    alpha_sum, alpha_count: sum over verified positions of sum_v min(p, q), and how many.
    seconds: decoding time of this turn, device synchronised, without the prefill.
    ends_inside_draft: the last round met the end token among its accepted tokens, so it
        emitted no token after them.
    accepted_before_stop: the accepted tokens of each round before the answer was cut at its end.
    batch: number of the batch whose time its prompts share equally; None = timed alone.
    """

    prompt_id: str
    category: str | None
    turn: int
    proposed: list[int] | None = field(default_factory=list)
    accepted: list[int] | None = field(default_factory=list)
    num_tokens: int = 0
    alpha_sum: float = 0.0
    alpha_count: int = 0
    seconds: float = 0.0
    ends_inside_draft: bool = False
    accepted_before_stop: list[int] | None = None
    batch: int | None = None

    @property
    def timed_as(self) -> str | int:
        """What its seconds were measured with: the unit of the speedup's interval."""
        return self.prompt_id if self.batch is None else self.batch


class Speedup(NamedTuple):
    """Two arms compared; other_lengths holds (prompt id, turn, baseline tokens, tokens)."""

    speedup: float | None
    speedup_ci95: list[float] | None
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    other_lengths: list[tuple[str, int, int, int]]


def aggregate(records: Sequence[PromptRecord], seed: int = 0) -> AcceptanceResult:
    """Pool the rounds of all turns of all prompts (definitions: eval.record.AcceptanceResult).

    tau = emitted / rounds, so it is 1 + mean accepted, less where rounds end inside a draft.
    A round that proposes less than K counts as not surviving beyond what it proposed.

    Args:
        records: one a turn; records without counters are left out of the rates and counted.
        seed: of the bootstrap; the same records and seed give the same interval.

    Raises:
        UserError: a round accepts more than it proposed, or the two lists differ in length.
    """
    proposed: list[int] = []
    accepted: list[int] = []
    emitted_by_prompt: dict[str, int] = {}
    rounds_by_prompt: dict[str, int] = {}
    before_stop = num_rejected = num_missing = 0
    for record in records:
        if record.proposed is None or record.accepted is None:
            num_missing += 1
            continue
        _check_rounds(record.proposed, record.accepted, record)
        proposed += record.proposed
        accepted += record.accepted
        before_stop += sum(record.accepted_before_stop or record.accepted)
        num_rounds = len(record.accepted)
        emitted = sum(record.accepted) + num_rounds - int(record.ends_inside_draft)
        # An answer that ends inside a draft rejected nothing of that draft.
        judged = record.accepted[:-1] if record.ends_inside_draft else record.accepted
        num_rejected += sum(a < k for a, k in zip(judged, record.proposed, strict=False))
        name = record.prompt_id
        emitted_by_prompt[name] = emitted_by_prompt.get(name, 0) + emitted
        rounds_by_prompt[name] = rounds_by_prompt.get(name, 0) + num_rounds

    known = num_missing < len(records) or not records
    num_rounds, num_proposed, num_accepted = len(accepted), sum(proposed), sum(accepted)
    survivors = [sum(a >= i for a in accepted) for i in range(1, max(proposed, default=0) + 1)]
    emitted_C = np.array(list(emitted_by_prompt.values()), dtype=np.float64)
    rounds_C = np.array(list(rounds_by_prompt.values()), dtype=np.float64)
    taus = [e / r for e, r in zip(emitted_C.tolist(), rounds_C.tolist(), strict=True) if r]
    return {
        "num_prompts": len({record.prompt_id for record in records}),
        "num_missing": num_missing,
        "num_rounds": num_rounds if known else None,
        "num_proposed": num_proposed if known else None,
        "num_accepted": num_accepted if known else None,
        "num_tokens": sum(record.num_tokens for record in records),
        "acceptance_rate": _ratio(num_accepted, num_proposed),
        "acceptance_rate_tested": _ratio(num_accepted, num_accepted + num_rejected),
        "alpha": _ratio(sum(r.alpha_sum for r in records), sum(r.alpha_count for r in records)),
        "mean_accepted": _ratio(num_accepted, num_rounds),
        "tau": _ratio(sum(emitted_by_prompt.values()), num_rounds),
        "tau_ci95": interval(
            _resampled_ratio(emitted_C, rounds_C, resample_counts(len(rounds_C), seed))
        ),
        "tau_mean_of_prompts": _ratio(sum(taus), len(taus)),
        "tau_before_stop": _ratio(before_stop + num_rounds, num_rounds),
        "survival": [count / num_rounds for count in survivors],
        "conditional": [
            _ratio(count, before)
            for count, before in zip(survivors, [num_rounds, *survivors], strict=False)
        ],
    }


def speedup(
    baseline: Sequence[PromptRecord], records: Sequence[PromptRecord], seed: int = 0
) -> Speedup:
    """Ratio of pooled tokens per second, both arms counted by generated ids.

    The interval resamples prompts, the same ones in both arms, because a long or an easy
    prompt is so for both; or batches, where prompts share the time of one. A ratio of wall times
    would call a shorter answer a speedup.

    Args:
        baseline: the same engine without a drafter, on the same prompts and turns.
        records: with the drafter. Repeats of a turn are added up within each arm.
        seed: of the bootstrap.

    Raises:
        UserError: a prompt was decoded in one arm only.
    """
    tokens_by_turn = [_tokens_by_turn(arm) for arm in (baseline, records)]
    unpaired = tokens_by_turn[0].keys() ^ tokens_by_turn[1].keys()
    if unpaired:
        name, turn = min(unpaired)
        raise UserError(
            f"speedup: prompt {name!r} turn {turn} was decoded in one arm only; measure the "
            "baseline and the drafter on the same prompts"
        )
    names = sorted({record.timed_as for record in baseline}, key=str)
    base_tokens_C, base_seconds_C = _totals(baseline, names)
    tokens_C, seconds_C = _totals(records, names)
    base_rate = _ratio(base_tokens_C.sum(), base_seconds_C.sum())
    rate = _ratio(tokens_C.sum(), seconds_C.sum())

    draws_RC = resample_counts(len(names), seed)
    ratios_R = _resampled_ratio(tokens_C, seconds_C, draws_RC)
    base_ratios_R = _resampled_ratio(base_tokens_C, base_seconds_C, draws_RC)
    with np.errstate(divide="ignore", invalid="ignore"):
        speedups_R = ratios_R / base_ratios_R
    return Speedup(
        speedup=None if rate is None or base_rate is None else _ratio(rate, base_rate),
        speedup_ci95=interval(speedups_R),
        tokens_per_second=rate,
        baseline_tokens_per_second=base_rate,
        other_lengths=[
            (*turn, num_tokens, tokens_by_turn[1][turn])
            for turn, num_tokens in tokens_by_turn[0].items()
            if num_tokens != tokens_by_turn[1][turn]
        ],
    )


def by_category(
    baseline: Sequence[PromptRecord], records: Sequence[PromptRecord], seed: int = 0
) -> dict[str, CategoryResult]:
    """Acceptance and speedup of the prompts of each category, in order of first appearance.

    Prompts without a category are in none, so the categories need not add up to the task.
    """
    found: dict[str, CategoryResult] = {}
    for name in dict.fromkeys(r.category for r in records if r.category is not None):
        ours = [r for r in records if r.category == name]
        theirs = [r for r in baseline if r.category == name]
        rates = aggregate(ours, seed)
        found[name] = {
            "num_rounds": rates["num_rounds"],
            "tau": rates["tau"],
            "tau_ci95": rates["tau_ci95"],
            "speedup": speedup(theirs, ours, seed).speedup,
        }
    return found


def by_turn(records: Sequence[PromptRecord], seed: int = 0) -> list[TurnResult]:
    """Acceptance of each turn of the conversations, turn 1 first."""
    found: list[TurnResult] = []
    for turn in sorted({record.turn for record in records}):
        rates = aggregate([record for record in records if record.turn == turn], seed)
        found.append({"turn": turn + 1, "tau": rates["tau"], "num_rounds": rates["num_rounds"]})
    return found


def _check_rounds(proposed: list[int], accepted: list[int], record: PromptRecord) -> None:
    if len(proposed) != len(accepted) or any(
        not 0 <= a <= k for a, k in zip(accepted, proposed, strict=True)
    ):
        raise UserError(
            f"prompt {record.prompt_id!r} turn {record.turn}: accepted {accepted} does not fit "
            f"proposed {proposed}; each round needs 0 <= accepted <= proposed"
        )


def _ratio(numerator: float, denominator: float) -> float | None:
    """None where nothing was counted."""
    return float(numerator) / float(denominator) if denominator else None


def _tokens_by_turn(records: Sequence[PromptRecord]) -> dict[tuple[str, int], int]:
    tokens: dict[tuple[str, int], int] = {}
    for record in records:
        turn = (record.prompt_id, record.turn)
        tokens[turn] = tokens.get(turn, 0) + record.num_tokens
    return tokens


def _totals(
    records: Sequence[PromptRecord], names: list[str | int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens and seconds of each prompt, or batch, in the order of names."""
    index = {name: i for i, name in enumerate(names)}
    tokens_C, seconds_C = np.zeros(len(names)), np.zeros(len(names))
    for record in records:
        tokens_C[index[record.timed_as]] += record.num_tokens
        seconds_C[index[record.timed_as]] += record.seconds
    return tokens_C, seconds_C


def resample_counts(num_prompts: int, seed: int) -> NDArray[np.float64]:
    """How often each prompt is drawn in each resample, [R, C]; no rows below two prompts."""
    if num_prompts < 2:  # one prompt says nothing about the spread between prompts
        return np.zeros((0, num_prompts))
    weights_C = np.full(num_prompts, 1.0 / num_prompts)
    draws_RC = np.random.default_rng(seed).multinomial(num_prompts, weights_C, NUM_RESAMPLES)
    return draws_RC.astype(np.float64)


def _resampled_ratio(
    numerator_C: NDArray[np.float64],
    denominator_C: NDArray[np.float64],
    draws_RC: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Pooled ratio of each resample; NaN where its denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_R: NDArray[np.float64] = (draws_RC @ numerator_C) / (draws_RC @ denominator_C)
    return ratio_R


def interval(values_R: NDArray[np.float64]) -> list[float] | None:
    """The middle 95%, or None where no resample is defined."""
    finite = values_R[np.isfinite(values_R)]
    if not len(finite):
        return None
    low, high = np.percentile(finite, [2.5, 97.5])
    return [float(low), float(high)]
