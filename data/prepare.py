"""Prepare the data of a recipe: prompts, the target's own answers, rows, vocabulary, states.

Examples:
    python data/prepare.py recipes/smollm2.yaml
    python data/prepare.py recipes/smollm2.yaml data.num_prompts=500
    python data/prepare.py recipes/smollm2.yaml --show 5
    python data/prepare.py recipes/smollm2.yaml --report
    python data/prepare.py recipes/smollm2.yaml --estimate
    python data/prepare.py recipes/smollm2.yaml --verify
    torchrun --nproc_per_node 8 data/prepare.py recipes/qwen3.yaml target.placement=sharded

--show and --report need the tokenizer alone where the rows are there already or the answers are the
source's own (data.regenerate: false); nothing is prepared then.
"""

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from data.data_report import write_report
from data.hidden_states import stored_states
from data.look import Look, look_at
from data.pipeline import data_dir, prepare, prepare_together
from data.progress import log_to_stderr
from data.row_summary import summarize
from data.target import Target
from data.target_config import resolve_device
from data.target_parts import join_processes, wait_for_all
from data.viewer import row_text, row_title
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe


def view(recipe: Recipe, num_rows: int, report: bool) -> None:
    """Print rows and write the page; prepares first where the answers are still to be written."""
    look = look_at(recipe, report)
    if look is None:
        prepare(recipe, Target.load(recipe.target))
        look = look_at(recipe, report)
    if look is None:
        raise UserError(f"{data_dir(recipe)}: no rows; run it without --show and --report")
    rows = shown(look, num_rows)
    if not report:
        deque(rows, maxlen=0)
        return
    summary = summarize(chain(rows, look.rows), look.vocab_size)
    path = data_dir(recipe) / "report.html"
    title = f"{recipe.name}: rows for {recipe.target.model}"
    write_report(path, title, summary, look.read(), look.tokenizer, look.eos_ids)
    print(f"report: {path}")


def shown(look: Look, num_rows: int) -> Iterator[dict[str, Any]]:
    """The first rows, each printed as it passes; no row behind them is read."""
    console = Console(highlight=False)
    for row in islice(look.rows, num_rows):
        console.rule(row_title(row))
        console.print(row_text(look.tokenizer, row), soft_wrap=True)
        yield row


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a YAML file, e.g. recipes/smollm2.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted keys, e.g. data.num_prompts=500")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print N rows, what is learned marked"
    )
    parser.add_argument("--report", action="store_true", help="write RUN/data/report.html")
    parser.add_argument(
        "--estimate", action="store_true", help="rows, tokens and bytes at most; touches nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare all stored states with their checksums"
    )
    args = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        device = resolve_device(recipe.target.device)
        rank, world = join_processes(device)
        log_to_stderr(rank == 0)
        if world > 1 and (args.estimate or args.verify or args.show > 0 or args.report):
            raise UserError("--show, --report, --estimate, --verify: start one process for these")
        if args.estimate:
            from data.estimate import estimate_data

            print(estimate_data(recipe))
            return 0
        if args.verify:
            num_shards = stored_states(data_dir(recipe)).verify()
            print(f"states: {num_shards} shards are as they were written")
            return 0
        if args.show > 0 or args.report:
            view(recipe, args.show, args.report)
            return 0
        prepare_together(recipe, Target.load(recipe.target), rank, world, wait_for_all)
        if rank == 0:
            print(f"data: {data_dir(recipe)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was written is kept, the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
