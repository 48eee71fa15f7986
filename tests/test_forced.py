"""Teacher-forced acceptance: the same numbers as one pass by hand, for drafters of any kind."""

from dataclasses import replace

import pytest
import torch

from drafters.base import Sampling
from drafters.lookup import Lookup
from eval.decode import DecodeSettings, decode
from eval.forced import teacher_forced
from eval.oracle import Replay
from tests.exports_of_all import four_layer_target, make
from tests.scripted import FixedLaw, Oracle, ScriptedTarget
from tests.test_measure import make_eagle, make_target


def test_alpha_is_the_mean_of_sum_min_p_q_at_every_drafted_position():
    """p after token a is a row of a table; q is fixed: 3 tokens drafted in each of two answers."""
    p_VV = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])
    target = ScriptedTarget(p_VV.log(), [])
    q_V = torch.tensor([0.5, 0.3, 0.2])
    answers = [([0], [1, 2, 0, 0]), ([0, 1, 2], [2, 1])]
    found = teacher_forced(target, FixedLaw(q_V), answers, Sampling(1.0, draft_sampled=True))
    # Guessed behind tokens 1, 2, 0 (min sums .5, .7, .8) and behind 2 (.7).
    assert found.num_positions == 4
    assert found.alpha == pytest.approx((0.5 + 0.7 + 0.8 + 0.7) / 4)
    assert found.top1 == 0.25  # q's likeliest token is 0, p's is 1, 2, 0 and 2


def test_replayed_answers_agree_everywhere_and_a_shifted_oracle_nowhere():
    chain = {i: i + 1 for i in range(20)}
    target = ScriptedTarget.chain(chain, [])
    answer = list(range(3, 12))
    right = Oracle({(2,): answer}, 64)
    wrong = Oracle({(2,): answer}, 64, [0])
    for drafter, expected in ((right, 1.0), (wrong, 0.0)):
        found = teacher_forced(target, drafter, [([2], answer)], Sampling())
        assert (found.alpha, found.top1, found.num_positions) == (expected, expected, 8)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_alpha_is_what_one_drafted_token_a_round_is_accepted_at(penalty):
    """K = 1, greedy: rounds that propose are positions; those between bonus tokens are not seen."""
    target = make_target()
    drafter, sampling = make_eagle(target), Sampling(repetition_penalty=penalty)
    prompts = [[5, 6, 7], [9], [40, 41]]
    plain, _ = decode(target, None, prompts, DecodeSettings(max_new_tokens=10, sampling=sampling))
    answers = [(prompt, a.ids) for prompt, a in zip(prompts, plain, strict=True)]
    found = teacher_forced(target, drafter, answers, sampling)
    assert found.num_positions == sum(len(a.ids) - 1 for a in plain)
    by_hand = 0
    for prompt, ids in answers:
        for i in range(1, len(ids)):
            # A fresh decode whose prompt is the text so far, all but the token it begins with.
            text = prompt + ids[: i - 1]
            settings = DecodeSettings(max_new_tokens=3, num_draft=1, sampling=sampling)
            (row,), _ = decode(target, drafter, [text], settings)
            by_hand += row.rounds[0].accepted if row.rounds else 0
    assert found.num_top1 == by_hand
    assert found.alpha == found.top1 == by_hand / found.num_positions


def test_lookup_is_silent_where_it_finds_nothing():
    target = ScriptedTarget.chain({1: 2, 2: 3, 3: 1}, [])
    found = teacher_forced(target, Lookup(1, 2), [([1], [2, 3, 1, 2, 3])], Sampling())
    # Behind 2 and 3 nothing is known yet; behind 1 and 2 their first continuations are right.
    assert (found.num_silent, found.num_positions, found.num_top1) == (2, 2, 2)
    assert found.alpha == 0.5


def test_nothing_to_guess_is_null():
    target = ScriptedTarget.chain({1: 2}, [])
    found = teacher_forced(target, Lookup(1, 2), [([1], [2]), ([1], [])], Sampling())
    assert (found.alpha, found.top1) == (None, None)


def test_oracle_proposes_nothing_where_the_answer_is_not_known():
    target = make_target()
    drafter = Replay(make_eagle(target), {})
    settings = DecodeSettings(max_new_tokens=6, num_draft=3)
    (row,), _ = decode(target, drafter, [[5, 6]], settings)
    (plain,), _ = decode(target, None, [[5, 6]], settings)
    assert row.ids == plain.ids
    assert all(r.proposed == 0 for r in row.rounds)


@pytest.mark.parametrize(("method", "most"), [("medusa", 3), ("dflash", 3), ("dspark", 4)])
def test_oracle_proposes_no_more_than_its_drafter_can_draft(method, most):
    """3 heads, and a block of 4, are asked for 6 tokens."""
    target = four_layer_target(eos_token_id=[])
    prompt, settings = [5, 6, 7], DecodeSettings(max_new_tokens=14, num_draft=6)
    (plain,), _ = decode(target, None, [prompt], settings)
    drafter = Replay(make(method, target), {tuple(prompt): plain.ids})
    (row,), _ = decode(target, drafter, [prompt], settings)
    assert row.ids == plain.ids
    assert all(r.accepted == r.proposed for r in row.rounds)
    assert max(r.emitted for r in row.rounds) == most + 1


def test_oracle_stops_where_the_drafters_confidence_does():
    target = four_layer_target()
    unsure = make("dspark", target)
    unsure.config = replace(unsure.config, confidence_threshold=1.0)
    settings = DecodeSettings(max_new_tokens=6, num_draft=3)
    (plain,), _ = decode(target, None, [[5, 6]], settings)
    (row,), _ = decode(target, Replay(unsure, {(5, 6): plain.ids}), [[5, 6]], settings)
    assert row.ids == plain.ids
    assert [r.proposed for r in row.rounds] == [0] * (len(plain.ids) - 1)
