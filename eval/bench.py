"""Measure an exported drafter, n-gram lookup and both together, beside the target alone."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from data.files import read_json, write_json
from data.progress import progress
from data.target import Target
from eval.lossless import GreedyComparison
from eval.measure import Measured, check_prompts, greedy_check, measure, num_batches
from eval.report import COLUMNS, make_rows, sort_rows
from eval.results import (
    Plan,
    is_done,
    make_drafters,
    make_record,
    make_settings,
    read_heldout,
    result_path,
)
from eval.tasks import Task, load_task
from recipes.errors import UserError
from recipes.keys import apply_override, describe_errors
from recipes.schema import Recipe, load_recipe

EXAMPLES = """examples:
  python eval/bench.py recipes/smollm2.yaml
  python eval/bench.py recipes/smollm2.yaml --tasks mt_bench:20,heldout:16 --temperature 0,1
  python eval/bench.py recipes/smollm2.yaml eval.draft_sampling=sampled target.dtype=float32
  python eval/bench.py --target Qwen/Qwen3-8B --drafter outputs/qwen3-8b/export --tasks gsm8k:50
  accelerate launch --num_processes 1 eval/bench.py recipes/qwen3.yaml --batch-size 8

A drafter is read from the exported folder (RUN/export), never from a checkpoint. Each drafter and
temperature gives one file RESULTS/<drafter>_T<temperature>.json; those that are newer than the
export and have the same settings are not measured again. Compare them with eval/leaderboard.py."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RECIPE [key=value ...]")
    parser.add_argument("--target", help="without a recipe: hub id or folder of the target")
    parser.add_argument("--drafter", type=Path, help="exported folder (default: RUN/export)")
    parser.add_argument("--tasks", help="e.g. mt_bench:40,humaneval,gsm8k,heldout,FILE.jsonl")
    parser.add_argument("--temperature", help="e.g. 0,1")
    parser.add_argument("--num-draft-tokens", help="tokens proposed a round")
    parser.add_argument("--max-new-tokens", help="tokens an answer, at most")
    parser.add_argument("--batch-size", help="prompts side by side; 1 measures latency")
    parser.add_argument("--out", type=Path, help="folder of the results (default: RUN/results)")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    return parser.parse_intermixed_args()


def make_plan(arguments: argparse.Namespace) -> Plan:
    """The recipe with the options on top of it.

    Raises:
        UserError: neither a recipe nor a target and a drafter; a bad key or value.
    """
    words: list[str] = arguments.words
    overrides = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word]
    for key in ("tasks", "temperature"):
        if (value := getattr(arguments, key)) is not None:
            listed = "[" + ", ".join(value.split(",")) + "]"
            overrides.append(f"eval.{key.removesuffix('s')}s={listed}")
    for key in ("num_draft_tokens", "max_new_tokens", "batch_size"):
        if (value := getattr(arguments, key)) is not None:
            overrides.append(f"eval.{key}={value}")
    if arguments.target is None:
        if len(files) != 1:
            raise UserError("name one recipe, or --target and --drafter; see --help")
        recipe = load_recipe(files[0], overrides)
        run_dir = recipe.run_dir
        name, export = recipe.name, arguments.drafter or run_dir / "export"
    else:
        if files or arguments.drafter is None:
            raise UserError("--target goes with --drafter and without a recipe; see --help")
        recipe = _recipe_without_file(arguments.target, overrides)
        export = arguments.drafter
        run_dir = export.absolute().parent
        name = run_dir.name if export.name == "export" else export.name
    return Plan(recipe, name, run_dir, export, arguments.out or run_dir / "results")


def _recipe_without_file(target: str, overrides: list[str]) -> Recipe:
    values: dict[Any, Any] = {
        "name": "bench",
        "target": {"model": target},
        "data": {"sources": ["book"], "num_prompts": 1},  # of no use here, but part of a recipe
    }
    keys = [apply_override(values, override, Recipe) for override in overrides]
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_errors(error, Recipe, "(none)", keys)) from error


def load_tasks(plan: Plan) -> list[Task]:
    """All tasks of the recipe, before any model is loaded."""
    specs = plan.recipe.eval.tasks
    heldout = None
    if any(spec.partition(":")[0] == "heldout" for spec in specs):
        heldout = read_heldout(plan.run_dir / "data" / "rows.jsonl")
    return [load_task(spec, heldout) for spec in specs]


