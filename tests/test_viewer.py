"""Rows as printed and as a page; both without the target's weights."""

import json
import math
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data import data_report, row_summary
from data.conversations import render
from data.data_report import coverage_by_size, histogram, write_report
from data.look import look_at
from data.pipeline import data_dir
from data.row_summary import summarize
from data.source_rows import render_row, spans_of
from data.viewer import Piece, pieces_of, row_text, row_title
from recipes.errors import UserError
from recipes.schema import Recipe
from tests.chat_tokenizers import CHATML, chat_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TALK = [
    {"role": "user", "content": "What is\n1+2?"},
    {"role": "assistant", "content": "It is 3.\nYes \u00e9."},
]


def row_of(messages: list[dict[str, str]], **values: Any) -> dict[str, Any]:
    row = render(chat_tokenizer(CHATML), messages)
    spans = spans_of(row.mask)
    return {
        "id": "r1",
        "ids": row.ids,
        "spans": spans,
        "finish": "stop",
        "messages": messages,
        **values,
    }


def test_pieces_are_runs_and_special_tokens_stand_alone() -> None:
    row = row_of(TALK)
    assert list(pieces_of(chat_tokenizer(CHATML), row["ids"], row["spans"])) == [
        Piece("<|im_start|>", False, True),
        Piece("user\nWhat is\n1+2?", False, False),
        Piece("<|im_end|>", False, True),
        Piece("\n", False, False),
        Piece("<|im_start|>", False, True),
        Piece("assistant\n", False, False),
        Piece("It is 3.\nYes \u00e9.", True, False),  # two bytes of one letter are decoded together
        Piece("<|im_end|>", True, True),
        Piece("\n", False, False),
    ]


def test_printed_row_is_readable_without_colour() -> None:
    text = row_text(chat_tokenizer(CHATML), row_of(TALK))
    assert text.plain == (
        "  <|im_start|>user\\n\n"
        "  What is\\n\n"
        "  1+2?<|im_end|>\\n\n"
        "  <|im_start|>assistant\\n\n"
        "  ---- answer 1\n"
        "+ It is 3.\\n\n"
        "+ Yes \u00e9.<|im_end|>\n"
        "  \\n\n"
    )
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert (styles["It is 3."], styles["1+2?"]) == ("bold green", "bright_black")
    assert styles["<|im_start|>"] == "cyan"
    assert row_title(row_of(TALK, split="train", finish="length")).startswith("r1 (train): ")
    assert row_title(row_of(TALK, finish="length")).endswith("tokens supervised, cut")


def test_coverage_by_size_is_chosen_by_the_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_report, "_SIZES", (2, 3))
    train = row_of(TALK, ids=[5, 5, 5, 6, 6, 7, 9], spans=[[0, 6]])
    heldout = row_of(TALK, ids=[5, 8, 9, 9], spans=[[0, 2], [3, 4]], split="heldout")
    found = summarize([train, heldout], 10)
    train_V, heldout_V = found.train.counts_V, found.heldout.counts_V
    assert train_V.tolist() == [0, 0, 0, 0, 0, 3, 2, 1, 0, 0]
    assert heldout_V.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1, 1]
    # size 2: the end token 9 and 5; size 3: 6 as well; 10: all
    assert coverage_by_size(train_V, heldout_V, [9]) == [
        (2, 3 / 6, 2 / 3),
        (3, 5 / 6, 2 / 3),
        (10, 1.0, 1.0),
    ]
    assert math.isnan(coverage_by_size(train_V, 0 * heldout_V, [9])[0][2])


def test_overlap_counts_what_is_asked_and_what_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def grams(names: list[str]) -> set[str]:
        if names == ["gsm8k"]:
            raise UserError("gsm8k: not installed")
        return {"it is 3 yes"}

    monkeypatch.setattr(row_summary, "benchmark_ngrams", grams)
    asks = [{"role": "user", "content": "It is 3. Yes"}, {"role": "assistant", "content": "No."}]
    answers = [TALK[0], {"role": "assistant", "content": "it is 3 - yes"}]
    rows = [row_of(answers), row_of(asks), row_of(TALK[:1] + asks[1:])]
    found = summarize(rows, 400).overlaps
    assert found["mt_bench"] == [1, 1]
    assert found["gsm8k"] == "gsm8k: not installed"


def test_histogram_counts_every_value() -> None:
    page = histogram("tokens", [0, 1, 2, 24])
    assert "least 0, median 2, most 24" in page
    bars = [int(part.split(": ")[1].split(" rows")[0]) for part in page.split("<title>")[1:]]
    assert len(bars) == 24 and sum(bars) == 4 and bars[:3] == [1, 1, 1] and bars[-1] == 1
    assert "no rows" in histogram("tokens", [])


