"""Other people's drafters: folders without draftsmith.json, read with the engines' own defaults.

Known are the speculators forms of EAGLE-3, P-EAGLE, DFlash and DSpark, EAGLE-3 as SGLang and
SpecForge write it, EAGLE-1 and EAGLE-3 as their authors published them (pytorch_model.bin), z-lab's
DFlash, DeepSeek's DSpark, and Medusa heads by vLLM's and by the authors' names. A key that is
absent has the value that the engine gives it (drafters.foreign_config), which is told in the log. A
key or tensor that is not known is an error: it might decide what is drafted.

Dimensions: V target vocabulary, D draft vocabulary, H width.
"""

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.files import read_json
from data.target import Target
from data.vocab import DraftVocab, check_map, full_vocab
from drafters import foreign_config
from drafters.base import TrainedDrafter
from drafters.export_info import INFO, TargetInfo, load_info
from drafters.foreign_config import Read
from drafters.foreign_medusa import read_medusa, vllm_name
from drafters.methods import METHODS
from drafters.vllm_format import CONFIG, exported_name, load
from recipes.errors import UserError

log = logging.getLogger("draftsmith")

SINGLE_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
MASK_FILE = "mask_embedding.pt"  # vLLM would put it in the place of the mask token's
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class Described(NamedTuple):
    """What a result says of a drafter; what nobody wrote down is None."""

    method: str
    num_trained_tokens: int | None


def describe(folder: Path) -> Described:
    """Of an exported folder, ours or not. Raises UserError where it is no drafter known here."""
    if (folder / INFO).is_file():
        info = load_info(folder)
        return Described(info["method"], info["num_trained_tokens"])
    return Described(foreign_config.method_of(_config(folder), folder / CONFIG), None)


def load_any(folder: Path, target: Target, dtype: torch.dtype | None = None) -> TrainedDrafter:
    """Read a drafter for this target, strictly where the folder is ours, else as engines read it.

    Args:
        dtype: of the parameters; None = as stored.

    Raises:
        UserError: anything unknown or missing, or that does not fit the target.
    """
    if (folder / INFO).is_file():
        return load(folder, TargetInfo.of(target), dtype)
    drafter, notes = import_folder(folder, target, dtype)
    for note in notes:
        log.info("%s: %s", folder, note)
    return drafter


def import_folder(
    folder: Path, target: Target, dtype: torch.dtype | None = None
) -> tuple[TrainedDrafter, list[str]]:
    """Somebody else's drafter and what was assumed for it; arguments as `load_any`."""
    if (folder / MASK_FILE).is_file():
        raise UserError(f"{folder / MASK_FILE}: a mask embedding of its own is not read")
    config, where = _config(folder), folder / CONFIG
    method = foreign_config.method_of(config, where)
    tensors, weights = _tensors(folder)
    names, info = METHODS[method].form, TargetInfo.of(target)
    if method == "medusa":
        read = read_medusa(config, tensors, info, where)
        tensors = {vllm_name(n, read.fields["num_layers"]): t for n, t in tensors.items()}
    else:
        tensors = {name.replace("midlayer.", "layers.0.", 1): t for name, t in tensors.items()}
        read = foreign_config.READERS[method](config, info, where)
    drafter = _build(method, read, where)
    faults = names.faults(drafter.config) + names.target_faults(drafter.config, info)
    if faults:
        raise UserError(f"{where}: {'; '.join(faults)}")
    notes = list(read.notes)
    vocab = _vocab(tensors, drafter, weights)
    wanted = {exported_name(n, names, "vllm"): n for n in drafter.state_dict() if n != "d2t"}
    _settle_shared(tensors, wanted, drafter, target, weights, notes)
    unknown, missing = sorted(tensors.keys() - wanted), sorted(wanted.keys() - tensors)
    if unknown or missing:
        found = [f"unknown tensors: {', '.join(unknown)}"] if unknown else []
        found += [f"missing tensors: {', '.join(missing)}"] if missing else []
        raise UserError(f"{weights}: {'; '.join(found)}")
    state, shapes = {}, drafter.state_dict()
    for name, ours in wanted.items():
        if tensors[name].numel() != shapes[ours].numel():
            raise UserError(
                f"{weights}: {name} has shape {list(tensors[name].shape)}, expected "
                f"{list(shapes[ours].shape)}"
            )
        kind = dtype or tensors[name].dtype
        state[ours] = tensors[name].view(shapes[ours].shape).to(kind)
    drafter.load_state_dict({**state, "d2t": vocab.d2t}, strict=True, assign=True)
    return drafter, notes


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG}: expected a JSON object")
    return config


