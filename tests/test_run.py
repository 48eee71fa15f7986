"""Whole runs through the real commands: resume, interruption, processes, export, bench, report."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.schema import load_recipe
from train.run import run as distill

pytestmark = pytest.mark.slow  # each command takes ten seconds to import what it needs

ROOT = Path(__file__).resolve().parents[1]
SMOKE = "recipes/smoke.yaml"
FAST = ["data.num_prompts=12", "data.max_new_tokens=10", "train.validate_prompts=1"]
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


def command(*args: str, processes: int = 1) -> list[str]:
    if processes == 1:
        return [sys.executable, *args]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *launcher, *args]


def run(*args: str, code: int = 0, processes: int = 1) -> str:
    done = subprocess.run(
        command(*args, processes=processes),
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def metrics(folder: Path, name: str = "loss") -> list[Any]:
    lines = (folder / "smoke/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines if name in json.loads(line)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "smoke/drafter/model.safetensors")


def assert_same_weights(a: Path, b: Path, tolerance: float = 0.0) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if tolerance:
            torch.testing.assert_close(second[name], tensor, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(second[name], tensor), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run that others are compared with."""
    folder = tmp_path_factory.mktemp("straight")
    run("train/distill.py", SMOKE, f"output_dir={folder}", "log.every=1", *FAST)
    return folder


def test_p63_p64_resume_equals_a_straight_run(straight: Path, tmp_path: Path) -> None:
    args = ["train/distill.py", SMOKE, f"output_dir={tmp_path}", "log.every=1", *FAST]
    with subprocess.Popen(
        command(*args, "train.save_every=5"), cwd=ROOT, env=ENV, stderr=subprocess.DEVNULL
    ) as process:
        # Kill without warning as soon as a first checkpoint stands.
        while not list(tmp_path.glob("smoke/checkpoints/step-*/state.json")):
            assert process.poll() is None, "finished before it could be killed"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "smoke/drafter").exists()
    refused = run(*args, "train.save_every=5", code=2)
    assert "--resume" in refused
    run(*args, "train.save_every=5", "--resume")
    assert_same_weights(straight, tmp_path)
    for name in ("loss", "lr", "grad_norm", "num_tokens"):
        assert metrics(tmp_path, name) == metrics(straight, name)
    assert "is trained already" in run(*args, "train.save_every=5", "--resume")


def test_sigterm_saves_and_exits_zero(straight: Path, tmp_path: Path) -> None:
    args = ["train/distill.py", SMOKE, f"output_dir={tmp_path}", "log.every=1", *FAST]
    with subprocess.Popen(
        command(*args), cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 3 " in line:
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stderr.read()
    assert process.returncode == 0 and "--resume" in rest
    run(*args, "--resume")
    assert_same_weights(straight, tmp_path)


def test_p53_two_processes_equal_one_with_accumulation(tmp_path: Path) -> None:
    common = [*FAST, "log.every=1", "train.max_steps=5", "train.seed=3"]
    one, two = tmp_path / "one", tmp_path / "two"
    common += ["train.micro_batch_size=2"]
    script = "train/distill.py"
    run(script, SMOKE, f"output_dir={one}", *common, "train.gradient_accumulation=2")
    run(script, SMOKE, f"output_dir={two}", *common, processes=2)
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-5)
    assert metrics(two, "num_tokens") == metrics(one, "num_tokens")
    assert_same_weights(one, two, tolerance=1e-5)


def test_online_states_train_like_cached_ones(straight: Path, tmp_path: Path) -> None:
    run(
        "train/distill.py", SMOKE, f"output_dir={tmp_path}", "log.every=1", *FAST,
        "data.states=online",
    )  # fmt: skip
    assert metrics(tmp_path) == pytest.approx(metrics(straight), rel=1e-4)


def test_p61_training_mode_after_validation_and_same_result(straight: Path, tmp_path: Path) -> None:
    # Validating on the way must not change what is learnt.
    args = [f"output_dir={tmp_path}", "log.every=1", *FAST, "train.validate_every=3"]
    run("train/distill.py", SMOKE, *args)
    assert_same_weights(straight, tmp_path)
    assert len(metrics(tmp_path, "valid/tau")) == 7  # at 3, 6, .. 18 and at the end


