"""Every drafter of a table at the same minutes of training, compared (`make study`).

    python tests/benchmarks/study.py [--minutes 20] [--arms eagle3 dflash] [--plan]

The answers and states are made once, then each arm is trained, exported and measured by the
project's own commands. OUT/<minutes>min/ARM is its run; study.json and the text between the markers
of DOCS are written anew after each arm. What is done is skipped, so Ctrl-C and the same command go
on where it was; with other --minutes it is another study beside.
"""

import argparse
import gc
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pydantic import ValidationError

from data.files import make_folder, read_json, stable_hash, write_json, write_text
from data.pipeline import Prepared, aux_layers_of, prepare
from data.progress import log_to_stderr
from data.provenance import ROOT
from data.target import Target
from drafters.export_info import TargetInfo
from drafters.methods import build_drafter
from drafters.vllm_format import load
from eval.results import Plan
from eval.sweep import find_todo, load_tasks, make_points, run_points
from recipes.drafter_sections import Eagle3Section
from recipes.errors import UserError
from recipes.keys import describe_errors
from recipes.schema import Recipe, dump_recipe
from recipes.yaml_text import parse_yaml
from tests.benchmarks import study_numbers as numbers
from tests.benchmarks.study_text import insert, to_markdown

TABLE = Path(__file__).with_suffix(".yaml")
MEASURING = 8  # minutes an arm for starting, export and measurement, on two cores


class Table(NamedTuple):
    """The arms as whole recipes, and which of them answer a question together."""

    arms: dict[str, Recipe]
    contrasts: dict[str, list[str]]


class Stopped(Exception):
    """A command was interrupted; its state is saved."""


def read_table(path: Path, minutes: float, folder: Path) -> Table:
    """The table with the budget filled in.

    Raises:
        UserError: a section or key is wrong; arms that do not share target, answers and tasks.
    """
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict) or set(values) != {"recipe", "arms", "contrasts"}:
        raise UserError(f"{path}: expected the sections recipe:, arms: and contrasts:")
    budget = {
        "output_dir": str(folder),
        "train": {"max_minutes": float(minutes)},
        "data": {"max_minutes": float(minutes)},
    }
    arms = {}
    for name, changes in values["arms"].items():
        fields = merged(merged(merged(values["recipe"], budget), changes), {"name": name})
        try:
            arms[name] = Recipe.model_validate(fields)
        except ValidationError as error:
            raise UserError(describe_errors(error, Recipe, f"{path}, arm {name}", [])) from error
    first = next(iter(arms.values()))
    for name, recipe in arms.items():
        drafters = {"drafters": first.eval.drafters}
        same = recipe.target == first.target and recipe.data == first.data
        if not same or recipe.eval.model_copy(update=drafters) != first.eval:
            raise UserError(f"{path}, arm {name}: target, data and eval are those of all arms")
        if len(recipe.eval.drafters) != 1 or recipe.eval.temperatures != [0.0]:
            raise UserError(f"{path}, arm {name}: needs one eval.drafters and temperatures [0.0]")
    for question, names in values["contrasts"].items():
        if unknown := set(names) - arms.keys():
            raise UserError(f"{path}, contrast {question!r}: no arm {', '.join(sorted(unknown))}")
    return Table(arms, values["contrasts"])


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the changes put over it, section by section."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = merged(inner, value)
        result[key] = value
    return result


def is_trained(recipe: Recipe) -> bool:
    """Whether the arm's drafter has weights."""
    return recipe.eval.drafters[0] not in ("lookup", "suffix")


def prepare_shared(table: Table, folder: Path, target: Target) -> Prepared:
    """Answers and states for all arms of the table: RUN/data of each is a link to this one."""
    arms = [recipe for recipe in table.arms.values() if is_trained(recipe)]
    layers = {k for recipe in arms for k in aux_layers_of(recipe, target)} - {target.num_layers}
    section = Eagle3Section(aux_layers=sorted(layers) or [target.num_layers], draft_vocab_size=None)
    one = next(iter(table.arms.values()))
    shared = one.model_copy(update={"name": "shared", "drafter": section})
    prepared = prepare(shared, target)
    for recipe in table.arms.values():
        make_folder(recipe.run_dir)
        link = recipe.run_dir / "data"
        if not link.is_symlink():
            link.symlink_to(Path("..") / "shared" / "data", target_is_directory=True)
    return prepared