def _tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """All tensors of the folder, and the file to name in messages."""
    path = next((folder / name for name in SINGLE_FILES if (folder / name).is_file()), None)
    index = folder / "model.safetensors.index.json"
    if path is None and not index.is_file():
        raise UserError(f"{folder}: no weights; looked for {', '.join(SINGLE_FILES)}, {index.name}")
    try:
        if path is None:
            parts = sorted(set(read_json(index)["weight_map"].values()))
            return {n: t for part in parts for n, t in load_file(folder / part).items()}, index
        if path.suffix == ".safetensors":
            return load_file(path), path
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, KeyError) as error:
        raise UserError(f"{path or index}: cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not all(torch.is_tensor(t) for t in loaded.values()):
        raise UserError(f"{path}: expected tensors by their names")
    return loaded, path


def _build(method: str, read: Read, where: Path) -> TrainedDrafter:
    try:
        shape = TypeAdapter(foreign_config.SHAPES[method]).validate_python(read.fields)
        with torch.device("meta"):
            return METHODS[method].drafter(shape)
    except ValidationError as error:
        found = [f"{e['loc'][0]}: {e['msg']} (is {e['input']!r})" for e in error.errors()]
        raise UserError(f"{where}: {'; '.join(found)}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: no drafter has this shape: {error!r}") from error


def _vocab(tensors: dict[str, Tensor], drafter: TrainedDrafter, weights: Path) -> DraftVocab:
    """The draft vocabulary; t2d, which no engine reads, may be absent."""
    shape = drafter.config
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    D, V = shape.draft_vocab_size, shape.vocab_size
    if d2t is not None and V == D and not bool(d2t.any()):
        return full_vocab(V)  # an empty map, which SpecForge writes
    if d2t is not None and t2d is None and tuple(d2t.shape) == (D,):
        ids_D = d2t.long() + torch.arange(D)
        t2d = DraftVocab(ids_D[(ids_D >= 0) & (ids_D < V)], V).t2d
    try:
        vocab = check_map(d2t, t2d, D, V)
    except UserError as error:
        raise UserError(f"{weights}: {error}") from error
    if not vocab.is_identity and not bool(vocab.d2t.any()):
        raise UserError(f"{weights}: d2t is all zeros: the first {D} ids of {V} would be drafted")
    return vocab


def _settle_shared(
    tensors: dict[str, Tensor],
    wanted: dict[str, str],
    drafter: TrainedDrafter,
    target: Target,
    weights: Path,
    notes: list[str],
) -> None:
    """Embedding and head that the drafter takes from the target: dropped if equal, else refused.

    A head that is absent is the target's where the draft vocabulary is whole, as in vLLM.
    """
    theirs = {EMBEDDING: target.embed_weight_VH, HEAD: target.head_weight_VH}
    for name, weight_VH in theirs.items():
        if name in wanted or name not in tensors:
            continue
        own = tensors.pop(name)
        same = own.shape == weight_VH.shape and torch.equal(
            own.to(weight_VH.device, weight_VH.dtype), weight_VH
        )
        if not same:
            raise UserError(
                f"{weights}: {name} is not that of the target {target.name}; drafters with their "
                "own are not read (or is it another target?)"
            )
        notes.append(f"{name} is the target's")
    whole = drafter.config.draft_vocab_size == drafter.config.vocab_size
    if HEAD in wanted and HEAD not in tensors and whole:
        tensors[HEAD] = target.head_weight_VH.detach().cpu().clone()
        notes.append(f"{HEAD} is absent: the target's, as in vLLM")
