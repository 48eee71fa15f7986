"""eval/metrics.py and eval/record.py: each number under its own name, None where unknown."""

import copy
import json
import math

import pytest

from eval.metrics import PromptRecord, aggregate, by_category, by_turn, speedup
from eval.record import validate
from recipes.errors import UserError


def prompt(name: str, accepted: list[int], k: int = 3, turn: int = 0) -> PromptRecord:
    num_tokens = sum(accepted) + len(accepted)
    return PromptRecord(name, None, turn, [k] * len(accepted), accepted, num_tokens)


def timed(name: str, num_tokens: int, seconds: float, turn: int = 0) -> PromptRecord:
    return PromptRecord(name, None, turn, num_tokens=num_tokens, seconds=seconds)


PAIRS = (("a", 0), ("b", 0), ("c", 1), ("d", 1))  # prompt, batch


def test_p97_every_definition_under_its_own_name() -> None:
    result = aggregate([prompt("a", [3, 0, 1, 3, 2])])
    assert result["num_rounds"] == 5
    assert (result["num_proposed"], result["num_accepted"]) == (15, 9)
    assert result["num_tokens"] == 14
    assert result["tau"] == pytest.approx(2.8)
    assert result["mean_accepted"] == pytest.approx(1.8)
    assert result["acceptance_rate"] == pytest.approx(0.6)
    assert result["acceptance_rate_tested"] == pytest.approx(0.75)
    assert result["survival"] == pytest.approx([0.8, 0.6, 0.4])
    assert result["conditional"] == pytest.approx([0.8, 0.75, 2 / 3])
    assert sum(result["survival"]) == pytest.approx(result["tau"] - 1)


def test_p98_pooled_is_the_headline_and_the_mean_of_prompts_is_named() -> None:
    result = aggregate([prompt("a", [2] * 10), prompt("b", [1] * 150)])
    assert result["num_tokens"] == 330
    assert result["tau"] == pytest.approx(2.0625)
    assert result["tau_mean_of_prompts"] == pytest.approx(2.5)


def test_p99_all_rounds_of_all_turns_count() -> None:
    turns = {
        ("a", 0): [3, 1], ("a", 1): [0], ("b", 0): [2, 2, 2],
        ("b", 1): [1], ("c", 0): [3], ("c", 1): [0, 0],
    }  # fmt: skip
    records = [prompt(name, accepted, turn=turn) for (name, turn), accepted in turns.items()]
    total = aggregate(records)
    assert total["num_prompts"] == 3
    assert (total["num_rounds"], total["num_accepted"], total["num_tokens"]) == (10, 14, 24)
    assert total["tau"] == pytest.approx(2.4)
    for key in ("num_rounds", "num_proposed", "num_accepted", "num_tokens"):
        assert sum(aggregate([record])[key] for record in records) == total[key]


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([], id="no prompts"),
        pytest.param([PromptRecord("a", None, 0, num_tokens=1)], id="max_new_tokens=1"),
        pytest.param([PromptRecord("a", None, 0, None, None, 50)], id="no counters"),
        pytest.param([PromptRecord("a", None, 0, None, None)], id="all failed"),
    ],
)
def test_p101_undefined_is_none(records: list[PromptRecord]) -> None:
    result = aggregate(records)
    rates = (
        "acceptance_rate", "acceptance_rate_tested", "alpha", "mean_accepted", "tau", "tau_ci95",
        "tau_mean_of_prompts",
    )  # fmt: skip
    assert [result[key] for key in rates] == [None] * 7
    assert (result["survival"], result["conditional"]) == ([], [])
    unknown = any(record.proposed is None for record in records)
    assert result["num_missing"] == (1 if unknown else 0)
    assert result["num_rounds"] == (None if unknown else 0)


def test_p101_missing_counters_do_not_dilute_the_rest() -> None:
    known = prompt("a", [3, 0, 1, 3, 2])
    result = aggregate([known, PromptRecord("b", None, 0, None, None, 40)])
    assert (result["num_missing"], result["num_prompts"], result["num_rounds"]) == (1, 2, 5)
    assert result["tau"] == pytest.approx(2.8)
    assert result["num_tokens"] == 54


def test_p101_rounds_without_a_proposal() -> None:
    result = aggregate([prompt("a", [0, 0], k=0)])
    assert (result["tau"], result["acceptance_rate"], result["survival"]) == (1.0, None, [])


