"""The result record: one JSON object for a drafter under one group of settings, schema 1.

Every number has one definition, given beside its key; null means undefined or not measured,
never zero. Tables and pages are views of records.
"""

from collections.abc import Mapping
from typing import Literal, cast

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from pydantic import NonNegativeInt as Count
from typing_extensions import NotRequired, TypedDict  # pydantic needs these before Python 3.12

from recipes.errors import UserError

SCHEMA = 1


class Identity(TypedDict):
    """What was measured, by what, on what."""

    target: str
    target_revision: str | None
    drafter: str
    method: str
    drafter_hash: NotRequired[str | None]  # of the exported folder; null without weights
    drafter_params: Count | None
    trained_tokens: Count | None
    train_minutes: NotRequired[FiniteFloat | None]
    commit: str | None
    versions: dict[str, str]
    hardware: str


class Settings(TypedDict):
    """How it was decoded."""

    engine: str
    temperature: FiniteFloat
    top_p: FiniteFloat
    top_k: Count
    draft_sampling: Literal["greedy", "sampled"]
    verification: Literal["token", "block", "tree"]
    num_draft_tokens: Count
    batch_size: Count
    dtype: str
    max_new_tokens: Count


class AcceptanceResult(TypedDict):
    """What a task's rounds say without a clock; made by eval.metrics.aggregate."""

    num_prompts: Count  # distinct prompt ids; the turns of a conversation are one prompt
    num_missing: Count  # records without round counters: failed, or the engine gives none
    num_rounds: Count | None
    num_proposed: Count | None
    num_accepted: Count | None
    num_tokens: Count  # ids emitted in rounds (not by the prefill), cut at end token and limit
    acceptance_rate: FiniteFloat | None  # accepted / proposed
    acceptance_rate_tested: FiniteFloat | None  # accepted / (accepted + rejected)
    alpha: FiniteFloat | None  # mean over verified positions of sum_v min(p, q)
    mean_accepted: FiniteFloat | None  # accepted / rounds, without the bonus token
    tau: FiniteFloat | None  # emitted / rounds, with the bonus token, pooled over all rounds
    tau_ci95: list[FiniteFloat] | None  # cluster bootstrap over prompts
    tau_mean_of_prompts: FiniteFloat | None  # mean of each prompt's own tau: not the headline
    tau_before_stop: NotRequired[FiniteFloat | None]  # as engines count: answers not cut at the end
    survival: list[FiniteFloat]  # s_i = P(accepted >= i), i = 1, 2, ..., over all rounds
    conditional: list[FiniteFloat | None]  # c_i = s_i / s_(i-1), with s_0 = 1


class MsPerRound(TypedDict):
    """Mean milliseconds of each part of a round."""

    draft: FiniteFloat | None  # all passes of the drafter
    verify: FiniteFloat | None  # the target's pass
    other: FiniteFloat | None  # sampling + bookkeeping
    sampling: NotRequired[FiniteFloat | None]  # distributions, accepting, drawing
    bookkeeping: NotRequired[FiniteFloat | None]  # the rest of the loop


class CategoryResult(TypedDict):
    """The prompts of one category."""

    num_rounds: Count | None
    tau: FiniteFloat | None
    tau_ci95: list[FiniteFloat] | None
    speedup: FiniteFloat | None


class TurnResult(TypedDict):
    """One turn of all conversations; the first is 1."""

    turn: Count
    tau: FiniteFloat | None
    num_rounds: Count | None


class PredictedPoint(TypedDict):
    """What acceptance by position and times by size predict (eval.theory)."""

    num_draft_tokens: Count
    speedup: FiniteFloat
    tau: FiniteFloat
    extrapolated: NotRequired[bool]  # no round reached the last position: its acceptance is guessed


class Contamination(TypedDict):
    """Prompts of the task that share an 8-gram with a prompt that the drafter was trained on."""

    num_prompts: Count
    num_training_prompts: Count
    num_overlapping: Count
    share: FiniteFloat | None


