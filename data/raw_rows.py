"""Rows of chat data, in the shapes that people publish, to one form of conversation.

Read here: OpenAI `messages` (with tools and tool calls), ShareGPT `conversations` (from/value),
Alpaca `instruction`/`input`/`output`, a plain `prompt` (with `response`), and token `ids` with a
loss `mask`. A `system` column goes before the first turn. Lists may be given as JSON text.
"""

import json
from collections.abc import Mapping
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
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # its text is the call
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "reasoning_effort": "reasoning_effort",  # no turn: an argument of the template, see _split
}
_OPTIONAL = ("id", "tools", "system", "input", "output", "response")  # columns a row may lack
_IDS = ("ids", "input_ids")
_MASKS = ("mask", "loss_mask", "assistant_masks", "labels")
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
    ids: list[int]  # a row that came as tokens has these and `mask`, and no messages
    mask: list[int]


def normalize(raw: dict[str, Any], columns: Mapping[Any, str] | None = None) -> Conversation:
    """Bring one raw row into the common form.

    Args:
        raw: has `messages` (OpenAI), `conversations` (ShareGPT, from/value), `instruction` (Alpaca,
            with `input` and `output`), `prompt` (text) or `ids` and `mask` (tokens; or `labels`
            with -100 for what is not learned). `tools` may be a list, its JSON text or absent.
            `id` and `source` are kept.
        columns: data.columns of the recipe; a name here -> the column's name in the row.

    Returns:
        The conversation. Without an `id` of its own it gets one from its content, so rows that
        differ in any message differ in id.

    Raises:
        BadRow: the row has no usable shape.
    """
    raw = _renamed(raw, columns) if columns else raw
    if any(raw.get(key) is not None for key in _IDS):
        return _tokens(raw)
    keys = [(columns or {}).get(key, key) for key in ("role", "content")]
    messages = [_message(item, *keys) for item in _raw_messages(raw)]
    system = raw.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
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
            value = _parsed(raw[key], key)
            if not isinstance(value, list):
                raise BadRow(f"{key} is not a list")
            return value
    if isinstance(raw.get("instruction"), str):
        parts = [raw["instruction"], raw.get("input")]
        text = "\n\n".join(p for p in parts if isinstance(p, str) and p.strip())
        answer = raw.get("output")
    elif isinstance(raw.get("prompt"), str):
        text, answer = raw["prompt"], raw.get("response")
    else:
        raise BadRow("no messages, conversations, instruction, prompt or ids")
    if not text.strip():
        raise BadRow("empty prompt")
    messages = [{"role": "user", "content": text}]
    if isinstance(answer, str) and answer:
        messages.append({"role": "assistant", "content": answer})
    return messages


def _message(item: Any, role_key: str, content_key: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow("a message is not an object")
    name = item.get(role_key, item.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"unknown role {name!r:.40}")
    content = item.get(content_key, item.get("value"))
    calls = _parsed(item.get("tool_calls"), "tool_calls") or []
    if name == "function_call":
        calls, content = [_parsed(content, "function_call")], None
    elif item.get("function_call"):
        calls = [item["function_call"]]
    message: Message = {"role": role, "content": _text(content)}
    message |= {key: item[key] for key in _KEPT if item.get(key)}
    thoughts = [item[key] for key in _REASONING if isinstance(item.get(key), str) and item[key]]
    thoughts += (
        [_thought(part) for part in content if _is_thought(part)]
        if isinstance(content, list)
        else []
    )
    if thoughts:
        message["reasoning_content"] = thoughts[0]
    if calls:
        if not isinstance(calls, list):
            raise BadRow("tool_calls is not a list")
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _thought(part: dict[str, Any]) -> str:
    text = part.get("thinking", part.get("text"))
    if not isinstance(text, str):
        raise BadRow("a thinking part without text")
    return text


def _renamed(raw: dict[str, Any], columns: Mapping[Any, str]) -> dict[str, Any]:
    """The mapped columns under the names used here, with the row's id and source."""
    result: dict[str, Any] = {key: raw[key] for key in ("id", "source") if key in raw}
    for key, column in columns.items():
        if key in ("role", "content"):
            continue
        if column in raw:
            result[key] = raw[column]
        elif key not in _OPTIONAL:
            raise BadRow(f"no column {column!r}, which data.columns names for {key}")
    # With the fields of a message alone renamed, the columns are the row's own.
    return result if result.keys() - {"id", "source"} else raw


def _parsed(value: Any, name: str) -> Any:
    """A list or object, which some files (CSV) hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise BadRow(f"{name} is not JSON") from None


def _tokens(raw: dict[str, Any]) -> Conversation:
    ids = _parsed(next(raw[key] for key in _IDS if raw.get(key) is not None), "ids")
    name = next((key for key in _MASKS if raw.get(key) is not None), None)
    if name is None:
        raise BadRow("ids without a mask or labels")
    mask = _parsed(raw[name], name)
    for values in (ids, mask):
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise BadRow("ids and mask are not lists of whole numbers")
    if len(ids) != len(mask) or not ids:
        raise BadRow("ids and mask differ in length or are empty")
    if name == "labels":
        if any(label not in (-100, token) for label, token in zip(mask, ids, strict=True)):
            raise BadRow("labels are neither the ids nor -100; are they shifted?")
        mask = [int(label != -100) for label in mask]
    mask = [int(value) for value in mask]
    if min(ids) < 0 or not set(mask) <= {0, 1}:
        raise BadRow("a negative id, or a mask of other values than 0 and 1")
    given = raw.get("id")
    return {
        "id": stable_hash([ids, mask]) if given in (None, "") else str(given),
        "messages": [],
        "source": str(raw.get("source") or ""),
        "ids": ids,
        "mask": mask,
    }


def _text(content: Any) -> str:
    """Content as one string; null is empty, a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("content is neither text nor a list of parts")
    content = [part for part in content if not _is_thought(part)]
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
