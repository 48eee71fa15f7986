"""A second look at the turns found in a rendered conversation, by another way than they were found.

`locate_turns` (data/turns.py) compares renderings. Here the texts of the messages are looked up:
each answer must stand inside its own turn, each user's text between the turns around it. A template
that leaves out tool calls, cuts an answer or changes the order is told from these, and so is a
wrong boundary. Generation tags, where a template has them, are a third witness.

Character offsets throughout, half-open.
"""

from collections.abc import Callable

from data.thinking import CLOSE, THOUGHT
from data.turns import BadRow, Message, Turn

_LEAD = 48  # characters of a generation prompt that tags may cover too


def check_texts(text: str, turns: list[Turn], messages: list[Message], eos: str | None) -> None:
    """Every message's text must stand where the turns say that it stands.

    Args:
        text: the rendered conversation.
        turns: its assistant turns, in order.
        messages: the conversation; what is said by tools and system may be reshaped by templates
            (as JSON, or moved), so only the user's and the assistant's texts are looked up.

    Raises:
        BadRow: a text is not where it should be.
    """
    index, left = 0, 0
    for message in messages:
        if message["role"] == "assistant":
            if eos and eos in text[turns[index].start : turns[index].end]:
                raise BadRow("an end-of-sequence token stands inside an answer")
            _check_answer(text[turns[index].start : turns[index].stop], message)
            left = turns[index].stop
            index += 1
        elif message["role"] == "user":
            right = turns[index].start if index < len(turns) else len(text)
            said = message["content"].strip()
            found = text.find(said, left, right)
            if found < 0:
                raise BadRow("the chat template changes or moves a user turn")
            left = found + len(said)


def _check_answer(said: str, message: Message) -> None:
    parts = CLOSE.split(message["content"])
    if parts[-1].strip() not in said:
        raise BadRow("the chat template leaves out or changes an answer")
    if any(call["function"]["name"] not in said for call in message.get("tool_calls") or []):
        raise BadRow("the chat template leaves out a tool call")


def check_tags(
    text: str, turns: list[Turn], tagged: list[tuple[int, int]], fail: Callable[[str], Exception]
) -> list[Turn]:
    """Generation tags must lie in the turns found and leave none of them out.

    White space does not count, nor the end of a generation prompt right before a turn. Tags may
    cover less: many end before the end-of-turn token, which is supervised all the same. Where a
    turn has no end-of-turn token and the tags go on behind it, what they cover there is its end.

    Args:
        text: the rendered conversation.
        turns: as found.
        tagged: ranges of the tokens inside tags.
        fail: makes the error from a short reason.

    Returns:
        The turns, some with a later `stop`.
    """
    tagged = [(a, b) for a, b in tagged if text[a:b].strip()]
    rest, result = tagged, []
    for number, turn in enumerate(turns, start=1):
        lead = [t for t in rest if turn.start - _LEAD <= t[0] and t[1] <= turn.start]
        if lead and not text[lead[-1][1] : turn.start].strip():
            rest = [t for t in rest if t not in lead]
        inside = [t for t in rest if turn.start < t[1] and t[0] < turn.stop]
        if turn.end > turn.start and not inside:
            raise fail(f"turn {number} has none")
        rest = [t for t in rest if t not in inside]
        stop = turn.stop
        while turn.stop == turn.end and rest and not text[stop : rest[0][0]].strip():
            stop = rest.pop(0)[1]
        result.append(turn._replace(stop=stop))
    if rest:
        raise fail("some stand outside every turn")
    return result


def skip_thought(text: str, turn: Turn, message: Message) -> Turn:
    """The turn without its thinking, for data.train_on_thinking: false.

    Raises:
        BadRow: the thinking is there but cannot be told from the answer.
    """
    thought = message.get("reasoning_content") or ""
    if not thought and not CLOSE.search(message["content"]):
        return turn
    match = THOUGHT.match(text, turn.start, turn.stop)
    if match:
        return turn._replace(start=match.end(), end=max(turn.end, match.end()))
    if thought and thought.strip() in text[turn.start : turn.stop]:
        raise BadRow("thinking cannot be told from the answer")
    return turn
