"""The decoding loop: caches, positions, and nothing that outlives a prompt."""

import pytest
import torch

from data.cache import KVCache
from drafters.lookup import Lookup, LookupThen
from eval.decode import DecodeSettings, Run, decode
from tests.decoding import PROMPTS, greedy_answers, random_eagle, small_target
from tests.scripted import Oracle
from tests.tiny_targets import KINDS, tiny_target


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
    monkeypatch.setattr(Run, "drop_finished", lambda _self: None)  # all caches to the end
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


@pytest.mark.parametrize("kind", sorted(KINDS))
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