class TaskResult(AcceptanceResult):
    """All that is measured on one task."""

    version: Count
    tokens_per_second: FiniteFloat | None  # generated ids / decoding seconds, pooled
    baseline_tokens_per_second: FiniteFloat | None  # the same engine without a drafter
    speedup: FiniteFloat | None  # ratio of the two above
    speedup_ci95: list[FiniteFloat] | None  # cluster bootstrap over prompts, arms paired
    ms_per_round: MsPerRound
    baseline_ms_per_token: FiniteFloat | None  # between two tokens of one answer
    predicted_speedup: FiniteFloat | None  # from conditional and the measured costs
    predicted_from_alpha: FiniteFloat | None  # from alpha alone, as if each position had it
    predicted_curve: NotRequired[list[PredictedPoint]]  # for 1, 2, ... draft tokens
    cost_ratio: NotRequired[FiniteFloat | None]  # c: time a drafted token / time a plain token
    oracle_speedup: NotRequired[FiniteFloat | None]  # of the target's own tokens at this cost
    oracle_share: NotRequired[FiniteFloat | None]  # speedup / oracle_speedup
    alpha_teacher_forced: NotRequired[FiniteFloat | None]  # sum_v min(p, q) along plain answers
    top1_agreement: NotRequired[FiniteFloat | None]  # argmax p = argmax q, at the same positions
    per_category: NotRequired[dict[str, CategoryResult]]
    per_turn: NotRequired[list[TurnResult]]
    contamination: NotRequired[Contamination | None]  # null without the training prompts
    speedup_by_repeat: NotRequired[list[FiniteFloat]]
    prefill_ms: NotRequired[FiniteFloat | None]  # a turn, not part of any round
    baseline_prefill_ms: NotRequired[FiniteFloat | None]
    task_hash: NotRequired[str]  # of prompts and order (eval.tasks)
    turns: NotRequired[Count]  # user turns answered of each prompt, at most
    repeats: NotRequired[Count]  # timed runs of each prompt
    same_as_baseline: NotRequired[str | None]  # T=0: "x/y" turns with the baseline's tokens
    other_lengths: NotRequired[list[list[object]]]  # [prompt, turn, baseline tokens, tokens]


class Lossless(TypedDict):
    """Whether the emitted tokens follow the target."""

    greedy_identical: str | None  # "25/25" prompts whose fp32 greedy tokens are the target's
    pit_p_value: FiniteFloat | None  # Kolmogorov-Smirnov p-value of the sampled tokens' PIT
    pit_num_tokens: Count | None


class ResultRecord(TypedDict):
    """One file under results/."""

    schema: Count
    identity: Identity
    settings: Settings
    tasks: dict[str, TaskResult]
    lossless: NotRequired[Lossless | None]


_RECORD = TypeAdapter(ResultRecord)


def validate(record: object, source: str = "record") -> ResultRecord:
    """Check a record's keys, types and the relations between its counts.

    Keys that schema 1 does not know are left alone, so that later writers can add some.

    Args:
        record: what json.load gave.
        source: the file's name, for error messages.

    Returns:
        The same object, typed.

    Raises:
        UserError: names the source, the key and what was expected.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{source}: expected a JSON object, found {type(record).__name__}")
    if record.get("schema") != SCHEMA:
        raise UserError(
            f"{source}: key schema is {record.get('schema')!r}, this version reads {SCHEMA}; "
            "measure again with eval/bench.py"
        )
    try:
        _RECORD.validate_python(record, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(
                f"{source}: key {key} is missing; add it, null where unknown"
            ) from error
        raise UserError(f"{source}: key {key} is {first['input']!r}: {first['msg']}") from error
    for name, task in record["tasks"].items():
        _check_task(task, f"tasks.{name}", source)
    return cast(ResultRecord, record)


def _check_task(task: TaskResult, key: str, source: str) -> None:
    """Relations that hold for any honest count, and that a swapped key breaks."""
    proposed, accepted, rounds = task["num_proposed"], task["num_accepted"], task["num_rounds"]
    if proposed is not None and accepted is not None and accepted > proposed:
        raise UserError(
            f"{source}: key {key}.num_accepted is {accepted}, more than num_proposed {proposed}"
        )
    if not rounds and task["tau"] is not None:
        raise UserError(f"{source}: key {key}.tau is {task['tau']}, expected null without rounds")
    for name in ("tau_ci95", "speedup_ci95"):
        interval = task["tau_ci95"] if name == "tau_ci95" else task["speedup_ci95"]
        if interval is not None and (len(interval) != 2 or interval[0] > interval[1]):
            raise UserError(f"{source}: key {key}.{name} is {interval}, expected [low, high]")
