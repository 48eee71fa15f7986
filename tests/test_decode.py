"""The decoding loop: greedy identity, the law of drawn tokens, stopping, caches."""

from functools import cache
from itertools import product
from math import prod

import pytest
import torch
from scipy.stats import chisquare

from data.cache import KVCache
from data.sampling import final_probs
from drafters.base import DecodingDrafter, Sampling
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.lookup import Lookup, LookupThen
from eval.decode import Decoded, DecodeSettings, decode
from eval.lossless import pit_p_value
from recipes.errors import UserError
from tests.scripted import FixedLaw, Oracle, ScriptedTarget
from tests.tiny_targets import tiny_target

PROMPTS = [
    [3],
    [1, 2, 3, 1, 2],
    [4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5],
    [9, 8, 7, 9, 8, 7, 9, 8],
]


@cache
def small_target(vocab_size=12, eos=None):
    """Few tokens, so that even random drafters are right now and then."""
    eos = vocab_size - 1 if eos is None else eos
    eos = list(eos) if isinstance(eos, tuple) else eos
    return tiny_target("qwen3", vocab_size=vocab_size, eos_token_id=eos, pad_token_id=0)


def random_eagle(target, seed=1):
    config = Eagle3Config(
        target_hidden_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(1, 2, 3),
    )
    torch.manual_seed(seed)
    drafter = Eagle3(config).eval()
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    drafter.use_embeddings(target.embed_weight_VH)
    return drafter


def greedy_answers(target, prompts, num_tokens):
    """Token by token with a fresh pass each: no cache, no batch, no loop of ours."""
    answers = {}
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + num_tokens and not set(ids[len(prompt) :]) & set(
            target.eos_ids
        ):
            hidden_BSH = target.forward(torch.tensor([ids])).hidden_BSH
            ids.append(int(target.logits(hidden_BSH[0, -1]).argmax()))
        answers[tuple(prompt)] = ids[len(prompt) :]
    return answers


def make_drafter(name: str, target, answers) -> DecodingDrafter:
    return {
        "eagle3": lambda: random_eagle(target),
        "lookup": lambda: Lookup(2, 4),
        "lookup+eagle3": lambda: LookupThen(Lookup(1, 3), random_eagle(target)),
        "perfect": lambda: Oracle(answers, target.vocab_size),
        "wrong": lambda: Oracle(answers, target.vocab_size, [0]),
    }[name]()


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


def test_random_eagle_is_right_now_and_then():
    # The identity above would say little if no token were ever accepted.
    target = small_target()
    settings = DecodeSettings(max_new_tokens=24, num_draft=4)
    rows, _ = decode(target, random_eagle(target), PROMPTS, settings)
    accepted = [r.accepted for row in rows for r in row.rounds]
    assert 0 < sum(accepted) < 4 * len(accepted)


DRAWN = Sampling(temperature=1.2, top_k=5, top_p=0.95, draft_sampled=True)


def law_of_first_three(target, prompt, sampling):
    """Probability of every answer, cut to three tokens, from passes without a cache."""
    V = target.vocab_size

    def next_law(ids):
        hidden_BSH = target.forward(torch.tensor([ids])).hidden_BSH
        logits_1V = target.logits(hidden_BSH[:, -1])
        return final_probs(logits_1V, sampling.temperature, sampling.top_k, sampling.top_p)[0]

    known = {}
    law: dict[tuple[int, ...], float] = {}
    for tokens in product(range(V), repeat=3):
        stop = next((i + 1 for i, t in enumerate(tokens) if t in target.eos_ids), 3)
        kept = tokens[:stop]
        if kept in law:
            continue
        for i in range(stop):
            if kept[:i] not in known:
                known[kept[:i]] = next_law([*prompt, *kept[:i]])
        law[kept] = prod(float(known[kept[:i]][kept[i]]) for i in range(stop))
    return law


@pytest.mark.parametrize("name", ["eagle3", "greedy eagle3", "lookup", "lookup+eagle3"])
def test_drawn_tokens_follow_the_targets_law(name):
    target, prompt, num = small_target(vocab_size=6), [1, 2, 3, 1, 2, 3, 1], 2000
    law = law_of_first_three(target, prompt, DRAWN)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    drafter = make_drafter(name.removeprefix("greedy "), target, {})
    sampling = Sampling(1.2, 5, 0.95, draft_sampled=not name.startswith("greedy"))
    settings = DecodeSettings(max_new_tokens=4, num_draft=2, sampling=sampling, seed=5)
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


def test_p85_replacement_comes_from_the_residual():
    p_V, q_V, num = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3]), 4000
    target = ScriptedTarget(p_V.log().expand(3, 3), eos_ids=[])
    sampling = Sampling(temperature=1.0, draft_sampled=True)
    settings = DecodeSettings(max_new_tokens=3, num_draft=1, sampling=sampling, seed=3)
    rows, _ = decode(target, FixedLaw(q_V), [[0]] * num, settings)
    second = torch.bincount(torch.tensor([row.ids[1] for row in rows]), minlength=3)
    assert chisquare(second.tolist(), (num * p_V.double()).tolist()).pvalue > 0.001
    alpha = sum(row.alpha_sum for row in rows) / sum(row.alpha_count for row in rows)
    assert alpha == pytest.approx(0.7)  # .2 + .3 + .2
    first = [row.rounds[0].accepted for row in rows]
    assert sum(first) / num == pytest.approx(0.7, abs=0.03)


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


