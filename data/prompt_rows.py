"""One prompt: how it is made, cut from a conversation, and compared.

Imported by the prompt book, the benchmarks and data/prompts.py, which loads a recipe's prompts.
"""

import re
from collections.abc import Sequence
from typing import Any

from data.conversations import BadRow, Conversation, Message
from data.files import stable_hash

_WORD = re.compile(r"\w+")


class Prompt(Conversation, total=False):
    """A conversation that ends with a user turn.

    `turns` holds the user turns that follow, each after an answer of the target to the one before;
    `category` is a word for reports and even subsets.
    """

    category: str
    turns: list[str]


def make_prompt(source: str, text: str, turns: Sequence[str] = (), category: str = "") -> Prompt:
    """A prompt of one user message; its id depends on the text and the turns alone."""
    messages: list[Message] = [{"role": "user", "content": text}]
    prompt = Prompt(id=prompt_id(messages, list(turns)), messages=messages, source=source)
    prompt["turns"] = list(turns)
    prompt["category"] = category
    return prompt


def prompt_id(messages: list[Message], turns: list[str], tools: Any = None) -> str:
    """16 hex characters that differ whenever the content differs."""
    return stable_hash([messages, turns, tools or []])


def cut_prompt(conversation: Conversation, source: str) -> Prompt:
    """Keep what the user and the system said; the target is to answer every turn itself.

    Messages end with the first user turn. Later user turns go to `turns`, up to the first tool
    turn or tool call, whose result would not fit a new answer.

    Raises:
        BadRow: two user turns in a row at the start, or an empty first user turn.
    """
    messages = conversation["messages"]
    roles = [m["role"] for m in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    head = messages[:first]
    if roles[:first].count("user") != 1 or roles[first - 1] != "user":
        raise BadRow("roles do not alternate")
    if not head[-1]["content"].strip():
        raise BadRow("empty user turn")

    turns: list[str] = []
    for before, message in zip(messages[first:], messages[first + 1 :], strict=False):
        if before.get("tool_calls") or message["role"] == before["role"]:
            break
        if message["role"] == "user":
            if not message["content"].strip():
                break
            turns.append(message["content"])
        elif message["role"] != "assistant":
            break
    tools = conversation.get("tools")
    prompt = Prompt(id=prompt_id(head, turns, tools), messages=head, source=source, turns=turns)
    if tools:
        prompt["tools"] = tools
    return prompt


def ngrams(text: str, n: int = 8) -> set[str]:
    """Runs of n words, lower-cased, joined by blanks; punctuation does not count.

    A text of fewer than n words is one run: it matches only its equal.
    """
    words = _WORD.findall(text.lower())
    if not words:
        return set()
    return {" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def prompt_ngrams(prompt: Prompt) -> set[str]:
    """The 8-grams of each message and turn; none reaches across two of them."""
    texts = [*(m["content"] for m in prompt["messages"]), *prompt.get("turns", [])]
    return set().union(*(ngrams(text) for text in texts))
