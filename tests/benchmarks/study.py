"""Every drafter of a table at the same minutes of training, compared (`make study`).

    python tests/benchmarks/study.py [--minutes 20] [--arms eagle3 dflash] [--plan]
    python tests/benchmarks/study.py --minutes 20 --speed [eagle3 dflash]      # on a quiet machine

The answers and states are made once, then each arm is trained, exported and measured by the
project's own commands. OUT/<minutes>min/ARM is its run; study.json, the curves beside DOCS and the
text between its markers are written anew after each arm. What is done is skipped, so Ctrl-C and the
same command go on where it was; with other --minutes it is another study beside. What a study says
is what all arms that were measured say, whatever --arms names.
"""

import argparse
import gc
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.batch import Row
from data.files import make_folder, read_json, stable_hash, write_json, write_text
from data.pipeline import Prepared, aux_layers_of, prepare
from data.progress import log_to_stderr
from data.provenance import ROOT
from data.target import Target
from data.vocab import DraftVocab
from drafters.export_info import TargetInfo
from drafters.methods import build_drafter
from drafters.vllm_format import load
from eval.results import make_drafters
from recipes.drafter_sections import Eagle3Section
from recipes.errors import UserError
from recipes.schema import Recipe, dump_recipe
from tests.benchmarks import study_numbers as numbers
from tests.benchmarks.study_heldout import Part, heldout_parts, with_stored_states
from tests.benchmarks.study_measure import acceptance, measure_speed, plan_of, read_speed
from tests.benchmarks.study_plot import to_svg
from tests.benchmarks.study_table import Table, is_trained, read_table
from tests.benchmarks.study_text import insert, to_markdown

TABLE = Path(__file__).with_suffix(".yaml")
# Minutes on two cores: an arm's start and export, its acceptance, one number of draft tokens timed.
START_MINUTES, MEASURE_MINUTES, SPEED_MINUTES = 1, 2, 2
NUMBERS = 2  # of what is measured of an arm; those of another version are measured again
MIN_HELDOUT = 2  # rows; of one there is no interval


class Stopped(Exception):
    """A command was interrupted; its state is saved."""


def prepare_shared(table: Table, target: Target) -> tuple[Recipe, Prepared]:
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
    return shared, prepared


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


def train_arm(recipe: Recipe) -> None:
    """Train and export an arm, or what is missing of it."""
    path = recipe.run_dir / "recipe.yaml"
    write_text(path, dump_recipe(recipe))
    command("train/distill.py", path.absolute(), "--resume")
    command("train/export.py", recipe.run_dir.absolute())


def measure_training(
    recipe: Recipe, target: Target, vocab: DraftVocab, rows: Sequence[Row], ngram: numbers.Heldout
) -> dict[str, Any]:
    """What training did: held-out numbers before and after it, beside lookup's, and the curve."""
    layers, seed = aux_layers_of(recipe, target), recipe.train.seed
    before = build_drafter(recipe.drafter, target, layers, vocab, seed)
    after = load(recipe.run_dir / "drafter", TargetInfo.of(target))
    first, last = (
        numbers.heldout_sums(recipe, target, vocab, rows, drafter.to(target.device), num_depths)
        for drafter, num_depths in ((before, 1), (after, numbers.num_depths(recipe)))
    )
    hits, ngram_hits = (last.top1_CG, last.counts_CG), (ngram.top1_CG, ngram.counts_CG)
    alphas, ngram_alphas = (last.alpha_CG, last.counts_CG), (ngram.alpha_CG, ngram.counts_CG)
    return {
        "alpha": numbers.rates(*alphas),
        "top1": numbers.rates(*hits),
        "top1_untrained": numbers.rates(first.top1_CG, first.counts_CG),
        "rise": numbers.gain((first.top1_CG, first.counts_CG), hits),
        "over_ngram": numbers.gain(ngram_hits, hits),
        "alpha_over_ngram": numbers.gain(ngram_alphas, alphas),
        "curve": numbers.learning_curve(recipe.run_dir / "metrics.jsonl"),
    }


