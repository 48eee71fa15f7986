"""Every launcher with two processes: the losses of one, exact resume, whole exports, no hang.

One launch an engine does it all (tests/rank_runs.py), since starting costs most of the time. The
reference is one process with twice the accumulation, in this process.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from data.hidden_states import StateStore
from drafters import vllm_format
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe
from tests.rank_runs import poison
from train.run import make_accelerator, run_with

pytestmark = pytest.mark.slow  # each launch takes ten seconds to import what it needs

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
DATA = [
    "data.num_prompts=16",
    "data.max_new_tokens=10",
    "train.micro_batch_size=1",
    "train.validate_prompts=3",
    "log.every=1",
]
TWICE = "train.gradient_accumulation=2"
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


def recipe_of(folder: Path, name: str, *more: str) -> Recipe:
    smoke = ROOT / "recipes/smoke.yaml"
    return load_recipe(smoke, [f"output_dir={folder}", f"name={name}", *DATA, *more])


def alone(folder: Path, name: str, *more: str, resume: bool = False) -> None:
    """A run in this process."""
    recipe = recipe_of(folder, name, TWICE, *more)
    run_with(make_accelerator(recipe), recipe, resume)


def column(folder: Path, key: str) -> list[Any]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter/model.safetensors")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process: straight, and one with a damaged row."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("one")
    alone(folder, "straight")
    shutil.copytree(folder / "straight/data", folder / "poisoned/data")
    rows = map(json.loads, (folder / "straight/data/rows.jsonl").read_text().splitlines())
    row_id = next(row["id"] for row in rows if row["split"] == "train")
    (folder / "row.txt").write_text(row_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateStore, "get", StateStore.get)  # put back afterwards
        poison(row_id)
        alone(folder, "poisoned", "train.max_steps=8")
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def two(
    request: pytest.FixtureRequest, one: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """The same runs by two processes: engine, folder, what they printed."""
    engine, folder = request.param, tmp_path_factory.mktemp(request.param)
    for name in ("straight", "resumed", "crossed", "poisoned"):
        source = "poisoned" if name == "poisoned" else "straight"
        shutil.copytree(one / source / "data", folder / name / "data")
    shutil.copytree(one / "straight/checkpoints/step-10", folder / "crossed/checkpoints/step-10")
    shutil.copy(one / "row.txt", folder)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", f"recipes/accelerate/{engine}.yaml", "tests/rank_runs.py"]
    done = subprocess.run(
        [*command, str(folder), *DATA],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return engine, folder, done.stdout + done.stderr


def test_p53_p64_two_processes_take_the_steps_of_one(one: Path, two: Any) -> None:
    engine, folder, _ = two
    facts = json.loads((folder / "facts.json").read_text())
    assert (
        facts
        == {
            "ddp": {"world": 2, "zero": 0, "divided": False},
            "zero1": {"world": 2, "zero": 1, "divided": False},
            "zero2": {"world": 2, "zero": 2, "divided": False},
            "zero3": {"world": 2, "zero": 3, "divided": True},
            "fsdp2": {"world": 2, "zero": 0, "divided": True},
        }[engine]
    )
    for key in ("loss", "grad_norm"):
        expected = column(one / "straight", key)
        assert len(expected) == 20
        assert column(folder / "straight", key) == pytest.approx(expected, rel=1e-5)
    # 14 rows a pass: with 2 a step they come out even; see below for a pass that does not.
    for key in ("rows", "num_tokens", "lr", "epoch"):
        assert column(folder / "straight", key) == column(one / "straight", key)
    for key in ("valid/loss", "valid/tau"):
        expected = column(one / "straight", key)
        assert column(folder / "straight", key) == pytest.approx(expected, rel=1e-5)


def test_p63_resumed_runs_end_alike(one: Path, two: Any, tmp_path: Path) -> None:
    _, folder, _ = two
    straight, resumed = weights(folder / "straight"), weights(folder / "resumed")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert column(folder / "resumed", "loss") == column(folder / "straight", "loss")[10:]
    # What one process began, two of any engine go on with, and the other way round.
    expected = column(one / "straight", "loss")[10:]
    assert column(folder / "crossed", "loss") == pytest.approx(expected, rel=1e-5)
    shutil.copytree(folder / "straight/data", tmp_path / "back/data")
    checkpoint = tmp_path / "back/checkpoints/step-10"
    shutil.copytree(folder / "straight/checkpoints/step-10", checkpoint)
    alone(tmp_path, "back", resume=True)
    assert column(tmp_path / "back", "loss") == pytest.approx(expected, rel=1e-5)
    assert column(tmp_path / "back", "rows") == column(one / "straight", "rows")[10:]


def test_whole_weights_are_saved_exported_and_loaded(one: Path, two: Any, tmp_path: Path) -> None:
    _, folder, _ = two
    expected = weights(one / "straight")
    for name, tensor in weights(folder / "straight").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)
    source = folder / "straight/drafter"
    target, origin = vllm_format.load_origin(source)
    drafter = vllm_format.load(source, target)
    vllm_format.save(drafter, tmp_path / "out", "speculators", torch.float32, target, origin)
    again = vllm_format.load(tmp_path / "out", target).state_dict()
    assert all(torch.equal(again[name], t) for name, t in drafter.state_dict().items())
    best = load_file(folder / "straight/drafter-best/model.safetensors")
    assert all(torch.equal(best[name], t) for name, t in weights(folder / "straight").items())


def test_row_that_is_not_finite_is_skipped_by_all_and_named(one: Path, two: Any) -> None:
    _, folder, printed = two
    skipped = column(one / "poisoned", "num_skipped")
    assert skipped[-1] >= 1
    assert column(folder / "poisoned", "num_skipped") == skipped
    row_id = (one / "row.txt").read_text()
    assert f"loss or target states not finite; rows {row_id}; the step was skipped" in printed
    assert all(tensor.isfinite().all() for tensor in weights(folder / "poisoned").values())
    for name, tensor in weights(folder / "poisoned").items():
        expected = weights(one / "poisoned")[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
    # Adam's moments were not touched either: the losses behind the skipped step agree.
    losses = [loss for loss in column(one / "poisoned", "loss") if loss is not None]
    assert [x for x in column(folder / "poisoned", "loss") if x is not None] == pytest.approx(
        losses, rel=1e-5
    )


def test_too_many_skipped_steps_stop_the_run(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(one / "poisoned/data", tmp_path / "bad/data")
    row_id = (one / "row.txt").read_text()
    monkeypatch.setattr(StateStore, "get", StateStore.get)  # put back afterwards
    poison(row_id)
    with pytest.raises(UserError, match=rf"rows {row_id}. 1 steps were skipped, train.max_skipped"):
        alone(tmp_path, "bad", "train.max_skipped_steps=0")


def test_other_step_size_is_refused_with_the_mend(one: Path, tmp_path: Path) -> None:
    shutil.copytree(one / "straight/data", tmp_path / "other/data")
    shutil.copytree(one / "straight/checkpoints", tmp_path / "other/checkpoints")
    with pytest.raises(UserError, match=r"its steps have 2 micro-batches .* 4 .*accumulation=2"):
        alone(tmp_path, "other", "train.gradient_accumulation=4", resume=True)
