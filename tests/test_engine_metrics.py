"""eval/engine_metrics.py: what engines report, read by hand-made cases with the answer in sight."""

import pytest

from eval.engine_metrics import (
    EngineRounds,
    ServerCounters,
    in_our_terms,
    sglang_gauges,
    sglang_rounds,
    vllm_counters,
    vllm_rounds,
)

# A response of vLLM 0.32 at the level "detailed": 5 steps, K = 3.
DETAILED = {
    "speculative_decoding": {
        "mean_acceptance_length": 2.2,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [2, 1, 1, 1],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 15,
        "num_spec_tokens": 3,
        "per_step_accepted": [3, 0, 1, 0, 2],
        "per_step_drafted": [3, 3, 3, 3, 3],
    }
}
SUMMARY = {
    "speculative_decoding": {
        key: value
        for key, value in DETAILED["speculative_decoding"].items()
        if not key.startswith("per_step")
    }
}


def test_detailed_metrics_are_taken_step_by_step():
    assert vllm_rounds(DETAILED) == EngineRounds([3] * 5, [3, 0, 1, 0, 2], ordered=True)


def test_summary_gives_the_same_counts_without_their_order():
    assert vllm_rounds(SUMMARY) == EngineRounds([3] * 5, [0, 0, 1, 2, 3], ordered=False)


def test_summary_with_shorter_drafts_keeps_the_sum():
    found = {"acceptance_histogram": [1, 0, 0, 2], "num_draft_tokens": 7}
    assert vllm_rounds({"speculative_decoding": found}) == EngineRounds([1, 3, 3], [0, 3, 3], False)


@pytest.mark.parametrize(
    "metrics",
    [None, {}, {"speculative_decoding": None}, {"time_to_first_token_ms": 3.0}],
)
def test_p101_missing_counters_are_none(metrics):
    assert vllm_rounds(metrics) is None
    assert sglang_rounds(metrics) is None


def test_a_request_without_a_step_has_no_rounds():
    found = {"acceptance_histogram": [0, 0, 0, 0], "num_draft_tokens": 0}
    rounds = vllm_rounds({"speculative_decoding": found})
    assert rounds == EngineRounds([], [], ordered=True)
    assert in_our_terms(rounds, num_tokens=1, max_tokens=1) == ([], [], False, True)


@pytest.mark.parametrize(
    ("histogram", "total"),
    [
        ("spec_correct_drafts_histogram", "spec_num_proposed_drafts"),
        ("spec_accept_histogram", "spec_draft_token_num"),
    ],
)
def test_sglang_names_of_several_versions(histogram, total):
    meta = {"completion_tokens": 8, "spec_verify_ct": 3, histogram: [1, 1, 0, 1], total: 9}
    assert sglang_rounds(meta) == EngineRounds([3, 3, 3], [0, 1, 3], ordered=False)


def test_p101_sglang_without_a_histogram_is_unknown():
    # spec_verify_ct alone gives a mean, but nothing of its parts.
    assert sglang_rounds({"completion_tokens": 8, "spec_verify_ct": 3}) is None


# The engine drafts 3 each time and counts before it cuts; ours drafts what there is room for.
@pytest.mark.parametrize(
    ("accepted", "num_tokens", "max_tokens", "expected"),
    [
        # 1 + 4 + 1 + 2 tokens, well below the cap: nothing changes.
        ([3, 0, 1], 8, 100, ([3, 3, 3], [3, 0, 1], False)),
        # Cap 7: behind 5 tokens one draft fits besides the target's token, behind 6 none.
        ([3, 0, 1], 7, 7, ([3, 1, 0], [3, 0, 0], False)),
        # Cap 4: two drafts fit besides the target's token; the engine accepted three.
        ([3], 4, 4, ([2], [2], False)),
        # The end token was the second one drafted: accepted up to and with it, no bonus.
        ([3, 3], 7, 100, ([3, 3], [3, 2], True)),
        # The end token was the bonus.
        ([3, 1], 7, 100, ([3, 3], [3, 1], False)),
        # Two rounds without a draft (n-gram lookup): no step of the engine, rounds of ours.
        ([3], 7, 100, ([3, 0, 0], [3, 0, 0], False)),
    ],
)
def test_steps_become_our_rounds(accepted, num_tokens, max_tokens, expected):
    rounds = EngineRounds([3] * len(accepted), accepted, ordered=True)
    assert in_our_terms(rounds, num_tokens, max_tokens) == (*expected, True)


def test_without_order_the_end_cannot_be_cut():
    rounds = EngineRounds([3, 3], [0, 3], ordered=False)
    assert in_our_terms(rounds, 6, 100) == ([3, 3], [0, 3], False, True)  # 1 + 1 + 4 tokens
    assert in_our_terms(rounds, 5, 100) == ([3, 3], [0, 3], False, False)  # one was cut off


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.764e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
"""


def test_server_counters_add_up_engines_and_are_a_difference():
    after = vllm_counters(METRICS)
    assert after == ServerCounters(15, 45, 18, [12, 5, 1])
    counted = after.since(ServerCounters(5, 15, 8, [6, 2, 0]))
    assert counted == ServerCounters(10, 30, 10, [6, 3, 1])
    assert counted.rates() == {
        "num_drafts": 10,
        "num_draft_tokens": 30,
        "num_accepted_tokens": 10,
        "mean_acceptance_length": 2.0,  # with the bonus token, as vLLM defines it
        "per_position": [0.6, 0.3, 0.1],
    }


def test_p101_server_without_drafts_has_null_rates():
    idle = ServerCounters(15, 45, 18, [12, 5, 1])
    rates = idle.since(idle).rates()
    assert (rates["mean_acceptance_length"], rates["per_position"]) == (None, None)
    assert vllm_counters("") is None
    assert vllm_counters('vllm:num_requests_running{engine="0"} 0.0\n') is None


def test_sglang_gauges():
    text = 'sglang:spec_accept_length{model_name="m"} 2.5\nsglang:spec_accept_rate{} 0.5\n'
    assert sglang_gauges(text) == {"spec_accept_length": 2.5, "spec_accept_rate": 0.5}
    assert sglang_gauges("sglang:num_running_reqs 0.0\n") is None