class Runner:
    """Measures arms, or finds what an earlier call measured."""

    def __init__(self, table: Table, target: Target) -> None:
        self.table, self.target = table, target
        self.recipe, self.shared = prepare_shared(table, target)
        self._parts: list[Part] = []
        self._ngram: numbers.Heldout | None = None

    @property
    def parts(self) -> list[Part]:
        """Held-out rows, those that the table adds included; made when they are first asked for."""
        if not self._parts:
            num_more = self.table.heldout
            self._parts = heldout_parts(self.recipe, self.shared, self.target, num_more)
        num = sum(len(rows) for rows, _ in self._parts)
        if num < MIN_HELDOUT:
            raise UserError(
                f"{num} held-out rows say nothing about spread; a larger "
                "data.num_prompts, data.heldout_fraction or heldout gives more"
            )
        return self._parts

    def heldout(self, aux_layers: tuple[int, ...]) -> list[Row]:
        """These rows with the target's states."""
        stored_as = self.recipe.data.states_dtype
        return with_stored_states(self.parts, self.target, aux_layers, stored_as)

    @property
    def ngram(self) -> numbers.Heldout:
        """Lookup's first guesses on the held-out rows."""
        if self._ngram is None:
            plan = plan_of(next(iter(self.table.arms.values())))
            lookup = make_drafters(plan, self.target, ["lookup"])["lookup"]
            self._ngram = numbers.heldout_guesses(self.target, self.heldout(()), lookup)
        return self._ngram

    def key(self, recipe: Recipe) -> str:
        """Changes with all that an arm's numbers depend on."""
        fields = recipe.model_dump(mode="json", exclude={"output_dir"})
        return stable_hash(fields | {"heldout": self.table.heldout, "numbers": NUMBERS})

    def known(self, name: str) -> dict[str, Any] | None:
        """An arm's numbers, where they are those of its recipe; its speed, where measured."""
        recipe = self.table.arms[name]
        path = recipe.run_dir / f"{name}.json"
        if not path.is_file() or (stored := read_json(path))["key"] != self.key(recipe):
            return None
        return dict(stored) | {"speed": read_speed(recipe, self.table.speed)}

    def run(self, name: str) -> None:
        """Train and measure an arm, speed left out, where that is not done."""
        recipe = self.table.arms[name]
        if self.known(name) is not None:
            return
        print(f"== {name}", file=sys.stderr)
        training: dict[str, Any] = {"alpha": None}
        if name != recipe.name:
            self.run(recipe.name)  # the drafter's own run
        elif is_trained(recipe):
            train_arm(recipe)
            vocab = prepare(recipe, self.target).vocab
            rows = self.heldout(aux_layers_of(recipe, self.target))
            training = measure_training(recipe, self.target, vocab, rows, self.ngram)
        elif name == "lookup":
            hits = numbers.rates(self.ngram.top1_CG, self.ngram.counts_CG)
            training = training | {"top1": hits}
        found = {"name": name} | acceptance(recipe, self.target) | training
        write_json(recipe.run_dir / f"{name}.json", found | {"key": self.key(recipe)})
        gc.collect()


def write_study(args: argparse.Namespace, runner: Runner) -> None:
    """study.json of all arms that are known and, where there is a document, its section."""
    table = runner.table
    recipe = next(iter(table.arms.values()))
    known = {name: runner.known(name) for name in table.arms}
    report = runner.shared.report
    study = {
        "minutes": args.minutes,
        "target": recipe.target.model,
        "num_rows": report["num_train_rows"],
        "num_train_tokens": report["num_supervised_tokens"],
        "num_heldout_rows": sum(len(rows) for rows, _ in runner.parts),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "speed": table.speed.model_dump(),
        "contrasts": table.contrasts,
        "arms": {name: arm for name, arm in known.items() if arm is not None},
    }
    write_json(args.out / "study.json", study)
    if args.docs is None or not study["arms"]:
        return
    curves = args.docs.with_suffix(".svg")
    write_text(curves, to_svg(study))
    text = args.docs.read_text(encoding="utf-8")
    write_text(args.docs, insert(text, to_markdown(study, curves.name), str(args.docs)))


def run_study(args: argparse.Namespace, table: Table, names: list[str]) -> int:
    """All arms, one after another, or the speed of some; returns how many failed."""
    target = Target.load(table.arms[names[0]].target)
    runner = Runner(table, target)
    num_failed = 0
    for name in names:
        recipe = table.arms[name]
        try:
            if args.train_only:
                if is_trained(recipe) and name == recipe.name:
                    train_arm(recipe)
                continue
            if args.speed is None:
                runner.run(name)
            elif runner.known(name) is None:
                raise UserError("measure its acceptance first, by the command without --speed")
            else:
                measure_speed(recipe, table.speed)
        except UserError as error:
            print(f"error: arm {name} is left out: {error}", file=sys.stderr)
            num_failed += 1
            continue
        write_study(args, runner)
    return num_failed


def hours(args: argparse.Namespace, table: Table, names: list[str]) -> str:
    """What is asked for, and about how long it takes from nothing."""
    if args.speed is not None:
        minutes = SPEED_MINUTES * len(names) * len(table.speed.num_draft_tokens)
        return f"speed of {len(names)} arms: about {minutes / 60:.1f} hours"
    runs = {table.arms[name].name for name in names if is_trained(table.arms[name])}
    answers = next(iter(table.arms.values())).data.max_minutes or 0
    minutes = answers + (args.minutes + START_MINUTES) * len(runs)
    if not args.train_only:
        minutes += MEASURE_MINUTES * len(names)
    return f"{len(names)} arms, {len(runs)} trained: about {minutes / 60:.1f} hours in all"


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="of training, each arm")
    parser.add_argument("--arms", nargs="*", help="names in the table; none = all")
    parser.add_argument("--speed", nargs="*", help="time these arms, which are done; none = all")
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
        names = args.speed or args.arms or list(table.arms)
        if unknown := set(names) - table.arms.keys():
            known = ", ".join(table.arms)
            raise UserError(f"no arm {', '.join(sorted(unknown))}; {args.table} has {known}")
        print(hours(args, table, names))
        return 0 if args.plan else min(run_study(args, table, names), 1)
    except (Stopped, KeyboardInterrupt):
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