def command(*words: object) -> None:
    """Run one of the project's scripts; Ctrl-C reaches it once, and it is waited for.

    Raises:
        Stopped: it was interrupted.
        UserError: it failed, for the reason it said.
    """
    texts = [str(word) for word in words]
    with subprocess.Popen(
        [sys.executable, *texts], cwd=ROOT, stdout=sys.stderr, start_new_session=True
    ) as child:
        interrupted = False
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(signal.SIGINT)
    if interrupted or code == 130:
        raise Stopped
    if code:
        raise UserError(f"{' '.join(texts)}: exit code {code}")


def bench(recipe: Recipe, num_draft: int) -> dict[str, Any]:
    """The record of the arm at a number of draft tokens, measured where it is not there yet."""
    run = recipe.run_dir.absolute()
    plan = Plan(recipe, recipe.name, run, run / "export", run / "results")
    points = make_points(plan, [recipe.eval.batch_size], [num_draft])
    tasks = load_tasks(plan)
    run_points(find_todo(points, tasks), tasks)
    record: dict[str, Any] = read_json(points[0].path)
    for name, task in record["tasks"].items():
        known = task["tau_ci95"] and task["speedup_ci95"] and task.get("predicted_curve")
        if not known:
            raise UserError(f"{points[0].path}: no intervals on {name}; name more prompts of it")
    return record


def bounded(record: dict[str, Any], key: str) -> dict[str, list[float]]:
    """Task -> value and the ends of its interval."""
    return {name: [task[key], *task[f"{key}_ci95"]] for name, task in record["tasks"].items()}


def summary(recipe: Recipe) -> dict[str, Any]:
    """What records say of an arm: at the common number of draft tokens, and at its best one."""
    record = bench(recipe, recipe.eval.num_draft_tokens)
    best = numbers.best_num_draft(record)
    at_best = bench(recipe, best)
    costs = [task["cost_ratio"] for task in record["tasks"].values()]
    known = [cost for cost in costs if cost is not None]
    return {
        "name": recipe.name,
        "method": record["identity"]["method"],
        "num_params": record["identity"]["drafter_params"],
        "num_tokens": record["identity"]["trained_tokens"],
        "minutes": record["identity"]["train_minutes"],
        "hardware": record["identity"]["hardware"],
        "commit": record["identity"]["commit"],
        "tau": bounded(record, "tau"),
        "best_num_draft": best,
        "speedup": bounded(at_best, "speedup"),
        "predicted": {
            name: next(p["speedup"] for p in t["predicted_curve"] if p["num_draft_tokens"] == best)
            for name, t in record["tasks"].items()
        },
        "cost": sum(known) / len(known) if known else None,
        "alpha": None,
    }


def train_arm(recipe: Recipe) -> None:
    """Train and export an arm, or what is missing of it."""
    path = recipe.run_dir / "recipe.yaml"
    write_text(path, dump_recipe(recipe))
    command("train/distill.py", path.absolute(), "--resume")
    command("train/export.py", recipe.run_dir.absolute())


def train_and_measure(recipe: Recipe, target: Target) -> dict[str, Any]:
    """One arm with weights."""
    run = recipe.run_dir
    train_arm(recipe)
    found = summary(recipe)
    prepared = prepare(recipe, target)
    layers, seed = aux_layers_of(recipe, target), recipe.train.seed
    before = build_drafter(recipe.drafter, target, layers, prepared.vocab, seed)
    after = load(run / "drafter", TargetInfo.of(target))
    sums = [
        numbers.heldout_sums(recipe, target, prepared, drafter.to(target.device))
        for drafter in (before, after)
    ]
    return found | {
        "alpha": numbers.ratio(*sums[1]),
        "alpha_untrained": numbers.ratio(*sums[0]),
        "alpha_gain": numbers.gain(sums[0], sums[1]),
        "curve": numbers.learning_curve(run / "metrics.jsonl"),
    }


