"""The files of a measurement: what is measured, what a record says, and whether it is there.

A file `results/<drafter>_T<temperature>.json` holds one drafter at one temperature on all tasks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.conversations import Conversation
from data.files import read_json
from data.provenance import ROOT, git_state, hardware, versions
from data.target import Target, resolve_device, resolve_dtype
from drafters.base import DecodingDrafter
from drafters.export_info import TargetInfo, load_info
from drafters.lookup import Lookup, LookupThen
from drafters.vllm_format import load
from eval.lossless import GreedyComparison, ks_p_value
from eval.measure import Measured, count_text
from eval.record import SCHEMA, ResultRecord, validate
from eval.tasks import Task
from recipes.errors import UserError
from recipes.schema import Recipe


class Plan(NamedTuple):
    """What is measured, and where files lie. name: of the trained drafter."""

    recipe: Recipe
    name: str
    run_dir: Path
    export: Path
    results: Path


def read_heldout(path: Path) -> list[Conversation]:
    """Held-out conversations of a run's rows.jsonl.

    Raises:
        UserError: the file is missing.
    """
    if not path.is_file():
        raise UserError(
            f"{path}: no such file, so there is no task heldout; make it with "
            "`python data/prepare.py RECIPE`, or name other --tasks"
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [
        Conversation(id=row["id"], messages=row["messages"], source="heldout")
        for row in rows
        if row["split"] == "heldout"
    ]


def result_path(plan: Plan, name: str, temperature: float) -> Path:
    """File of one drafter and temperature."""
    return plan.results / f"{name}_T{temperature:g}.json"


def make_drafters(plan: Plan, target: Target, names: Sequence[str]) -> dict[str, DecodingDrafter]:
    """The named drafters, in the target's dtype and on its device.

    Raises:
        UserError: there is no export, or it was made for another target.
    """
    section = plan.recipe.eval
    lookup = Lookup(section.lookup_min, section.lookup_max)
    if set(names) <= {"lookup"}:
        return dict.fromkeys(names, lookup)
    drafter = load(plan.export, TargetInfo.of(target), target.dtype)
    drafter.to(target.device).eval()
    drafter.use_embeddings(target.embed_weight_VH)
    known = {"drafter": drafter, "lookup": lookup, "lookup+drafter": LookupThen(lookup, drafter)}
    return {name: known[name] for name in names}


def make_settings(recipe: Recipe, temperature: float) -> dict[str, Any]:
    """The record's settings; two records with equal ones can be compared."""
    section = recipe.eval
    dtype = resolve_dtype(recipe.target.dtype, resolve_device(recipe.target.device))
    return {
        "engine": "torch",
        "temperature": float(temperature),
        "top_p": section.top_p,
        "top_k": section.top_k,
        "draft_sampling": section.draft_sampling,
        "verification": "token",
        "num_draft_tokens": section.num_draft_tokens,
        "batch_size": section.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "max_new_tokens": section.max_new_tokens,
        "seed": section.seed,
        "lookup": [section.lookup_min, section.lookup_max],
    }


def make_identity(plan: Plan, target: Target, name: str) -> dict[str, Any]:
    """Who was measured on what; `name` is one of eval.drafters."""
    num_params, num_tokens = 0, 0
    if name != "lookup":
        num_params = sum(p.numel() for p in load(plan.export).parameters())
        num_tokens = load_info(plan.export)["num_trained_tokens"]
    git, machine = git_state(ROOT), hardware()
    commit = git["commit"] and git["commit"] + ("-dirty" if git["dirty"] else "")
    chips = machine["gpus"] if target.device.type == "cuda" else []
    parts = chips or [machine["cpu"], f"{machine['torch_threads']} threads"]
    return {
        "target": plan.recipe.target.model,
        "target_revision": target.revision,
        "drafter": name.replace("drafter", plan.name),
        "method": name.replace("drafter", "eagle3"),
        "drafter_params": num_params,
        "trained_tokens": num_tokens,
        "commit": commit,
        "versions": {key: value for key, value in versions().items() if value},
        "hardware": ", ".join(parts),
    }


def is_done(plan: Plan, name: str, temperature: float, tasks: Sequence[Task]) -> bool:
    """Whether a result is newer than the export and was measured with these settings."""
    path = result_path(plan, name, temperature)
    exported = [file.stat().st_mtime for file in plan.export.glob("*") if file.is_file()]
    if not path.is_file() or path.stat().st_mtime < max(exported, default=0.0):
        return False
    record = read_json(path)
    measured = {name: task.get("task_hash") for name, task in record.get("tasks", {}).items()}
    return (
        record.get("settings") == make_settings(plan.recipe, temperature)
        and record.get("identity", {}).get("target") == plan.recipe.target.model
        and measured == {task.name: task.hash for task in tasks}
    )


def make_lossless(
    target: Target, measured: Sequence[Measured], check: GreedyComparison | None
) -> dict[str, Any]:
    """The record's lossless section: greedy identity in float32, or the law of drawn tokens."""
    pit = [value for m in measured for value in m.pit]
    comparisons = [m.comparison for m in measured if m.comparison is not None]
    if comparisons and target.dtype == torch.float32:
        identical = sum(c.num_identical for c in comparisons)
        check = GreedyComparison(identical, sum(c.num_prompts for c in comparisons), [])
    return {
        "greedy_identical": count_text(check) if comparisons and check is not None else None,
        "pit_p_value": ks_p_value(pit),
        "pit_num_tokens": len(pit) or None,
    }


def make_record(
    plan: Plan,
    target: Target,
    name: str,
    temperature: float,
    measured: dict[str, Measured],
    check: GreedyComparison | None,
) -> ResultRecord:
    """The record of one drafter at one temperature.

    Args:
        name: one of eval.drafters.
        measured: by task.
        check: its greedy comparison in float32, where one was made.
    """
    parts = list(measured.values())
    record = {
        "schema": SCHEMA,
        "identity": make_identity(plan, target, name),
        "settings": make_settings(plan.recipe, temperature),
        "tasks": {task: m.result for task, m in measured.items()},
        "lossless": make_lossless(target, parts, check),
        "samples": [sample for m in parts for sample in m.samples],
    }
    return validate(record, str(result_path(plan, name, temperature)))