def load_target(recipe: Recipe, dtype: str | None = None) -> Target:
    """The target with the recipe's chat template."""
    target = Target.load(recipe.target, dtype)
    if recipe.data.chat_template is not None:
        text = recipe.data.chat_template.read_text(encoding="utf-8")
        target.tokenizer.chat_template = text
    return target


def run(plan: Plan, force: bool) -> list[Path]:
    """Measure what is not done and return all result files."""
    section = plan.recipe.eval
    if set(section.drafters) != {"lookup"} and not (plan.export / "config.json").is_file():
        raise UserError(
            f"{plan.export}: no exported drafter here; make it with "
            f"`python train/export.py {plan.run_dir}` (after train/distill.py)"
        )
    tasks = load_tasks(plan)
    todo = {
        t: [n for n in section.drafters if force or not is_done(plan, n, t, tasks)]
        for t in section.temperatures
    }
    for t, names in todo.items():
        for name in set(section.drafters) - set(names):
            print(f"{result_path(plan, name, t)} is up to date (--force measures again)")
    if any(todo.values()):
        checks = check_in_float32(plan, tasks, todo.get(0.0, []))
        target = load_target(plan.recipe)
        for t, names in todo.items():
            if names:
                measure_all(plan, target, names, tasks, t, checks)
    return [result_path(plan, n, t) for n in section.drafters for t in section.temperatures]


def check_in_float32(
    plan: Plan, tasks: Sequence[Task], names: Sequence[str]
) -> dict[str, GreedyComparison]:
    """Greedy identity on some prompts, where the measurement itself is not in float32."""
    recipe = plan.recipe
    prompts = check_prompts(tasks, recipe.eval.greedy_check_prompts)
    if not names or not prompts or make_settings(recipe, 0.0)["dtype"] == "float32":
        return {}
    target = load_target(recipe, "float32")
    drafters = make_drafters(plan, target, names)
    total = num_batches(len(prompts), len(names), recipe.eval.batch_size)
    kwargs = recipe.data.template_kwargs
    with progress(total, "greedy check in float32") as advance:
        return greedy_check(target, drafters, prompts, recipe.eval, kwargs, advance)


def measure_all(
    plan: Plan,
    target: Target,
    names: Sequence[str],
    tasks: Sequence[Task],
    temperature: float,
    checks: dict[str, GreedyComparison],
) -> None:
    """Measure drafters on all tasks at one temperature and write their records."""
    section, kwargs = plan.recipe.eval, plan.recipe.data.template_kwargs
    drafters = make_drafters(plan, target, names)
    by_task: dict[str, dict[str, Measured]] = {}
    for task in tasks:
        total = num_batches(len(task.prompts), len(names), section.batch_size)
        with progress(total, f"T={temperature:g} {task.name}") as advance:
            by_task[task.name] = measure(
                target, drafters, task, section, temperature, kwargs, advance
            )
    for name in names:
        measured = {task: found[name] for task, found in by_task.items()}
        record = make_record(plan, target, name, temperature, measured, checks.get(name))
        write_json(result_path(plan, name, temperature), record)


def show(paths: Sequence[Path]) -> None:
    """Print the main columns of the results."""
    wanted = ("drafter", "temperature", "tau", "acceptance_rate", "tokens_per_second",
              "baseline_tokens_per_second", "speedup", "lossless")  # fmt: skip
    columns = [column for column in COLUMNS if column.key in wanted]
    table = Table("Task", *(column.title for column in columns))
    rows = [row for path in paths for row in make_rows(read_json(path), str(path))]
    for row in sort_rows(rows):
        table.add_row(row["task"], *(column.text(row) for column in columns))
    Console().print(table)


def main() -> None:
    """Measure and say where the results lie."""
    arguments = parse_arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("eval/bench.py runs in one process: accelerate launch --num_processes 1")
    plan = make_plan(arguments)
    paths = run(plan, arguments.force)
    show(paths)
    print("\n".join(str(path) for path in paths))
    print(f"compare: python eval/leaderboard.py {plan.results} --out {plan.run_dir / 'report'}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nstopped. Results written so far are whole; the same command goes on with the rest",
            file=sys.stderr,
        )
        sys.exit(130)