def run_chain(chain, eos_ids, num_right=None, **settings) -> tuple[Decoded, ScriptedTarget]:
    """Decode [3] with a scripted target and a drafter that knows the chain."""
    target = ScriptedTarget.chain(chain, eos_ids)
    answer = [chain[3]]
    while answer[-1] in chain and len(answer) < 50:
        answer.append(chain[answer[-1]])
    drafter = Oracle({(3,): answer}, target.vocab_size, num_right)
    rows, _ = decode(target, drafter, [[3]], DecodeSettings(**settings))
    return rows[0], target


SIX = {3: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 10}


@pytest.mark.parametrize("eos", [5, 6, 7, 8, 9, 10])
def test_p82_answer_ends_at_the_end_token_wherever_it_is_in_the_block(eos):
    row, target = run_chain(SIX, [eos], max_new_tokens=20, num_draft=4)
    expected = list(range(5, eos + 1))
    assert (row.ids, row.finish) == (expected, "stop")
    plain, _ = decode(target, None, [[3]], DecodeSettings(max_new_tokens=20))
    assert plain[0].ids == expected
    assert 1 + sum(r.emitted for r in row.rounds) == len(expected)  # nothing behind it is counted
    # 6, 7, 8, 9 are drafted: an end among them ends the round inside the draft.
    expected_last = {5: [], 6: [(1, 1)], 7: [(2, 2)], 8: [(3, 3)], 9: [(4, 4)], 10: [(4, 5)]}
    assert [(r.accepted, r.emitted) for r in row.rounds] == expected_last[eos]
    assert row.alpha_count == sum(r.accepted for r in row.rounds)


def test_p82_nothing_behind_the_end_token_is_left_in_the_cache():
    target, caches = ScriptedTarget.chain(SIX, [7]), []
    make = target.new_cache
    target.new_cache = lambda *size: caches.append(make(*size)) or caches[-1]
    drafter = Oracle({(3,): [5, 6, 7, 8, 9, 10]}, 64)
    rows, _ = decode(target, drafter, [[3]], DecodeSettings(max_new_tokens=20, num_draft=4))
    assert rows[0].ids == [5, 6, 7]
    assert caches[0].lengths_B.tolist() == [3]  # 3, 5, 6: all but the last token


STOP = {3: 10, 10: 11, 11: 12, 12: 20, 20: 21, 21: 22, 22: 23}


@pytest.mark.parametrize("num_draft", [2, 5, 8])
@pytest.mark.parametrize(
    ("eos", "cap", "expected", "finish"),
    [
        (12, 5, [10, 11, 12], "stop"),
        (20, 5, [10, 11, 12, 20], "stop"),
        (21, 5, [10, 11, 12, 20, 21], "stop"),
        (22, 5, [10, 11, 12, 20, 21], "length"),  # the end token lies beyond the cap
        (10, 1, [10], "stop"),
        (12, 1, [10], "length"),
    ],
)
def test_p83_stop_goes_before_cap_and_nothing_passes_the_cap(num_draft, eos, cap, expected, finish):
    row, _ = run_chain(STOP, [eos], max_new_tokens=cap, num_draft=num_draft)
    assert (row.ids, row.finish) == (expected, finish)


def test_stop_string_inside_a_block():
    ids = ScriptedTarget.chain({}, []).tokenizer("abSTOPcd")["input_ids"]
    chain = dict(zip([3, *ids], ids, strict=False))
    target = ScriptedTarget.chain(chain, [], vocab_size=264)
    drafter = Oracle({(3,): ids}, 264)
    settings = DecodeSettings(max_new_tokens=20, num_draft=7, stop=("STOP",))
    rows, _ = decode(target, drafter, [[3]], settings)
    assert (target.tokenizer.decode(rows[0].ids), rows[0].finish) == ("abSTOP", "stop")


@pytest.mark.parametrize("eos", [7, 8, 9])
def test_p18_each_of_several_end_tokens_stops(eos):
    chain = {3: 5, 5: 6, 6: eos, eos: 20}
    row, _ = run_chain(chain, [7, 8, 9], max_new_tokens=9, num_draft=4)
    assert (row.ids, row.finish) == ([5, 6, eos], "stop")


def test_p18_target_lists_all_end_tokens_and_pads_with_one():
    target = small_target(eos=(7, 8, 9))
    assert target.eos_ids == [7, 8, 9]
    assert isinstance(target.pad_id, int)
    rows, _ = decode(target, None, PROMPTS, DecodeSettings(max_new_tokens=40))
    assert any(row.finish == "stop" for row in rows)
    assert all((row.ids[-1] in (7, 8, 9)) == (row.finish == "stop") for row in rows)


