"""Rows of chat data, in the shapes that people publish, to one form of conversation.

Read here: OpenAI `messages` (with tools and tool calls), ShareGPT `conversations` (from/value),
Alpaca `instruction`/`input`/`output`, and a plain `prompt` (with `response`).
"""

import json
from typing import Any, TypedDict

from data.files import stable_hash
from data.turns import BadRow, Message

_ROLES = {
    "system": "system",
    "developer": "system",  # most templates know no developer and would leave it out silently
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "reasoning_effort": "reasoning_effort",  # no turn: an argument of the template, see _split
}
_KEPT = ("name", "tool_call_id", "truncated")
_REASONING = ("reasoning_content", "reasoning", "thinking")


class _Required(TypedDict):
    id: str
    messages: list[Message]
    source: str


class Conversation(_Required, total=False):
    """One conversation in the form that all of the project reads.

    Messages have `role` and `content` (str), and may have `reasoning_content`, `tool_calls`
    (arguments as dicts), `tool_call_id`, `name` and `truncated` (the answer hit the token cap).
    """

    tools: list[dict[str, Any]]


def normalize(raw: dict[str, Any]) -> Conversation:
    """Bring one raw row into the common form.

    Args:
        raw: has `messages` (OpenAI), `conversations` (ShareGPT, from/value), `instruction` (Alpaca,
            with `input` and `output`) or `prompt` (text). `tools` may be a list, its JSON text or
            absent. `id` and `source` are kept.

    Returns:
        The conversation. Without an `id` of its own it gets one from its content, so rows that
        differ in any message differ in id.

    Raises:
        BadRow: the row has no usable shape.
    """
    messages = [_message(item) for item in _raw_messages(raw)]
    turns = [m["role"] for m in messages if m["role"] not in ("system", "reasoning_effort")]
    if not messages:
        raise BadRow("no messages")
    if "user" not in turns:
        raise BadRow("no user turn")
    if turns[0] != "user":
        raise BadRow(f"starts with the turn of the {turns[0]}")
    tools = _tools(raw.get("tools"))
    given = raw.get("id")
    conversation: Conversation = {
        "id": stable_hash([messages, tools]) if given in (None, "") else str(given),
        "messages": messages,
        "source": str(raw.get("source") or ""),
    }
    if tools:
        conversation["tools"] = tools
    return conversation


def _raw_messages(raw: dict[str, Any]) -> list[Any]:
    for key in ("messages", "conversations"):
        if raw.get(key) is not None:
            if not isinstance(raw[key], list):
                raise BadRow(f"{key} is not a list")
            return list(raw[key])
    if isinstance(raw.get("instruction"), str):
        parts = [raw["instruction"], raw.get("input")]
        text = "\n\n".join(p for p in parts if isinstance(p, str) and p.strip())
        answer = raw.get("output")
    elif isinstance(raw.get("prompt"), str):
        text, answer = raw["prompt"], raw.get("response")
    else:
        raise BadRow("no messages, conversations, instruction or prompt")
    if not text.strip():
        raise BadRow("empty prompt")
    messages = [{"role": "user", "content": text}]
    if isinstance(answer, str) and answer:
        messages.append({"role": "assistant", "content": answer})
    return messages


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise BadRow("a message is not an object")
    name = item.get("role", item.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"unknown role {name!r}")
    message: Message = {"role": role, "content": _text(item.get("content", item.get("value")))}
    message |= {key: item[key] for key in _KEPT if item.get(key)}
    for key in _REASONING:
        if isinstance(item.get(key), str) and item[key]:
            message["reasoning_content"] = item[key]
            break
    if item.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in item["tool_calls"]]
    return message


def _text(content: Any) -> str:
    """Content as one string; null is empty, a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("content is neither text nor a list of parts")
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise BadRow("content has a part that is not text")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any) -> dict[str, Any]:
    """OpenAI's form with the arguments as a dict: templates would quote a string once more."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call without a function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            raise BadRow("tool call arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise BadRow("tool call arguments are not an object")
    named = {"name": function["name"], "arguments": arguments}
    clean = {"type": "function", "function": named}
    return clean | ({"id": call["id"]} if call.get("id") else {})


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise BadRow("tools are not JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("tools are not a list of objects")
    return value
