import json

import pytest

from data.conversations import BadRow, normalize, render_prompt
from tests.chat_tokenizers import QWEN3, chat_tokenizer

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ANSWER, USER, ANSWER], "starts with the turn of the assistant"),
        ([], "no messages"),
        ([{"role": "system", "content": "s"}], "no user turn"),
        ([{"role": "narrator", "content": "s"}], "unknown role 'narrator'"),
        (["hello"], "a message is not an object"),
    ],
)
def test_p07_rows_without_a_usable_shape_are_dropped_with_a_reason(messages, reason):
    assert normalize({"messages": [USER, ANSWER]})["messages"] == [USER, ANSWER]
    with pytest.raises(BadRow) as caught:
        normalize({"messages": messages})
    assert caught.value.reason == reason


def test_p09_sharegpt_system_turn_is_kept():
    system = {"from": "system", "value": "Answer in French."}
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Salut"}]
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}]
    assert normalize({"conversations": turns})["messages"] == expected
    assert normalize({"conversations": [system, *turns]})["messages"] == [
        {"role": "system", "content": "Answer in French."},
        *expected,
    ]


def test_p12_tools_as_list_text_null_or_missing():
    rows = [{"tools": [TOOL]}, {"tools": json.dumps([TOOL])}, {"tools": None}, {}]
    tokenizer = chat_tokenizer(QWEN3)
    texts = []
    for row in rows:
        conversation = normalize({"messages": [USER], **row})
        ids = render_prompt(tokenizer, conversation["messages"], conversation.get("tools"))
        texts.append(tokenizer.decode(ids))
    assert "# Tools" in texts[0] and texts[0] == texts[1]
    assert "# Tools" not in texts[2] and texts[2] == texts[3]
    with pytest.raises(BadRow, match="tools are not JSON"):
        normalize({"messages": [USER], "tools": "[{"})


def test_p20_content_null_or_a_list_of_parts():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for content, expected in ((None, ""), ("", ""), (parts, "one two"), ([], "")):
        row = normalize({"messages": [USER, {"role": "assistant", "content": content}]})
        assert row["messages"][1]["content"] == expected
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(BadRow, match="not text"):
        normalize({"messages": [{"role": "user", "content": image}]})


def test_p20_tool_call_without_content_is_kept():
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = normalize(
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert row["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function, "id": "c1"}],
    }
    call["function"]["arguments"] = "{"
    with pytest.raises(BadRow, match="arguments are not JSON"):
        normalize({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})


def test_p23_alpaca_input_is_part_of_the_prompt_and_of_the_id():
    first, second = (
        normalize({"instruction": "Sort the list", "input": text, "output": "ok"})
        for text in ("[3,1]", "[9,8]")
    )
    assert first["messages"] == [
        {"role": "user", "content": "Sort the list\n\n[3,1]"},
        {"role": "assistant", "content": "ok"},
    ]
    assert "[9,8]" in second["messages"][0]["content"]
    assert first["id"] != second["id"]
    plain = normalize({"instruction": "Sort the list", "input": "", "output": ""})
    assert plain["messages"] == [{"role": "user", "content": "Sort the list"}]


def test_plain_prompt_and_own_id():
    row = normalize({"prompt": "hi", "id": 7, "source": "mine"})
    assert row == {"id": "7", "source": "mine", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(BadRow, match="empty prompt"):
        normalize({"prompt": "  "})
    with pytest.raises(BadRow, match="no messages, conversations, instruction, prompt or ids"):
        normalize({"text": "hi"})


def test_reasoning_and_truncation_are_kept():
    answer = {"role": "assistant", "content": "4", "reasoning": "2+2", "truncated": True}
    assert normalize({"messages": [USER, answer]})["messages"][1] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "2+2",
        "truncated": True,
    }
