"""eval/theory.py against published formulas and tables."""

import pytest

from eval.theory import (
    best_num_draft_tokens,
    expected_tokens,
    expected_tokens_from_conditional,
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
