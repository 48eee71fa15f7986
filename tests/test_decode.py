"""The decoding loop: greedy identity, the law of drawn tokens, rows of a batch."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from data.sampling import penalise, sample
from drafters.base import Sampling
from eval.decode import DecodeSettings, decode
from eval.lossless import pit_p_value
from eval.verify import Verdict, verify_token
from recipes.errors import UserError
from tests.decoding import (
    PROMPTS,
    SIX,
    greedy_answers,
    law_of_first_three,
    make_drafter,
    random_eagle,
    small_target,
)
from tests.scripted import FixedLaw, Oracle, ScriptedTarget


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["eagle3", "lookup", "lookup+eagle3", "perfect", "wrong"])
def test_greedy_tokens_are_the_targets_own(name, batched):
    target = small_target()
    answers = greedy_answers(target, PROMPTS, 24)
    drafter = make_drafter(name, target, answers)
    settings = DecodeSettings(max_new_tokens=24, num_draft=4)
    rounds = []
    for batch in [PROMPTS] if batched else [[p] for p in PROMPTS]:
        expected = [answers[tuple(p)] for p in batch]
        plain, _ = decode(target, None, batch, settings)
        assert [row.ids for row in plain] == expected
        rows, _ = decode(target, drafter, batch, settings)
        assert [row.ids for row in rows] == expected
        rounds += [row.rounds for row in rows]
    if name == "perfect":  # only an end token ends a round early
        assert all(r.accepted == r.proposed for row in rounds for r in row[:-1])
    if name == "wrong":
        assert all(r.accepted == 0 and r.emitted == 1 for row in rounds for r in row)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2", "mistral"])
def test_greedy_tokens_are_those_of_every_architecture(kind):
    # Windows are five tokens wide, so answers of twenty leave them behind in every row.
    target = small_target(vocab_size=24, kind=kind)
    answers = greedy_answers(target, PROMPTS, 20)
    assert max(len(ids) for ids in answers.values()) == 20
    drafter = Oracle(answers, target.vocab_size, [1, 3, 0, 2, 4, 0])
    settings = DecodeSettings(max_new_tokens=20, num_draft=4)
    counts = set()
    for batch in [PROMPTS, PROMPTS[2:3]]:
        rows, _ = decode(target, drafter, batch, settings)
        assert [row.ids for row in rows] == [answers[tuple(p)] for p in batch]
        counts |= {r.accepted for row in rows for r in row.rounds}
    assert counts == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("penalty", [0.6, 1.7])
@pytest.mark.parametrize("name", ["eagle3", "lookup+eagle3", "perfect"])
def test_greedy_tokens_under_a_repetition_penalty(name, penalty):
    target = small_target()
    answers = greedy_answers(target, PROMPTS, 16, penalty)
    assert answers != greedy_answers(target, PROMPTS, 16)
    drafter = make_drafter(name, target, answers)
    sampling = Sampling(repetition_penalty=penalty)
    settings = DecodeSettings(max_new_tokens=16, num_draft=4, sampling=sampling)
    for arm in [None, drafter]:
        rows, _ = decode(target, arm, PROMPTS, settings)
        assert [row.ids for row in rows] == list(answers.values())
    if name == "perfect":  # a penalty that came one token late would reject some
        assert all(r.accepted == r.proposed for row in rows for r in row.rounds[:-1])


def test_random_eagle_is_right_now_and_then():
    # The identity above would say little if no token were ever accepted.
    target = small_target()
    settings = DecodeSettings(max_new_tokens=24, num_draft=4)
    rows, _ = decode(target, random_eagle(target), PROMPTS, settings)
    accepted = [r.accepted for row in rows for r in row.rounds]
    assert 0 < sum(accepted) < 4 * len(accepted)


DRAWN = Sampling(temperature=1.2, top_k=5, top_p=0.95, draft_sampled=True)


PENALISED = Sampling(0.9, draft_sampled=True, min_p=0.02, repetition_penalty=1.6)


@pytest.mark.parametrize(
    ("name", "sampling", "verification"),
    [
        ("eagle3", DRAWN, "token"),
        ("greedy eagle3", replace(DRAWN, draft_sampled=False), "token"),
        ("lookup", DRAWN, "token"),
        ("lookup+eagle3", DRAWN, "token"),
        ("eagle3", DRAWN, "block"),
        ("lookup+eagle3", DRAWN, "block"),
        ("eagle3", PENALISED, "token"),
        ("greedy eagle3", replace(PENALISED, draft_sampled=False), "token"),
        ("lookup+eagle3", PENALISED, "block"),
    ],
)
def test_drawn_tokens_follow_the_targets_law(name, sampling, verification):
    target, prompt, num = small_target(vocab_size=6), [1, 2, 3, 1, 2, 3, 1], 1200
    law = law_of_first_three(target, prompt, sampling)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    drafter = make_drafter(name.removeprefix("greedy "), target, {})
    settings = DecodeSettings(
        max_new_tokens=4, num_draft=2, sampling=sampling, seed=5, verification=verification
    )
    rows, _ = decode(target, drafter, [prompt] * num, settings)
    counts = dict.fromkeys(law, 0)
    for row in rows:
        counts[tuple(row.ids[:3])] += 1
    assert all(counts[tokens] == 0 for tokens, p in law.items() if p == 0)
    # Cells that expect fewer than five answers are put together.
    large = [tokens for tokens, p in law.items() if num * p >= 5]
    observed = [counts[tokens] for tokens in large]
    expected = [num * law[tokens] for tokens in large]
    observed.append(num - sum(observed))
    expected.append(num - sum(expected))
    assert len(large) > 10
    assert chisquare(observed, expected).pvalue > 0.001
    p_value = pit_p_value([value for row in rows for value in row.pit])
    assert p_value is not None and p_value > 0.001
    assert sum(r.accepted for row in rows for r in row.rounds) > 0


def second_tokens(p_V, q_V, num=2000, **settings):
    """Answers whose every token has law p, drafted from q; how often each came second."""
    target = ScriptedTarget(p_V.log().expand(len(p_V), -1), eos_ids=[])
    sampling = Sampling(temperature=1.0, draft_sampled=True)
    rows, _ = decode(
        target,
        FixedLaw(q_V),
        [[0]] * num,
        DecodeSettings(max_new_tokens=3, num_draft=1, sampling=sampling, seed=3, **settings),
    )
    second = torch.bincount(torch.tensor([row.ids[1] for row in rows]), minlength=len(p_V))
    return rows, second / num


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize(
    ("p", "q", "acceptance"),
    [
        ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3), 0.7),  # .2 + .3 + .2
        ((0.5, 0.3, 0.2), (0.5, 0.3, 0.2), 1.0),
        ((0.5, 0.3, 0.2), (1.0, 0.0, 0.0), 0.5),
        ((0.0, 0.0, 1.0), (0.2, 0.5, 0.3), 0.3),
    ],
)
def test_p85_replacement_comes_from_the_residual(p, q, acceptance, verification):
    rows, second = second_tokens(torch.tensor(p), torch.tensor(q), verification=verification)
    expected = 2000 * torch.tensor(p).double()
    if max(p) == 1:
        assert second.tolist() == list(p)
    else:
        assert chisquare((2000 * second).tolist(), expected.tolist()).pvalue > 0.001
    alpha = sum(row.alpha_sum for row in rows) / sum(row.alpha_count for row in rows)
    assert alpha == pytest.approx(acceptance)
    accepted = [row.rounds[0].accepted for row in rows]
    assert sum(accepted) / 2000 == pytest.approx(acceptance, abs=0.04 if acceptance < 1 else 0)


def token_rule(x):
    return x.judged_by(verify_token)


def test_p85_a_verifier_put_in_place_of_the_rule_decides():
    def replaced_from_p(x):
        accepted_B = token_rule(x).num_accepted_B
        p_BV = x.p_BSV[torch.arange(len(accepted_B)), accepted_B]
        return Verdict(accepted_B, sample(p_BV, x.final_uniforms_B))

    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    # min(p, q) + 0.3 p: the wrong rule that this case is about.
    wrong_V = 2000 * torch.tensor([0.35, 0.39, 0.26], dtype=torch.float64)
    _, second = second_tokens(p_V, q_V, verifier=replaced_from_p)
    assert chisquare((2000 * second).tolist(), wrong_V.tolist()).pvalue > 0.001


def test_verifiers_see_what_the_rule_sees_and_how_the_draft_came_about():
    target, seen = small_target(), []

    def spy(x):
        seen.append(x)
        return token_rule(x)

    def answers(verifier, draft_sampled):
        sampling = Sampling(1.0, 0, 0.6, draft_sampled, keep_laws=True)
        settings = DecodeSettings(
            max_new_tokens=12, num_draft=3, sampling=sampling, verifier=verifier
        )
        return [row.ids for row in decode(target, random_eagle(target), PROMPTS, settings)[0]]

    for draft_sampled in [True, False]:
        seen.clear()
        assert answers(spy, draft_sampled) == answers(None, draft_sampled)
        assert len(seen[0].tokens_BK) == 3  # of four rows one ends with its first token
        for x in seen[:2]:  # before drafts become shorter; rows that have ended are in none
            final_BKV, unfiltered_BKV = x.laws
            assert final_BKV.shape == (len(x.tokens_BK), 3, target.vocab_size)
            assert bool((unfiltered_BKV > 0).all()) and bool((final_BKV == 0).any())
            if draft_sampled:
                torch.testing.assert_close(x.q_BKV, final_BKV)
                cdf_BKV = final_BKV.double().cumsum(-1)
                drawn_BK = torch.searchsorted(cdf_BKV, x.draft_uniforms_BK.double()[..., None])
                assert x.tokens_BK.tolist() == drawn_BK[..., 0].tolist()
            else:
                assert x.q_BKV is None
                assert x.tokens_BK.tolist() == final_BKV.argmax(-1).tolist()
            drafted, accepted = x.draft_uniforms_BK, x.accept_uniforms_BK
            assert not {*drafted.flatten().tolist()} & {*accepted.flatten().tolist()}


def test_block_rule_accepts_more_than_the_token_rule():
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    target = ScriptedTarget(p_V.log().expand(3, 3), eos_ids=[])
    accepted = {}
    for rule in ["token", "block"]:
        settings = DecodeSettings(
            max_new_tokens=5,
            num_draft=3,
            sampling=Sampling(1.0, draft_sampled=True),
            verification=rule,
        )
        rows, _ = decode(target, FixedLaw(q_V), [[0]] * 2000, settings)
        accepted[rule] = sum(row.rounds[0].accepted for row in rows) / 2000
    assert accepted["token"] == pytest.approx(0.7 + 0.49 + 0.343, abs=0.08)
    assert accepted["block"] > accepted["token"] + 0.03


def test_drafter_is_penalised_for_its_own_tokens_too():
    target = small_target()
    drafter = random_eagle(target)
    sampling = Sampling(1.0, draft_sampled=True, repetition_penalty=1.5, keep_laws=True)
    state = drafter.start([[3, 5]], 16)
    aux_BSF = target.forward(torch.tensor([[3, 5]]), None, drafter.aux_layers).aux_BSF
    drafter.observe(state, torch.tensor([[5, 7]]), aux_BSF, torch.tensor([2]))

    def laws(seen):
        seen_BV = torch.zeros(1, 12, dtype=torch.bool)
        seen_BV[0, seen] = True
        # A uniform of 0 draws the first id, 0, whatever the law is.
        proposal = drafter.propose(state, 2, sampling, torch.zeros(1, 2), seen_BV)
        assert proposal.tokens_BK.tolist() == [[0, 0]]
        assert seen_BV[0].nonzero()[:, 0].tolist() == seen
        return proposal.laws.unfiltered_BKV[0]

    logits_BD = drafter.lm_head(drafter.head_input(state.last_hidden_BH))
    seen_BV = torch.zeros(1, 12, dtype=torch.bool)
    seen_BV[0, [3, 5, 7]] = True
    expected_BV = penalise(logits_BD, seen_BV, 1.5).softmax(-1)
    torch.testing.assert_close(laws([3, 5, 7])[:1], expected_BV)
    # Behind a drafted 0 it makes no difference whether 0 had been seen before.
    torch.testing.assert_close(laws([3, 5, 7])[1], laws([0, 3, 5, 7])[1])
    assert not torch.allclose(laws([3, 5, 7])[0], laws([0, 3, 5, 7])[0])


def test_rows_of_64_are_those_of_8_and_of_1():
    target = small_target()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 24, (64,), generator=generator).tolist()
    prompts = [torch.randint(0, 11, (n,), generator=generator).tolist() for n in lengths]
    drafter = make_drafter("lookup+eagle3", target, {})
    sampling = Sampling(0.9, 8, draft_sampled=True, repetition_penalty=1.2)
    settings = DecodeSettings(max_new_tokens=12, num_draft=3, sampling=sampling, seed=7)

    def rounds_of(size, start=0, end=64):
        rows = []
        for i in range(start, end, size):
            part = prompts[i : min(i + size, end)]
            rows += decode(target, drafter, part, settings, range(i, i + len(part)))[0]
        return [(row.ids, row.finish, row.rounds) for row in rows]

    together = rounds_of(64)
    assert len({len(ids) for ids, _, _ in together}) > 4  # some rows end long before others
    assert {finish for _, finish, _ in together} == {"stop", "length"}
    assert rounds_of(8) == together
    assert rounds_of(1, 20, 30) == together[20:30]


@pytest.mark.parametrize("name", ["eagle3", "lookup+eagle3"])
def test_a_row_does_not_depend_on_its_batch(name):
    target = small_target()
    drafter = make_drafter(name, target, {})
    sampling = Sampling(temperature=1.0, draft_sampled=True)
    settings = DecodeSettings(max_new_tokens=16, num_draft=3, sampling=sampling, seed=2)
    together, _ = decode(target, drafter, PROMPTS, settings)
    alone = [
        decode(target, drafter, [p], settings, indices=[i])[0][0] for i, p in enumerate(PROMPTS)
    ]
    assert [row.ids for row in together] == [row.ids for row in alone]
    assert [row.rounds for row in together] == [row.rounds for row in alone]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(
            torch.tensor(one.pit), torch.tensor(other.pit), atol=1e-4, rtol=0
        )


def test_p88_nan_is_an_error_that_names_the_round():
    table_VV = torch.zeros(6, 6)
    table_VV[0, 1], table_VV[1, 2], table_VV[2] = 9.0, 9.0, torch.nan
    target = ScriptedTarget(table_VV, [5])
    with pytest.raises(UserError, match="target logits, round 2"):
        decode(target, None, [[0]], DecodeSettings(max_new_tokens=5))


@pytest.mark.parametrize("verification", ["token", "block"])
def test_p88_nan_from_the_drafter_is_an_error_that_names_the_place(verification):
    with pytest.raises(UserError, match="NaN probability in row 0 at position 0"):
        second_tokens(torch.ones(3) / 3, torch.full((3,), torch.nan), 2, verification=verification)


def test_p88_certain_draft_of_an_impossible_token_is_replaced():
    target = ScriptedTarget.chain(SIX, [], vocab_size=16)
    q_V = torch.zeros(16)
    q_V[0] = 1.0
    sampling = Sampling(temperature=0.01, draft_sampled=True)  # p is 1 on the chain, exactly
    settings = DecodeSettings(max_new_tokens=6, num_draft=3, sampling=sampling)
    rows, _ = decode(target, FixedLaw(q_V), [[3]], settings)
    assert rows[0].ids == [5, 6, 7, 8, 9, 10]


def test_p89_seeds_do_not_matter_when_greedy_and_do_when_drawn():
    target = small_target()
    drafter = random_eagle(target)

    def texts(temperature, seed):
        sampling = Sampling(temperature, draft_sampled=True)
        settings = DecodeSettings(max_new_tokens=12, num_draft=3, sampling=sampling, seed=seed)
        return [row.ids for row in decode(target, drafter, PROMPTS, settings)[0]]

    expected = list(greedy_answers(target, PROMPTS, 12).values())
    assert [texts(0.0, seed) for seed in (0, 1, 2)] == [expected] * 3
    assert texts(1e-6, 0) == expected
    assert texts(1.0, 4) == texts(1.0, 4)
    assert texts(1.0, 4) != texts(1.0, 5)


@pytest.mark.parametrize("drafted", [3, 7])
def test_p89_exact_tie_goes_to_the_lower_id(drafted):
    table_VV = torch.zeros(9, 9)
    table_VV[:, [3, 7]] = 5.0
    drafter = Oracle({(0,): [drafted] * 9}, 9)
    settings = DecodeSettings(max_new_tokens=6, num_draft=3)
    rows, _ = decode(ScriptedTarget(table_VV, []), drafter, [[0]], settings)
    assert rows[0].ids == [3] * 6
