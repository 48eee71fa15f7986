"""What an exported folder says of itself in draftsmith.json, and how it is served."""

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from data import embedded
from data.files import read_json, sha256, write_json
from data.target import Target
from drafters.base import TrainedDrafter
from recipes.errors import UserError

INFO, CARD = "draftsmith.json", "README.md"
WITH_TARGET = "-with-target"  # behind an export's name: where train/export.py --stitch writes
LAYER_IDS = (
    "aux layer id k = residual stream of the target after k decoder layers, before its final norm "
    "(0 = embeddings, n = after the last of n layers); vLLM counts alike"
)


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What an export says of its target.

    name: as in the recipe. path: the hub id or folder that an engine can load.
    eos_token_id: an id, or a list where the target has several.
    dtype: of its weights, the dtype that `export.dtype: auto` stands for.
    """

    name: str
    path: str
    revision: str | None
    architectures: list[str]
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | list[int]
    pad_token_id: int | None
    dtype: str

    @classmethod
    def of(cls, target: Target) -> "TargetInfo":
        """Read it off a loaded target."""
        name, config, eos = target.name, target.config.to_dict(), target.eos_ids
        comes_along = name.startswith(("embedded:", "random:"))
        path = embedded.resolve(name) if comes_along else str(Path(name).expanduser())
        return cls(
            name=name,
            path=str(Path(path).resolve()) if Path(path).is_dir() else path,
            revision=target.revision,
            architectures=list(target.model.config.architectures or [type(target.model).__name__]),
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            max_position_embeddings=int(config["max_position_embeddings"]),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=eos[0] if len(eos) == 1 else list(eos),
            pad_token_id=target.pad_id,
            dtype=str(target.dtype).removeprefix("torch."),
        )

    @property
    def hub_revision(self) -> str | None:
        """What an engine is to ask the hub for with `path`; None where that is a folder."""
        return None if Path(self.path).is_dir() else self.revision


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a drafter comes from, so that a result can name it.

    recipe: the resolved recipe, `recipe.model_dump(mode="json")`.
    commit: of the code; None outside a checkout.
    num_trained_tokens: places of answers that training drafted from (anchors with a supervised
        token behind them), of all steps, repeats counted; the depths of one place count once.
    num_draft_tokens: how many to propose a round, as it was evaluated.
    """

    recipe: dict[str, Any]
    commit: str | None
    versions: dict[str, str | None]
    num_trained_tokens: int
    num_draft_tokens: int


def write_info(
    folder: Path, form: str, drafter: TrainedDrafter, target: TargetInfo, origin: Origin
) -> None:
    """Write draftsmith.json."""
    head = {"schema": 1, "method": drafter.method, "form": form}
    layers = {"aux_layers": list(drafter.aux_layers), "layer_ids": LAYER_IDS}
    write_json(folder / INFO, {**head, **layers, "target": asdict(target), **asdict(origin)})


def load_info(folder: str | Path) -> dict[str, Any]:
    """draftsmith.json as it stands, complete: `target` (TargetInfo) and the fields of Origin.

    Raises:
        UserError: it is missing or not complete.
    """
    path = Path(folder) / INFO
    info = read_json(path)
    if not isinstance(info, dict) or not isinstance(info.get("target"), dict):
        raise UserError(f"{path}: missing keys: target")
    missing = [f"target.{f.name}" for f in fields(TargetInfo) if f.name not in info["target"]]
    missing += [f.name for f in fields(Origin) if f.name not in info]
    if missing:
        raise UserError(f"{path}: missing keys: {', '.join(missing)}")
    return info


def load_origin(folder: str | Path) -> tuple[TargetInfo, Origin]:
    """The target and the origin of an export, to export it again. Raises as `load_info`."""
    info = load_info(folder)
    target = TargetInfo(**{f.name: info["target"][f.name] for f in fields(TargetInfo)})
    return target, Origin(**{f.name: info[f.name] for f in fields(Origin)})


def export_hash(folder: Path) -> str:
    """Of all that an exported folder holds but its card: with other weights it is another."""
    files = sorted(file for file in folder.glob("*") if file.is_file() and file.name != CARD)
    return _hash_of(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@cache
def _hash_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    found = hashlib.sha256()
    for path, _, _ in files:
        found.update(path.name.encode() + bytes.fromhex(sha256(path)))
    return found.hexdigest()[:16]


def serve_command(
    folder: str | Path, target: TargetInfo, engine: dict[str, Any], num_draft_tokens: int
) -> str:
    """The shell line that serves the target with this drafter.

    `engine` always names the method: without it vLLM guesses one from the folder's path. An MTP
    layer is served from a copy of the target that it was joined to, so there is no model to name.
    """
    speculative = {"model": str(folder), **engine, "num_speculative_tokens": num_draft_tokens}
    served = target.path
    if engine["method"] == "mtp":
        del speculative["model"]
        served = f"{folder}{WITH_TARGET}"
    return (
        f"vllm serve {shlex.quote(served)} "
        f"--speculative-config {shlex.quote(json.dumps(speculative))}"
    )


def sglang_command(folder: str | Path, target: TargetInfo, options: list[str]) -> str:
    """The shell line that serves the target with this drafter through SGLang."""
    words = ["--model-path", target.path, "--speculative-draft-model-path", str(folder), *options]
    return "python -m sglang.launch_server " + shlex.join(words)