def test_end_token_inside_the_draft_earns_no_bonus() -> None:
    record = prompt("a", [3, 2])
    record.ends_inside_draft = True
    assert aggregate([record])["tau"] == pytest.approx((3 + 1 + 2) / 2)


@pytest.mark.parametrize(
    ("accepted", "ends_inside", "expected"),
    [
        ([4, 2], True, 1.0),  # the end stopped the second round; nothing was rejected
        ([4, 4], True, 1.0),  # the last draft token is the end
        ([1, 2], True, 3 / 4),  # rejected in the first round alone
        ([4, 2], False, 6 / 7),
    ],
)
def test_an_answers_end_inside_the_draft_rejects_nothing(
    accepted: list[int], ends_inside: bool, expected: float
) -> None:
    record = prompt("a", accepted, k=4)
    record.ends_inside_draft = ends_inside
    assert aggregate([record])["acceptance_rate_tested"] == pytest.approx(expected)


def test_position_never_reached_has_no_conditional() -> None:
    result = aggregate([prompt("a", [1, 0])])
    assert result["survival"] == [0.5, 0.0, 0.0]
    assert result["conditional"] == [0.5, 0.0, None]


def test_alpha_is_pooled() -> None:
    records = [prompt("a", [1]), prompt("b", [2])]
    records[0].alpha_sum, records[0].alpha_count = 3.0, 4
    records[1].alpha_sum, records[1].alpha_count = 1.0, 1
    assert aggregate(records)["alpha"] == pytest.approx(0.8)