def test_export_bench_and_report(straight: Path) -> None:
    folder = straight / "smoke"
    out = run("train/export.py", str(folder))
    assert "vllm serve" in out and '"method": "eagle3"' in out
    run("eval/bench.py", SMOKE, f"output_dir={straight}", "eval.tasks=[heldout:2]", *FAST)
    results = [json.loads(p.read_text()) for p in (folder / "results").glob("*.json")]
    assert len(results) == 6  # three drafters at two temperatures
    for record in results:
        if record["settings"]["temperature"] == 0:
            done, checked = record["lossless"]["greedy_identical"].split("/")
            assert done == checked and int(checked) > 0
        else:
            assert record["lossless"]["pit_num_tokens"] > 0
        (task,) = record["tasks"].values()
        assert task["num_tokens"] > 0
    run("eval/leaderboard.py", str(folder / "results"), "--out", str(folder / "report"))
    assert (folder / "report/leaderboard.html").stat().st_size > 10_000


def test_dry_run_prints_and_touches_nothing(tmp_path: Path) -> None:
    out = run("train/distill.py", SMOKE, f"output_dir={tmp_path}/none", "--dry-run")
    assert "num_steps: 3" in out and "steps: 20" in out and "memory a process" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["recipes/none.yaml"], "recipes/none.yaml"),
        ([SMOKE, "train.lrr=1"], "train.lr"),
        ([SMOKE, "target.model=./no-such-folder"], "no such folder"),
        ([SMOKE, "target.model=./no-such-folder", "--dry-run"], "no such folder"),
        ([SMOKE, "drafter.draft_vocab_size=300"], "300"),
        ([SMOKE, "train.lr=fast"], "fast"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: list[str], said: str, tmp_path: Path) -> None:
    out = run("train/distill.py", *args, f"output_dir={tmp_path}", *FAST[:2], code=2)
    errors = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0] and "Traceback" not in out


def test_processor_minutes_do_not_pass_while_the_machine_is_busy_elsewhere(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the wall's clock, which jumps here, the same limit ends the run after its first step."""
    steps = {}
    for kind in ("processor", "wall"):
        folder = tmp_path / kind
        shutil.copytree(straight / "smoke/data", folder / "smoke/data")
        hours = iter(range(0, 3600 * 10_000, 3600))
        clocks = SimpleNamespace(monotonic=lambda h=hours: float(next(h)), process_time=float)
        monkeypatch.setattr("train.loop.time", clocks)
        changes = [f"output_dir={folder}", f"train.clock={kind}", "train.max_minutes=30"]
        distill(load_recipe(ROOT / SMOKE, [*FAST, *changes]), resume=False)
        steps[kind] = max(metrics(folder, "step"))
    assert steps == {"processor": 20, "wall": 1}


def test_a_run_killed_before_it_was_saved_gets_its_temperatures_again(tmp_path: Path) -> None:
    # Validation fits what makes DSpark's confidence a probability; no checkpoint holds it.
    changes = [
        f"output_dir={tmp_path}",
        "drafter={method: dspark, num_layers: 1, num_aux_layers: 1, block_size: 3, "
        "markov_rank: 8, confidence_threshold: 0.2}",
        "data.states=online",
        "train.max_steps=3",
    ]
    recipe = load_recipe(ROOT / SMOKE, [*FAST, *changes])
    distill(recipe, resume=False)
    run_dir = tmp_path / "smoke"
    names = ("config.json", "model.safetensors")
    whole = [(run_dir / "drafter" / name).read_bytes() for name in names]
    assert len(json.loads(whole[0])["confidence_temperatures"]) == 3
    shutil.rmtree(run_dir / "drafter")
    (run_dir / "trained.json").unlink()
    distill(recipe, resume=True)
    assert [(run_dir / "drafter" / name).read_bytes() for name in names] == whole
    assert max(metrics(tmp_path, "step")) == 3
