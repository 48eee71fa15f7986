"""The result record: one JSON object for a drafter under one group of settings, schema 1.

Every number has one definition, given beside its key; null means undefined or not measured,
never zero. Tables and pages are views of records.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError
from pydantic import NonNegativeInt as Count
from typing_extensions import NotRequired, TypedDict  # pydantic needs these before Python 3.12

from eval.record_checks import check_pair, check_task, check_values
from recipes.errors import UserError

SCHEMA = 1
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
MeanOfSums = Annotated[FiniteFloat, Field(ge=0, le=1.001)]  # float32 sums may end above 1 by a hair
Pair = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,12}/[0-9]{1,12}$")]  # "24/25"


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
    temperature: NotNegative
    top_p: Share
    top_k: Count
    min_p: NotRequired[Share]
    repetition_penalty: NotRequired[Positive]
    draft_sampling: Literal["greedy", "sampled"]
    verification: Literal["token", "block", "tree"]
    tree: NotRequired[str | None]
    siblings: NotRequired[str | None]
    num_draft_tokens: Count
    batch_size: Count
    dtype: str
    max_new_tokens: Count
    lookup: NotRequired[list[Count]]
    suffix: NotRequired[list[FiniteFloat]]


class AcceptanceResult(TypedDict):
    """What a task's rounds say without a clock; made by eval.metrics.aggregate."""

    num_prompts: Count  # distinct prompt ids; the turns of a conversation are one prompt
    num_missing: Count  # records without round counters: failed, or the engine gives none
    num_rounds: Count | None
    num_proposed: Count | None
    num_accepted: Count | None
    num_tokens: Count  # ids emitted in rounds (not by the prefill), cut at end token and limit
    acceptance_rate: Share | None  # accepted / proposed
    acceptance_rate_tested: Share | None  # accepted / (accepted + rejected)
    alpha: MeanOfSums | None  # mean over verified positions of sum_v min(p, q)
    mean_accepted: NotNegative | None  # accepted / rounds, without the bonus token
    tau: NotNegative | None  # emitted / rounds, with the bonus token, pooled over all rounds
    tau_ci95: list[FiniteFloat] | None  # cluster bootstrap over prompts
    tau_mean_of_prompts: FiniteFloat | None  # mean of each prompt's own tau: not the headline
    tau_before_stop: NotRequired[FiniteFloat | None]  # as engines count: answers not cut at the end
    survival: list[Share]  # s_i = P(accepted >= i), i = 1, 2, ..., over all rounds
    conditional: list[Share | None]  # c_i = s_i / s_(i-1), with s_0 = 1


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


class Contamination(TypedDict):
    """Prompts of the task that share an 8-gram with a prompt that the drafter was trained on."""

    num_prompts: Count
    num_training_prompts: Count
    num_overlapping: Count
    share: Share | None


class TaskResult(AcceptanceResult):
    """All that is measured on one task."""

    version: Count
    tokens_per_second: NotNegative | None  # generated ids / decoding seconds, pooled
    baseline_tokens_per_second: NotNegative | None  # the same engine without a drafter
    speedup: NotNegative | None  # ratio of the two above
    speedup_ci95: list[FiniteFloat] | None  # cluster bootstrap over prompts, arms paired
    ms_per_round: MsPerRound
    baseline_ms_per_token: FiniteFloat | None  # between two tokens of one answer
    predicted_speedup: FiniteFloat | None  # from conditional and the measured costs
    predicted_from_alpha: FiniteFloat | None  # from alpha alone, as if each position had it
    predicted_curve: NotRequired[list[PredictedPoint]]  # for 1, 2, ... draft tokens
    cost_ratio: NotRequired[FiniteFloat | None]  # c: time a drafted token / time a plain token
    oracle_speedup: NotRequired[FiniteFloat | None]  # of the target's own tokens at this cost
    oracle_share: NotRequired[FiniteFloat | None]  # speedup / oracle_speedup
    alpha_teacher_forced: NotRequired[MeanOfSums | None]  # sum_v min(p, q) along plain answers
    top1_agreement: NotRequired[Share | None]  # argmax p = argmax q, at the same positions
    per_category: NotRequired[dict[str, CategoryResult]]
    per_turn: NotRequired[list[TurnResult]]
    contamination: NotRequired[Contamination | None]  # null without the training prompts
    speedup_by_repeat: NotRequired[list[FiniteFloat]]
    prefill_ms: NotRequired[FiniteFloat | None]  # a turn, not part of any round
    baseline_prefill_ms: NotRequired[FiniteFloat | None]
    task_hash: NotRequired[str]  # of prompts and order (eval.tasks)
    turns: NotRequired[Count]  # user turns answered of each prompt, at most
    repeats: NotRequired[Count]  # timed runs of each prompt
    same_as_baseline: NotRequired[Pair | None]  # T=0: "x/y" turns with the baseline's tokens
    other_lengths: NotRequired[list[list[object]]]  # [prompt, turn, baseline tokens, tokens]


class BrokenVerifier(TypedDict):
    """A verifier that was broken on purpose, and whether the test rejects it."""

    name: str
    p_value: Share | None
    tokens_needed: Count | None
    at_least: NotRequired[bool]  # tokens_needed is a bound


class ShownCertificate(TypedDict):
    """What the views show of a certificate (eval.certify)."""

    verdict: Literal["passed", "failed"]
    broken: list[BrokenVerifier]


class Lossless(TypedDict):
    """Whether the emitted tokens follow the target."""

    greedy_identical: Pair | None  # "25/25" prompts whose fp32 greedy tokens are the target's
    greedy_check_prompts: NotRequired[Count]  # how many the recipe asked to be compared so
    pit_p_value: Share | None  # Kolmogorov-Smirnov p-value of the sampled tokens' PIT
    pit_num_tokens: Count | None
    certificate: NotRequired[ShownCertificate | None]  # else that of the file beside the record


class ResultRecord(TypedDict):
    """One file under results/."""

    schema: Count
    identity: Identity
    settings: Settings
    tasks: dict[str, TaskResult]
    lossless: NotRequired[Lossless | None]


_RECORD = TypeAdapter(ResultRecord)


def validate(record: object, source: str = "record") -> ResultRecord:
    """Check a record's keys, types and the relations between its numbers.

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
        raise UserError(f"{source}: key {key} is {first['input']!r:.99}: {first['msg']}") from error
    found = cast(ResultRecord, record)
    check_values(found, source)
    for name, task in found["tasks"].items():
        check_task(task, f"tasks.{name}", source, found["settings"]["engine"] == "torch")
    if lossless := found.get("lossless"):
        check_pair(lossless["greedy_identical"], "lossless.greedy_identical", source)
    return found
