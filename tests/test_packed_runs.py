"""Whole runs on packed rows: the losses of padded ones, exact resume, two processes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from recipes.schema import load_recipe
from tests.test_run import ENV, ROOT
from train.run import make_accelerator, run_with

pytestmark = pytest.mark.slow
PACKED = ["train.packing=true", "train.batch_tokens=600", "train.gradient_accumulation=2"]
COMMON = [
    "data.num_prompts=16",
    "data.max_new_tokens=10",
    "train.max_steps=6",
    "train.save_every=3",
    "train.keep_checkpoints=9",
    "train.validate_prompts=0",
    "log.every=1",
]


def run(folder: Path, *more: str, resume: bool = False) -> Path:
    """A run in this process: its folder."""
    smoke = ROOT / "recipes/smoke.yaml"
    recipe = load_recipe(
        smoke, [f"output_dir={folder.parent}", f"name={folder.name}", *COMMON, *more]
    )
    run_with(make_accelerator(recipe), recipe, resume)
    return folder


def column(folder: Path, key: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    AcceleratorState._reset_state(reset_partial_state=True)
    return run(tmp_path_factory.mktemp("packed") / "straight", *PACKED)


def copied(packed: Path, folder: Path, part: str = "data") -> Path:
    shutil.copytree(packed / part, folder / part)
    return folder


def same_weights(one: Path, two: Path, tolerance: float) -> None:
    first, second = (load_file(f / "drafter/model.safetensors") for f in (one, two))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=tolerance, atol=tolerance)


def test_packed_epochs_have_the_losses_of_padded_ones(packed: Path, tmp_path: Path) -> None:
    """Every step is an epoch, so that both read the same rows in each."""
    all_rows = ["train.packing=true", "train.batch_tokens=100000"]
    one = run(copied(packed, tmp_path / "packed"), *all_rows)
    two = run(copied(packed, tmp_path / "padded"), "train.micro_batch_size=100")
    assert column(one, "num_tokens") == column(two, "num_tokens")
    for key in ("loss", "grad_norm"):
        assert column(one, key) == pytest.approx(column(two, key), rel=1e-5)
    same_weights(one, two, tolerance=1e-4)
    assert set(column(one, "share_padding")) == {0.0}
    report = json.loads((two / "data/report.json").read_text())
    assert column(two, "share_padding") == [pytest.approx(report["padding_share"])] * 6
    assert 0.05 < report["padding_share"] < 0.9
    assert json.loads((one / "data/report.json").read_text())["padding_share"] == 0


def test_p63_packed_run_resumes_bit_for_bit(packed: Path, tmp_path: Path) -> None:
    resumed = copied(packed, tmp_path / "resumed")
    copied(packed, resumed, "checkpoints/step-3")
    shutil.copy(packed / "metrics.jsonl", resumed)
    run(resumed, *PACKED, resume=True)
    for key in ("rows", "loss", "lr", "grad_norm", "num_tokens"):
        assert column(resumed, key) == column(packed, key) and len(column(packed, key)) == 6
    same_weights(packed, resumed, tolerance=0)


def test_p53_two_processes_on_packed_rows_take_the_steps_of_one(
    packed: Path, tmp_path: Path
) -> None:
    two = copied(packed, tmp_path / "two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["train/distill.py", "recipes/smoke.yaml", *COMMON, *PACKED]
    more = [f"output_dir={tmp_path}", "name=two", "train.gradient_accumulation=1"]
    done = subprocess.run(
        [*command, *more], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for key in ("rows", "num_tokens"):
        assert column(two, key) == column(packed, key)
    assert column(two, "loss") == pytest.approx(column(packed, "loss"), rel=1e-5)
    same_weights(packed, two, tolerance=1e-5)
