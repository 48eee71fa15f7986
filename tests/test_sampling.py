"""data/sampling.py: final distributions and draws."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from data.sampling import final_probs, mark_seen, penalise, sample, seen_along, seen_in
from recipes.errors import UserError

LOGITS_13 = torch.tensor([[0.5, 0.3, 0.2]]).log()


def test_temperature_0_is_one_hot_and_1_is_softmax() -> None:
    assert final_probs(LOGITS_13, 0.0).tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(final_probs(LOGITS_13, 1.0), torch.tensor([[0.5, 0.3, 0.2]]))
    squares = torch.tensor([[0.25, 0.09, 0.04]])
    torch.testing.assert_close(final_probs(LOGITS_13, 0.5), squares / 0.38)


def test_p89_greedy_tie_goes_to_the_first_id() -> None:
    logits_18 = torch.zeros(1, 8)
    logits_18[0, [3, 7]] = 5.0
    assert final_probs(logits_18, 0.0).argmax().item() == 3
    assert final_probs(logits_18, 0.0).sum().item() == 1.0
    probs = final_probs(logits_18, 1e-6)  # as T goes to 0 a tie stays a tie, without NaN
    assert probs[0, [3, 7]].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-50])
def test_p89_tiny_temperature_is_finite(temperature: float) -> None:
    assert final_probs(100 * LOGITS_13, temperature).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.5, [1.0, 0.0, 0.0]),
        (0.51, [0.625, 0.375, 0.0]),
        (0.8, [0.625, 0.375, 0.0]),  # .5 + .3 reaches .8, so the third is not needed
        (0.81, [0.5, 0.3, 0.2]),
        (1e-9, [1.0, 0.0, 0.0]),  # always at least one
    ],
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, expected: list[float]) -> None:
    torch.testing.assert_close(final_probs(LOGITS_13, 1.0, top_p=top_p), torch.tensor([expected]))


def test_top_k_then_top_p() -> None:
    probs = final_probs(LOGITS_13, 1.0, top_k=2)
    torch.testing.assert_close(probs, torch.tensor([[0.625, 0.375, 0.0]]))
    # Of the two kept, the first has .625 of the mass, which is enough for .6 (not .5 of all).
    assert final_probs(LOGITS_13, 1.0, top_k=2, top_p=0.6).tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(final_probs(LOGITS_13, 1.0, top_k=9), LOGITS_13.exp())


def test_top_p_of_a_large_vocabulary_matches_a_full_sort() -> None:
    """Row 0 is peaked (found among the likeliest), row 1 is flat (needs the full sort)."""
    torch.manual_seed(0)
    logits_2V = torch.randn(2, 5000) * torch.tensor([[6.0], [0.1]])
    probs = final_probs(logits_2V, 1.0, top_p=0.9)
    for row in range(2):
        full = logits_2V[row].softmax(-1)
        values, ids = full.sort(descending=True)
        num_kept = int((values.cumsum(0) < 0.9).sum()) + 1
        assert (probs[row] > 0).sum().item() == num_kept
        assert set(probs[row].nonzero()[:, 0].tolist()) == set(ids[:num_kept].tolist())
        assert probs[row].sum().item() == pytest.approx(1.0, abs=1e-5)


def test_p88_nan_row_is_an_error_that_names_step_and_row() -> None:
    logits = torch.zeros(3, 4)
    logits[2, 1] = torch.nan
    with pytest.raises(UserError, match=r"target logits, round 7: row 2 has maximum nan"):
        final_probs(logits, 1.0, where="target logits, round 7")
    with pytest.raises(UserError, match="row 2"):
        final_probs(logits, 0.0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_rows_without_a_finite_maximum_are_errors(value: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1] = value
    with pytest.raises(UserError, match="row 1"):
        final_probs(logits, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_p88_row_of_minus_inf_except_one_gives_that_token(temperature: float) -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 4] = -3.0
    probs = final_probs(logits, temperature, top_k=2, top_p=0.9)
    assert probs.tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0]]
    assert [sample(probs, torch.tensor([u])).item() for u in (0.0, 0.5, 1.0)] == [4, 4, 4]


@pytest.mark.parametrize(
    "setting", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}]
)
def test_settings_out_of_range(setting: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(setting))):
        final_probs(LOGITS_13, 1.0, **setting)
    with pytest.raises(UserError, match="temperature=-1"):
        final_probs(LOGITS_13, -1)


def test_sample_is_the_inverse_cdf() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    uniforms = [0.0, 0.2499, 0.25, 0.9, 1.0]  # 1.0: what rounding can make of 1 - 1e-9
    ids = sample(probs.expand(5, 5), torch.tensor(uniforms))
    assert ids.tolist() == [1, 1, 3, 3, 3]
    assert ids.dtype == torch.int64


def test_sample_never_gives_an_id_without_mass() -> None:
    """Mass on every 7th id of a vocabulary whose tail is empty, uniforms up to the ends."""
    torch.manual_seed(0)
    weights = torch.rand(1, 3001).pow(8)
    weights[0, torch.arange(3001) % 7 != 0] = 0.0
    weights[0, 2000:] = 0.0
    uniforms = torch.cat([torch.rand(2000), torch.tensor([0.0, 1.0, 1 - 2**-24])])
    ids = sample(weights.expand(len(uniforms), -1), uniforms)
    assert bool((weights[0, ids] > 0).all())


def test_sample_frequencies() -> None:
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.3, 0.2])
    frequencies = sample(probs.expand(200_000, 3), torch.rand(200_000)).bincount() / 200_000
    torch.testing.assert_close(frequencies, probs, atol=0.005, rtol=0)


@pytest.mark.parametrize("bad", [0.0, torch.nan])
def test_sample_without_mass_is_an_error(bad: float) -> None:
    weights = torch.ones(2, 3)
    weights[1] = bad
    with pytest.raises(UserError, match="row 1"):
        sample(weights, torch.rand(2))


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [
        (0.0, [0.5, 0.3, 0.2]),
        (0.39, [0.5, 0.3, 0.2]),  # .2 is .4 of the likeliest
        (0.41, [0.625, 0.375, 0.0]),
        (0.61, [1.0, 0.0, 0.0]),
        (1.0, [1.0, 0.0, 0.0]),
    ],
)
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p, expected) -> None:
    torch.testing.assert_close(final_probs(LOGITS_13, 1.0, min_p=min_p), torch.tensor([expected]))


def test_min_p_comes_after_temperature_and_before_top_p() -> None:
    # At T = 0.5 the law is (.25, .09, .04) / .38: .09 is .36 of .25, at T = 1 it would be .6.
    assert final_probs(LOGITS_13, 0.5, min_p=0.4).tolist() == [[1.0, 0.0, 0.0]]
    # Of (.625, .375), which min-p leaves, .6 is reached by the first; of all three it is not.
    assert final_probs(LOGITS_13, 1.0, top_p=0.6, min_p=0.5).tolist() == [[1.0, 0.0, 0.0]]
    assert final_probs(LOGITS_13, 1.0, top_p=0.6).tolist()[0][1] > 0


def test_min_p_without_other_filters_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 50)
    theirs = MinPLogitsWarper(0.1)(torch.zeros(4, 0), logits / 0.7).softmax(-1)
    ours = final_probs(logits, 0.7, min_p=0.1)
    assert 4 < (ours > 0).sum() < 4 * 50
    torch.testing.assert_close(ours, theirs)


def test_min_p_keeps_all_that_tie_with_the_likeliest() -> None:
    probs = final_probs(torch.tensor([[2.0, 2.0, 1.9, -torch.inf]]), 1.0, min_p=1.0)
    assert probs.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, -2.0, 0.0, -torch.inf]])
    seen = torch.tensor([[True, False, True, False, True, True]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.0, 2.0, -4.0, -2.0, 0.0, -torch.inf]]
    assert penalise(logits, seen, 1.0).tolist() == logits.tolist()


def test_repetition_penalty_is_that_of_transformers_and_counts_a_token_once() -> None:
    torch.manual_seed(0)
    logits, prompts = 3 * torch.randn(2, 20), [[3, 3, 3, 5], [1, 2, 1, 2]]
    seen = seen_in(prompts, 20, torch.device("cpu"))
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(prompts), logits.clone())
    torch.testing.assert_close(penalise(logits, seen, 1.3), theirs)


def test_what_is_seen_grows_along_a_proposal_and_with_what_is_committed() -> None:
    seen = seen_in([[0], [1, 1]], 6, torch.device("cpu"))
    along = seen_along(seen, torch.tensor([[2, 3], [4, 1]]))

    def ids(flags):
        return [row.nonzero()[:, 0].tolist() for row in flags]

    assert [ids(row) for row in along] == [[[0], [0, 2], [0, 2, 3]], [[1], [1, 4], [1, 4]]]
    mark_seen(seen, torch.tensor([[2, 3, 5], [4, 0, 0]]), torch.tensor([2, 0]))
    assert ids(seen) == [[0, 2, 3], [1]]


@pytest.mark.parametrize("penalty", [0.0, -1.0, float("nan")])
def test_penalty_out_of_range(penalty: float) -> None:
    with pytest.raises(UserError, match="repetition_penalty"):
        penalise(LOGITS_13, torch.ones(1, 3, dtype=torch.bool), penalty)
