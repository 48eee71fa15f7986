"""The files of a measurement: what is measured, what a record says, and whether it is there.

A file `<drafter>_T<temperature>_K<draft tokens>_B<batch size>_<hash>.json` in the results folder
holds one drafter under one group of settings on all tasks. The hash is of all settings and tasks,
so different settings never share a file.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.conversations import Conversation
from data.files import read_json, stable_hash
from data.provenance import ROOT, git_state, hardware, versions
from data.target import Target
from data.target_config import find_revision, resolve_device, resolve_dtype
from drafters.base import DecodingDrafter
from drafters.export_info import INFO, export_hash, load_info
from drafters.foreign import describe, load_any
from drafters.lookup import UNTRAINED, Lookup, LookupThen
from drafters.suffix import Suffix
from eval.lossless import GreedyComparison, pit_p_value
from eval.measure import ORACLE_OF, Measured
from eval.record import SCHEMA, Identity, ResultRecord, validate
from eval.task_result import count_text
from eval.tasks import Task
from recipes.errors import UserError
from recipes.schema import EvalSection, Recipe

log = logging.getLogger("draftsmith")


class Plan(NamedTuple):
    """What is measured, and where files lie. name: of the trained drafter."""

    recipe: Recipe
    name: str
    run_dir: Path
    export: Path
    results: Path


def read_split(path: Path, split: str) -> list[Conversation]:
    """Conversations of a run's rows.jsonl that were trained on ("train") or held out ("heldout").

    Raises:
        UserError: the file is missing.
    """
    if not path.is_file():
        raise UserError(
            f"{path}: no such file, so there is no task heldout; make it with "
            "`python data/prepare.py RECIPE`, or name other --tasks"
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    found = []
    for row in rows:
        if row["split"] == split:
            talk = Conversation(id=row["id"], messages=row["messages"], source=split)
            if "tools" in row:
                talk["tools"] = row["tools"]
            found.append(talk)
    return found


def result_path(plan: Plan, name: str, temperature: float) -> Path:
    """File of one drafter and temperature; the words in its name are for people."""
    section = plan.recipe.eval
    words = [name, f"T{temperature:g}", f"K{section.num_draft_tokens}", f"B{section.batch_size}"]
    if section.verification != "token":
        words.append(section.verification)
    settings = make_settings(plan.recipe, temperature)
    target = plan.recipe.target
    parts: list[Any] = [target.model, settings, section.tasks]
    if target.revision is not None:
        parts.append(target.revision)
    if (other := other_export(plan, name)) is not None:
        parts.append(other)
    digest = stable_hash(parts)[:8]
    return plan.results / ("_".join([*words, digest]) + ".json")


def other_export(plan: Plan, name: str) -> str | None:
    """Folder of the drafter where that is not the run's own: several share a folder of results."""
    export = plan.export.absolute()
    own = name in UNTRAINED or export == plan.run_dir.absolute() / "export"
    return None if own else str(export)


def template_hash(target: Target) -> str:
    """Of the chat template that prompts are rendered with."""
    return stable_hash(target.tokenizer.chat_template)


def make_drafters(plan: Plan, target: Target, names: Sequence[str]) -> dict[str, DecodingDrafter]:
    """The named drafters, in the target's dtype and on its device.

    Raises:
        UserError: there is no drafter in the folder (ours, or one that drafters.foreign reads), or
            it was made for another target.
    """
    section = plan.recipe.eval
    lookup = Lookup(section.lookup_min, section.lookup_max)
    suffix, behind = make_suffix(section, 1), make_suffix(section, section.lookup_min)
    untrained: dict[str, DecodingDrafter] = {"lookup": lookup, "suffix": suffix}
    if set(names) <= untrained.keys():
        return {name: untrained[name] for name in names}
    drafter = load_any(plan.export, target, target.dtype)
    drafter.to(target.device).eval()
    drafter.use_target(target)
    if section.compile is not None:
        drafter.compile_passes(section.compile, "eval.compile")
    known: dict[str, DecodingDrafter] = {
        **untrained,
        "drafter": drafter,
        "lookup+drafter": LookupThen(lookup, drafter),
        "suffix+drafter": LookupThen(behind, drafter),
    }
    return {name: known[name] for name in names}


def make_suffix(section: EvalSection, min_match: int) -> Suffix:
    """The suffix decoder that a recipe asks for; in front of a head, short matches are not used."""
    return Suffix(
        section.suffix_max_tree_depth,
        section.suffix_max_spec_factor,
        section.suffix_min_token_prob,
        section.suffix_cached_answers,
        min_match,
    )


def make_settings(
    recipe: Recipe, temperature: float, template_hash: str | None = None
) -> dict[str, Any]:
    """The record's settings; two records with equal ones can be compared.

    Args:
        template_hash: of the chat template that was used; None = that of the recipe's own file, or
            not known before the target is loaded.
    """
    section, template = recipe.eval, recipe.data.chat_template
    dtype = resolve_dtype(recipe.target.dtype, resolve_device(recipe.target.device))
    if template_hash is None and template is not None:
        template_hash = stable_hash(template.read_text(encoding="utf-8"))
    return {
        "engine": "torch",
        "temperature": float(temperature),
        "top_p": section.top_p,
        "top_k": section.top_k,
        "min_p": section.min_p,
        "repetition_penalty": section.repetition_penalty,
        "draft_sampling": section.draft_sampling,
        "verification": section.verification,
        "tree": section.tree if section.verification == "tree" else None,
        "num_draft_tokens": section.num_draft_tokens,
        "batch_size": section.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "max_new_tokens": section.max_new_tokens,
        "turns": section.turns,
        "seed": section.seed,
        "lookup": [section.lookup_min, section.lookup_max],
        "suffix": [
            section.suffix_max_tree_depth,
            section.suffix_max_spec_factor,
            section.suffix_min_token_prob,
            section.suffix_cached_answers,
        ],
        "template_kwargs": recipe.data.template_kwargs,
        "template_hash": template_hash,
        **({"siblings": section.siblings} if section.verification == "tree" else {}),
        **({} if section.compile is None else {"compile": section.compile}),
    }