def test_p88_nan_is_an_error_that_names_the_round():
    table_VV = torch.zeros(6, 6)
    table_VV[0, 1], table_VV[1, 2], table_VV[2] = 9.0, 9.0, torch.nan
    target = ScriptedTarget(table_VV, [5])
    with pytest.raises(UserError, match="target logits, round 2"):
        decode(target, None, [[0]], DecodeSettings(max_new_tokens=5))


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


@pytest.mark.parametrize(("back", "left"), [(0, 3), (1, 2), (3, 0), (5, None)])
def test_p90_rollback_by_length(back, left):
    buffers = KVCache(1, 1, 8, 1, 2, torch.float32)
    buffers.begin(3)
    buffers.append(0, torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    buffers.advance(3)
    if left is None:
        with pytest.raises(ValueError, match="rollback"):
            buffers.rollback(buffers.lengths_B - back)
        left = 3
    else:
        buffers.rollback(buffers.lengths_B - back)
    assert buffers.lengths_B.tolist() == [left]
    buffers.begin(1)
    keys, _ = buffers.append(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    assert keys[0, 0, :, 0].tolist() == [1.0] * left + [0.0]  # nothing stale is read


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[2]], ids=["1", "17"])
def test_p91_positions_after_partial_acceptance(prompt, monkeypatch):
    # Tokens: 1 from the prefill and 1, 2, 3, 4, 5, 1, 5 from the rounds.
    target, counts = small_target(vocab_size=264, eos=257), [0, 1, 2, 3, 4, 0, 4]
    answers = greedy_answers(target, [prompt], 22)
    assert len(answers[tuple(prompt)]) == 22
    seen = []
    forward = target.forward

    def spy(ids_BS, cache, aux_layers):
        seen.append(int(cache.lengths_B[0]))
        states = forward(ids_BS, cache, aux_layers)
        assert cache.positions_BS[0, 0] == seen[-1]
        return states

    monkeypatch.setattr(target, "forward", spy)
    drafter = Oracle(answers, 264, counts)
    rows, _ = decode(target, drafter, [prompt], DecodeSettings(max_new_tokens=22, num_draft=4))
    assert rows[0].ids == answers[tuple(prompt)]
    assert [r.accepted for r in rows[0].rounds] == counts
    committed = [len(prompt) + n for n in (1, 2, 4, 7, 11, 16, 17)]
    assert seen == [0, *(n - 1 for n in committed)]


def test_p91_drafter_cache_holds_all_committed_tokens_but_one(monkeypatch):
    target = small_target()
    drafter, states = random_eagle(target), []
    start = drafter.start
    monkeypatch.setattr(drafter, "start", lambda *a: states.append(start(*a)) or states[-1])
    settings = DecodeSettings(max_new_tokens=14, num_draft=4)
    rows, _ = decode(target, drafter, PROMPTS, settings)
    expected = [len(p) + len(row.ids) - 1 for p, row in zip(PROMPTS, rows, strict=True)]
    assert states[0].cache.lengths_B.tolist() == expected


def test_p96_no_state_passes_from_prompt_to_prompt():
    target = small_target()
    drafter = LookupThen(Lookup(2, 3), random_eagle(target))
    settings = DecodeSettings(max_new_tokens=15, num_draft=4)

    def rounds(order):
        found = {i: decode(target, drafter, [PROMPTS[i]], settings, [i])[0][0] for i in order}
        return [found[i].rounds for i in range(3)]

    assert rounds([0, 1, 2]) == rounds([2, 0, 1])
    rows, _ = decode(target, random_eagle(target), PROMPTS, settings)
    for row in rows:
        room = 15 - 1
        for r in row.rounds:
            assert r.proposed == min(4, room - 1)  # 4, but never beyond the cap
            room -= r.emitted


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_logits_after_any_history_are_those_of_a_fresh_pass(kind):
    target = tiny_target(kind)
    generator = torch.Generator().manual_seed(0)
    buffers = target.new_cache(2, 64)
    committed: list[list[int]] = [[], []]
    for _ in range(8):
        ids_BS = torch.randint(0, 264, (2, 5), generator=generator)
        logits_BSV = target.logits(target.forward(ids_BS, buffers).hidden_BSH)
        for b in range(2):
            fresh_1S = torch.tensor([committed[b] + ids_BS[b].tolist()])
            fresh_SV = target.logits(target.forward(fresh_1S).hidden_BSH)[0, -5:]
            scale = float(fresh_SV.abs().max())
            torch.testing.assert_close(logits_BSV[b], fresh_SV, atol=1e-5 * scale, rtol=0)
        kept_B = torch.randint(0, 6, (2,), generator=generator)
        buffers.advance(5)
        buffers.rollback(buffers.lengths_B - 5 + kept_B)
        for b in range(2):
            committed[b] += ids_BS[b, : kept_B[b]].tolist()
    assert buffers.lengths_B.tolist() == [len(c) for c in committed]
