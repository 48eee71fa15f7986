"""eval/theory.py and eval/roofline.py against published formulas and tables."""

import pytest

from eval.roofline import Device, Work, find_device, pass_ms, roofline_costs
from eval.theory import (
    Costs,
    best_num_draft_tokens,
    best_point,
    brought_to,
    expected_tokens,
    expected_tokens_from_conditional,
    extend_conditional,
    predict,
    predicted_speedup,
)


def test_expected_tokens() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens(1.0, 4) == 5.0  # where the closed form is 0 / 0
    assert expected_tokens(0.0, 4) == 1.0
    assert expected_tokens(0.8, 0) == 1.0


def test_expected_tokens_from_conditional() -> None:
    """P97's rounds: c = .8, .75, .667 give tau 2.8 again."""
    assert expected_tokens_from_conditional([0.8, 0.75, 2 / 3]) == pytest.approx(2.8)
    assert expected_tokens_from_conditional([0.0, None, None]) == 1.0


@pytest.mark.parametrize(
    ("cost", "alpha", "num_draft_tokens", "speedup"),
    [
        (0.02, 0.6, 6, 2.17), (0.02, 0.7, 8, 2.76), (0.02, 0.8, 11, 3.82), (0.02, 0.9, 19, 6.37),
        (0.05, 0.6, 4, 1.92), (0.05, 0.7, 6, 2.35), (0.05, 0.8, 8, 3.09), (0.05, 0.9, 13, 4.67),
        (0.10, 0.6, 3, 1.67), (0.10, 0.7, 4, 1.98), (0.10, 0.8, 6, 2.47), (0.10, 0.9, 10, 3.43),
        (0.20, 0.6, 2, 1.40), (0.20, 0.7, 3, 1.58), (0.20, 0.8, 4, 1.87), (0.20, 0.9, 7, 2.37),
    ],
)  # fmt: skip
def test_best_number_for_a_sequential_drafter(
    cost: float, alpha: float, num_draft_tokens: int, speedup: float
) -> None:
    best, predicted = best_num_draft_tokens(alpha, cost, 1.0, 0.0, 1.0)
    assert best == num_draft_tokens
    assert predicted == pytest.approx(speedup, abs=0.006)


@pytest.mark.parametrize(
    ("alpha", "num_draft_tokens", "speedup"),
    [(0.6, 3, 1.94), (0.6, 15, 2.23), (0.8, 7, 3.72), (0.9, 15, 7.27), (0.95, 7, 6.01)],
)
def test_block_drafter(alpha: float, num_draft_tokens: int, speedup: float) -> None:
    tau = expected_tokens(alpha, num_draft_tokens)
    assert predicted_speedup(tau, 0.12, 1.0, 0.0, 1.0) == pytest.approx(speedup, abs=0.006)


def test_parallel_drafter_proposes_as_many_as_it_may() -> None:
    best, _ = best_num_draft_tokens(0.9, 0.12, 1.0, 0.0, 1.0, max_draft_tokens=15, parallel=True)
    assert best == 15


def test_no_speculation_where_drafting_costs_more_than_it_gains() -> None:
    assert best_num_draft_tokens(0.3, 0.4, 1.0, 0.0, 1.0) == (0, 1.0)


def test_overheads_count() -> None:
    """2.8 tokens in 2 + 5 + 1 ms against 4 ms a token."""
    assert predicted_speedup(2.8, 2.0, 5.0, 1.0, 4.0) == pytest.approx(1.4)


COSTS = Costs(
    verify_ms={1: 10.0, 2: 10.0, 4: 14.0, 17: 40.0},
    draft_ms={1: 1.0, 2: 2.0, 4: 4.0},
    loop_ms={0: 0.0, 4: 1.0},
)


def test_costs_between_and_behind_measured_sizes() -> None:
    assert [COSTS.verify(r) for r in (1, 2, 3, 4, 17)] == [10.0, 10.0, 12.0, 14.0, 40.0]
    assert COSTS.draft(3) == 3.0
    assert COSTS.draft(8) == 8.0  # goes on as between 2 and 4
    assert COSTS.loop(2) == 0.5
    assert COSTS.plain_ms == 10.0
    assert COSTS.cost_ratio == pytest.approx(0.1)