def test_tau_interval_is_seeded_and_clusters_by_prompt() -> None:
    """20 prompts whose rounds are all alike: the spread between prompts decides."""
    records = [prompt(str(i), [1 + 2 * (i % 2)] * 10) for i in range(20)]
    low, high = aggregate(records)["tau_ci95"]
    assert [low, high] == aggregate(records)["tau_ci95"]
    assert low < high
    # tau is 3 +- 1 between prompts: standard error 1 / sqrt(20), half width 1.96 of them.
    assert low == pytest.approx(3 - 1.96 / 20**0.5, abs=0.06)
    assert high == pytest.approx(3 + 1.96 / 20**0.5, abs=0.06)
    turns = [prompt(str(i // 2), [1] * 10, turn=i % 2) for i in range(2)]
    assert aggregate(turns)["tau_ci95"] is None  # two turns of one prompt are one cluster


def test_impossible_rounds_are_an_error() -> None:
    with pytest.raises(UserError, match="prompt 'a' turn 0"):
        aggregate([prompt("a", [4], k=3)])
    with pytest.raises(UserError, match="prompt 'a'"):
        aggregate([PromptRecord("a", None, 0, [3, 3], [1])])


def test_p102_speedup_is_a_ratio_of_token_rates() -> None:
    result = speedup([timed("a", 100, 10.0)], [timed("a", 60, 4.0)])
    assert (result.baseline_tokens_per_second, result.tokens_per_second) == (10.0, 15.0)
    assert result.speedup == pytest.approx(1.5)  # the wall ratio, 2.5, is no speedup
    assert result.other_lengths == [("a", 0, 100, 60)]
    assert result.speedup_ci95 is None  # one prompt has no spread


def test_p102_rates_are_pooled_and_the_interval_is_paired() -> None:
    """Prompts differ 100-fold in speed; paired, the ratio is 2 in every resample."""
    baseline = [timed(str(i), 100, 0.1 * 10 ** (i % 3)) for i in range(9)]
    ours = [timed(str(i), 100, 0.05 * 10 ** (i % 3)) for i in reversed(range(9))]
    result = speedup(baseline, ours)
    assert result.speedup == pytest.approx(2.0)
    assert result.speedup_ci95 == pytest.approx([2.0, 2.0])
    assert result.baseline_tokens_per_second == pytest.approx(900 / 33.3)
    assert result.other_lengths == []


def test_prompts_side_by_side_are_one_measurement_of_time() -> None:
    """Two batches of two, 1x and 3x: whole batches are drawn, so the interval holds both."""
    base = [PromptRecord(n, None, 0, num_tokens=8, seconds=3.0, batch=b) for n, b in PAIRS]
    fast = [PromptRecord(n, None, 0, num_tokens=8, seconds=3.0 - 2 * b, batch=b) for n, b in PAIRS]
    result = speedup(base, fast)
    assert result.speedup == pytest.approx(1.5)  # 12 s against 3 + 3 + 1 + 1
    assert result.speedup_ci95 == pytest.approx([1.0, 3.0])
    assert speedup(base[:2], fast[:2]).speedup_ci95 is None  # one batch has no spread


def test_speedup_without_time_or_pair() -> None:
    assert speedup([], []).speedup is None
    assert speedup([timed("a", 1, 0.0)], [timed("a", 1, 0.0)]).speedup is None
    with pytest.raises(UserError, match="prompt 'b' turn 1"):
        speedup([timed("a", 1, 1.0)], [timed("a", 1, 1.0), timed("b", 1, 1.0, turn=1)])


# ---------------------------------------------------------------- the result record


def record() -> dict:
    task = {
        **aggregate([prompt("a", [3, 0]), prompt("b", [1])]),
        "version": 1, "tokens_per_second": 20.0, "baseline_tokens_per_second": 10, "speedup": 2.0,
        "speedup_ci95": [1.9, 2.1], "ms_per_round": {"draft": 1.0, "verify": 2.0, "other": None},
        "baseline_ms_per_token": 2.0, "predicted_speedup": None, "predicted_from_alpha": None,
    }  # fmt: skip
    return {
        "schema": 1,
        "identity": {
            "target": "t", "target_revision": None, "drafter": "d", "method": "eagle3",
            "drafter_params": 0, "trained_tokens": 0, "commit": "c", "versions": {"torch": "2"},
            "hardware": "cpu",
        },
        "settings": {
            "engine": "torch", "temperature": 0, "top_p": 1.0, "top_k": 0,
            "draft_sampling": "greedy", "verification": "token", "num_draft_tokens": 3,
            "batch_size": 1, "dtype": "float32", "max_new_tokens": 128,
        },
        "tasks": {"mt_bench": task},
        "lossless": {"greedy_identical": "2/2", "pit_p_value": None, "pit_num_tokens": 0},
    }  # fmt: skip


def test_record_survives_json_and_validates() -> None:
    assert validate(json.loads(json.dumps(record()))) == record()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "key schema is 2"),
        (("identity", "target"), 3, "key identity.target is 3: Input should be a valid string"),
        (("settings", "draft_sampling"), "argmax", "settings.draft_sampling is 'argmax'"),
        (("settings", "top_k"), True, "settings.top_k is True"),
        (("tasks", "mt_bench", "tau"), float("nan"), "tasks.mt_bench.tau is nan"),
        (("tasks", "mt_bench", "num_rounds"), -1, "tasks.mt_bench.num_rounds is -1"),
        (("tasks", "mt_bench", "num_rounds"), 0, "tasks.mt_bench.tau"),
        (("tasks", "mt_bench", "num_accepted"), 99, "more than num_proposed 9"),
        (("tasks", "mt_bench", "survival"), [1.0, "x"], "survival.1 is 'x'"),
        (("tasks", "mt_bench", "speedup_ci95"), [2.0, 1.0], "speedup_ci95"),
        (("tasks", "mt_bench", "ms_per_round"), [], r"ms_per_round is \[\]"),
        (
            ("settings", "temperature"),
            -1.0,
            "settings.temperature is -1.0: .* greater than or equal",
        ),
        (("tasks", "mt_bench", "tau"), 99, "tasks.mt_bench.tau is 99, but num_tokens / num_rounds"),
        (("tasks", "mt_bench", "acceptance_rate"), 7.5, "acceptance_rate is 7.5: .*less than or"),
        (("tasks", "mt_bench", "acceptance_rate"), 0.5, "num_accepted / num_proposed is 0.4444"),
        (("tasks", "mt_bench", "mean_accepted"), 2.0, "num_accepted / num_rounds is 1.333"),
        (("tasks", "mt_bench", "survival"), [5, 9], "survival.0 is 5: .*less than or equal to 1"),
        (("tasks", "mt_bench", "survival"), [0.2, 0.5], "survival .*shares that never rise"),
        (("tasks", "mt_bench", "speedup"), -5, "tasks.mt_bench.speedup is -5: .*greater than"),
        (
            ("tasks", "mt_bench", "speedup"),
            50,
            "tokens_per_second / baseline_tokens_per_second is 2",
        ),
        (("tasks", "mt_bench", "speedup_ci95"), [3.0, 3.1], "speedup is 2.0, far outside"),
        (("tasks", "mt_bench", "same_as_baseline"), "3/2", "same_as_baseline is '3/2', more than"),
        (("tasks", "mt_bench", "other_lengths"), [["a", 0, math.nan]], "other_lengths.0.2 is nan"),
        (
            ("lossless", "greedy_identical"),
            "9/4",
            "lossless.greedy_identical is '9/4', more than all",
        ),
        (("lossless", "greedy_identical"), "all", "lossless.greedy_identical is 'all'"),
        (
            ("lossless", "pit_p_value"),
            -3,
            "lossless.pit_p_value is -3: .*greater than or equal to 0",
        ),
        (("identity", "hardware"), "\ud800", r"hardware is '\\ud800'"),
        (("tasks", "mt_bench", "\udc00"), 1, "a key of it is .*half of a surrogate pair"),
        (("samples",), [{"next_p": 10**400}], r"samples.0.next_p is 1000.*too large a number"),
        (("samples",), [{"next_p": math.inf}], "samples.0.next_p is inf: expected a finite number"),
    ],
)
def test_record_errors_name_the_key(path: tuple[str, ...], value: object, message: str) -> None:
    broken = copy.deepcopy(record())
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(UserError, match=f"^r.json: .*{message}"):
        validate(broken, "r.json")


