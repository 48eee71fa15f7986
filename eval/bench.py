"""Measure an exported drafter, n-gram lookup and both together, beside the target alone."""

import argparse
import json
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

from data.files import make_folder, read_json
from eval import serving
from eval.certificates import run_certificates, to_text
from eval.report import COLUMNS, make_rows, sort_rows
from eval.results import Plan
from eval.roofline import DEVICES
from eval.served import ServeOptions, bench_served
from eval.sweep import Point, find_todo, load_tasks, make_points, need_export, run_points
from recipes.errors import UserError
from recipes.keys import apply_override, describe_errors
from recipes.schema import EvalSection, Recipe, load_recipe

EXAMPLES = """examples:
  python eval/bench.py recipes/smollm2.yaml
  python eval/bench.py recipes/smollm2.yaml --tasks mt_bench:20,heldout:16 --temperature 0,1
  python eval/bench.py recipes/smollm2.yaml --batch-size 1,2,4,8 --num-draft-tokens 1,2,3,4
  python eval/bench.py recipes/smollm2.yaml --plan
  python eval/bench.py recipes/smollm2.yaml --certify --tasks mt_bench:40
  python eval/bench.py recipes/smollm2.yaml eval.draft_sampling=sampled target.dtype=float32
  python eval/bench.py --target Qwen/Qwen3-8B --drafter outputs/qwen3-8b/export --tasks gsm8k:50
  accelerate launch --num_processes 1 eval/bench.py recipes/qwen3.yaml --batch-size 8
  python eval/bench.py recipes/qwen3.yaml --engine vllm --concurrency 1,8,32
  python eval/bench.py recipes/qwen3.yaml --engine sglang --server http://host:30000

A drafter is read from the exported folder (RUN/export), never from a checkpoint. Each drafter,
temperature, batch size and number of draft tokens gives one file in RESULTS, whose name ends in a
hash of all settings; what was measured of the same weights is not measured again. Compare them with
eval/leaderboard.py. --plan measures costs and acceptance in a minute, predicts the speedup of
1 to 16 draft tokens, and writes RESULTS/plan.json with the number to serve with.
--certify draws 10,000 tokens in each of one to three settings under the recipe's verification
(token, block or tree), writes RESULTS/certificate_NAME.json (NAME_block, NAME_tree) and exits with
0 if the drafter loses nothing, else with 1 (2: wrong usage)."""


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
    parser.add_argument("--num-draft-tokens", help="tokens proposed a round; several: 1,2,4")
    parser.add_argument("--max-new-tokens", help="tokens an answer, at most")
    parser.add_argument("--batch-size", help="prompts side by side; 1 = latency; several: 1,8,32")
    parser.add_argument("--repeats", help="timed runs of each prompt")
    parser.add_argument("--oracle", action="store_true", help="time a perfect drafter, too (T=0)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: RUN/results)")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument("--plan", action="store_true", help="how many tokens to draft when serving")
    parser.add_argument("--certify", action="store_true", help="only test that nothing is lost")
    parser.add_argument("--engine", choices=["torch", "vllm", "sglang"], default="torch")
    parser.add_argument("--server", help="attach to this address (vllm: else one is started)")
    parser.add_argument("--baseline-server", help="the same engine without speculation")
    parser.add_argument("--engine-command", default="vllm serve", help="what starts a vLLM")
    parser.add_argument("--engine-flags", default="", help="for both servers, in one string")
    parser.add_argument("--concurrency", help="requests in flight; several: 1,8,64 (default: 1)")
    parser.add_argument("--api", choices=["completions", "chat"], default="completions")
    names = [device.name for device in DEVICES]
    parser.add_argument("--device", choices=names, help="with --plan: the roofline's device")
    return parser.parse_intermixed_args()


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The options of the recipe's section eval as overrides; of a swept option the first value."""
    overrides = []
    if arguments.tasks is not None:
        tasks = [task.strip() for task in arguments.tasks.split(",")]
        overrides.append(f"eval.tasks={json.dumps(tasks, ensure_ascii=False)}")
    if arguments.temperature is not None:
        overrides.append(f"eval.temperatures=[{arguments.temperature}]")
    for key in ("num_draft_tokens", "max_new_tokens", "batch_size", "repeats"):
        if (value := getattr(arguments, key)) is not None:
            if key in ("num_draft_tokens", "batch_size"):
                value = value.split(",")[0]
            overrides.append(f"eval.{key}={value}")
    return overrides + (["eval.oracle=true"] if arguments.oracle else [])


def make_plan(arguments: argparse.Namespace) -> Plan:
    """The recipe with the options on top of it.

    Raises:
        UserError: neither a recipe nor a target and a drafter; a bad key or value.
    """
    words: list[str] = arguments.words
    overrides = [word for word in words if "=" in word] + overrides_of(arguments)
    files = [word for word in words if "=" not in word]
    if arguments.target is None:
        if len(files) != 1:
            raise UserError("name one recipe, or --target and --drafter; see --help")
        recipe = load_recipe(files[0], overrides)
        run_dir = recipe.run_dir
        name, export = recipe.name, run_dir / "export"
        if arguments.drafter is not None:
            name, export = name_of(arguments.drafter), arguments.drafter
    else:
        if files or arguments.drafter is None:
            raise UserError("--target goes with --drafter and without a recipe; see --help")
        recipe = _recipe_without_file(arguments.target, overrides)
        export = arguments.drafter
        run_dir, name = export.absolute().parent, name_of(export)
    return Plan(recipe, name, run_dir, export, arguments.out or run_dir / "results")


