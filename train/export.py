"""Export the trained drafter of a run as a folder that vLLM or the speculators library loads."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.files import read_json
from data.target import DTYPES
from drafters import vllm_format
from drafters.methods import METHODS
from recipes.errors import UserError

EXAMPLES = """examples:
  python train/export.py outputs/smollm2
  python train/export.py outputs/smollm2 --format speculators --out outputs/smollm2/speculators
  python train/export.py outputs/smollm2 --checkpoint best --dtype float32 --force

RUN is the folder of a run. Its last weights lie in RUN/drafter, its best ones (where training
validated on the way) in RUN/drafter-best, in float32. What is not named is taken from the recipe
of the run; dtype auto is the target's."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: outputs/NAME")
    parser.add_argument("--format", choices=["vllm", "speculators"], help="form of config.json")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], help="of the weights")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="last")
    parser.add_argument("--force", action="store_true", help="export again what is up to date")
    return parser.parse_args()


def is_current(out: Path, source: Path, form: str, dtype: str) -> bool:
    """Whether `out` holds this form and dtype, and is no older than the weights of `source`."""
    config, weights = out / vllm_format.CONFIG, vllm_format.WEIGHTS
    if not (config.is_file() and (out / weights).is_file()):
        return False
    values = read_json(config)
    same_form = ("speculators_model_type" in values) == (form == "speculators")
    is_newer = (out / weights).stat().st_mtime_ns >= (source / weights).stat().st_mtime_ns
    return same_form and values.get("dtype") == dtype and is_newer


def main() -> None:
    """Export what the command line names."""
    args = arguments()
    source = args.run / ("drafter" if args.checkpoint == "last" else "drafter-best")
    out = args.out or args.run / "export"
    if not (source / vllm_format.WEIGHTS).is_file():
        raise UserError(
            f"{source}: no trained weights here; run train/distill.py first"
            + (" with train.validate_every above 0" if args.checkpoint == "best" else "")
        )
    if out.resolve() in {(args.run / name).resolve() for name in ("drafter", "drafter-best")}:
        raise UserError(f"{out}: holds the trained weights themselves; name another folder")
    target, origin = vllm_format.load_origin(source)
    names = METHODS[vllm_format.load_info(source)["method"]].form
    wanted = origin.recipe["export"]
    form, dtype = args.format or wanted["format"], args.dtype or wanted["dtype"]
    dtype = target.dtype if dtype == "auto" else dtype
    if not args.force and is_current(out, source, form, dtype):
        print(f"{out}: up to date ({form}, {dtype}); --force exports it again")
    else:
        drafter = vllm_format.load(source, target)
        vllm_format.save(drafter, out, form, DTYPES[dtype], target, origin)
        num_params = sum(parameter.numel() for parameter in drafter.parameters())
        size = (out / vllm_format.WEIGHTS).stat().st_size
        sizes = f"{num_params:,} {dtype} weights, {size / 1e6:.1f} MB"
        print(f"{out}: {names.title}, {form} form, {sizes}")
    print(vllm_format.serve_command(out, target, names.engine, origin.num_draft_tokens))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
