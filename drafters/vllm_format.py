"""The exported folder of an EAGLE-3 drafter, both ways, for vLLM and for the speculators library.

    config.json        what an engine reads (drafters/vllm_config.py)
    model.safetensors  the weights, under the names below
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
from data.target import DTYPES
from data.vocab import DraftVocab, check_map
from drafters.eagle3 import Eagle3
from drafters.export_info import (
    CARD,
    INFO,
    Origin,
    TargetInfo,
    load_info,
    load_origin,
    serve_command,
    write_card,
    write_info,
)
from drafters.vllm_config import (
    Form,
    build_on_meta,
    make_config,
    read_config,
    shape_faults,
    target_faults,
)
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

# Our name of a tensor: its name in the file, the same in both forms; {i} is an index.
TENSORS = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "input_norm.weight",
    "fc_norm.{i}.weight": "fc_norm.{i}.weight",
    "layers.{i}.self_attn.q_proj.weight": "layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.self_attn.k_proj.weight": "layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.self_attn.v_proj.weight": "layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.self_attn.o_proj.weight": "layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp.gate_proj.weight": "layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.down_proj.weight",
    "layers.{i}.input_layernorm.weight": "layers.{i}.input_layernorm.weight",
    "layers.{i}.hidden_norm.weight": "layers.{i}.hidden_norm.weight",
    "layers.{i}.post_attention_layernorm.weight": "layers.{i}.post_attention_layernorm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def save(
    drafter: Eagle3,
    folder: str | Path,
    form: Form,
    dtype: torch.dtype,
    target: TargetInfo,
    origin: Origin,
) -> None:
    """Write the folder, whole or not at all; an earlier export in its place is overwritten.

    Raises:
        UserError: the drafter would load as something else, does not fit its target or holds
            values that are not finite; the folder holds other files; no disk space.
    """
    folder, shape = Path(folder), drafter.config
    faults = shape_faults(shape) + target_faults(shape, target)
    if dtype not in DTYPES.values():
        faults.append(f"dtype {dtype} is none of {', '.join(DTYPES)}")
    if faults:
        raise UserError(f"{folder}: not exported: {'; '.join(faults)}")
    tensors = _named(drafter, dtype)
    faults = _shape_faults(tensors, _named(build_on_meta(shape, folder)))
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
        config = make_config(drafter, form, dtype, target, origin.num_draft_tokens)
        write_json(temporary / CONFIG, config)
        write_info(temporary, form, drafter.config, target, origin)
        write_card(temporary, folder, drafter, target, origin)


def load(
    folder: str | Path, target: TargetInfo | None = None, dtype: torch.dtype | None = None
) -> Eagle3:
    """Read either form. The drafter still needs the target's embedding (`use_embeddings`).

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
    drafter, stored = read_config(read_json(folder / CONFIG), folder / CONFIG)
    faults = target_faults(drafter.config, target) if target is not None else []
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
    faults = _shape_faults(tensors, _named(drafter))
    faults += [
        f"{name} is {t.dtype}, config.json says {stored}"
        for name, t in tensors.items()
        if t.dtype != stored
    ]
    if faults:
        raise UserError(f"{where}: {'; '.join(faults)}")
    vocab = _checked_map(d2t, t2d, drafter, where)
    ours = {
        name: tensors[_exported(name)].to(dtype or stored)
        for name in drafter.state_dict()
        if name != "d2t"
    }
    # Strict, and built without memory: no tensor can keep a value from initialisation.
    drafter.load_state_dict({**ours, "d2t": vocab.d2t}, strict=True, assign=True)
    return drafter


def _exported(name: str) -> str:
    index = re.search(r"\.(\d+)\.", name)
    if index is None:
        return TENSORS[name]
    return TENSORS[name.replace(index[0], ".{i}.", 1)].replace("{i}", index[1])


def _named(drafter: Eagle3, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The parameters under their exported names; on the CPU in `dtype` when one is given."""
    tensors = {_exported(n): t.detach() for n, t in drafter.state_dict().items() if n != "d2t"}
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


def _map_tensors(drafter: Eagle3, folder: Path) -> dict[str, Tensor]:
    """d2t and t2d; nothing for a whole vocabulary, for which vLLM refuses a map."""
    shape, d2t = drafter.config, drafter.get_buffer("d2t").cpu()
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
    d2t: Tensor | None, t2d: Tensor | None, drafter: Eagle3, where: Path
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