def name_of(export: Path) -> str:
    """What an exported folder is called: RUN of RUN/export, else its own name."""
    return export.absolute().parent.name if export.name == "export" else export.name


NOT_ASKED = {
    "plan": ("num_draft_tokens", "repeats", "oracle", "force", "concurrency"),
    "certify": ("repeats", "oracle", "force", "concurrency", "device", "plan"),
}


def refuse_ignored(arguments: argparse.Namespace, section: EvalSection) -> None:
    """Refuse options that would have no effect beside others.

    Raises:
        UserError: names the first one.
    """
    for mode in ("certify", "plan"):
        if not getattr(arguments, mode):
            continue
        given = [key for key in NOT_ASKED[mode] if getattr(arguments, key)]
        given += ["engine"] if arguments.engine != "torch" else []
        for key in given:
            raise UserError(f"--{mode} goes without --{key.replace('_', '-')}")
        single = ("num_draft_tokens", "batch_size", "temperature") if mode == "certify" else ()
        for key in single:
            value = getattr(arguments, key)
            if value is not None and "," in value:
                raise UserError(f"--certify takes one --{key.replace('_', '-')}, not {value}")
    if section.verification == "tree" and arguments.plan:
        raise UserError(
            "--plan predicts chains, but eval.verification is tree; give eval.verification=token"
        )
    if section.verification == "tree" and arguments.num_draft_tokens is not None:
        raise UserError(
            "--num-draft-tokens is not for trees: eval.tree gives their depth and breadth"
        )


def swept(text: str | None, default: int, option: str) -> list[int]:
    """The values of an option that may hold several, each once.

    Raises:
        UserError: a value is no number from 1, or stands twice.
    """
    if text is None:
        return [default]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"{option} {text}: give numbers from 1, with commas between them")
    values = [int(word) for word in words]
    if len(set(values)) < len(values):
        raise UserError(f"{option} {text}: a number stands twice; give each once")
    return values


def serve_options(arguments: argparse.Namespace) -> ServeOptions:
    """How to reach the engine that `--engine` names."""
    return ServeOptions(
        engine=arguments.engine,
        server=arguments.server,
        baseline_server=arguments.baseline_server,
        command=arguments.engine_command,
        flags=arguments.engine_flags,
        concurrency=tuple(swept(arguments.concurrency, 1, "--concurrency")),
        api=arguments.api,
    )


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


def _written(points: list[Point]) -> dict[Path, int]:
    """When each result that is there was written."""
    return {p.path: p.path.stat().st_mtime_ns for p in points if p.path.is_file()}


def measure_all(points: list[Point], plan: Plan, force: bool) -> None:
    """Measure what is not there yet, and say where everything lies."""
    tasks = load_tasks(plan)
    todo, before = points if force else find_todo(points, tasks), _written(points)
    for point in points:
        if point not in todo:
            print(f"{point.path} is up to date (--force measures again)")
    try:
        run_points(todo, tasks)
    except KeyboardInterrupt:
        if force:
            num_new = len(_written(points).items() - before.items())
            said = f"{num_new} of {len(points)} results are measured again; the others are as "
            said += "they were, and the same command begins anew"
        else:
            num_done = len(points) - len(find_todo(points, tasks))
            said = f"{num_done} of {len(points)} results are written and stay; the same command "
            said += "goes on with the rest"
        print(f"\nstopped: {said}", file=sys.stderr)
        sys.exit(130)


def show(paths: Sequence[Path]) -> None:
    """Print the main columns of the results."""
    wanted = ("drafter", "temperature", "batch_size", "num_draft_tokens", "tau", "acceptance_rate",
              "tokens_per_second", "baseline_tokens_per_second", "speedup", "lossless")  # fmt: skip
    columns = [column for column in COLUMNS if column.key in wanted]
    table = Table("Task", *(column.title for column in columns))
    rows = [row for path in paths for row in make_rows(read_json(path), str(path))]
    for row in sort_rows(rows):
        table.add_row(row["task"], *(column.text(row) for column in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> None:
    """Measure and say where the results lie, or plan."""
    arguments = parse_arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("eval/bench.py runs in one process: accelerate launch --num_processes 1")
    plan = make_plan(arguments)
    section = plan.recipe.eval
    sizes = swept(arguments.batch_size, section.batch_size, "--batch-size")
    lengths = swept(arguments.num_draft_tokens, section.num_draft_tokens, "--num-draft-tokens")
    refuse_ignored(arguments, section)
    need_export(plan)
    make_folder(plan.results)  # now, not after an hour of measuring
    if arguments.certify:
        certificates = run_certificates(plan, load_tasks(plan))
        print("\n".join(to_text(certificate) for certificate in certificates))
        sys.exit(0 if all(certificate["passed"] for certificate in certificates) else 1)
    if arguments.plan:
        path, advice = serving.make_plan(plan, load_tasks(plan), sizes, arguments.device)
        print(serving.to_text(read_json(path)), advice, str(path), sep="\n")
        return
    if arguments.engine != "torch":
        paths = bench_served(plan, load_tasks(plan), serve_options(arguments))
        show(paths)
        print("\n".join(map(str, paths)))
        return
    points = make_points(plan, sizes, lengths)
    measure_all(points, plan, arguments.force)
    show([point.path for point in points])
    print("\n".join(str(point.path) for point in points))
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
        print("\nstopped before anything was measured", file=sys.stderr)
        sys.exit(130)
