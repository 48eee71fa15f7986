"""Distill a drafter: prepare what is missing, train, validate by real decoding, save.

Examples:
    accelerate launch train/distill.py recipes/smollm2.yaml
    accelerate launch train/distill.py recipes/smollm2.yaml train.lr=5e-4 --resume
    accelerate launch --config_file recipes/accelerate/ddp.yaml train/distill.py recipes/qwen3.yaml
    python train/distill.py recipes/qwen3.yaml --dry-run
    python train/distill.py recipes/qwen3.yaml --estimate 8xH100
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.progress import log_to_stderr
from recipes.errors import UserError
from recipes.schema import dump_recipe, load_recipe


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a YAML file, e.g. recipes/smollm2.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted keys, e.g. train.lr=5e-4")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done, and touch nothing"
    )
    parser.add_argument(
        "--estimate",
        metavar="GPU",
        help="print hours and memory on this GPU, e.g. H100 or 8xH100, and touch nothing",
    )
    args = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        if args.dry_run:
            from train.plan import estimates

            print(dump_recipe(recipe), flush=True)  # also where no estimate can be made
            print(estimates(recipe))
            return 0
        if args.estimate:
            from train.gpu_hours import estimate

            print(estimate(recipe, args.estimate))
            return 0
        from train.loop import Interrupted
        from train.run import run

        try:
            run(recipe, resume=args.resume)
        except Interrupted as stop:
            log_to_stderr()
            print(
                f"stopped; the state is saved in {recipe.run_dir}/checkpoints. Go on with:\n"
                f"  accelerate launch train/distill.py {args.recipe} "
                f"{' '.join(args.overrides)} --resume",
                file=sys.stderr,
            )
            return 0 if stop.signum == signal.SIGTERM else 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "stopped; what was prepared is kept. Go on with the same command (and --resume)",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
