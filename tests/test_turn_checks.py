"""The second look at turns: each fault that it must see, and what it must let pass."""

import pytest

from data.turn_checks import check_tags, check_texts, skip_thought
from data.turns import BadRow, Turn

#       0         1         2         3
#       0123456789012345678901234567890123
TEXT = "<u>alpha<a>beta<e><u>beta<a>gamma<e>"
TURNS = [Turn(11, 15, 18), Turn(28, 33, 36)]
MESSAGES = [
    {"role": "user", "content": "alpha"},
    {"role": "assistant", "content": "beta"},
    {"role": "user", "content": " beta\n"},
    {"role": "assistant", "content": "<think>hm</think>gamma"},
]


def with_message(index: int, **values: object) -> list[dict]:
    return [m | values if i == index else m for i, m in enumerate(MESSAGES)]


def test_right_turns_pass() -> None:
    assert [TEXT[a:c] for a, _, c in TURNS] == ["beta<e>", "gamma<e>"]
    check_texts(TEXT, TURNS, MESSAGES, "<e>")


@pytest.mark.parametrize(
    ("turns", "messages", "reason"),
    [
        ([Turn(12, 15, 18), TURNS[1]], MESSAGES, "leaves out or changes an answer"),  # "eta"
        ([Turn(3, 15, 18), TURNS[1]], MESSAGES, "changes or moves a user turn"),  # from "alpha" on
        ([TURNS[0], Turn(21, 33, 36)], MESSAGES, "changes or moves a user turn"),
        ([Turn(11, 33, 36), TURNS[1]], MESSAGES, "end-of-sequence token stands inside"),
        (TURNS, with_message(1, content="beta and more"), "leaves out or changes an answer"),
        (TURNS, with_message(0, content="ALPHA"), "changes or moves a user turn"),
        (TURNS, with_message(1, tool_calls=[{"function": {"name": "add"}}]), "out a tool call"),
    ],
)
def test_wrong_turns_and_lost_texts_are_seen(turns, messages, reason) -> None:
    with pytest.raises(BadRow, match=reason):
        check_texts(TEXT, turns, messages, "<e>")


def test_tags_agree_or_are_refused() -> None:
    assert check_tags(TEXT, TURNS, [(11, 15), (28, 33)], ValueError) == TURNS
    assert check_tags(TEXT, TURNS, [(8, 11), (11, 18), (28, 36)], ValueError) == TURNS  # prompt too
    with pytest.raises(ValueError, match="turn 2 has none"):
        check_tags(TEXT, TURNS, [(11, 15)], ValueError)
    with pytest.raises(ValueError, match="outside every turn"):
        check_tags(TEXT, TURNS, [(3, 8), (11, 15), (28, 33)], ValueError)


def test_tags_tell_the_end_of_a_turn_without_a_special_token() -> None:
    open_turns = [Turn(11, 15, 15), TURNS[1]]
    assert check_tags(TEXT, open_turns, [(11, 15), (15, 18), (28, 36)], ValueError) == TURNS
    assert check_tags(TEXT, open_turns, [(11, 15), (28, 36)], ValueError) == open_turns


@pytest.mark.parametrize(
    ("said", "rest"),
    [
        ("<think>\nhm\n</think>\n\nso", "so"),
        ("hm</think>so", "so"),  # the prompt opened it
        ("[THINK]hm[/THINK]so", "so"),
        ("<seed:think>hm</seed:think>so", "so"),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so",
            "<|channel|>final<|message|>so",
        ),
        ("so", "so"),  # the template dropped it
    ],
)
def test_thinking_is_skipped(said: str, rest: str) -> None:
    turn = skip_thought(
        said, Turn(0, len(said), len(said)), {"reasoning_content": "hm", "content": "so"}
    )
    assert said[turn.start : turn.end] == rest


def test_thinking_in_unknown_marks_costs_the_row() -> None:
    said = "{{hm}} so"
    message = {"reasoning_content": "hm", "content": "so"}
    with pytest.raises(BadRow, match="thinking cannot be told from the answer"):
        skip_thought(said, Turn(0, len(said), len(said)), message)
    assert skip_thought(said, Turn(0, 9, 9), {"content": "{{hm}} so"}) == Turn(0, 9, 9)
