"""Evaluation tasks: names, counts, order, hash, and what is refused."""

import json
from pathlib import Path

import pytest

from data.benchmarks import BENCHMARKS
from data.prompt_rows import make_prompt
from eval.results import read_split
from eval.tasks import HUMANEVAL_INSTRUCTION, Task, contamination, load_task
from recipes.errors import UserError
from recipes.schema import EvalSection


@pytest.fixture
def packages() -> None:
    for benchmark in BENCHMARKS.values():
        pytest.importorskip(benchmark.module)


@pytest.mark.usefixtures("packages")
def test_first_mt_bench_prompts_cover_all_categories() -> None:
    task = load_task("mt_bench:16")
    categories = [prompt["category"] for prompt in task.prompts]
    assert len(set(categories[:8])) == 8 and categories[8:] == categories[:8]
    assert all(len(prompt["turns"]) == 1 for prompt in task.prompts)
    assert (task.name, task.version, len(task.hash)) == ("mt_bench:16", 1, 16)
    assert len(load_task("mt_bench").prompts) == 80
    assert load_task("mt_bench").prompts[:16] == task.prompts


@pytest.mark.usefixtures("packages")
def test_humaneval_is_wrapped_as_a_request() -> None:
    task = load_task("humaneval")
    assert len(task.prompts) == 164
    text = task.prompts[0]["messages"][0]["content"]
    assert text.startswith(HUMANEVAL_INSTRUCTION.split("{")[0])
    assert "def has_close_elements(" in text and text.endswith('"""\n```')


@pytest.mark.usefixtures("packages")
def test_shipped_tasks_have_the_recorded_hash() -> None:
    """A change here needs a new version in eval/tasks.py: old and new numbers do not compare."""
    found = {name: (load_task(name).version, load_task(name).hash) for name in BENCHMARKS}
    assert found == {
        "mt_bench": (1, "871d6eb9e77e9930"),
        "humaneval": (1, "3f9c9279cda57e3c"),
        "gsm8k": (1, "27543f40a16a7819"),
    }


def test_heldout_takes_the_conversations_without_their_answers() -> None:
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "b"},
    ]
    task = load_task("heldout:1", heldout=[{"id": "7", "messages": messages, "source": "book"}])
    assert task.prompts == [{"id": "7", "messages": messages[:1], "source": "book", "turns": ["B"]}]
    with pytest.raises(UserError, match="heldout has no prompts"):
        load_task("heldout", heldout=[])


def test_heldout_offers_the_tools_that_the_conversation_had(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "a"}]
    row = {"id": "7", "ids": [1, 2], "spans": [[1, 2]], "messages": messages, "split": "heldout"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows = [row | {"tools": tools}, row | {"id": "8"}, row | {"id": "9", "split": "train"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_task("heldout", heldout=read_split(path, "heldout")).prompts
    assert [(p["id"], p.get("tools")) for p in prompts] == [("7", tools), ("8", None)]


def test_heldout_asks_each_conversation_once() -> None:
    """A template that drops earlier thinking gives a row a turn; the longest holds all turns."""
    said = [{"role": role, "content": role[0] + str(n)} for n in (1, 2, 3)
            for role in ("user", "assistant")]  # fmt: skip
    rows = [
        {"id": name, "messages": said[:end], "source": "book"}
        for name, end in [("c", 2), ("c+2", 4), ("c+3", 6), ("a+2", 4), ("b", 2)]
    ]  # "a+2" is the name of a conversation: there is no row "a"
    prompts = load_task("heldout", heldout=rows).prompts
    assert [(p["id"], p["turns"]) for p in prompts] == [
        ("c+3", ["u2", "u3"]),
        ("a+2", ["u2"]),
        ("b", []),
    ]
    with pytest.raises(UserError, match="asks for 4 prompts, heldout has 3"):
        load_task("heldout:4", heldout=rows)


def test_file_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "A"}) + "\n" + json.dumps({"prompt": "B"}) + "\n")
    task = load_task(f"{path}:1")
    assert [p["messages"][0]["content"] for p in task.prompts] == ["A"]
    assert task.hash != load_task(str(path)).hash
    with pytest.raises(UserError, match=r"asks for 3 prompts, .*mine\.jsonl has 2"):
        load_task(f"{path}:3")
    path.write_text('{"prompt": "A"}\n{"prompt"')
    with pytest.raises(UserError, match=r"mine\.jsonl: row 2: not valid JSON"):
        load_task(str(path))
    rows = ['{"question": " "}', '{"question": "A", "turns": ["  "]}', '{"turns": ["A", ""]}']
    for row in rows:
        path.write_text(row)
        with pytest.raises(UserError, match=r"mine\.jsonl: row 1: an empty user turn"):
            load_task(str(path))
    path.write_text("")
    with pytest.raises(UserError, match="holds no rows"):
        load_task(str(path))
    with pytest.raises(UserError, match="no such file"):
        load_task(str(tmp_path / "none.jsonl"))


def test_unknown_names_and_counts_are_refused() -> None:
    with pytest.raises(UserError, match="'mtbench' is no task; did you mean 'mt_bench'"):
        load_task("mtbench:4")
    for spec in ("mt_bench:", "mt_bench:0", "mt_bench:ten", "mt_bench:-1"):
        with pytest.raises(UserError, match="must be a number from 1"):
            load_task(spec)


def test_contamination_counts_prompts_that_share_eight_words_with_training() -> None:
    eight = "one two three four five six seven eight"
    task = Task(
        "made",
        1,
        "0" * 16,
        [make_prompt("m", f"Say: {eight}!"), make_prompt("m", "no", [f"then {eight.upper()}"]),
         make_prompt("m", "one two three four five six seven nine"), make_prompt("m", "fine")],
    )  # fmt: skip
    talk = [{"role": "user", "content": f"so {eight}"}, {"role": "assistant", "content": "fine"}]
    training = [{"id": "1", "messages": talk, "source": "book"}]
    assert contamination(task, training) == {
        "num_prompts": 4,
        "num_training_prompts": 1,
        "num_overlapping": 2,
        "share": 0.5,
    }
    assert contamination(task, None) is None
    assert contamination(Task("none", 1, "0" * 16, []), training)["share"] is None


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("tasks", ["gsm8k", "gsm8k"]),
        ("temperatures", [0.0, 1.0, 0.0]),
        ("drafters", ["lookup"] * 2),
    ],
)
def test_what_stands_twice_in_a_recipe_is_refused(key: str, values: list) -> None:
    with pytest.raises(ValueError, match="stands twice: "):
        EvalSection.model_validate({key: values})
