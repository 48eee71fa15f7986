"""Measuring all that a command asks for: every drafter, temperature, batch size and draft length.

A record is written as soon as it is whole, so an interrupted sweep goes on where it was.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from data.conversations import Conversation
from data.files import write_json
from data.progress import progress
from data.target import Target
from drafters.lookup import UNTRAINED
from eval.costs import PassTimes, measure_passes
from eval.lossless import GreedyComparison
from eval.measure import (
    Measured,
    check_prompts,
    decode_settings,
    greedy_check,
    measure,
    num_batches,
    oracle_of,
    render_all,
)
from eval.results import (
    Plan,
    is_done,
    make_drafters,
    make_record,
    make_settings,
    read_split,
    result_path,
)
from eval.tasks import Task, contamination, load_task
from eval.tree import parse_tree
from recipes.errors import UserError
from recipes.schema import Recipe

NUM_TIMED_PROMPTS = 32  # prompts that pass times are measured behind, at most one a row


Group = tuple[int, int, float]
"""Batch size, draft tokens and temperature: what is measured together."""


class Point(NamedTuple):
    """One file to be made: a drafter at a temperature, under the settings of `plan`."""

    plan: Plan
    temperature: float
    name: str

    @property
    def group(self) -> Group:
        section = self.plan.recipe.eval
        return section.batch_size, section.num_draft_tokens, self.temperature

    @property
    def path(self) -> Path:
        return result_path(self.plan, self.name, self.temperature)


def make_points(
    plan: Plan, batch_sizes: Sequence[int], num_draft_tokens: Sequence[int]
) -> list[Point]:
    """All points, those of one plan and temperature side by side: they are measured together.

    Only the trained drafter grows trees; its number of draft tokens is then the tree's depth.
    """
    points, drafters = [], plan.recipe.eval.drafters
    if plan.recipe.eval.verification == "tree":
        num_draft_tokens = [parse_tree(plan.recipe.eval.tree).depth]
        drafters = ["drafter"]
    for size, num in product(batch_sizes, num_draft_tokens):
        changed = {"batch_size": size, "num_draft_tokens": num}
        section = plan.recipe.eval.model_copy(update=changed)
        at = plan._replace(recipe=plan.recipe.model_copy(update={"eval": section}))
        points += [
            Point(at, temperature, name)
            for temperature, name in product(section.temperatures, drafters)
        ]
    return points


def load_tasks(plan: Plan) -> list[Task]:
    """All tasks of the recipe, before any model is loaded."""
    specs = plan.recipe.eval.tasks
    heldout = None
    if any(spec.partition(":")[0] == "heldout" for spec in specs):
        heldout = read_split(plan.run_dir / "data" / "rows.jsonl", "heldout")
    return [load_task(spec, heldout) for spec in specs]


def load_target(recipe: Recipe, dtype: str | None = None) -> Target:
    """The target with the recipe's chat template."""
    target = Target.load(recipe.target, dtype)
    if recipe.data.chat_template is not None:
        text = recipe.data.chat_template.read_text(encoding="utf-8")
        target.tokenizer.chat_template = text
    if recipe.eval.compile is not None:
        if recipe.eval.verification == "tree":
            raise UserError(
                "eval.compile: trees differ in size from round to round, and each size would be "
                "compiled; set eval.compile: null, or eval.verification to token or block"
            )
        target.compile_passes(recipe.eval.compile, "eval.compile")
    return target


def need_export(plan: Plan) -> None:
    """Raises UserError where a trained drafter is to be measured and none was exported."""
    drafters = plan.recipe.eval.drafters
    if not set(drafters) <= set(UNTRAINED) and not (plan.export / "config.json").is_file():
        raise UserError(
            f"{plan.export}: no exported drafter here; make it with "
            f"`python train/export.py {plan.run_dir}` (after train/distill.py)"
        )


def find_todo(points: Iterable[Point], tasks: Sequence[Task]) -> list[Point]:
    """The points whose record is missing, older than the export or of other settings or tasks."""
    return [p for p in points if not is_done(p.plan, p.name, p.temperature, tasks)]