def test_tau_of_an_engine_lies_between_accepted_and_one_more() -> None:
    """Its last rounds may be uncut, so num_tokens / num_rounds is not tau."""
    served = record()
    served["settings"]["engine"] = "vllm 0.11"
    served["tasks"]["mt_bench"]["num_tokens"] = 6
    assert validate(served) == served
    served["tasks"]["mt_bench"] |= {"tau": 3.0, "tau_ci95": None}
    with pytest.raises(UserError, match=r"tau is 3.0, expected mean_accepted 1.333 and at most"):
        validate(served)


def test_record_missing_key_and_wrong_kind() -> None:
    broken = record()
    del broken["tasks"]["mt_bench"]["alpha"]
    with pytest.raises(UserError, match=r"key tasks\.mt_bench\.alpha is missing"):
        validate(broken)
    with pytest.raises(UserError, match="expected a JSON object"):
        validate([])


def test_tau_before_and_after_the_answer_is_cut_at_its_end() -> None:
    """Two rounds: 2 of 3 accepted, then 3 of 3, of which the first is the end token."""
    record = PromptRecord("a", None, 0, [3, 3], [2, 1], 4, ends_inside_draft=True)
    record.accepted_before_stop = [2, 3]
    result = aggregate([record])
    assert result["tau"] == 2.0  # 3 tokens and 1
    assert result["tau_before_stop"] == 3.5  # as an engine counts: 3 tokens and 4
    assert aggregate([])["tau_before_stop"] is None


def test_categories_and_turns_are_parts_of_the_whole() -> None:
    def record(name: str, category: str | None, turn: int, accepted: list[int]) -> PromptRecord:
        num_tokens = sum(accepted) + len(accepted)
        k = [3] * len(accepted)
        return PromptRecord(name, category, turn, k, accepted, num_tokens, seconds=len(accepted))

    records = [
        record("a", "math", 0, [3, 1]),
        record("a", "math", 1, [0]),
        record("b", "code", 0, [2, 2]),
        record("c", "math", 0, [1]),
        record("d", None, 0, [0]),
    ]
    plain = [
        PromptRecord(r.prompt_id, r.category, r.turn, num_tokens=r.num_tokens, seconds=r.num_tokens)
        for r in records
    ]
    found = by_category(plain, records)
    assert list(found) == ["math", "code"]
    assert (found["math"]["num_rounds"], found["math"]["tau"]) == (4, 2.25)
    assert found["math"]["speedup"] == pytest.approx(2.25)  # a second a round or a plain token
    assert found["code"] == {"num_rounds": 2, "tau": 3.0, "tau_ci95": None, "speedup": 3.0}
    assert by_turn(records) == [
        {"turn": 1, "tau": pytest.approx(15 / 6), "num_rounds": 6},
        {"turn": 2, "tau": 1.0, "num_rounds": 1},
    ]