def test_page_holds_everything_and_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_summary, "benchmark_ngrams", lambda _names: set())
    rows = [row_of(TALK, split="train"), row_of(TALK, split="heldout", finish="length")]
    read = {
        "read": {"a.jsonl": 5},
        "kept": {"a.jsonl": 2},
        "drops": {"no messages": 3},
        "samples": {"no messages": [{"where": "a.jsonl row 4", "row": "<script>"}]},
    }
    tokenizer = chat_tokenizer(CHATML)
    path = tmp_path / "report.html"
    ends = [tokenizer.eos_token_id]
    write_report(path, "a & b", summarize(rows, len(tokenizer)), read, tokenizer, ends)
    page = path.read_text()
    assert "<h1>a &amp; b</h1>" in page
    assert "a.jsonl row 4: &lt;script&gt;" in page
    assert page.count("<svg") == 4
    assert "<mark>It is 3." in page and "<b class=s>&lt;|im_end|&gt;</b>" in page
    assert not any(word in page for word in ("<script", "http", "src=", "@import", "url("))
    write_report(path, "a", summarize(rows[:1], len(tokenizer)), None, tokenizer, ends)
    assert "No counts of the sources" in path.read_text()


def recipe_of(tmp_path: Path, **data: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "look",
            "output_dir": str(tmp_path),
            "target": {"model": "random:qwen3-tiny"},
            "data": {"num_prompts": 10, "decontaminate": [], **data},
        }
    )


def test_rows_of_the_source_are_looked_at_without_weights(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": TALK}) + "\n")
    recipe = recipe_of(tmp_path, sources=[str(source)], regenerate=False)
    look = look_at(recipe, all_rows=True)
    assert look is not None
    (row,) = look.rows
    read = look.read()
    assert row["messages"] == TALK and row["split"] == "train"
    assert read is not None and read["kept"] == {str(source): 1}
    assert not data_dir(recipe).exists()  # nothing was prepared


def test_answers_that_are_still_to_be_written_cannot_be_looked_at(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, sources=["book"])
    assert look_at(recipe, all_rows=True) is None
    data_dir(recipe).mkdir(parents=True)
    row = row_of(TALK, split="train")
    (data_dir(recipe) / "rows.jsonl").write_text(json.dumps(row) + "\n")
    look = look_at(recipe, all_rows=True)
    assert look is not None
    assert (list(look.rows), look.read()) == ([row], None)


class Loaded(dict[str, Any]):
    """A row that knows how many of its kind are alive."""

    alive = most = made = 0

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        Loaded.alive += 1
        Loaded.made += 1
        Loaded.most = max(Loaded.most, Loaded.alive)

    def __del__(self) -> None:
        Loaded.alive -= 1


@pytest.mark.parametrize("regenerate", [True, False])
def test_few_rows_are_held_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regenerate: bool
) -> None:
    monkeypatch.setattr(row_summary, "benchmark_ngrams", lambda _names: set())
    talks = [[{"role": "user", "content": f"What is {i}?"}, TALK[1]] for i in range(300)]
    source = tmp_path / "talks.jsonl"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    recipe = recipe_of(tmp_path, sources=[str(source)], regenerate=regenerate, num_prompts=300)
    if regenerate:
        data_dir(recipe).mkdir(parents=True)
        row = row_of(TALK)
        row["ids"] = [i % 100 for i in row["ids"]]
        lines = [json.dumps(row | {"id": f"r{i}"}) + "\n" for i in range(300)]
        (data_dir(recipe) / "rows.jsonl").write_text("".join(lines))
    num_rendered = 0

    def counted(text: str) -> Any:
        return Loaded(found) if "spans" in (found := json.loads(text)) else found

    def render_counted(*arguments: Any) -> Any:
        nonlocal num_rendered
        num_rendered += 1
        return render_row(*arguments)

    reader = SimpleNamespace(loads=counted, dumps=json.dumps, JSONDecodeError=json.JSONDecodeError)
    monkeypatch.setattr("data.json_lines.json", reader)
    monkeypatch.setattr("data.source_rows.render_row", render_counted)
    Loaded.alive = Loaded.most = Loaded.made = 0
    look = look_at(recipe, all_rows=False)
    assert look is not None
    assert len([row["id"] for row in islice(look.rows, 5)]) == 5
    # No row behind those that are shown is read.
    assert (Loaded.made, num_rendered) == ((5, 0) if regenerate else (0, 5))
    Loaded.alive = Loaded.most = Loaded.made = 0
    look = look_at(recipe, all_rows=True)
    assert look is not None
    summary = summarize(look.rows, look.vocab_size)
    assert summary.train.num_rows + summary.heldout.num_rows == 300
    assert Loaded.made == 300 and Loaded.most <= row_summary.NUM_EXAMPLES + 2


@pytest.mark.slow
def test_command_shows_rows_and_writes_the_page(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": TALK}) + "\n")
    overrides = [
        f"output_dir={tmp_path}",
        f"data.sources=[{source}]",
        "data.regenerate=false",
        "data.states=online",
    ]
    command = [sys.executable, "data/prepare.py", "recipes/smoke.yaml", *overrides]
    done = subprocess.run(
        [*command, "--show", "5", "--report"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "+ It is 3.\\n\n" in done.stdout and "  ---- answer 1\n" in done.stdout
    assert (tmp_path / "smoke" / "data" / "report.html").is_file()
