"""eval/lossless.py: the transform is uniform for the right sampler and only for it."""

import pytest
import torch
from scipy import stats

from data.sampling import sample
from eval.lossless import (
    Divergence,
    _kolmogorov_survival,
    greedy_identical,
    ks_distance,
    ks_p_value,
    pit_columns,
    pit_p_value,
    pit_value,
    pit_values,
)
from eval.verify import verify_token

NUM_TOKENS = 20_000


def test_pit_value_by_hand() -> None:
    p_V = torch.tensor([0.5, 0.3, 0.2])
    assert pit_value(p_V, token=1, uniform=0.5) == pytest.approx(0.5 + 0.5 * 0.3)
    order_V = torch.tensor([2.0, 1.0, 0.0])  # sums ids 2, 1, 0
    assert pit_value(p_V, 1, 0.5, order_V) == pytest.approx(0.2 + 0.5 * 0.3)
    ties_V = torch.tensor([1.0, 0.0, 1.0])  # sums ids 1, 0, 2
    assert pit_value(p_V, 2, 0.0, ties_V) == pytest.approx(0.8)


def test_pit_columns_by_hand() -> None:
    p_NV = torch.tensor([[0.5, 0.3, 0.2]]).expand(2, 3)
    q_NV = torch.tensor([[0.1, 0.6, 0.3], [0.0, 0.0, 0.0]])  # the second was not drafted
    tokens_N, uniforms_N = torch.tensor([2, 2]), torch.tensor([0.5, 0.5])
    # q / p = 0.2, 2, 1.5: summed 0, 2, 1. By probability 0, 1, 2, as by id.
    expected = torch.tensor([[0.5 + 0.1, 0.8 + 0.1, 0.8 + 0.1], [0.9, 0.9, 0.9]])
    found = pit_columns(p_NV, tokens_N, uniforms_N, q_NV)
    torch.testing.assert_close(found, expected.double())
    without_q = pit_columns(p_NV, tokens_N, uniforms_N)
    torch.testing.assert_close(without_q, torch.full((2, 3), 0.9, dtype=torch.float64))


def test_pit_p_value_is_three_times_the_smallest() -> None:
    torch.manual_seed(0)
    even = torch.rand(400, dtype=torch.float64)
    odd = even.pow(1.15)
    columns = torch.stack([even, odd, even], -1).tolist()
    assert pit_p_value(columns) == pytest.approx(3 * ks_p_value(odd.tolist()))
    assert pit_p_value([]) is None


def test_ks_distance_by_hand() -> None:
    assert ks_distance([0.5]) == 0.5
    assert ks_distance([0.1, 0.9, 0.2]) == pytest.approx(2 / 3 - 0.2)


def speculative_tokens(seed: int, broken: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First emitted token of 20k rounds with random p and q; broken: bonus for residual."""
    torch.manual_seed(seed)
    p_NV, q_NV = torch.randn(2, NUM_TOKENS, 12).softmax(-1)
    drafted_N = sample(q_NV, torch.rand(NUM_TOKENS))
    verdict = verify_token(
        p_NV[:, None].expand(-1, 2, -1),
        drafted_N[:, None],
        torch.ones(NUM_TOKENS, dtype=torch.long),
        q_NV[:, None],
        torch.rand(NUM_TOKENS, 1),
        torch.rand(NUM_TOKENS),
    )
    replacement_N = sample(p_NV, torch.rand(NUM_TOKENS)) if broken else verdict.next_token_B
    return p_NV, q_NV, torch.where(verdict.num_accepted_B > 0, drafted_N, replacement_N)


@pytest.mark.parametrize("order_by_q", [False, True])
def test_right_sampler_passes(order_by_q: bool) -> None:
    p_values = []
    for seed in range(5):
        p_NV, q_NV, tokens_N = speculative_tokens(seed, broken=False)
        order_NV = q_NV - p_NV if order_by_q else None
        values_N = pit_values(p_NV, tokens_N, torch.rand(NUM_TOKENS), order_NV)
        assert values_N.min() >= 0
        assert values_N.max() <= 1
        p_values.append(ks_p_value(values_N.tolist()))
    assert min(p_values) > 0.001
    assert max(p_values) > 0.1


def test_wrong_law_is_rejected() -> None:
    """Tokens drawn at temperature 0.9 and judged against temperature 1."""
    torch.manual_seed(0)
    logits_NV = torch.randn(NUM_TOKENS, 12).sort(dim=-1).values
    tokens_N = sample((logits_NV / 0.9).softmax(-1), torch.rand(NUM_TOKENS))
    values_N = pit_values(logits_NV.softmax(-1), tokens_N, torch.rand(NUM_TOKENS))
    assert ks_p_value(values_N.tolist()) < 1e-4


def test_broken_residual_is_rejected_and_the_order_gives_the_power() -> None:
    p_NV, q_NV, tokens_N = speculative_tokens(0, broken=True)
    values_N = pit_values(p_NV, tokens_N, torch.rand(NUM_TOKENS), q_NV - p_NV)
    assert ks_p_value(values_N.tolist()) < 1e-10
    by_id_N = pit_values(p_NV, tokens_N, torch.rand(NUM_TOKENS))
    assert ks_p_value(by_id_N.tolist()) > 1e-10  # ids of random rows hide it


def test_kolmogorov_distribution_matches_scipy() -> None:
    for x in (0.05, 0.3, 0.6, 0.99, 1.0, 1.36, 2.0, 4.0):
        assert _kolmogorov_survival(x) == pytest.approx(stats.kstwobign.sf(x), abs=1e-9)
    assert _kolmogorov_survival(0.0) == 1.0


@pytest.mark.parametrize("num_values", [20, 300, 5000])
@pytest.mark.parametrize("power", [1.0, 1.1])
def test_ks_p_value_matches_scipy(num_values: int, power: float) -> None:
    torch.manual_seed(num_values)
    values = torch.rand(num_values, dtype=torch.float64).pow(power).tolist()
    assert ks_p_value(values) == pytest.approx(stats.kstest(values, "uniform").pvalue, abs=0.01)


def test_ks_of_nothing_is_unknown() -> None:
    assert ks_p_value([]) is None


def test_greedy_identical_names_first_divergences() -> None:
    comparison = greedy_identical(
        [[1, 2, 3], [1, 9, 3], [1, 2], [], [5]], [[1, 2, 3], [1, 2, 3], [1, 2, 3], [], [6]]
    )
    assert (comparison.num_identical, comparison.num_prompts) == (2, 5)
    assert comparison.divergences == [Divergence(1, 1), Divergence(2, 2), Divergence(4, 0)]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        greedy_identical([[1]], [[1], [2]])
