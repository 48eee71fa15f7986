"""Where the assistant's turns lie in a rendered conversation, found without generation tags.

A turn is never looked up by its own text, which may also stand in a user's turn, and never by
rendering a prefix of the conversation alone: templates rewrite history (Qwen3 drops the thinking of
earlier answers). Instead the whole conversation is rendered once more with a marker in place of one
answer. Whatever the two renderings share before and after the marker is not the answer; where the
generation prompt of that turn ends, the answer starts.

Character offsets throughout: spans are half-open [start, end).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data import thinking
from recipes.errors import UserError

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
"""(messages, add_generation_prompt) -> text; raises BadRow where the template refuses."""

_TAIL = 24  # characters of the generation prompt that must stand right before an answer


class BadRow(Exception):
    """A row that cannot be used; `reason` is short and the same for all rows of its kind."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Turn(NamedTuple):
    """One assistant turn: it says text[start:end], and text[start:stop] has its end-of-turn token.

    stop == end where the template closes the turn with no special token.
    """

    start: int
    end: int
    stop: int


def locate_turns(
    render: Render, messages: list[Message], text: str, special: re.Pattern[str], name: str
) -> list[Turn]:
    """Find every assistant turn of `messages` in `text`.

    Args:
        render: renders a list of messages by the chat template.
        messages: the conversation; it starts with no assistant turn.
        text: render(messages, False).
        special: matches one special token, the end-of-turn token among them.
        name: of the template's tokenizer, for the message.

    Returns:
        The turns in order, disjoint.

    Raises:
        UserError: a turn's bounds cannot be told; guessing would train on the wrong tokens.
        BadRow: the template refuses a part of the conversation.
    """
    marker = "zq0turn0qz"
    while marker in text:
        marker += "qz"
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:index], True)
        for stand_in in _stand_ins(message, marker):
            try:
                other = render([*messages[:index], stand_in, *messages[index + 1 :]], False)
            except BadRow:
                continue
            turn = _bounds(text, other, marker, prompt, special, "tool_calls" in stand_in)
            if turn is not None and (not turns or turn.start >= turns[-1].stop):
                turns.append(turn)
                break
        else:
            raise UserError(
                f"{name}: cannot tell where assistant turn {len(turns) + 1} (message {index + 1}) "
                "starts and ends in the chat template's text; set data.chat_template to a template "
                "that writes each message once, in order, after its generation prompt"
            )
    return turns


def _stand_ins(message: Message, marker: str) -> Iterator[Message]:
    """The marker as the turn's text, then inside its last call: some templates want one there."""
    yield {"role": "assistant", "content": marker}
    calls = message.get("tool_calls")
    if calls:
        function = {**calls[-1]["function"], "arguments": {"x": marker}}
        yield {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}


def _bounds(
    text: str, other: str, marker: str, prompt: str, special: re.Pattern[str], in_call: bool
) -> Turn | None:
    """Bounds in `text` of the turn that `other` shows as the marker; None when they disagree."""
    if other.count(marker) != 1:
        return None
    head, tail = other.split(marker)
    start = _start(text, head, prompt, in_call)
    if start is None:
        return None

    shared = len(tail)
    while not text.endswith(tail[len(tail) - shared :]):
        shared -= 1
    unshared = tail[: len(tail) - shared]
    if special.search(unshared) or (unshared.strip() and not in_call):
        return None
    end = len(text) - shared
    if end < start:
        return None

    closing = special.search(text, end)
    if in_call:  # the marker stood inside the call: the rest of the call comes first
        if closing is None:
            return None
        end = closing.start()
    if closing and not text[end : closing.start()].strip():
        return Turn(start, end, closing.end())
    return Turn(start, end, end)


def _start(text: str, head: str, prompt: str, in_call: bool) -> int | None:
    """Where the turn starts: after its generation prompt, and after an empty think block."""
    opener = ""
    if head.startswith(prompt) and text.startswith(prompt):
        start = len(prompt)
    else:  # history or think block differ: only the prompt's last characters are the same
        core = thinking.OPENER.sub("", prompt)
        opener = prompt[len(core) :]
        core = core[-_TAIL:]
        start = head.rfind(core) + len(core)
        adjacent = thinking.FILLER.fullmatch(head, start)  # a call's own beginning may stand there
        if core not in head or not (adjacent or in_call):
            return None
    if not text.startswith(head[:start]):
        return None
    if text.startswith(opener, start):
        start += len(opener)
    empty = thinking.EMPTY.match(text, start)
    return empty.end() if empty else start