def run_points(points: Sequence[Point], tasks: Sequence[Task]) -> None:
    """Measure the points and write their records, one group after another.

    Drafters of one plan and temperature share the baseline's runs and take turns with it.
    """
    groups: dict[Group, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    if not groups:
        return
    checks = check_in_float32(list(groups.values()), tasks)
    recipe = points[0].plan.recipe
    target = load_target(recipe)
    kwargs, max_new_tokens = recipe.data.template_kwargs, recipe.eval.max_new_tokens
    for task in tasks:  # what does not fit is said before anything is measured
        render_all(target, task.prompts, kwargs, max_new_tokens)
    times: dict[int, PassTimes] = {}
    for key, group in groups.items():
        plan, size = group[0].plan, group[0].plan.recipe.eval.batch_size
        # Compiled, each size of a pass would cost a minute: then nothing is predicted from them.
        if size not in times and plan.recipe.eval.compile is None:
            times[size] = time_passes(plan, target, tasks)
        measure_group(group, target, tasks, checks.get(key, {}), times.get(size))


def check_in_float32(
    groups: Sequence[Sequence[Point]], tasks: Sequence[Task]
) -> dict[Group, dict[str, GreedyComparison]]:
    """Greedy identity on some prompts, where the measurement itself is not in float32."""
    recipe = groups[0][0].plan.recipe
    prompts = check_prompts(tasks, recipe.eval.greedy_check_prompts)
    greedy = [group for group in groups if group[0].temperature == 0]
    if not greedy or not prompts or make_settings(recipe, 0.0)["dtype"] == "float32":
        return {}
    target = load_target(recipe, "float32")
    kwargs, found = recipe.data.template_kwargs, {}
    for group in greedy:
        plan, names = group[0].plan, [point.name for point in group]
        section = plan.recipe.eval
        drafters = make_drafters(plan, target, names)
        total = num_batches(len(prompts), len(names), section.batch_size)
        with progress(total, "greedy check in float32") as advance:
            compared = greedy_check(target, drafters, prompts, section, kwargs, advance)
        found[group[0].group] = compared
    return found


def time_passes(plan: Plan, target: Target, tasks: Sequence[Task]) -> PassTimes:
    """Times of all drafters' and the target's passes behind the first prompts."""
    section, kwargs = plan.recipe.eval, plan.recipe.data.template_kwargs
    prompts = check_prompts(tasks, min(section.batch_size, NUM_TIMED_PROMPTS))
    ids = render_all(target, prompts, kwargs, section.max_new_tokens)
    drafters = make_drafters(plan, target, section.drafters)
    sampling = decode_settings(section, section.temperatures[0]).sampling
    return measure_passes(target, drafters, ids, section.batch_size, sampling)


def measure_group(
    group: Sequence[Point],
    target: Target,
    tasks: Sequence[Task],
    checks: dict[str, GreedyComparison],
    times: PassTimes | None,
) -> None:
    """Measure drafters on all tasks at one temperature and write their records."""
    plan, temperature = group[0].plan, group[0].temperature
    section, kwargs = plan.recipe.eval, plan.recipe.data.template_kwargs
    drafters = make_drafters(plan, target, [point.name for point in group])
    training = read_training(plan)
    with_oracle = oracle_of(drafters, section, temperature) is not None
    size, repeats = section.batch_size, section.repeats
    by_task: dict[str, dict[str, Measured]] = {}
    for task in tasks:
        total = num_batches(len(task.prompts), len(drafters), size, repeats, with_oracle)
        title = f"T={temperature:g} K={section.num_draft_tokens} B={size} {task.name}"
        with progress(total, title) as advance:
            by_task[task.name] = measure(
                target, drafters, task, section, temperature, kwargs, advance, times
            )
        overlap = contamination(task, training)
        for found in by_task[task.name].values():
            found.result["contamination"] = overlap
    for point in group:
        measured = {task: found[point.name] for task, found in by_task.items()}
        check = checks.get(point.name)
        record = make_record(plan, target, point.name, temperature, measured, check)
        write_json(point.path, record)


def read_training(plan: Plan) -> list[Conversation] | None:
    """The conversations that the run's drafter was trained on; None where they are not there."""
    path = plan.export.parent / "data" / "rows.jsonl"
    return read_split(path, "train") if path.is_file() else None
