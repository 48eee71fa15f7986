"""Records of what served engines did: eval/served.py runs them, this makes the numbers.

Times are those of a client. A stream's speed is that of its tokens behind the first
(tokens_per_second and speedup, pooled over prompts, at any concurrency); what the whole server
gives is served.output_tokens_per_second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.provenance import ROOT, git_state, hardware, versions
from data.target_config import find_revision
from drafters.export_info import INFO
from drafters.foreign import describe
from drafters.vllm_format import load
from eval import metrics
from eval.engine_metrics import OurRounds, ServerCounters, in_our_terms
from eval.engines import Answer, Server
from eval.lossless import greedy_identical
from eval.record import SCHEMA, ResultRecord, validate
from eval.results import Plan, make_settings
from eval.tasks import Task
from recipes.schema import Recipe


@dataclass
class TaskRun:
    """One arm on one task. counted: by the server over this run, with the warm-up left out."""

    answers: list[Answer]
    seconds: float
    counted: ServerCounters | None


@dataclass
class ArmRun:
    """One arm on all tasks, by (temperature, concurrency, task)."""

    server: Server
    runs: dict[tuple[float, int, str], TaskRun]
    gauges: dict[str, float] | None = None


def make_record(
    plan: Plan,
    tasks: Sequence[Task],
    drafted: ArmRun,
    baseline: ArmRun | None,
    temperature: float,
    concurrency: int,
    engine_settings: dict[str, Any],
) -> ResultRecord:
    """The record of one temperature and concurrency, all tasks."""
    server, found = drafted.server, {}
    for task in tasks:
        key = (temperature, concurrency, task.name)
        plain = None if baseline is None else baseline.runs[key]
        found[task.name] = task_result(plan.recipe, task, drafted.runs[key], plain, temperature)
        if drafted.gauges is not None:
            found[task.name]["served"]["gauges"] = drafted.gauges
    settings = make_settings(plan.recipe, temperature)
    settings |= {"engine": f"{server.engine} {server.version}", "batch_size": concurrency}
    settings |= {"turns": "first", **engine_settings}
    record = {
        "schema": SCHEMA,
        "identity": make_identity(plan, server),
        "settings": settings,
        "tasks": found,
        "lossless": {
            "greedy_identical": _identical(found, settings, temperature),
            "pit_p_value": None,  # no engine gives the distributions
            "pit_num_tokens": None,
        },
    }
    return validate(record, "served record")


def _identical(found: dict[str, Any], settings: dict[str, Any], temperature: float) -> str | None:
    """As "24/25" over all tasks, in float32 only: other dtypes differ by rounding."""
    texts = [task["same_as_baseline"] for task in found.values()]
    if temperature > 0 or settings["dtype"] != "float32" or None in texts:
        return None
    pairs = [text.split("/") for text in texts]
    return f"{sum(int(a) for a, _ in pairs)}/{sum(int(b) for _, b in pairs)}"


def _num_params(export: Path) -> int | None:
    """Of an export of ours; somebody else's folder is not read without its target."""
    if not (export / INFO).is_file():
        return None
    return sum(p.numel() for p in load(export).parameters())


def make_identity(plan: Plan, server: Server) -> dict[str, Any]:
    """What was measured. An attached server's drafter is whatever it was started with."""
    info = describe(plan.export)
    git, machine = git_state(ROOT), hardware()
    return {
        "target": plan.recipe.target.model,
        "target_revision": find_revision(plan.recipe.target),
        "drafter": plan.name,
        "method": info.method,
        "drafter_params": _num_params(plan.export),
        "trained_tokens": info.num_trained_tokens,
        "commit": git["commit"] and git["commit"] + ("-dirty" if git["dirty"] else ""),
        "versions": {key: value for key, value in versions().items() if value}
        | {server.engine: server.version},
        "hardware": ", ".join(machine["gpus"] or [machine["cpu"]]),
    }


