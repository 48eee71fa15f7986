"""Folders that others publish: read with the engines' defaults, refused where not all is known."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.target import Target
from drafters.foreign import describe, import_folder, load_any
from drafters.vllm_format import load
from recipes.errors import UserError
from tests.exports_of_all import FORMS, export, foreign, four_layer_target, make

TRAINING_ONLY = {"keep_ratio", "min_keep_ratio", "feature_weight", "noise"}


@pytest.fixture(scope="module")
def target() -> Target:
    return four_layer_target()


def same(one: Any, two: Any) -> None:
    shapes = [
        {k: v for k, v in d.config.to_dict().items() if k not in TRAINING_ONLY} for d in (one, two)
    ]
    assert shapes[0] == shapes[1]
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(config))


def eagle3(target: Target, tmp_path: Path, form: Any = "vllm", **changes: Any) -> tuple[Any, Path]:
    drafter = make("eagle3", target, **changes)
    return drafter, foreign(export(drafter, target, tmp_path / "own", form), tmp_path / "theirs")


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_round_trip_in_both_directions(method, form, target, tmp_path):
    drafter = make(method, target)
    folder = foreign(export(drafter, target, tmp_path / "own", form), tmp_path / "theirs")
    imported, notes = import_folder(folder, target)
    same(drafter, imported)
    assert notes == []
    assert describe(folder) == (method, None)
    same(drafter, load(export(imported, target, tmp_path / "back", form)))


def test_eagles_own_pytorch_model_bin(target, tmp_path):
    drafter, folder = eagle3(target, tmp_path, "sglang", aux_layers=[1, 2, 3])
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    edit(folder, architectures=["LlamaForCausalLM"])
    same(drafter, load_any(folder, target))


def test_p34_layer_ids_of_specforge_alone_are_indices(target, tmp_path):
    drafter, folder = eagle3(target, tmp_path, "sglang")
    edit(folder, eagle_aux_hidden_state_layer_ids="gone")
    imported, notes = import_folder(folder, target)
    assert imported.aux_layers == drafter.aux_layers == (1, 2, 3)
    assert "are indices: residual streams [1, 2, 3]" in notes[0]


def test_absent_keys_have_the_engines_defaults(target, tmp_path):
    _, folder = eagle3(target, tmp_path, "speculators", aux_layers=[1, 2])
    edit(folder, norm_before_residual="gone", fc_norm="gone")
    imported, notes = import_folder(folder, target)
    assert imported.config.norm_before_residual is True  # vLLM's, in this form
    assert "norm_before_residual is absent: True (vLLM)" in notes


def test_p31_p80_unknown_keys_and_tensors_are_listed(target, tmp_path):
    _, folder = eagle3(target, tmp_path)
    edit(folder, mixture="of experts", router_z=2)
    with pytest.raises(UserError, match=r"mixture = 'of experts', router_z = 2"):
        import_folder(folder, target)
    edit(folder, mixture="gone", router_z="gone")
    tensors = load_file(folder / "model.safetensors")
    more = {**tensors, "gate.weight": torch.ones(2)}
    save_file(more, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"unknown tensors: gate\.weight"):
        import_folder(folder, target)
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="no d2t and t2d"):
        import_folder(folder, target)


def test_embedding_must_be_the_targets(target, tmp_path):
    drafter, folder = eagle3(target, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = target.embed_weight_VH.clone()
    save_file(tensors, folder / "model.safetensors")
    imported, notes = import_folder(folder, target)
    same(drafter, imported)
    assert notes == ["embed_tokens.weight is the target's"]
    tensors["embed_tokens.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"embed_tokens\.weight is not that of the target"):
        import_folder(folder, target)


def test_medusa_by_its_authors_names(target, tmp_path):
    drafter = make("medusa", target)
    tensors = {}
    for name, weight in drafter.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            tensors[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = weight
        elif parts[0] == "lm_heads":
            tensors[f"{parts[1]}.1.weight"] = weight
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    imported, notes = import_folder(tmp_path, target)
    same(drafter, imported)
    assert notes == ["the config names 2 heads, the weights hold 3: these count"]
