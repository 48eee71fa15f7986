"""Conversations answered turn after turn."""

from itertools import pairwise

import pytest

from data.conversations import render_prompt
from data.prompt_rows import make_prompt
from drafters.base import Sampling
from drafters.lookup import Lookup
from eval.decode import DecodeSettings, decode
from eval.rounds import Decoded, Seconds
from eval.turns import decode_turns
from tests.scripted import Oracle, ScriptedTarget
from tests.tiny_targets import tiny_target

END = 257  # <|im_end|> of the byte tokenizer


def talk(*texts):
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


@pytest.mark.parametrize("num_right", [None, [2], [0]])
def test_p82_nothing_behind_the_end_token_reaches_the_next_turn(num_right):
    """The target would go on with "LEAK" behind the end, and all of it is drafted."""
    tokenizer = ScriptedTarget.chain({}, []).tokenizer
    newline, *answer = tokenizer("\nok")["input_ids"]
    leak = tokenizer("LEAK")["input_ids"]
    path = [newline, *answer, END, *leak]
    target = ScriptedTarget.chain(dict(pairwise(path)), [END], vocab_size=264)
    first = render_prompt(tokenizer, talk("hi"))
    second = render_prompt(tokenizer, talk("hi", "ok", "and?"))
    drafter = Oracle({tuple(p): path[1:] for p in (first, second)}, 264, num_right)
    settings = DecodeSettings(max_new_tokens=20, num_draft=6)

    def answer_batch(prompts, indices):  # the oracle fails on a prompt it does not know
        return decode(target, drafter, prompts, settings, indices)

    turns = decode_turns(target, [make_prompt("test", "hi", ["and?"])], answer_batch)
    assert [turn.prompts for turn in turns] == [[first], [second]]
    assert [turn.answers[0].ids for turn in turns] == [[*answer, END]] * 2
    assert [turn.answers[0].finish for turn in turns] == ["stop", "stop"]


def test_conversations_of_different_lengths_keep_their_numbers():
    target, calls = ScriptedTarget.chain({}, [END], vocab_size=264), []
    word = target.tokenizer("yes")["input_ids"]

    def answer_batch(prompts, indices):
        calls.append(list(indices))
        ended = [Decoded(ids=[*word, END], finish="stop"), Decoded(ids=word, finish="length")]
        return ended[: len(prompts)], Seconds()

    prompts = [make_prompt("t", "a"), make_prompt("t", "b", ["c", "d"])]
    turns = decode_turns(target, prompts, answer_batch, indices=[7, 9])
    assert [(turn.turn, turn.indices) for turn in turns] == [(0, [7, 9]), (1, [9]), (2, [9])]
    # Both ways of ending give the same history: the end token is the template's to write.
    expected = [talk("b"), talk("b", "yes", "c"), talk("b", "yes", "c", "yes", "d")]
    rendered = [render_prompt(target.tokenizer, messages) for messages in expected]
    assert [turn.prompts[-1] for turn in turns] == rendered
    assert calls[0] == [7, 9] and len({9, *calls[1], *calls[2]}) == 3  # other random numbers
    assert decode_turns(target, [], answer_batch) == []


def test_turns_do_not_depend_on_the_conversations_beside_them():
    target = tiny_target("qwen3")
    sampling = Sampling(0.8, repetition_penalty=1.1)
    settings = DecodeSettings(max_new_tokens=8, num_draft=3, sampling=sampling)
    prompts = [make_prompt("t", "one", ["two"]), make_prompt("t", "three", ["four"])]

    def answer_batch(prompts, indices):
        return decode(target, Lookup(1, 3), prompts, settings, indices)

    turns = decode_turns(target, prompts, answer_batch)
    alone = decode_turns(target, prompts[1:], answer_batch, indices=[1])
    assert [t.answers[0].ids for t in alone] == [t.answers[1].ids for t in turns]
    said = target.tokenizer.decode(turns[0].answers[0].ids, skip_special_tokens=True)
    assert turns[1].prompts[0] == render_prompt(target.tokenizer, talk("one", said, "two"))
    assert turns[0].answers[0].pit[0] != turns[1].answers[0].pit[0]
