"""A task's entry in the record, made of what two arms did."""

from collections.abc import Sequence

from data.prompt_rows import Prompt
from eval import metrics, theory
from eval.arms import Arm
from eval.costs import PassTimes
from eval.lossless import GreedyComparison
from eval.record import MsPerRound, PredictedPoint, TaskResult
from eval.tasks import Task
from recipes.schema import EvalSection

MAX_PREDICTED = 16  # draft tokens up to which a record predicts


def make_records(
    prompts: Sequence[Prompt], arm: Arm, batch_size: int = 1
) -> list[metrics.PromptRecord]:
    """An arm's answers as records; all of them, all their rounds."""
    records = []
    for turn in arm.turns:
        prompt, rounds = prompts[turn.prompt_index], turn.decoded.rounds
        records.append(
            metrics.PromptRecord(
                prompt_id=prompt["id"],
                category=prompt.get("category") or None,
                turn=turn.turn,
                proposed=[r.proposed for r in rounds],
                accepted=[r.accepted for r in rounds],
                accepted_before_stop=[r.accepted_before_stop for r in rounds],
                num_tokens=sum(r.emitted for r in rounds),
                alpha_sum=turn.decoded.alpha_sum,
                alpha_count=turn.decoded.alpha_count,
                seconds=turn.seconds,
                batch=None if batch_size == 1 else turn.prompt_index // batch_size,
                ends_inside_draft=bool(rounds) and rounds[-1].emitted == rounds[-1].accepted,
            )
        )
    return records


def make_task_result(
    task: Task,
    baseline: Arm,
    arm: Arm,
    section: EvalSection,
    comparison: GreedyComparison | None,
    forced: dict[str, float | None],
    oracle: Arm | None,
    times: PassTimes | None,
    name: str,
) -> TaskResult:
    """Counts, rates, speed and predictions of one drafter on one task.

    Args:
        comparison: with the baseline's tokens, at temperature 0.
        forced: teacher-forced metrics, by their keys in the record.
        oracle: the perfect drafter's arm, where it ran.
        times: of passes by size; the drafter's own under `name`.
    """
    size = section.batch_size
    plain, records = (make_records(task.prompts, one, size) for one in (baseline, arm))
    rates = metrics.aggregate(records, section.seed)
    speed = metrics.speedup(plain, records, section.seed)
    split, plain_ms = ms_per_round(arm), _ms(baseline.total.decode, baseline.num_steps)
    alpha = rates["alpha"]
    by_position = theory.expected_tokens_from_conditional(rates["conditional"])
    most = len(rates["conditional"])  # proposed in a round: fewer than asked for of a short block
    by_alpha = None if alpha is None else theory.expected_tokens(alpha, most)
    result: TaskResult = {
        **rates,
        "version": task.version,
        "tokens_per_second": speed.tokens_per_second,
        "baseline_tokens_per_second": speed.baseline_tokens_per_second,
        "speedup": speed.speedup,
        "speedup_ci95": speed.speedup_ci95,
        "speedup_by_repeat": speedup_by_repeat(plain, baseline, records, arm),
        "ms_per_round": split,
        "baseline_ms_per_token": plain_ms,
        "prefill_ms": _ms(arm.total.prefill, len(arm.turns)),
        "baseline_prefill_ms": _ms(baseline.total.prefill, len(baseline.turns)),
        "predicted_speedup": _predict(
            by_position if rates["num_rounds"] else None, split, plain_ms
        ),
        "predicted_from_alpha": _predict(by_alpha, split, plain_ms),
        "cost_ratio": cost_ratio(arm, plain_ms),
        "alpha_teacher_forced": forced["alpha_teacher_forced"],
        "top1_agreement": forced["top1_agreement"],
        "per_category": metrics.by_category(plain, records, section.seed),
        "per_turn": metrics.by_turn(records, section.seed),
        "task_hash": task.hash,
        "turns": 1 + max((turn.turn for turn in arm.turns), default=0),
        "repeats": section.repeats,
        "same_as_baseline": None if comparison is None else count_text(comparison),
        "other_lengths": [
            [prompt, turn, plain_tokens, tokens]
            for prompt, turn, plain_tokens, tokens in speed.other_lengths
            if comparison is not None  # drawn answers differ in length anyway
        ],
    }
    if oracle is not None:
        ideal = make_records(task.prompts, oracle, size)
        perfect = metrics.speedup(plain, ideal, section.seed).speedup
        result["oracle_speedup"] = perfect
        if perfect and speed.speedup is not None:
            result["oracle_share"] = speed.speedup / perfect
    chain = section.verification != "tree"  # a tree's costs are not those of a chain as deep
    drafted = round(mean_proposed(arm)) > 0  # else nothing was seen of what drafting costs
    if chain and times is not None and drafted and baseline.num_steps:
        result["predicted_curve"] = predicted_curve(baseline, arm, rates["survival"], times, name)
    return result


