"""Checks of an export: any one damage is refused with its reason, any one misreading is named."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.target import Target
from data.vocab import full_vocab
from drafters.base import TrainedDrafter
from drafters.methods import METHODS, build_drafter
from eval import check_export
from eval.ask_vllm import ask_vllm
from eval.check_export import (
    Checked,
    EngineRun,
    against_engine,
    check,
    engine_anchors,
    fixed_prompts,
    folder_faults,
    to_text,
)
from eval.decode import DecodeSettings, decode
from eval.reading_faults import Reading, agreement, as_read, drafts_of, make_row, readings
from recipes.drafter_sections import MTPSection
from recipes.errors import UserError
from recipes.lm_sections import PardSection, SmallLMSection
from recipes.schema import TargetSection
from tests.exports_of_all import (
    FORMS,
    NUM_DRAFT,
    SECTIONS,
    export,
    foreign,
    four_layer_target,
    leaves,
    make,
    set_leaf,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return four_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_export, "NUM_PROMPTS", 1)
    monkeypatch.setattr(check_export, "NUM_TOKENS", 16)


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_p78_p80_any_one_damaged_key_or_tensor_is_refused(method, form, target, tmp_path):
    whole = export(make(method, target), target, tmp_path / "whole", form)
    assert folder_faults(whole) == []
    config = json.loads((whole / "config.json").read_text())
    (folder := tmp_path / "damaged").mkdir()
    for name in ("config.json", "model.safetensors", "draftsmith.json"):
        shutil.copy(whole / name, folder / name)
    for path in leaves(config):
        if path[-1] == "transformers_version":
            continue
        for change in (None, lambda _: "damaged"):
            shutil.copy(whole / "config.json", folder / "config.json")
            set_leaf(folder, path, change)
            faults = folder_faults(folder)
            assert faults and str(folder) in faults[0], path
    shutil.copy(whole / "config.json", folder / "config.json")
    tensors = load_file(whole / "model.safetensors")
    for name, tensor in tensors.items():
        rest = {n: t for n, t in tensors.items() if n != name}
        for damaged in (
            rest,
            {**rest, name: tensor[:-1].clone()},
            {**rest, f"model.{name}": tensor},
        ):
            save_file(damaged, folder / "model.safetensors")
            faults = folder_faults(folder)
            assert faults and (name in faults[0] or "d2t" in faults[0]), name


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_p77_export_of_each_method_agrees_with_its_weights(method, form, target, tmp_path):
    drafter = make(method, target)
    export(drafter, target, tmp_path / "drafter")
    folder = export(drafter, target, tmp_path / "export", form, torch.bfloat16)
    found = check(folder, None, None, None)
    assert found.passed, to_text(found)
    assert any("drafts: all" in line for line in found.lines)


@pytest.mark.parametrize(
    ("named", "wanted"), [(None, ("org/name", "0a1b2c3")), ("org/other", ("org/other", None))]
)
def test_target_is_loaded_at_the_revision_of_the_export(
    named, wanted, target, tmp_path, monkeypatch
):
    folder = export(make("eagle3", target), target, tmp_path / "export")
    info = json.loads((folder / "draftsmith.json").read_text())
    info["target"] |= {"name": "org/name", "revision": "0a1b2c3"}
    (folder / "draftsmith.json").write_text(json.dumps(info))
    loaded = []

    def load(section: TargetSection) -> Target:
        loaded.append((section.model, section.revision))
        return target

    monkeypatch.setattr(Target, "load", load)
    assert check(folder, None, named, None).passed
    assert loaded == [wanted]


@pytest.mark.parametrize("method", ["mtp", "small_lm", "pard"])
def test_export_without_fields_of_its_own_agrees_with_its_weights(method, target, tmp_path):
    section = {"mtp": MTPSection, "small_lm": SmallLMSection, "pard": PardSection}[method]()
    full = full_vocab(target.vocab_size)
    drafter = build_drafter(section, target, section.default_aux_layers(4), full, seed=0).eval()
    export(drafter, target, tmp_path / "drafter")
    folder = export(drafter, target, tmp_path / "export", dtype=torch.bfloat16)
    found = check(folder, None, None, None)
    assert found.passed, to_text(found)
    assert any("drafts: all" in line for line in found.lines)
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].dim())
    save_file(tensors | {name: -tensors[name]}, folder / "model.safetensors", {"format": "pt"})
    faults = check(folder, None, None, None).faults
    assert any(fault.startswith("tensors that are not those of") for fault in faults)


def plant_tensor(name: str, change: Any) -> Any:
    def plant(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "model.safetensors")

    return plant


def plant_map(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] -= 1
    tensors["t2d"] = tensors["t2d"].roll(-1)
    save_file(tensors, folder / "model.safetensors")


PLANTED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "p34_layer_ids": ("layer ids", {"aux_layers": (0, 1, 2)}, None),
    "p75_rope": ("RoPE", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
    "norm_switch": ("norm switches", {"norm_before_residual": True}, None),
    "norm_output": ("norm switches", {"norm_output": True}, None),
    "p35_final_norm": ("final norm", {}, plant_tensor("norm.weight", torch.ones_like)),
    "p24_d2t": ("d2t", {}, plant_map),
}


@pytest.mark.parametrize("name", PLANTED)
def test_fault_planted_in_a_folder_is_named(name, target, tmp_path):
    cause, changes, plant = PLANTED[name]
    drafter = make("eagle3", target)
    export(drafter, target, tmp_path / "drafter")
    other = METHODS["eagle3"].drafter(replace(drafter.config, **changes))
    other.load_state_dict(drafter.state_dict())
    folder = export(other, target, tmp_path / "export")
    if plant is not None:
        plant(folder)
    found = check(folder, None, None, None)
    assert not found.passed
    assert found.causes == [cause], to_text(found)


def misread(drafter: TrainedDrafter, target: Target) -> dict[str, Reading]:
    return {f"{r.cause}: {r.what}": r for r in readings(drafter, target)}


MISREADINGS = {
    "eagle3": [
        "layer ids: one layer too early",
        "layer ids: one layer too late",
        "layer ids: in reverse order",
        "final norm: its weights are lost",
        "RoPE: its base is reset to 10000",
        "RoPE: its scaling is dropped",
        "norm switches: norm_before_residual is read as true",
        "norm switches: norm_output is read as true",
        "norm switches: norm_before_fc is read as true",
        "norm switches: fc_norm is read as true",
        "d2t: it is lost, so draft ids stand for the first target ids",
        "d2t: offsets are read as ids",
        "head: the first rows of the target's are taken",
    ],
    "p_eagle": ["layer ids: one layer too early", "RoPE: its base is reset to 10000"],
    "eagle1": ["layer ids: one layer too early", "final norm: features are normed twice"],
    "medusa": ["layer ids: one layer too early", "final norm: features are normed twice"],
    "dflash": ["layer ids: one layer too early", "RoPE: it is all defaults"],
    "dspark": ["layer ids: one layer too early", "final norm: its weights are lost"],
}


def engine_like(reading: Reading, target: Target, prompts: list[list[int]]) -> EngineRun:
    """The greedy text, and drafts along it, of an engine that reads the drafter in this way."""
    outputs, drafts = [], []
    for ids in prompts:
        output = decode(target, None, [ids], DecodeSettings(max_new_tokens=16))[0][0].ids
        everywhere = make_row(target, ids + output, list(range(len(ids), len(ids) + len(output))))
        made = drafts_of(reading, [everywhere], NUM_DRAFT)[0]
        anchors: list[list[int]] = []
        place = 0
        while place < len(output):
            anchors.append(made[place])
            place += 1 + next(
                (i for i, (a, b) in enumerate(zip(made[place], output[place + 1 :], strict=False))
                 if a != b),
                min(NUM_DRAFT, len(output) - place - 1),
            )  # fmt: skip
        outputs.append(output)
        drafts.append(anchors)
    return EngineRun(outputs, drafts)


@pytest.mark.parametrize(("method", "name"), [(m, n) for m in MISREADINGS for n in MISREADINGS[m]])
def test_an_engines_misreading_is_named(method, name, target):
    drafter = make(method, target)
    prompts = fixed_prompts(drafter)[:1]
    run = engine_like(misread(drafter, target)[name], target, prompts)
    found = Checked()
    against_engine(found, "an engine", target, drafter, prompts, run, NUM_DRAFT)
    assert not found.passed
    assert found.causes == [name.split(":")[0]], to_text(found)
    assert name in found.faults[0] and "100% would be" in found.faults[0]


@pytest.mark.parametrize("method", SECTIONS)
def test_an_engine_that_reads_it_rightly_passes(method, target):
    drafter = make(method, target)
    prompts = fixed_prompts(drafter)[:1]
    run = engine_like(as_read(drafter), target, prompts)
    found = Checked()
    against_engine(found, "an engine", target, drafter, prompts, run, NUM_DRAFT)
    assert found.passed, to_text(found)
    assert found.lines[0].startswith("an engine's drafts: all")


def test_an_engine_with_another_target_is_told_apart(target):
    drafter = make("eagle3", target)
    prompts = fixed_prompts(drafter)[:1]
    run = engine_like(as_read(drafter), target, prompts)
    run.outputs[0][3] = (run.outputs[0][3] + 1) % target.vocab_size
    found = Checked()
    against_engine(found, "an engine", target, drafter, prompts, run, NUM_DRAFT)
    assert "the target itself says something else" in found.faults[0]


def test_engine_drafts_stand_behind_what_was_accepted():
    output = [10, 11, 12, 13, 14, 15]
    drafts = [[11, 12, 99], [14, 99, 99], [7, 7, 7]]  # 2 and 1 accepted: places 0, 3, 5
    assert engine_anchors([1, 2], output, drafts) == [2, 5, 7]


def test_agreement_compares_as_far_as_both_go():
    assert agreement([[[1, 2, 3], [4, 5]]], [[[1, 2], [4, 6]]]) == 0.5


def test_folder_of_another_draftsmith_json_is_refused(target, tmp_path):
    folder = export(make("eagle3", target), target, tmp_path / "export")
    info = json.loads((folder / "draftsmith.json").read_text())
    (folder / "draftsmith.json").write_text(json.dumps(info | {"aux_layers": [1, 2, 4]}))
    assert "aux_layers is [1, 2, 4], config.json says [1, 2, 3]" in folder_faults(folder)[0]


def test_folder_of_somebody_else_is_read_for_a_named_target(target, tmp_path):
    drafter = make("eagle3", target)
    folder = foreign(export(drafter, target, tmp_path / "own"), tmp_path / "theirs")
    with pytest.raises(UserError, match="names no target; give --target"):
        check(folder, None, None, None)
    found = check(folder, tmp_path / "own", target.name, None)
    assert found.passed, to_text(found)
    assert "not ours" in found.lines[0]


def test_paths_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        check(tmp_path / "nowhere", None, None, None)
    with pytest.raises(UserError, match=r"--vllm-python .*: no such file"):
        check(tmp_path, None, None, tmp_path / "python")


def fake_vllm(folder: Path, body: str) -> Path:
    """An interpreter that does this instead of running eval/vllm_drafts.py."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    return python


def test_an_engine_that_fails_is_quoted(tmp_path):
    python = fake_vllm(tmp_path, "echo 'No module named vllm' >&2; exit 1")
    with pytest.raises(UserError, match=r"python does not run:\nNo module named vllm"):
        ask_vllm(python, {})


@pytest.mark.parametrize(
    ("method", "device", "passed", "message"),
    [
        ("dspark", "cpu", True, "not compared, this one runs on a CPU; vLLM serves DSpark with"),
        ("dspark", "cuda", False, "vLLM does not serve .*: size mismatch"),
        ("eagle3", "cpu", False, "vLLM does not serve .*: size mismatch"),
    ],
)
def test_a_refused_folder_is_a_fault_but_where_the_machine_is_the_reason(
    method, device, passed, message, target, tmp_path
):
    answer = {"device": device, "jobs": {"check": {"error": "size mismatch"}}}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    python = fake_vllm(tmp_path, f"cp {tmp_path}/answer.json $3")
    folder = export(make(method, target), target, tmp_path / "export")
    found = check(folder, None, None, python)
    assert found.passed == passed
    assert re.search(message, to_text(found)), to_text(found)
