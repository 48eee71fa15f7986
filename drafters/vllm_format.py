"""The exported folder of a drafter, both ways: for vLLM, the speculators library and SGLang.

    config.json        what an engine reads (each architecture's ExportForm)
    model.safetensors  the weights, under the names of its table
    draftsmith.json    where it comes from: target, recipe, commit, versions, tokens
    README.md          a short model card

An engine takes much that is wrong without a word: a head without its map, layer ids that it sorts,
weights that are absent. Both `save` and `load` refuse that instead.

Dimensions: V target vocabulary, D draft vocabulary.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import read_json, replace_dir, require_disk, write_json
from data.target_config import DTYPES
from data.vocab import DraftVocab, check_map
from drafters.base import TrainedDrafter
from drafters.export_form import ExportForm, Form
from drafters.export_info import (
    CARD,
    INFO,
    Origin,
    TargetInfo,
    load_info,
    load_origin,
    serve_command,
    write_info,
)
from drafters.methods import METHODS
from drafters.model_card import CardFacts, read_findings, write_card
from recipes.errors import UserError

__all__ = [
    "Form",
    "Origin",
    "TargetInfo",
    "load",
    "load_info",
    "load_origin",
    "save",
    "serve_command",
]

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save(
    drafter: TrainedDrafter,
    folder: str | Path,
    form: Form,
    dtype: torch.dtype,
    target: TargetInfo,
    origin: Origin,
    results: Path | None = None,
) -> None:
    """Write the folder, whole or not at all; an earlier export in its place is overwritten.

    Args:
        results: folder of the results that the model card tells of.

    Raises:
        UserError: the drafter would load as something else, does not fit its target or holds
            values that are not finite; the folder holds other files; no disk space.
    """
    folder, shape, names = Path(folder), drafter.config, METHODS[drafter.method].form
    faults = names.faults(shape) + names.target_faults(shape, target)
    if form not in names.forms:
        faults.append(f"form {form!r}: {names.title} is written as {' or '.join(names.forms)}")
    if dtype not in DTYPES.values():
        faults.append(f"dtype {dtype} is none of {', '.join(DTYPES)}")
    if faults:
        raise UserError(f"{folder}: not exported: {'; '.join(faults)}")
    tensors = _named(drafter, names, form, dtype)
    with torch.device("meta"):
        faults = _shape_faults(tensors, _named(METHODS[drafter.method].drafter(shape), names, form))
    faults += [f"{name} is not finite as {dtype}" for name, t in tensors.items() if not _finite(t)]
    if faults:
        raise UserError(f"{folder}: not exported: {'; '.join(faults)}")
    tensors |= _map_tensors(drafter, folder)
    _refuse_foreign_files(folder)
    require_disk(folder, sum(t.nbytes for t in tensors.values()), "exported weights")
    with replace_dir(folder.resolve()) as temporary:
        try:
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {folder / WEIGHTS}: {error}") from error
        config = names.make_config(drafter, form, dtype, target, origin.num_draft_tokens)
        write_json(temporary / CONFIG, config)
        write_info(temporary, form, drafter, target, origin)
        facts = CardFacts(names, form, drafter, target, origin, folder)
        write_card(temporary, facts, read_findings(results, temporary, facts))


def load(
    folder: str | Path, target: TargetInfo | None = None, dtype: torch.dtype | None = None
) -> TrainedDrafter:
    """Read any form. The drafter still needs its target (`use_target`).

    Args:
        folder: as `save` wrote it.
        target: to be checked against, where it is known.
        dtype: of the parameters; None = as stored. (Converting afterwards with `.to(dtype)` would
            round the rotary table as well.)

    Raises:
        UserError: anything missing, unexpected, of the wrong shape, or that does not fit together
            or to the target.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    names, form = form_of(config, folder / CONFIG)
    drafter, stored = names.read_config(config, folder / CONFIG)
    faults = names.target_faults(drafter.config, target) if target is not None else []
    if faults:
        raise UserError(f"{folder}: {'; '.join(faults)}")
    where = folder / WEIGHTS
    try:
        tensors = load_file(where)
    except FileNotFoundError as error:
        raise UserError(f"{where}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: cannot be read: {error}") from error
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    faults = _shape_faults(tensors, _named(drafter, names, form))
    faults += [
        f"{name} is {t.dtype}, config.json says {stored}"
        for name, t in tensors.items()
        if t.dtype != stored
    ]
    if faults:
        raise UserError(f"{where}: {'; '.join(faults)}")
    vocab = _checked_map(d2t, t2d, drafter, where)
    ours = {
        name: tensors[exported_name(name, names, form)].to(dtype or stored)
        for name in drafter.state_dict()
        if name != "d2t"
    }
    # Strict, and built without memory: no tensor can keep a value from initialisation.
    drafter.load_state_dict({**ours, "d2t": vocab.d2t}, strict=True, assign=True)
    return drafter


