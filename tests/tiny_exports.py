"""A tiny EAGLE-3 drafter, its target and its exported folder, to be damaged in tests."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.vllm_format import Origin, TargetInfo, save
from recipes.schema import load_recipe

ROOT = Path(__file__).resolve().parents[1]
H, V, D = 32, 200, 64
SHAPE: dict[str, Any] = {
    "target_hidden_size": H,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "draft_vocab_size": D,
    "aux_layers": (2, 4, 5),
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
}
TARGET = TargetInfo(
    name="org/tiny",
    path="org/tiny",
    revision="abc123",
    architectures=["LlamaForCausalLM"],
    vocab_size=V,
    hidden_size=H,
    num_layers=8,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=[2, 7],
    pad_token_id=0,
    dtype="bfloat16",
)
ORIGIN = Origin(
    recipe=load_recipe(ROOT / "recipes" / "smoke.yaml").model_dump(mode="json"),
    commit="0123abc",
    versions={"torch": "2", "vllm": None},
    num_trained_tokens=12345,
    num_draft_tokens=3,
)


def make(**changes: Any) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(Eagle3Config(**(SHAPE | changes)))
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if drafter.config.draft_vocab_size == D:
        drafter.get_buffer("d2t").copy_(torch.arange(D) * 2 + 1)  # draft id i = target id 3i + 1
    return drafter


def write(drafter: Eagle3, folder: Path, form: Any = "vllm", dtype=torch.float32, **target) -> Path:
    save(drafter, folder, form, dtype, replace(TARGET, **target), ORIGIN)
    return folder


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
