"""The two measurements of an arm: acceptance, which no clock touches, and speed at batch size 1.

Acceptance is decoded side by side and without the target alone, since tau does not depend on
either. Speed is measured by eval/bench.py's own sweep, beside the target alone, and kept in
RUN/results; it is asked for apart (`--speed`), since it wants a quiet machine.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from data.files import read_json
from data.target import Target
from eval.arms import Arm
from eval.measure import decode_settings, make_answer
from eval.metrics import PromptRecord, aggregate
from eval.results import Plan, make_drafters, make_identity
from eval.sweep import Point, find_todo, load_tasks, make_points, run_points
from eval.task_result import make_records
from eval.tasks import Task
from recipes.errors import UserError
from recipes.schema import Recipe
from tests.benchmarks import study_numbers as numbers


class Speed(BaseModel):
    """The table's section speed: what is timed, at batch size 1, for every arm alike."""

    model_config = ConfigDict(extra="forbid")

    tasks: list[str] = Field(min_length=1)
    num_draft_tokens: list[int] = Field(min_length=1)
    max_new_tokens: int


def plan_of(recipe: Recipe) -> Plan:
    """Where the arm's export and results lie."""
    run = recipe.run_dir.absolute()
    return Plan(recipe, recipe.name, run, run / "export", run / "results")


def acceptance(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Who the arm is; tau by task and accepted positions, with intervals over prompts.

    sums: of each task [tokens, rounds] a prompt, for comparisons prompt by prompt.

    Raises:
        UserError: too few prompts for an interval.
    """
    plan, section = plan_of(recipe), recipe.eval
    name = section.drafters[0]
    drafter = make_drafters(plan, target, [name])[name]
    settings, kwargs = decode_settings(section, 0.0), recipe.data.template_kwargs
    taus, records = dict[str, list[float]](), list[PromptRecord]()
    sums: dict[str, list[list[float]]] = {}
    for task in load_tasks(plan):
        answer, arm = make_answer(target, task.prompts, section, kwargs), Arm()
        for start in range(0, len(task.prompts), section.batch_size):
            indices = range(start, min(start + section.batch_size, len(task.prompts)))
            arm.add([answer(drafter, indices, settings)])
        found = make_records(task.prompts, arm)
        rates = aggregate(found, section.seed)
        if rates["tau"] is None or not rates["tau_ci95"]:
            raise UserError(f"{recipe.name}: no interval on {task.name}; name more prompts of it")
        taus[task.name] = [rates["tau"], *rates["tau_ci95"]]
        sums[task.name] = numbers.tokens_and_rounds(found)
        records += found
    identity = make_identity(plan, target, name)
    return {
        "method": identity["method"],
        "num_params": identity["drafter_params"],
        "num_tokens": identity["trained_tokens"],
        "minutes": identity["train_minutes"],
        "hardware": identity["hardware"],
        "commit": identity["commit"],
        "tau": taus,
        "sums": sums,
        "accepted": numbers.accepted(records, section.num_draft_tokens),
    }


def speed_points(recipe: Recipe, speed: Speed) -> tuple[list[Point], list[Task]]:
    """The records of an arm's speed, one a number of draft tokens, and their tasks."""
    update = {"tasks": speed.tasks, "max_new_tokens": speed.max_new_tokens}
    section = recipe.eval.model_copy(update=update)
    plan = plan_of(recipe.model_copy(update={"eval": section}))
    return make_points(plan, [1], speed.num_draft_tokens), load_tasks(plan)


def measure_speed(recipe: Recipe, speed: Speed) -> None:
    """Make the records that are not there yet."""
    points, tasks = speed_points(recipe, speed)
    run_points(find_todo(points, tasks), tasks)


def read_speed(recipe: Recipe, speed: Speed) -> dict[str, Any] | None:
    """Number of draft tokens -> speedup by task, and cost c; None where it was not measured.

    Raises:
        UserError: too few prompts for an interval.
    """
    points, tasks = speed_points(recipe, speed)
    if find_todo(points, tasks):
        return None
    return {
        str(num): _read_record(read_json(point.path), str(point.path))
        for num, point in zip(speed.num_draft_tokens, points, strict=True)
    }


def _read_record(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    tasks = record["tasks"]
    for name, task in tasks.items():
        if not task["speedup_ci95"]:
            raise UserError(f"{where}: no interval on {name}; name more prompts of it")
    costs = [task["cost_ratio"] for task in tasks.values() if task["cost_ratio"] is not None]
    return {
        "speedup": {name: [task["speedup"], *task["speedup_ci95"]] for name, task in tasks.items()},
        "cost": sum(costs) / len(costs) if costs else None,
        "hardware": record["identity"]["hardware"],
    }
