"""Export the trained drafter of a run as a folder that vLLM, SGLang or speculators loads.

With --check a folder is held against the weights it was made of instead, and against an engine.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from huggingface_hub import HfApi

from data.files import read_json
from data.target_config import DTYPES
from drafters import vllm_format
from drafters.base import TrainedDrafter
from drafters.export_form import ExportForm, Form
from drafters.export_info import WITH_TARGET
from drafters.methods import METHODS
from drafters.model_card import CardFacts, read_findings, serve_lines, write_card
from drafters.mtp_stitch import stitch, target_folder
from eval.check_export import check, to_text
from recipes.errors import UserError
from train.hub_push import push_folder

EXAMPLES = """examples:
  python train/export.py outputs/smollm2
  python train/export.py outputs/smollm2 --format sglang --out outputs/smollm2/sglang
  python train/export.py outputs/smollm2 --checkpoint best --dtype float32 --force
  python train/export.py outputs/smollm2-mtp --stitch
  python train/export.py outputs/smollm2 --push ORG/NAME
  python train/export.py outputs/smollm2/export --check
  python train/export.py outputs/smollm2/export --check --vllm-python ~/vllm/bin/python
  python train/export.py somebodys/folder --check --target Qwen/Qwen3-8B --against other/folder

RUN is the folder of a run. Its last weights lie in RUN/drafter, its best ones (where training
validated on the way) in RUN/drafter-best, in float32. What is not named is taken from the recipe
of the run; dtype auto is the target's. The model card tells of what RUN/results holds of these very
files; a later export that finds the weights up to date writes the card anew.

With --check and a vLLM (--vllm-python, or VLLM_ENV=dir as made by `make test-vllm`) fixed prompts
are decoded there too, and its drafts are held against ours. --check exits with 0 where all agrees,
else with 1 and the likely cause (2: wrong usage)."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: outputs/NAME")
    forms = ["vllm", "speculators", "sglang"]
    parser.add_argument("--format", choices=forms, help="form of config.json and names of tensors")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], help="of the weights")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="last")
    parser.add_argument("--force", action="store_true", help="export again what is up to date")
    parser.add_argument(
        "--stitch",
        action="store_true",
        help="mtp: join it to a copy of the target, OUT-with-target",
    )
    parser.add_argument("--push", metavar="ORG/NAME", help="upload the folder to the hub")
    parser.add_argument("--public", action="store_true", help="with --push: for all to see")
    parser.add_argument("--check", action="store_true", help="RUN is an exported folder: check it")
    parser.add_argument("--against", type=Path, help="with --check: folder of the right weights")
    parser.add_argument("--target", help="with --check: the target, where the folder names none")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=vllm_python(),
        help="with --check: python of an environment with vLLM (default: VLLM_ENV/bin/python)",
    )
    return parser.parse_args()


def vllm_python() -> Path | None:
    """That of the environment that VLLM_ENV names, as `make test-vllm` makes one."""
    folder = os.environ.get("VLLM_ENV")
    return Path(folder) / "bin" / "python" if folder else None


def is_current(out: Path, source: Path, drafter: TrainedDrafter, form: str, dtype: str) -> bool:
    """Whether `out` holds this drafter in this form and dtype, and is no older than `source`."""
    config, weights = out / vllm_format.CONFIG, vllm_format.WEIGHTS
    if not (config.is_file() and (out / weights).is_file()):
        return False
    if (out / weights).stat().st_mtime_ns < (source / weights).stat().st_mtime_ns:
        return False
    try:
        values = read_json(config)
        if vllm_format.form_of(values, config)[1] != form or values.get("dtype") != dtype:
            return False
        found = vllm_format.load(out)
    except UserError:  # something else lies there; saving says what
        return False
    ours, theirs = drafter.state_dict(), found.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor.to(theirs[name].dtype), theirs[name]) for name, tensor in ours.items()
    )


def form_for(names: ExportForm, drafter: TrainedDrafter, wanted: Form) -> Form:
    """The wanted form, or the plain one where SGLang reads that."""
    if wanted == "sglang" and wanted not in names.forms:
        if names.sglang(drafter.config, "vllm", 1) is None:
            raise UserError(
                f"export.format sglang: SGLang serves no {names.title} drafter of this shape"
            )
        return "vllm"
    return wanted


def export(args: argparse.Namespace) -> None:
    """Export what the command line names."""
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
    drafter = vllm_format.load(source, target)
    wanted = origin.recipe["export"]
    form = form_for(names, drafter, args.format or wanted["format"])
    dtype = args.dtype or wanted["dtype"]
    dtype, results = target.dtype if dtype == "auto" else dtype, args.run / "results"
    facts = CardFacts(names, form, drafter, target, origin, out)
    current = not args.force and is_current(out, source, drafter, form, dtype)
    if not current:
        vllm_format.save(drafter, out, form, DTYPES[dtype], target, origin, results)
        num_params = sum(parameter.numel() for parameter in drafter.parameters())
        size = (out / vllm_format.WEIGHTS).stat().st_size
        sizes = f"{num_params:,} {dtype} weights, {size / 1e6:.1f} MB"
        print(f"{out}: {names.title}, {form} form, {sizes}")
    findings = read_findings(results, out, facts)
    if current:
        write_card(out, facts, findings)
        print(f"{out}: up to date ({form}, {dtype}); --force exports it again")
    if args.stitch:
        joined = out.with_name(out.name + WITH_TARGET)
        if drafter.method != "mtp":
            raise UserError(
                f"--stitch: {drafter.method} is served from its own folder; leave it out"
            )
        stitch(target_folder(target.name, target.revision), out, joined)
        print(f"{joined}: the target with its MTP layer")
    print("\n".join(serve_lines(facts, findings).values()))
    if names.engine_note:
        print(names.engine_note)
    if args.push:
        print(push_folder(HfApi(), out, args.push, private=not args.public))


def main() -> None:
    """Export, or check an export."""
    args = arguments()
    if not args.check:
        export(args)
        return
    found = check(args.run, args.against, args.target, args.vllm_python)
    print(to_text(found))
    sys.exit(0 if found.passed else 1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
