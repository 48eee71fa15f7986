"""A run killed at any moment and resumed is, bit for bit, the run that was never killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.files import sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LEARNT = {
    "step", "loss", "loss_by_step", "alpha_by_step", "top1_by_step", "lr", "grad_norm",
    "grad_norm_max", "epoch", "rows", "num_tokens", "num_skipped", "num_empty",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, "tests/kill_runs.py", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    killed = json.loads(done.stdout.splitlines()[-1])
    return folder, killed


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """What was logged of learning; the rest is times."""
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k in LEARNT or k.startswith("valid/")} for x in lines]


def test_p63_p64_killed_at_20_random_moments_and_at_every_rename(runs: Any) -> None:
    folder, killed = runs
    assert len(killed["random"]) == 20
    assert {"data", "first step"} <= set(killed["renames"])
    assert killed["exports"] and set(killed["exports"]) == {"export"}
    assert any(where.startswith("step") for where in killed["random"])
    straight = folder / "straight"
    others = sorted(path for path in folder.iterdir() if path != straight)
    expected = numbers(straight)
    # 20 steps: a line at 4, 8, .. 20, validation at 3, 6, .. 18 and 20; each with all its numbers.
    assert len(expected) == 5 + 7 and {"loss", "lr", "rows", "grad_norm"} <= expected[1].keys()
    for run_dir in others:
        assert numbers(run_dir) == expected, run_dir.name
        for name in ("drafter", "drafter-best", "export"):
            weights = f"{name}/model.safetensors"
            assert sha256(run_dir / weights) == sha256(straight / weights), (run_dir.name, name)
        left = [path.name for path in (run_dir / "checkpoints").iterdir()]
        assert all(name.startswith("step-") for name in left), left  # nothing half-written
