"""An MTP layer among the target's own tensors, where engines look for it.

vLLM runs MiMo's form (vllm/model_executor/models/mimo.py): a Qwen2 with `model.mtp_layers.0.*`.
A Llama or Mistral is a Qwen2 whose biases are zero, so a layer trained for one of them is served in
that form too. Targets with norms of queries and keys (Qwen3), windows or a head width of their own
have no such form: there an MTP layer runs in this project's own loop only.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data import embedded
from data.files import read_json, replace_dir, require_disk, write_json
from data.target_config import DTYPES
from recipes.errors import UserError

PREFIX = "model.mtp_layers."
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OURS, COPY = "mtp.safetensors", "target.safetensors"
SERVED = ("mimo", "qwen2", "llama", "mistral")  # decoder layers that MiMo's form can hold
NOT_COPIED = (INDEX, "config.json")


def weight_map(folder: Path) -> dict[str, str]:
    """Every tensor of a model's folder: the file that holds it.

    Raises:
        UserError: there are no safetensors files, or one cannot be read.
    """
    if (folder / INDEX).is_file():
        return dict(read_json(folder / INDEX)["weight_map"])
    try:
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: no safetensors weights can be read there: {error}") from error


def read_native(model: str, revision: str | None, names: list[str]) -> dict[str, Tensor]:
    """The named MTP tensors of a target's own files.

    Raises:
        UserError: the target brings none, or not all of them.
    """
    folder = target_folder(model, revision)
    files = weight_map(folder)
    missing = [name for name in names if name not in files]
    if missing:
        raise UserError(
            f"drafter.init 'native': {model} has no {missing[0]} ({len(missing)} of {len(names)} "
            "tensors of an MTP layer in MiMo's form are missing); use init: target or random"
        )
    found: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in names}):
        with safe_open(folder / file, "pt") as tensors:
            found |= {n: tensors.get_tensor(n) for n in names if files[n] == file}
    return found


def target_folder(model: str, revision: str | None) -> Path:
    """Where a target's files lie; a hub model's weights are fetched if they are not there."""
    folder = Path(embedded.resolve(model)).expanduser()
    if folder.is_dir():
        return folder
    wanted = ["*.safetensors", "*.json", "*.py", "*.txt", "*.model", "*.jinja"]
    return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))


def stitch(source: Path, drafter_folder: Path, out: Path) -> None:
    """Write a copy of the target with an exported MTP layer in it, as vLLM serves it.

    Serve it with `--speculative-config '{"method": "mtp", "num_speculative_tokens": K}'`; there is
    no model to name. An MTP layer that the target brings is replaced; everything else stays as it
    is, but that biases of zero are added where MiMo's form has some and the target has none.

    Raises:
        UserError: the target has another shape than that form can hold, the layer is not for it,
            or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists; name a folder that does not")
    config = read_json(source / "config.json")
    _require_served(config, source)
    layer_config = read_json(drafter_folder / "config.json")
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if layer_config.get(key) != config[key]:
            raise UserError(
                f"{drafter_folder}: {key} is {layer_config.get(key)}, that of {source} is "
                f"{config[key]}: the layer was trained for another target"
            )
    kind = DTYPES[config.get("dtype") or config.get("torch_dtype") or "float32"]
    layer = load_file(drafter_folder / SINGLE)
    added = {name: tensor.to(kind) for name, tensor in layer.items()}
    old = {n: f for n, f in weight_map(source).items() if not n.startswith(PREFIX)}
    rewritten = {f for n, f in weight_map(source).items() if n.startswith(PREFIX)}
    added |= _zero_biases(config, {*old, *added}, kind)
    if "lm_head.weight" not in old:  # vLLM reads the layer's head from the file alone
        with safe_open(source / old["model.embed_tokens.weight"], "pt") as file:
            added["lm_head.weight"] = file.get_tensor("model.embed_tokens.weight").to(kind)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    require_disk(out, size + sum(t.nbytes for t in added.values()), "target with its MTP layer")
    with replace_dir(out.resolve()) as temporary:
        for file in sorted(source.iterdir()):
            if not file.is_file() or file.name in NOT_COPIED:
                continue
            name = _new_name(file.name)
            if file.name in rewritten:
                kept = {n: t for n, t in load_file(file).items() if not n.startswith(PREFIX)}
                save_file(kept, temporary / name, metadata={"format": "pt"})
            else:
                shutil.copyfile(file, temporary / name)
        save_file(added, temporary / OURS, metadata={"format": "pt"})
        files = {n: _new_name(f) for n, f in old.items()} | dict.fromkeys(added, OURS)
        total = sum((temporary / file).stat().st_size for file in set(files.values()))
        write_json(temporary / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
        write_json(temporary / "config.json", served_config(config))


def _new_name(name: str) -> str:
    """transformers reads no index where there is a single file of this name."""
    return COPY if name == SINGLE else name


def served_config(config: dict[str, Any]) -> dict[str, Any]:
    """The target's config.json, as that of a MiMo with one MTP layer."""
    changed: dict[str, Any] = {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    if config["model_type"] != "mimo":  # whose own config needs code from its repository
        changed["model_type"] = "qwen2"
    return json.loads(json.dumps({**config, **changed}))


def _require_served(config: dict[str, Any], where: Path) -> None:
    kind = config.get("model_type")
    faults = [] if kind in SERVED else [f"model_type {kind!r} is none of {', '.join(SERVED)}"]
    if not faults:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if (config.get("head_dim") or width // heads) * heads != width:
            faults.append(f"head_dim {config['head_dim']} is not hidden_size / heads")
        if kind == "mistral" and config.get("sliding_window"):
            faults.append("its attention has a window")
        if config.get("attention_bias") and kind == "llama":
            faults.append("the output projection of its attention has a bias")
        if config.get("mlp_bias"):
            faults.append("its MLPs have biases")
    if faults:
        raise UserError(
            f"{where}: no engine runs an MTP layer on this target: {'; '.join(faults)}. The layer "
            "runs in eval/bench.py (engine torch) only; train eagle3 or dflash to serve"
        )


def _zero_biases(config: dict[str, Any], names: set[str], kind: torch.dtype) -> dict[str, Tensor]:
    """Biases that MiMo's form has and the target or its layer has not."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_width = (config.get("num_key_value_heads") or heads) * (width // heads)
    prefixes = [f"model.layers.{i}." for i in range(config["num_hidden_layers"])] + [PREFIX + "0."]
    zeros = {}
    for prefix in prefixes:
        for letter, size in (("q", width), ("k", kv_width), ("v", kv_width)):
            name = f"{prefix}self_attn.{letter}_proj.bias"
            if name not in names:
                zeros[name] = torch.zeros(size, dtype=kind)
    return zeros
