"""Prepare the data of a recipe: prompts, the target's own answers, rows, vocabulary, states.

Examples:
    python data/prepare.py recipes/smollm2.yaml
    python data/prepare.py recipes/smollm2.yaml data.num_prompts=500
    python data/prepare.py recipes/smollm2.yaml --show 3
    python data/prepare.py recipes/smollm2.yaml --estimate
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.text import Text

from data.batch import Row
from data.pipeline import data_dir, prepare
from data.progress import log_to_stderr
from data.target import Target
from recipes.errors import UserError
from recipes.schema import load_recipe


def show(row: Row, target: Target, console: Console) -> None:
    """One row; supervised tokens are green, the others grey, special tokens visible."""
    text = Text()
    for token, supervised in zip(row.ids_S.tolist(), row.mask_S.tolist(), strict=True):
        piece = str(target.tokenizer.decode([token]))
        text.append(piece, style="bold green" if supervised else "bright_black")
    console.rule(f"{row.id}: {int(row.mask_S.sum())} of {len(row.ids_S)} tokens supervised")
    console.print(text)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a YAML file, e.g. recipes/smollm2.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted keys, e.g. data.num_prompts=500")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N rows, coloured")
    parser.add_argument(
        "--estimate", action="store_true", help="rows, tokens and bytes at most; touches nothing"
    )
    args = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        log_to_stderr()
        if args.estimate:
            from data.estimate import estimate_data

            print(estimate_data(recipe))
            return 0
        target = Target.load(recipe.target)
        prepared = prepare(recipe, target)
        for row in prepared.train[: args.show]:
            show(row, target, Console())
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
