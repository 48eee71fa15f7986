"""Evaluation tasks: fixed lists of prompts with a version and a hash, so that numbers compare.

A task is named `NAME` or `NAME:COUNT` (its first COUNT prompts), NAME being mt_bench, humaneval,
gsm8k, heldout (the run's own held-out prompts) or a file. MT-Bench is put in an order in which the
categories take turns, so that its first prompts cover all eight.

Bump a version below when prompts, order or wrapping change; the hash shows it as well.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from data.benchmarks import BENCHMARKS, read_benchmark, read_prompt_file
from data.conversations import BadRow, Conversation
from data.files import stable_hash
from data.prompt_rows import Prompt, cut_prompt, make_prompt, ngrams, prompt_ngrams
from eval.record import Contamination
from recipes.errors import UserError

VERSIONS = {"mt_bench": 1, "humaneval": 1, "gsm8k": 1, "heldout": 1}
FILE_VERSION = 1
_FILE_KINDS = (".jsonl", ".json", ".parquet")

HUMANEVAL_INSTRUCTION = (
    "Complete the Python function below. Answer with the whole function in one code block."
    "\n\n```python\n{code}\n```"
)
"""Around each HumanEval prompt (its trailing white space removed): chat models expect a request."""


@dataclass(frozen=True)
class Task:
    """Prompts to measure on; `hash` is 16 hex characters of messages, turns and tools, in order."""

    name: str
    version: int
    hash: str
    prompts: list[Prompt]


def load_task(spec: str, heldout: Sequence[Conversation] | None = None) -> Task:
    """Load a task.

    Args:
        spec: `mt_bench`, `humaneval:20`, `gsm8k`, `heldout:16`, `PATH.jsonl` or `PATH.jsonl:10`.
        heldout: rows of the held-out split; only for `heldout`. Each conversation is one prompt,
            and its answers are left out: the target answers again.

    Returns:
        The task under the name `spec`; prompts may have follow-up user messages in `turns`.

    Raises:
        UserError: unknown name, bad count, missing package or file, bad row, nothing held out.
    """
    name, count = _parse(spec)
    if name == "heldout":
        prompts = _heldout_prompts(heldout or [])
    elif name in BENCHMARKS:
        prompts = read_benchmark(name)
    else:
        prompts = read_prompt_file(name)
    if name == "mt_bench":
        prompts = _categories_in_turn(prompts)
    if name == "humaneval":
        prompts = [_wrap_code(prompt) for prompt in prompts]
    if count is not None and count > len(prompts):
        raise UserError(f"eval.tasks: {spec!r} asks for {count} prompts, {name} has {len(prompts)}")
    prompts = prompts[:count]
    content = [[p["messages"], p.get("turns", []), p.get("tools", [])] for p in prompts]
    return Task(spec, VERSIONS.get(name, FILE_VERSION), stable_hash(content), prompts)


def contamination(task: Task, training: Sequence[Conversation] | None) -> Contamination | None:
    """How many prompts of the task share an 8-gram with what users asked in training.

    Args:
        training: the conversations that the drafter was trained on; None = not known.

    Returns:
        Counts and the share of the task's prompts; None where the training prompts are not known.
    """
    if training is None:
        return None
    seen: set[str] = set()
    for conversation in training:
        for message in conversation["messages"]:
            if message["role"] == "user":
                seen |= ngrams(message["content"])
    num_overlapping = sum(not seen.isdisjoint(prompt_ngrams(prompt)) for prompt in task.prompts)
    return {
        "num_prompts": len(task.prompts),
        "num_training_prompts": len(training),
        "num_overlapping": num_overlapping,
        "share": num_overlapping / len(task.prompts) if task.prompts else None,
    }


def _parse(spec: str) -> tuple[str, int | None]:
    name, colon, count = spec.rpartition(":")
    if not colon:
        name, count = spec, ""
    if name not in VERSIONS and Path(name).suffix.lower() not in _FILE_KINDS:
        near = difflib.get_close_matches(name, VERSIONS, n=1, cutoff=0.4)
        raise UserError(
            f"eval.tasks: {name!r} is no task; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + f"use {', '.join(VERSIONS)} or a {', '.join(_FILE_KINDS)} file"
        )
    if not colon:
        return name, None
    if not count.isdecimal() or int(count) == 0:
        raise UserError(f"eval.tasks: {spec!r}: the part after the colon must be a number from 1")
    return name, int(count)


def _heldout_prompts(conversations: Sequence[Conversation]) -> list[Prompt]:
    if not conversations:
        raise UserError(
            "eval.tasks: heldout has no prompts; prepare data with data.heldout_fraction above 0 "
            "and at least two conversations, or name another task"
        )
    prompts = []
    for conversation in _longest_rows(conversations):
        try:
            prompt = cut_prompt(conversation, conversation["source"])
        except BadRow as error:
            raise UserError(f"held-out row {conversation['id']}: {error.reason}") from error
        prompt["id"] = conversation["id"]  # links the record to the training data
        prompts.append(prompt)
    return prompts


def _longest_rows(rows: Sequence[Conversation]) -> list[Conversation]:
    """The longest row of each conversation, in the order of the first ones.

    Where a template rewrites history, a conversation has a row a turn: ID, ID+2, ID+3 (data.talks),
    each with all turns up to its own.
    """
    ids = {row["id"] for row in rows}
    longest: dict[str, Conversation] = {}
    for row in rows:
        first, plus, turn = row["id"].rpartition("+")
        name = first if plus and turn.isdecimal() and first in ids else row["id"]
        if name not in longest or len(row["messages"]) > len(longest[name]["messages"]):
            longest[name] = row
    return list(longest.values())


def _categories_in_turn(prompts: list[Prompt]) -> list[Prompt]:
    """First prompt of every category, then the second of every category, and so on."""
    columns: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        columns.setdefault(prompt["category"], []).append(prompt)
    rows = zip_longest(*columns.values())
    return [prompt for prompt in chain.from_iterable(rows) if prompt is not None]


def _wrap_code(prompt: Prompt) -> Prompt:
    code = prompt["messages"][0]["content"].rstrip()
    return make_prompt("humaneval", HUMANEVAL_INSTRUCTION.format(code=code), category="code")
