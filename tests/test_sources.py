"""Sources of every form, renamed columns, streaming, pre-tokenised rows, and when a run stops."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from data.conversations import BadRow, normalize
from data.source_rows import spans_of
from data.sources import read_rows, shuffled_rows
from recipes.data_section import DataSection
from recipes.errors import UserError
from tests.chat_tokenizers import CHATML, QWEN3, chat_tokenizer
from tests.prompt_lists import load_prompts, load_rows

USER = {"role": "user", "content": "alpha"}
ANSWER = {"role": "assistant", "content": "beta"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def section(path: Path | str, num_prompts: int = 100, **values: Any) -> DataSection:
    values = {"regenerate": False, "decontaminate": [], **values}
    return DataSection(sources=[str(path)], num_prompts=num_prompts, **values)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def good(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"alpha {i}"}, ANSWER]}


def test_csv_columns_hold_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "tools", "prompt"])
        writer.writerow([json.dumps([USER, ANSWER]), "", ""])
        writer.writerow(["", "", "gamma,\ndelta"])
        writer.writerow(["[{", "", ""])
        file.write("1,2,3,4\r\n")
    rows = read_rows(str(path))
    assert normalize(rows[0])["messages"] == [USER, ANSWER]
    assert normalize(rows[1])["messages"] == [{"role": "user", "content": "gamma,\ndelta"}]
    with pytest.raises(BadRow, match="messages is not JSON"):
        normalize(rows[2])
    assert rows[3].reason == "more fields than columns"


def test_columns_are_renamed_and_others_not_read() -> None:
    raw = {
        "dialog": [{"speaker": "human", "text": "alpha"}, {"speaker": "gpt", "text": "beta"}],
        "functions": [CALL],
        "prompt": "not this one",
        "id": 3,
    }
    columns = {"messages": "dialog", "role": "speaker", "content": "text", "tools": "functions"}
    conversation = normalize(raw, columns)
    assert conversation["messages"] == [USER, ANSWER]
    assert (conversation["tools"], conversation["id"]) == ([CALL], "3")
    question = normalize({"q": "alpha", "a": "beta"}, {"prompt": "q", "response": "a"})
    assert question["messages"] == [USER, ANSWER]
    assert normalize({"q": "alpha"}, {"prompt": "q", "response": "a"})["messages"] == [USER]
    with pytest.raises(BadRow, match=r"no column 'q', which data\.columns names for prompt"):
        normalize({"prompt": "alpha"}, {"prompt": "q"})


def test_system_column_and_calls_of_older_forms() -> None:
    turns = [
        {"from": "human", "value": "alpha"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "beta"},
    ]
    system, user, call, result, answer = normalize({"conversations": turns, "system": "S"})[
        "messages"
    ]
    assert system == {"role": "system", "content": "S"}
    assert call == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert (user, result["role"], answer) == (USER, "tool", ANSWER)
    legacy = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    assert normalize({"messages": [USER, legacy]})["messages"][1]["tool_calls"] == [CALL]


def test_thinking_part_is_the_reasoning() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "beta"}]
    row = normalize({"messages": [USER, {"role": "assistant", "content": parts}]})
    assert row["messages"][1] == {**ANSWER, "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ids": [1, 2]}, "ids without a mask or labels"),
        ({"ids": [1, 2], "mask": [1]}, "differ in length"),
        ({"ids": [1, 2], "mask": [0, 2]}, "other values than 0 and 1"),
        ({"ids": [1, "2"], "mask": [0, 1]}, "not lists of whole numbers"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "are they shifted"),
    ],
)
def test_rows_of_tokens_are_checked(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        normalize(row)


def test_rows_of_tokens_keep_their_mask(tmp_path: Path) -> None:
    rows = [
        {"ids": [5, 6, 7, 8], "mask": [0, 1, 1, 0]},
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"ids": [5, 99999], "mask": [0, 1]},
        {"ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 0, 0, 0, 1]},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    limits = section(path, max_length=5, max_prompt_tokens=4)
    found, report = load_rows(limits, chat_tokenizer(CHATML))
    by_ids = {tuple(row["ids"]): row["spans"] for row in found}
    assert by_ids == {(5, 6, 7, 8): [[1, 3]], (5, 6, 7): [[2, 3]]}
    assert report.drops == {
        "a token id outside the target's tokenizer": 1,
        "nothing supervised within max_length": 1,
    }
    assert report.num_read == report.num_kept + report.drops.total() == 4
    with pytest.raises(UserError, match=r"token ids cannot be answered again"):
        load_prompts(section(path, regenerate=True))


def test_p07_p12_bad_rows_are_counted_with_samples_and_the_run_goes_on(tmp_path: Path) -> None:
    rows = [good(1), {"messages": [ANSWER, USER]}, {"messages": []}, {**good(2), "tools": "[{"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    found, report = load_rows(section(path), chat_tokenizer(CHATML))
    assert [row["messages"][0]["content"] for row in found] == ["alpha 1"]
    assert report.drops == {
        "starts with the turn of the assistant": 1,
        "no messages": 1,
        "tools are not JSON": 1,
    }
    assert report.samples["no messages"] == [
        {"where": f"{path} row 3", "row": '{"messages": []}'},
    ]
    assert report.as_json()["kept"] == {str(path): 1}


def test_too_many_bad_rows_stop_the_run(tmp_path: Path) -> None:
    rows = [good(i) for i in range(60)] + [{"messages": []}] * 20
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    match = (
        r"20 of 80 rows \(25%\) cannot be used, .*max_bad_share 20%: 20 no messages .e\.g\. .* row"
    )
    with pytest.raises(UserError, match=match):
        load_prompts(section(path))
    found, report = load_prompts(section(path, max_bad_share=0.25))
    assert (len(found), report.drops) == (60, {"no messages": 20})
    # rows that the template refuses count too, repeated ones do not
    path = write_jsonl(tmp_path / "twice.jsonl", [good(i % 30) for i in range(80)])
    assert len(load_prompts(section(path))[0]) == 30
    refused = chat_tokenizer(CHATML)
    refused.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match="refused by the chat template: never"):
        load_rows(section(path), refused)


def test_supervise_and_thinking_reach_the_rows(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "delta", "reasoning_content": "hm"}
    talk = [USER, ANSWER, {"role": "user", "content": "gamma"}, answer]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk}])
    tokenizer = chat_tokenizer(QWEN3)

    def learned(**values: Any) -> list[str]:
        (row,), _ = load_rows(section(path, **values), tokenizer)
        return [tokenizer.decode(row["ids"][a:b]) for a, b in row["spans"]]

    thought = "<think>\nhm\n</think>\n\ndelta<|im_end|>"
    assert learned() == ["beta<|im_end|>", thought]
    assert learned(supervise="last") == [thought]
    assert learned(train_on_thinking=False) == ["beta<|im_end|>", "delta<|im_end|>"]


def test_p66_shuffle_depends_on_the_seed_and_loses_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"n": i} for i in range(200)])
    first = list(shuffled_rows(str(path), 0))
    assert first == list(shuffled_rows(str(path), 0)) != list(shuffled_rows(str(path), 1))
    assert sorted(row["n"] for _, row in first) == list(range(200))
    assert all(number == row["n"] + 1 for number, row in first)


def test_hub_set_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the name of a hub set stands for it: datasets reads both alike."""
    pytest.importorskip("datasets")
    (tmp_path / "org" / "set").mkdir(parents=True)
    write_jsonl(tmp_path / "org" / "set" / "train.jsonl", [good(i) for i in range(30)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    streamed = section("hub:org/set", streaming=True)
    found, report = load_prompts(streamed)
    assert {p["messages"][0]["content"] for p in found} == {f"alpha {i}" for i in range(30)}
    assert report.num_read == 30
    assert [p["id"] for p in found] == [p["id"] for p in load_prompts(streamed)[0]]
    assert not (tmp_path / "home").exists()  # nothing was stored
    with pytest.raises(UserError, match="hub:org/set:none: cannot be loaded"):
        load_prompts(section("hub:org/set:none", streaming=True))


def test_broken_lines_are_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "\xff"}\n{broken\n{"prompt": "b"}')
    rows = read_rows(str(path))
    assert len(rows) == 4
    assert (rows[0], rows[3], rows[-1]) == ({"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"})
    assert [rows[1].reason, rows[2].reason] == ["not valid UTF-8", "not valid JSON"]
    deep, half, whole = "[" * 60_000, r'{"prompt": "\ud83d"}', r'{"prompt": "\ud83d\ude00"}'
    path.write_text(f"{deep}\n{half}\n{whole}\n" + '{"n": ' + "9" * 5000 + "}")
    rows = read_rows(str(path))
    assert rows[2] == {"prompt": "\N{GRINNING FACE}"}
    assert [rows[i].reason for i in (0, 1, 3)] == [
        "not valid JSON",
        "not valid UTF-8",
        "not valid JSON",
    ]


def test_spans_of_a_mask() -> None:
    assert spans_of([1, 1, 0, 1]) == [[0, 2], [3, 4]]
    assert spans_of([0, 0]) == []


def test_tokens_are_not_compared_with_tasks_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"ids": [5, 6], "mask": [0, 1]}])
    task = write_jsonl(tmp_path / "task.jsonl", [{"prompt": "a b c"}])
    with caplog.at_level(logging.WARNING, "draftsmith"):
        load_rows(section(path, decontaminate=[str(task)]), chat_tokenizer(CHATML))
    assert "1 rows came as tokens: not compared" in caplog.text
