"""Rows pass through one by one: what stays in memory, what the file gives back, and workers."""

import json
import operator
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from data.json_lines import cut_last_line, read_lines, write_lines
from data.parallel import worker_map
from data.prompts import PromptReport
from data.row_file import RowFile, write_rows
from data.row_splits import rows_of_responses, split_rows
from data.source_rows import rows_of_source
from recipes.data_section import DataSection
from recipes.errors import UserError
from tests.chat_tokenizers import CHATML, chat_tokenizer

LENGTH = 400


def section(path: Path, count: int, **values: Any) -> DataSection:
    base = {"sources": [str(path)], "num_prompts": count, "decontaminate": []}
    return DataSection.model_validate({**base, "regenerate": False, **values})


def token_rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for i in range(count):
            ids = [i // 250, *((i + j) % 250 for j in range(1, LENGTH))]
            file.write(json.dumps({"ids": ids, "mask": [0] * 10 + [1] * (LENGTH - 10)}) + "\n")
    return path


TOKENIZER = chat_tokenizer(CHATML)


def prepare_rows(folder: Path, settings: DataSection) -> dict[str, Any]:
    report = PromptReport()
    rows = split_rows(folder, rows_of_source(settings, TOKENIZER, report), settings)
    return write_rows(folder / "rows.jsonl", rows, len(TOKENIZER))


def peak(folder: Path, count: int) -> int:
    folder.mkdir()
    settings = section(token_rows(folder / "source.jsonl", count), count)
    tracemalloc.start()
    try:
        parts = prepare_rows(folder, settings)
        assert sum(len(rows) for rows, _ in parts.values()) == count
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_rows_but_with_their_ids(tmp_path: Path) -> None:
    few, many = peak(tmp_path / "few", 60), peak(tmp_path / "many", 460)
    grown = (many - few) / 400
    assert grown < 700, f"{grown:.0f} bytes a row"  # 400 tokens alone are 3200 in a list


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    settings = section(token_rows(tmp_path / "source.jsonl", 40), 40, heldout_fraction=0.25)
    parts = prepare_rows(tmp_path, settings)
    stored = list(read_lines(tmp_path / "rows.jsonl"))
    assert len(stored) == 40
    for split, count in (("train", 30), ("heldout", 10)):
        rows, totals = parts[split]
        expected = [record for record in stored if record["split"] == split]
        assert len(rows) == totals.num_rows == count
        assert rows.ids == [record["id"] for record in expected]
        for row, record in zip(rows, expected, strict=True):
            assert row.ids_S.tolist() == record["ids"]
            assert row.mask_S.tolist() == [False] * 10 + [True] * 390
        assert list(rows.lengths) == [LENGTH] * count
        assert (totals.num_tokens, totals.num_supervised) == (LENGTH * count, 390 * count)
        counts_V = torch.zeros(len(totals.counts_V), dtype=torch.int64)
        for row in rows:
            counts_V += torch.bincount(row.ids_S[row.mask_S], minlength=len(counts_V))
        assert torch.equal(counts_V, totals.counts_V)
    rows = parts["train"][0]
    assert [r.id for r in rows[3:5]] == rows.ids[3:5] and rows[-1].id == rows.ids[-1]
    assert isinstance(rows.only([4, 1]), RowFile) and rows.only([4, 1])[1].id == rows.ids[1]


def test_workers_give_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for i in range(150):
            answer = {"role": "assistant", "content": f"answer {i} " * (i % 5 + 1)}
            chat = [{"role": "user", "content": f"question {i}"}, answer]
            file.write(json.dumps({"messages": chat if i % 10 else chat[:1]}) + "\n")
    found = {}
    for workers in (0, 1):
        report = PromptReport()
        settings = section(path, 150, num_workers=workers, max_bad_share=0.5)
        rows = list(rows_of_source(settings, chat_tokenizer(CHATML), report))
        found[workers] = (rows, report.as_json())
    assert found[0] == found[1] and len(found[0][0]) == 135


def test_a_stream_is_read_little_ahead_of_the_workers() -> None:
    read = 0

    def items() -> Any:
        nonlocal read
        while True:
            read += 1
            yield read

    with worker_map(1, operator.add, 10) as mapped:
        results = mapped(items())
        assert [next(results) for _ in range(3)] == [(1, 11), (2, 12), (3, 13)]
        assert read <= 64 * 6


def test_an_error_in_the_stream_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"id": "a"}
        raise UserError("the source ends here")

    with pytest.raises(UserError, match="ends here"):
        write_lines(tmp_path / "x.jsonl", rows())
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_by_a_kill_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert cut_last_line(path) is False
    for whole, rest in (('{"id": 1}\n', '{"id'), ("", '{"id": 1'), ('{"id": 1}\n', "")):
        path.write_text(whole + rest)
        assert cut_last_line(path) is bool(rest)
        assert path.read_text() == whole


def test_rows_of_one_conversation_stay_on_one_side(tmp_path: Path) -> None:
    # Thinking templates make a row of each turn; neither may be seen in training and held out.
    with (tmp_path / "responses.jsonl").open("w") as file:
        for i in range(40):
            turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
            answers = [
                {"prompt_ids": [9, n, i], "answer_ids": [5, 6], "finish": "stop"} for n in (1, 2)
            ]
            record = {"id": f"{i:016x}", "messages": turns, "answers": answers, "finish": "stop"}
            file.write(json.dumps(record) + "\n")
    settings = section(tmp_path / "none.jsonl", 40, heldout_fraction=0.25)
    rows = list(rows_of_responses(tmp_path, settings, chat_tokenizer(CHATML), Counter()))
    assert len(rows) == 80 and [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    splits = {row["id"][:16]: set[str]() for row in rows}
    for row in rows:
        splits[row["id"][:16]].add(row["split"])
    assert all(len(split) == 1 for split in splits.values())
    assert sum(split == {"heldout"} for split in splits.values()) == 10