def form_of(config: object, where: Path) -> tuple[ExportForm, Form]:
    """The one architecture, and form of it, whose config.json this is.

    Raises:
        UserError: it is none that is known here.
    """
    if not isinstance(config, dict):
        raise UserError(f"{where}: expected a JSON object")
    forms = [method.form for method in METHODS.values()]
    found = [(known, form) for known in forms if (form := known.form_of(config)) is not None]
    if len(found) != 1:
        raise UserError(
            f"{where}: no drafter that is known here (architectures "
            f"{config.get('architectures')!r}, speculators_model_type "
            f"{config.get('speculators_model_type')!r}); known are "
            f"{', '.join(form.title for form in forms)}"
        )
    return found[0]


def exported_name(name: str, names: ExportForm, form: Form) -> str:
    """The file's name of one of our tensors: indices go through the table as they are."""
    if names.own_names and name.startswith(names.own_names):
        return name.removeprefix(names.own_names)
    indices = re.findall(r"\.(\d+)(?=\.)", name)
    for letter, index in zip("ij", indices, strict=False):
        name = name.replace(f".{index}.", f".{{{letter}}}.", 1)
    exported = names.names_of(form)[name]
    for letter, index in zip("ij", indices, strict=False):
        exported = exported.replace(f"{{{letter}}}", index)
    return exported


def _named(
    drafter: TrainedDrafter, names: ExportForm, form: Form, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The parameters under their exported names; on the CPU in `dtype` when one is given."""
    state = drafter.state_dict()
    tensors = {exported_name(n, names, form): t.detach() for n, t in state.items() if n != "d2t"}
    if dtype is None:
        return tensors
    return {name: t.to("cpu", dtype).contiguous() for name, t in tensors.items()}


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _shape_faults(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    missing, unexpected = sorted(expected.keys() - found), sorted(found.keys() - expected)
    faults = [f"missing tensors: {', '.join(missing)}"] if missing else []
    if unexpected:
        faults.append(f"unexpected tensors: {', '.join(unexpected)}")
    for name in sorted(expected.keys() & found):
        shape, wanted = list(found[name].shape), list(expected[name].shape)
        if shape != wanted:
            faults.append(f"{name} has shape {shape}, expected {wanted}")
    return faults


def _map_tensors(drafter: TrainedDrafter, folder: Path) -> dict[str, Tensor]:
    """d2t and t2d; nothing for a whole vocabulary, for which vLLM refuses a map."""
    shape, d2t = drafter.config, drafter.d2t.cpu()
    if shape.draft_vocab_size == shape.vocab_size:
        if bool(d2t.any()):
            raise UserError(
                f"{folder}: not exported: d2t reorders a draft vocabulary that is the whole one, "
                "and engines take no map for it"
            )
        return {}
    ids_D = d2t + torch.arange(d2t.numel())
    inside_D = ids_D[(ids_D >= 0) & (ids_D < shape.vocab_size)]
    t2d = DraftVocab(inside_D, shape.vocab_size).t2d
    return {"d2t": _checked_map(d2t, t2d, drafter, folder).d2t.contiguous(), "t2d": t2d}


def _checked_map(
    d2t: Tensor | None, t2d: Tensor | None, drafter: TrainedDrafter, where: Path
) -> DraftVocab:
    shape = drafter.config
    for name, tensor, wanted in (("d2t", d2t, torch.int64), ("t2d", t2d, torch.bool)):
        if tensor is not None and shape.draft_vocab_size == shape.vocab_size:
            raise UserError(f"{where}: unexpected tensors: {name} (the draft vocabulary is whole)")
        if tensor is not None and tensor.dtype != wanted:
            raise UserError(f"{where}: {name} is {tensor.dtype}, expected {wanted}")
    try:
        vocab = check_map(d2t, t2d, shape.draft_vocab_size, shape.vocab_size)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not vocab.is_identity and not bool(vocab.d2t.any()):
        raise UserError(
            f"{where}: d2t is all zeros, so the {vocab.size} draft ids would stand for the first "
            f"{vocab.size} target ids; set it from the draft vocabulary"
        )
    return vocab


def _refuse_foreign_files(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; name another folder for the export")
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if name not in (CONFIG, WEIGHTS, INFO, CARD)]
    if names and INFO not in names:
        foreign = names  # somebody else's model has a config.json too
    if foreign:
        raise UserError(
            f"{folder}: not overwritten, it holds files that no export of ours wrote: "
            f"{', '.join(foreign)}; name another folder"
        )