def make_records(
    task: Task, run: TaskRun, max_tokens: int
) -> tuple[list[metrics.PromptRecord], list[OurRounds | None]]:
    """One record a prompt; a prompt that failed or came without counters has none of them."""
    records, rounds = [], []
    for prompt, answer in zip(task.prompts, run.answers, strict=True):
        ours = None
        if answer.rounds is not None:
            ours = in_our_terms(answer.rounds, answer.num_tokens, max_tokens)
        rounds.append(ours)
        records.append(
            metrics.PromptRecord(
                prompt_id=prompt["id"],
                category=prompt.get("category"),
                turn=0,
                proposed=None if ours is None else ours.proposed,
                accepted=None if ours is None else ours.accepted,
                num_tokens=max(answer.num_tokens - 1, 0),
                seconds=answer.seconds,
                ends_inside_draft=ours is not None and ours.ends_inside_draft,
                accepted_before_stop=None if answer.rounds is None else answer.rounds.accepted,
            )
        )
    return records, rounds


def task_result(
    recipe: Recipe, task: Task, drafted: TaskRun, baseline: TaskRun | None, temperature: float
) -> dict[str, Any]:
    """A task's entry in the record; `served` holds what only a served engine has."""
    section = recipe.eval
    records, rounds = make_records(task, drafted, section.max_new_tokens)
    served = serving(drafted, rounds)
    speed, same = None, None
    if baseline is not None:
        plain, _ = make_records(task, baseline, section.max_new_tokens)
        both = [
            i for i, pair in enumerate(zip(drafted.answers, baseline.answers, strict=True))
            if pair[0].error is None and pair[1].error is None
        ]  # fmt: skip
        speed = metrics.speedup([plain[i] for i in both], [records[i] for i in both], section.seed)
        served["baseline"] = serving(baseline, [])
        rate, plain_rate = (s["output_tokens_per_second"] for s in (served, served["baseline"]))
        served["throughput_speedup"] = rate / plain_rate if rate and plain_rate else None
        ids = [[run.answers[i].ids for i in both] for run in (drafted, baseline)]
        if temperature == 0 and all(all(row) for row in ids):
            comparison = greedy_identical(*ids)
            same = f"{comparison.num_identical}/{comparison.num_prompts}"
    per_second = None if speed is None else speed.baseline_tokens_per_second
    return {
        **metrics.aggregate(records, section.seed),
        "version": task.version,
        "tokens_per_second": _rate(records) if speed is None else speed.tokens_per_second,
        "baseline_tokens_per_second": per_second,
        "speedup": None if speed is None else speed.speedup,
        "speedup_ci95": None if speed is None else speed.speedup_ci95,
        "ms_per_round": {"draft": None, "verify": None, "other": None},
        "baseline_ms_per_token": 1000 / per_second if per_second else None,
        "predicted_speedup": None,
        "predicted_from_alpha": None,
        "task_hash": task.hash,
        "turns": 1,
        "repeats": 1,
        "same_as_baseline": same,
        "other_lengths": []
        if speed is None or temperature > 0
        else [[name, before, after] for name, _turn, before, after in speed.other_lengths],
        "served": served,
    }


def _rate(records: Sequence[metrics.PromptRecord]) -> float | None:
    seconds = sum(record.seconds for record in records)
    return sum(record.num_tokens for record in records) / seconds if seconds else None


def serving(run: TaskRun, rounds: Sequence[OurRounds | None]) -> dict[str, Any]:
    """What a client and the server's counters saw. Milliseconds; null where nothing was measured.

    engine: the server's counters over this run, by its own definitions: accepted tokens before the
        answers are cut at their ends, steps that drafted something.
    num_uncut: answers whose engine does not tell the order of its steps, so that the last one
        still counts what lies behind the end.
    """
    good = [answer for answer in run.answers if answer.error is None]
    ttft = [1000 * (a.first - a.sent) for a in good]
    tpot = [1000 * a.seconds / (a.num_tokens - 1) for a in good if a.num_tokens > 1]
    num_tokens = sum(a.num_tokens for a in good)
    return {
        "num_failed": len(run.answers) - len(good),
        "first_error": next((a.error for a in run.answers if a.error is not None), None),
        "num_output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / run.seconds if num_tokens else None,
        "ttft_ms": _percentiles(ttft),
        "tpot_ms": _percentiles(tpot),
        "num_uncut": sum(r is not None and not r.cut for r in rounds),
        "engine": None if run.counted is None else run.counted.rates(),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    names = {"p50": 50, "p99": 99}
    return {n: float(np.percentile(values, p)) if values else None for n, p in names.items()}
