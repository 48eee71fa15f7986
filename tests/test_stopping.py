"""Where an answer ends: end tokens, stop strings, the cap; nothing behind it anywhere."""

import pytest

from drafters.lookup import Lookup
from eval.decode import DecodeSettings, decode
from tests.decoding import PROMPTS, SIX, run_chain, small_target
from tests.scripted import Oracle, ScriptedTarget


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


@pytest.mark.parametrize("eos", [5, 6, 7, 8, 9, 10])
@pytest.mark.parametrize("cap", [1, 3, 20])
def test_p82_streamed_pieces_are_the_answer_and_nothing_behind_it(eos, cap):
    target = ScriptedTarget.chain(SIX, [eos])
    drafter = Oracle({(3,): [5, 6, 7, 8, 9, 10]}, target.vocab_size)
    pieces: list[tuple[int, list[int]]] = []
    settings = DecodeSettings(max_new_tokens=cap, num_draft=4)
    rows, _ = decode(
        target, drafter, [[3]], settings, on_tokens=lambda row, ids: pieces.append((row, ids))
    )
    assert rows[0].ids == list(range(5, eos + 1))[:cap]
    assert [token for _, ids in pieces for token in ids] == rows[0].ids
    # One piece for the prefill and one a round.
    assert [len(ids) for _, ids in pieces] == [1, *(r.emitted for r in rows[0].rounds)]


def test_streamed_pieces_of_a_batch_belong_to_their_rows():
    target, pieces = small_target(), {b: [] for b in range(4)}
    drafter = Lookup(1, 3)
    settings = DecodeSettings(max_new_tokens=16, num_draft=3)
    rows, _ = decode(
        target, drafter, PROMPTS, settings, on_tokens=lambda row, ids: pieces[row].append(ids)
    )
    assert len({len(row.ids) for row in rows}) > 1  # some rows end before others
    for b, row in enumerate(rows):
        assert pieces[b][1:] == [row.ids[start : start + r.emitted] for start, r in starts_of(row)]
        assert pieces[b][0] == row.ids[:1]


def starts_of(row):
    """Where each round of an answer begins."""
    start = 1
    for r in row.rounds:
        yield start, r
        start += r.emitted