def test_predictions_use_the_cost_of_as_many_positions() -> None:
    """s = .8, .6: tau 2.4 with two drafted, in 2 + 12 + .5 ms against 10 ms a token."""
    points = predict(COSTS, [0.8, 0.6], 3)
    assert [p.num_draft_tokens for p in points] == [1, 2, 3]
    assert points[0].speedup == pytest.approx(1.8 * 10 / (1 + 10 + 0.25))
    assert points[1].tau == pytest.approx(2.4)
    assert points[1].speedup == pytest.approx(2.4 * 10 / (2 + 12 + 0.5))
    assert points[1].oracle_speedup == pytest.approx(3 * 10 / (2 + 12 + 0.5))
    assert points[1].oracle_share == pytest.approx(0.8)
    assert points[2].tau == pytest.approx(2.4 + 0.6 * 0.75)  # c_3 is not known: c_2
    assert [p.extrapolated for p in points] == [False, False, True]
    best = best_point(points)
    assert best is not None and best.num_draft_tokens == 2


def test_free_verification_and_equal_acceptance_give_the_published_optimum() -> None:
    """The table's c = .05, alpha = .8: 8 tokens, 3.09x."""
    costs = Costs({1: 1.0}, {1: 0.05, 2: 0.1}, {0: 0.0})
    best = best_point(predict(costs, [0.8], 16))
    assert best is not None
    assert (best.num_draft_tokens, round(best.speedup, 2)) == (8, 3.09)


def test_no_point_is_best_where_none_gains() -> None:
    costs = Costs({1: 1.0, 2: 2.0}, {1: 0.5}, {0: 0.0})
    assert best_point(predict(costs, [0.5], 4)) is None
    assert best_point([]) is None
    lucky = Costs({1: 2.0, 2: 1.0}, {1: 0.1}, {0: 0.0})  # a clock that ran wild
    assert predict(lucky, [0.0], 1)[0].speedup > 1
    assert best_point(predict(lucky, [0.0], 4)) is None  # no token was ever accepted


def test_the_loop_never_costs_less_than_it_was_seen_to() -> None:
    falling = Costs({1: 1.0}, {1: 0.1}, {0: 1.0, 1: 0.8})
    assert [falling.loop(K) for K in (0, 1, 6, 16)] == [1.0, 0.8, 0.8, 0.8]


def test_extended_acceptance_pools_the_later_positions() -> None:
    """P97's s = .8, .6, .4: the pooled later acceptance is (.6 + .4) / (.8 + .6)."""
    c = extend_conditional([0.8, 0.6, 0.4], 5)
    assert c == pytest.approx([0.8, 0.75, 2 / 3, 1 / 1.4, 1 / 1.4])
    assert extend_conditional([0.7], 2) == [0.7, 0.7]
    assert extend_conditional([0.0, 0.0], 3) == [0.0, 0.0, 0.0]
    assert extend_conditional([], 2) == [0.0, 0.0]


def test_roofline_of_a_pass() -> None:
    """Qwen3-8B in bf16 on an H200: 15.1 GB at 4.8 TB/s; its ridge at 206 tokens."""
    device = find_device("NVIDIA H200")
    assert device is not None and device.name == "H200"
    work = Work(fixed_bytes=15.1e9, row_flops=15.1e9)
    assert pass_ms(device, work, 1, 1) == pytest.approx(3.146, abs=0.001)
    assert pass_ms(device, work, 1, 206) == pytest.approx(pass_ms(device, work, 1, 1))
    assert pass_ms(device, work, 32, 13) == pytest.approx(2.02 * pass_ms(device, work, 1, 1), 0.01)
    assert find_device("NVIDIA GeForce RTX 3060") is None
    assert find_device("NVIDIA L40S").name == "L40S"


def test_roofline_costs_of_sequential_and_block_drafters() -> None:
    device, drafter = Device("d", 1e9, 1e15, "made"), Work(1e6, 2e6)
    target = Work(1e8, 2e8)
    chain = roofline_costs(device, target, drafter, 1, 4)
    assert (chain.plain_ms, chain.draft(4)) == (pytest.approx(100.0), pytest.approx(4.0))
    assert chain.cost_ratio == pytest.approx(0.01)
    block = roofline_costs(device, target, drafter, 1, 4, parallel=True)
    assert block.draft(4) == pytest.approx(1.0)
    assert roofline_costs(device, target, None, 1, 4).draft(4) == 0.0


def test_times_by_size_are_brought_to_those_known() -> None:
    times = {1: 10.0, 2: 20.0, 3: 30.0, 5: 50.0}
    assert brought_to(times, {2: 10.0}) == {1: 5.0, 2: 10.0, 3: 15.0, 5: 25.0}
    # Factors 2 at 1 and 1 at 3: 1.5 between, 1 beyond.
    assert brought_to(times, {1: 20.0, 3: 30.0}) == {1: 20.0, 2: 30.0, 3: 30.0, 5: 50.0}
    assert brought_to(times, {4: 80.0}) == {1: 20.0, 2: 40.0, 3: 60.0, 4: 80.0, 5: 100.0}
    assert brought_to({1: 0.0, 2: 4.0}, {1: 3.0}) == {1: 3.0, 2: 4.0}