def ms_per_round(arm: Arm) -> MsPerRound:
    """Milliseconds of each part of a round; the rounds of a batch run together."""
    total, steps = arm.total, arm.num_steps
    return {
        "draft": _ms(total.draft, steps),
        "verify": _ms(total.verify, steps),
        "sampling": _ms(total.sampling, steps),
        "bookkeeping": _ms(total.bookkeeping, steps),
        "other": _ms(total.sampling + total.bookkeeping, steps),
    }


def cost_ratio(arm: Arm, plain_ms: float | None) -> float | None:
    """c: the drafter's time a proposed token over the time of a plain token.

    A step of a batch proposes once for all its rows, so the mean proposal of a row counts.
    """
    proposed = mean_proposed(arm)
    if not proposed or not plain_ms or not arm.num_steps:
        return None
    return 1000 * arm.total.draft / arm.num_steps / proposed / plain_ms


def loop_ms(arm: Arm) -> float:
    """Sampling and bookkeeping of a round."""
    return 1000 * (arm.total.sampling + arm.total.bookkeeping) / arm.num_steps


def mean_proposed(arm: Arm) -> float:
    """Tokens proposed a round; rounded, what the arm's times are those of."""
    proposed = [r.proposed for answer in arm.answers for r in answer.rounds]
    return sum(proposed) / len(proposed) if proposed else 0.0


def loop_costs(baseline: Arm, arm: Arm, times: PassTimes, name: str) -> theory.Costs:
    """What the parts of a round cost in the loop, for any number of draft tokens.

    The loop ran with none and with as many as the drafter proposed (`mean_proposed`); from there to
    other numbers the proportions of passes timed by themselves lead. Their level is not that of
    the loop: there caches are longer and other passes come in between. Where hardly anything was
    proposed, the arm's rounds say nothing of drafting.
    """
    num_draft = round(mean_proposed(arm))
    plain, steps = 1000 * baseline.total.verify / baseline.num_steps, arm.num_steps
    verify, draft = 1000 * arm.total.verify / steps, 1000 * arm.total.draft / steps
    verify_ms, draft_ms, loop = {1: plain}, dict[int, float](), {0: loop_ms(baseline)}
    if num_draft:
        verify_ms[num_draft + 1], draft_ms[num_draft] = verify, draft
        loop[num_draft] = loop_ms(arm)
    return theory.Costs(
        theory.brought_to(times.verify, verify_ms),
        theory.brought_to(times.draft[name], draft_ms),
        loop,
    )


def predicted_curve(
    baseline: Arm, arm: Arm, survival: Sequence[float], times: PassTimes, name: str
) -> list[PredictedPoint]:
    """Speedup and tau predicted for other numbers of draft tokens, beside what was measured."""
    costs = loop_costs(baseline, arm, times, name)
    return [
        {"num_draft_tokens": p.num_draft_tokens, "speedup": p.speedup, "tau": p.tau}
        for p in theory.predict(costs, survival, MAX_PREDICTED)
    ]


def speedup_by_repeat(
    plain: Sequence[metrics.PromptRecord],
    baseline: Arm,
    records: Sequence[metrics.PromptRecord],
    arm: Arm,
) -> list[float]:
    """The speedup of each timed repeat alone: their spread is the machine's."""
    tokens, plain_tokens = (sum(r.num_tokens for r in rows) for rows in (records, plain))
    if not tokens or not plain_tokens:
        return []
    pairs = zip(baseline.by_repeat, arm.by_repeat, strict=True)
    return [(tokens / ours) / (plain_tokens / theirs) for theirs, ours in pairs if ours and theirs]


def count_text(comparison: GreedyComparison) -> str:
    """As "24/25"."""
    return f"{comparison.num_identical}/{comparison.num_prompts}"


def _predict(tokens: float | None, split: MsPerRound, plain_ms: float | None) -> float | None:
    draft, verify, other = split["draft"], split["verify"], split["other"]
    if tokens is None or draft is None or verify is None or other is None or plain_ms is None:
        return None
    return theory.predicted_speedup(tokens, draft, verify, other, plain_ms)


def _ms(seconds: float, num: int) -> float | None:
    return 1000 * seconds / num if num else None
