"""The decoding loop over draft trees: greedy identity, the law of drawn tokens, stopping."""

from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from drafters.base import Sampling
from drafters.lookup import Lookup
from eval.decode import DecodeSettings, Run, decode
from eval.decode_tree import decode_tree
from eval.lossless import pit_p_value
from eval.tree import DynamicTree, FixedTree
from recipes.errors import UserError
from tests.decoding import (
    PROMPTS,
    SIX,
    greedy_answers,
    law_of_first_three,
    random_eagle,
    small_target,
)
from tests.scripted import Oracle, ScriptedTarget
from tests.tiny_targets import tiny_target

CHAIN = FixedTree((1, 1, 1, 1))
SPECS = [FixedTree((3, 2, 1)), DynamicTree(9, 3, 3), DynamicTree(20, 5, 4)]


@cache
def few_tokens(kind):
    """A target of few tokens and its greedy answers; sliding windows (5) are shorter."""
    target = tiny_target(kind, vocab_size=12, eos_token_id=11, pad_token_id=0)
    return target, list(greedy_answers(target, PROMPTS, 12).values())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "gemma2"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_greedy_tokens_are_the_targets_own(kind, spec):
    target, answers = few_tokens(kind)
    settings = DecodeSettings(max_new_tokens=12)
    rows, seconds = decode_tree(target, random_eagle(target), PROMPTS, settings, spec)
    assert [row.ids for row in rows] == answers
    assert min(seconds.draft, seconds.verify, seconds.sampling, seconds.bookkeeping) > 0


def test_branches_are_taken():
    # The identity above would say little if no guess, or only first choices, were ever accepted.
    target, _ = few_tokens("gemma3")
    settings = DecodeSettings(max_new_tokens=12)
    accepted = []
    for spec in (CHAIN, FixedTree((3, 2, 1)), DynamicTree(20, 5, 4)):
        rows, _ = decode_tree(target, random_eagle(target), PROMPTS, settings, spec)
        accepted.append(sum(r.accepted for row in rows for r in row.rounds))
    assert accepted[0] < accepted[1]
    assert accepted[0] < accepted[2]


def test_every_token_as_a_guess_is_always_right():
    # 12 tokens, all guessed at each of two levels: every round emits three.
    target = small_target()
    settings = DecodeSettings(max_new_tokens=16)
    rows, _ = decode_tree(target, random_eagle(target), PROMPTS, settings, FixedTree((12, 12)))
    expected, _ = decode(target, None, PROMPTS, settings)
    assert [row.ids for row in rows] == [row.ids for row in expected]
    for row in rows:
        assert all((r.proposed, r.accepted, r.emitted) == (2, 2, 3) for r in row.rounds[:-1])
        assert row.alpha_sum == pytest.approx(row.alpha_count)


@pytest.mark.parametrize(
    ("name", "penalty", "temperature"),
    [
        ("eagle3", 1.0, 0.0),
        ("eagle3", 1.0, 1.0),
        ("eagle3", 1.3, 1.0),
        ("lookup", 1.0, 1.0),
        ("oracle", 1.3, 0.0),
        ("oracle", 1.0, 1.0),
    ],
)
def test_chain_as_a_tree_decodes_as_a_chain(name, penalty, temperature):
    target = small_target()
    drafter = {
        "eagle3": lambda: random_eagle(target),
        "lookup": lambda: Lookup(2, 4),
        "oracle": lambda: Oracle(greedy_answers(target, PROMPTS, 14), 12, [1, 4, 0, 2]),
    }[name]()
    sampling = Sampling(temperature, top_p=0.95, repetition_penalty=penalty)
    settings = DecodeSettings(max_new_tokens=14, num_draft=4, sampling=sampling, seed=3)
    tree_rows, _ = decode_tree(target, drafter, PROMPTS, settings, CHAIN)
    rows, _ = decode(target, drafter, PROMPTS, settings)
    for ours, theirs in zip(tree_rows, rows, strict=True):
        assert (ours.ids, ours.finish) == (theirs.ids, theirs.finish)
        assert ours.rounds == theirs.rounds
        assert ours.alpha_count == theirs.alpha_count
        assert ours.alpha_sum == pytest.approx(theirs.alpha_sum, abs=1e-4)
        for a, b in zip(ours.pit, theirs.pit, strict=True):
            assert a == pytest.approx(b, abs=1e-3)
        for a, b in zip(ours.rounds, theirs.rounds, strict=True):
            assert a.p == pytest.approx(b.p, abs=1e-4)
            assert a.q == b.q
            assert a.next_p == pytest.approx(b.next_p, abs=1e-4)


DRAWN = Sampling(temperature=1.2, top_k=5, top_p=0.95)


@pytest.mark.parametrize("spec", [FixedTree((3, 2)), DynamicTree(7, 2, 3)], ids=str)
def test_drawn_tokens_follow_the_targets_law(spec):
    target, prompt, num = small_target(vocab_size=6), [1, 2, 3, 1, 2, 3, 1], 1000
    law = law_of_first_three(target, prompt, DRAWN)
    settings = DecodeSettings(max_new_tokens=4, sampling=DRAWN, seed=5)
    rows, _ = decode_tree(target, random_eagle(target), [prompt] * num, settings, spec)
    counts = dict.fromkeys(law, 0)
    for row in rows:
        counts[tuple(row.ids[:3])] += 1
    assert all(counts[tokens] == 0 for tokens, p in law.items() if p == 0)
    large = [tokens for tokens, p in law.items() if num * p >= 5]
    observed = [counts[tokens] for tokens in large]
    expected = [num * law[tokens] for tokens in large]
    observed.append(num - sum(observed))
    expected.append(num - sum(expected))
    assert len(large) > 10
    assert chisquare(observed, expected).pvalue > 0.001
    p_value = pit_p_value([values for row in rows for values in row.pit])
    assert p_value is not None and p_value > 0.001
    assert sum(r.accepted for row in rows for r in row.rounds) > num / 2