def train_minutes(run_dir: Path, num_tokens: int | None) -> float | None:
    """Minutes in which a run's drafter saw so many tokens; None where that is not known.

    They are noted of the run's last weights alone, not of those that validated best before.
    """
    path, last = run_dir / "trained.json", run_dir / "drafter"
    if not (path.is_file() and (last / INFO).is_file()):
        return None
    if load_info(last)["num_trained_tokens"] != num_tokens:
        return None
    seconds = read_json(path).get("seconds")
    return None if seconds is None else float(seconds) / 60


def make_identity(plan: Plan, target: Target, name: str) -> Identity:
    """Who was measured on what; `name` is one of eval.drafters."""
    num_params, method = 0, name
    num_tokens: int | None = 0
    if name not in UNTRAINED:
        num_params = sum(p.numel() for p in load_any(plan.export, target).parameters())
        info = describe(plan.export)
        num_tokens, method = info.num_trained_tokens, name.replace("drafter", info.method)
    git, machine = git_state(ROOT), hardware()
    commit = git["commit"] and git["commit"] + ("-dirty" if git["dirty"] else "")
    chips = machine["gpus"] if target.device.type == "cuda" else []
    parts = chips or [machine["cpu"], f"{machine['torch_threads']} threads"]
    return {
        "target": plan.recipe.target.model,
        "target_revision": target.revision,
        "drafter": name.replace("drafter", plan.name),
        "method": method,
        "drafter_hash": None if name in UNTRAINED else export_hash(plan.export),
        "drafter_params": num_params,
        "trained_tokens": num_tokens,
        "train_minutes": 0.0
        if name in UNTRAINED
        else train_minutes(plan.export.parent, num_tokens),
        "commit": commit,
        "versions": {key: value for key, value in versions().items() if value},
        "hardware": ", ".join(parts),
    }


def is_done(plan: Plan, name: str, temperature: float, tasks: Sequence[Task]) -> bool:
    """Whether a result is of these weights and was measured with these settings.

    Raises:
        UserError: there is such a result, and the target that it is compared with cannot be found.
    """
    path = result_path(plan, name, temperature)
    if not path.is_file():
        return False
    try:
        record: Any = validate(read_json(path), str(path))
    except UserError as error:
        log.warning("%s; it is measured again", error)
        return False
    identity, section = record["identity"], plan.recipe.eval
    drafter = None if name in UNTRAINED else export_hash(plan.export)
    wanted, found = make_settings(plan.recipe, temperature), record["settings"]
    if found["num_draft_tokens"] < wanted["num_draft_tokens"]:  # more than the drafter can draft
        found = {**found, "num_draft_tokens": wanted["num_draft_tokens"]}
    if wanted["template_hash"] is None:  # the tokenizer's own, which is not loaded yet
        found = {**found, "template_hash": None}
    entries = record["tasks"]
    with_oracle = section.oracle and temperature == 0 and name == ORACLE_OF
    return (
        found == wanted
        and identity["target"] == plan.recipe.target.model
        and identity.get("drafter_hash", "") == drafter
        and {task: entry.get("task_hash") for task, entry in entries.items()}
        == {task.name: task.hash for task in tasks}
        and all(entry.get("repeats") == section.repeats for entry in entries.values())
        and all("oracle_speedup" in entry or not with_oracle for entry in entries.values())
        and _is_checked(record, section, tasks)
        and identity["target_revision"] == find_revision(plan.recipe.target)
    )


def _is_checked(record: ResultRecord, section: EvalSection, tasks: Sequence[Task]) -> bool:
    """Whether as many prompts were compared in float32 as eval.greedy_check_prompts asks for."""
    settings = record["settings"]
    if settings["temperature"] > 0 or settings["dtype"] == "float32":  # there all are compared
        return True
    lossless: dict[str, Any] = dict(record.get("lossless") or {})
    known = (lossless.get("greedy_identical") or "0/0").rpartition("/")[2]  # of older records
    num_asked = lossless.get("greedy_check_prompts", int(known))
    num_prompts = sum(len(task.prompts) for task in tasks)
    return bool(num_asked >= min(section.greedy_check_prompts, num_prompts))


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
        "pit_p_value": pit_p_value(pit),
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
    settings = make_settings(plan.recipe, temperature, template_hash(target))
    settings["num_draft_tokens"] = parts[0].num_draft
    record = {
        "schema": SCHEMA,
        "identity": make_identity(plan, target, name),
        "settings": settings,
        "tasks": {task: m.result for task, m in measured.items()},
        "lossless": {
            **make_lossless(target, parts, check),
            "greedy_check_prompts": plan.recipe.eval.greedy_check_prompts,
        },
        "samples": [sample for m in parts for sample in m.samples],
    }
    return validate(record, str(result_path(plan, name, temperature)))