def run_arm(recipe: Recipe, target: Target) -> dict[str, Any]:
    """The numbers of an arm; those of an earlier call where its recipe is the same."""
    fields = recipe.model_dump(mode="json", exclude={"output_dir"})
    path, key = recipe.run_dir / "arm.json", stable_hash(fields)
    if path.is_file() and (stored := read_json(path))["key"] == key:
        return dict(stored)
    print(f"== {recipe.name}", file=sys.stderr)
    found = train_and_measure(recipe, target) if is_trained(recipe) else summary(recipe)
    found["key"] = key
    write_json(path, found)
    gc.collect()
    return found


def joined(recipe: Recipe) -> dict[str, Any]:
    """n-gram lookup in front of an arm's drafter."""
    section = recipe.eval.model_copy(update={"drafters": ["lookup+drafter"]})
    found = summary(recipe.model_copy(update={"eval": section}))
    return found | {"name": f"lookup+{recipe.name}"}


def write_study(study: dict[str, Any], folder: Path, docs: Path | None) -> None:
    """study.json and, where there is one, the document's section."""
    write_json(folder / "study.json", study)
    if docs is not None:
        text = docs.read_text(encoding="utf-8")
        write_text(docs, insert(text, to_markdown(study), str(docs)))


def run_study(args: argparse.Namespace, table: Table, names: list[str], folder: Path) -> int:
    """All arms, one after another; returns how many failed."""
    recipe = table.arms[names[0]]
    target = Target.load(recipe.target)
    report = prepare_shared(table, folder, target).report
    if args.train_only:
        for name in names:
            if is_trained(table.arms[name]):
                train_arm(table.arms[name])
        return 0
    arms: dict[str, Any] = {}
    study = {
        "minutes": args.minutes,
        "target": recipe.target.model,
        "num_rows": report["num_train_rows"],
        "num_train_tokens": report["num_supervised_tokens"],
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "contrasts": table.contrasts,
        "arms": arms,
    }
    num_failed = 0
    for name in names:
        try:
            arms[name] = run_arm(table.arms[name], target)
        except UserError as error:
            print(f"error: arm {name} is left out: {error}", file=sys.stderr)
            num_failed += 1
            continue
        write_study(study, args.out, args.docs)
    trained = [name for name in arms if is_trained(table.arms[name])]
    if trained:
        best = max(trained, key=lambda name: numbers.mean(arms[name]["speedup"]))
        both = joined(table.arms[best])
        arms[both["name"]] = both
        write_study(study, args.out, args.docs)
    return num_failed


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="of training, each arm")
    parser.add_argument("--arms", nargs="*", help="names in the table; none = all")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--out", type=Path, default=Path("outputs/study"))
    parser.add_argument("--docs", type=Path, help="a file with the markers; none = no text")
    parser.add_argument("--train-only", action="store_true", help="train and export, no measuring")
    parser.add_argument("--plan", action="store_true", help="say what it takes, and stop")
    args = parser.parse_args()
    log_to_stderr()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = args.out.absolute() / f"{args.minutes:g}min"
    try:
        table = read_table(args.table, args.minutes, folder)
        names = args.arms or list(table.arms)
        if unknown := set(names) - table.arms.keys():
            known = ", ".join(table.arms)
            raise UserError(f"no arm {', '.join(sorted(unknown))}; {args.table} has {known}")
        num_trained = sum(is_trained(table.arms[name]) for name in names)
        total = args.minutes * (1 + num_trained) + MEASURING * len(names)
        print(f"{len(names)} arms, {num_trained} trained: about {total / 60:.1f} hours in all")
        return 0 if args.plan else min(run_study(args, table, names, folder), 1)
    except (Stopped, KeyboardInterrupt):
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