def test_a_row_does_not_depend_on_its_batch():
    target = small_target()
    drafter = random_eagle(target)
    sampling = Sampling(temperature=1.0, repetition_penalty=1.2)
    settings = DecodeSettings(max_new_tokens=16, sampling=sampling, seed=2)
    spec = DynamicTree(9, 3, 3)
    together, _ = decode_tree(target, drafter, PROMPTS, settings, spec)
    alone = [
        decode_tree(target, drafter, [p], settings, spec, indices=[i])[0][0]
        for i, p in enumerate(PROMPTS)
    ]
    assert [row.ids for row in together] == [row.ids for row in alone]
    assert [row.rounds for row in together] == [row.rounds for row in alone]


@pytest.mark.parametrize("eos", [5, 6, 7, 8, 9, 10])
def test_p82_answer_ends_at_the_end_token_wherever_it_is_in_the_path(eos):
    target, caches = ScriptedTarget.chain(SIX, [eos]), []
    make = target.new_cache
    target.new_cache = lambda *size: caches.append(make(*size)) or caches[-1]
    drafter = Oracle({(3,): [5, 6, 7, 8, 9, 10]}, 64)
    settings = DecodeSettings(max_new_tokens=20)
    rows, _ = decode_tree(target, drafter, [[3]], settings, CHAIN)
    expected = list(range(5, eos + 1))
    assert (rows[0].ids, rows[0].finish) == (expected, "stop")
    assert caches[0].lengths_B.tolist() == [len(expected)]  # the prompt, all but the last token
    expected_last = {5: [], 6: [(1, 1)], 7: [(2, 2)], 8: [(3, 3)], 9: [(4, 4)], 10: [(4, 5)]}
    assert [(r.accepted, r.emitted) for r in rows[0].rounds] == expected_last[eos]
    assert all(r.accepted_before_stop == 4 for r in rows[0].rounds)


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 7])
def test_p83_no_guess_is_deeper_than_the_cap_allows(cap):
    target = small_target(eos=(0, 1))
    settings = DecodeSettings(max_new_tokens=cap)
    expected, _ = decode(target, None, PROMPTS, settings)
    rows, _ = decode_tree(target, random_eagle(target), PROMPTS, settings, DynamicTree(20, 5, 4))
    assert [(row.ids, row.finish) for row in rows] == [(r.ids, r.finish) for r in expected]
    for row in rows:
        room = cap - 1
        for r in row.rounds:
            assert r.proposed <= room - 1
            room -= r.emitted


def test_p91_drafter_is_left_as_if_it_had_read_the_answer(monkeypatch):
    target = small_target()
    drafter, states = random_eagle(target), []
    monkeypatch.setattr(Run, "drop_finished", lambda _run: None)  # all rows are looked at
    start = drafter.start
    monkeypatch.setattr(drafter, "start", lambda *a: states.append(start(*a)) or states[-1])
    settings = DecodeSettings(max_new_tokens=14)
    rows, _ = decode_tree(target, drafter, PROMPTS, settings, FixedTree((3, 2)))
    state = states[0]
    for b, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        ids_1S = torch.tensor([prompt + row.ids])
        num_1 = torch.tensor([ids_1S.shape[1] - 1])
        fresh = start([prompt], 64)
        aux_1SF = target.forward(ids_1S[:, :-1], None, drafter.aux_layers).aux_BSF
        drafter.observe(fresh, ids_1S[:, 1:], aux_1SF, num_1)
        assert int(state.cache.lengths_B[b]) == int(num_1)  # all but the last token
        expected = fresh.last_hidden_BH[0]
        torch.testing.assert_close(state.last_hidden_BH[b], expected, atol=1e-3, rtol=1e-3)


def test_answers_are_told_while_they_are_written():
    target, told = small_target(), {b: [] for b in range(4)}
    settings = DecodeSettings(max_new_tokens=12)
    rows, _ = decode_tree(
        target, random_eagle(target), PROMPTS, settings, FixedTree((3, 2)),
        on_tokens=lambda b, ids: told[b].extend(ids),
    )  # fmt: skip
    assert list(told.values()) == [row.ids for row in rows]


def test_what_cannot_be_drafted_as_a_tree_is_refused():
    target, settings = small_target(), DecodeSettings(max_new_tokens=4)
    with pytest.raises(UserError, match="Lookup proposes chains"):
        decode_tree(target, Lookup(2, 4), PROMPTS, settings, FixedTree((2, 1)))
    drawn = DecodeSettings(max_new_tokens=4, sampling=Sampling(1.0, draft_sampled=True))
    with pytest.raises(UserError, match="siblings top are"):
        decode_tree(target, random_eagle(target), PROMPTS, drawn, FixedTree((2, 1)))
