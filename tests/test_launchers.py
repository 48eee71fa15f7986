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

from data.hidden_states import stored_states
from drafters import vllm_format
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe
from tests.rank_runs import CHUNK, HARD, blank, poison
from train.run import make_accelerator, run_with

# Each launch takes ten seconds to import what it needs, and more where cores are shared.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
DATA = [
    "data.num_prompts=16",
    "data.max_new_tokens=10",
    "train.micro_batch_size=1",
    "train.validate_prompts=3",
    "log.every=1",
]
SMOKE = "recipes/smoke.yaml"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
NUM_BLANK = 9  # of 14 rows
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


def train_rows(folder: Path) -> list[str]:
    rows = map(json.loads, (folder / "data/rows.jsonl").read_text().splitlines())
    return [row["id"] for row in rows if row["split"] == "train"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter/model.safetensors")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process: straight, from states made anew, with damaged rows, with hard ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("one")
    alone(folder, "straight")
    for name in ("poisoned", "hard", "online"):
        shutil.copytree(folder / "straight/data", folder / name / "data")
    ids = train_rows(folder / "straight")
    (folder / "row.txt").write_text(ids[0])
    (folder / "blank.txt").write_text("\n".join(ids[:NUM_BLANK]))
    alone(folder, "online", "data.states=online")
    with poison(ids[0]):
        alone(folder, "poisoned", "train.max_steps=8")
    with blank(ids[:NUM_BLANK]):
        alone(folder, "hard", *HARD, "train.gradient_accumulation=4")
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def two(
    request: pytest.FixtureRequest, one: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """The same runs by two processes: engine, folder, what they printed."""
    engine, folder = request.param, tmp_path_factory.mktemp(request.param)
    for name in ("straight", "resumed", "crossed", "sharded", "poisoned", "hard"):
        source = name if name in ("poisoned", "hard") else "straight"
        shutil.copytree(one / source / "data", folder / name / "data")
    shutil.rmtree(folder / "crossed/data/states")  # both ranks make them
    shutil.copytree(one / "straight/checkpoints/step-10", folder / "crossed/checkpoints/step-10")
    for name in ("row.txt", "blank.txt"):
        shutil.copy(one / name, folder)
    command = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    command += [f"recipes/accelerate/{engine}.yaml", "tests/rank_runs.py", str(folder), *DATA]
    done = launched(command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return engine, folder, done.stdout + done.stderr


def launched(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def test_p53_p64_two_processes_take_the_steps_of_one(one: Path, two: Any) -> None:
    engine, folder, _ = two
    facts = facts_of(folder)
    assert {key: facts[key] for key in ("world", "zero", "divided")} == {
        "ddp": {"world": 2, "zero": 0, "divided": False},
        "zero1": {"world": 2, "zero": 1, "divided": False},
        "zero2": {"world": 2, "zero": 2, "divided": False},
        "zero3": {"world": 2, "zero": 3, "divided": True},
        "fsdp2": {"world": 2, "zero": 0, "divided": True},
    }[engine]
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


def test_target_in_parts_gives_the_losses_of_a_whole_one(one: Path, two: Any) -> None:
    _, folder, _ = two
    for key in ("loss", "grad_norm", "valid/loss", "valid/tau"):
        expected = column(one / "online", key)
        assert len(expected) == (20 if key in ("loss", "grad_norm") else 1)
        assert column(folder / "sharded", key) == pytest.approx(expected, rel=1e-5)
    for name, tensor in weights(folder / "sharded").items():
        expected_tensor = weights(one / "online")[name]
        torch.testing.assert_close(tensor, expected_tensor, rtol=1e-5, atol=1e-5)
    # fp32. Embedding, head and final norm, [264 + 264 + 1, 64], are whole on both ranks; of the 8
    # layers each holds half.
    held = [[rank["held"][name] for rank in facts_of(folder)["ranks"]] for name in
            ("straight", "sharded")]  # fmt: skip
    ends, layers = 4 * (264 + 264 + 1) * 64, 4 * 8 * 37024
    assert held == [[ends + layers] * 2, [ends + layers // 2] * 2]
    # The crossed run stored the states of such a target: of 16 rows, 2 of them held out, 8 a rank.
    states = folder / "crossed/data/states"
    listed = [(states / f"shards-00{rank}.jsonl").read_text() for rank in (0, 1)]
    assert [len(json.loads(text)["rows"]) for text in listed] == [8, 8]


def test_p51_p52_p53_p71_blank_batches_more_padding_and_stand_ins(one: Path, two: Any) -> None:
    """9 of 14 rows have nothing to learn; rank 1 pads further, and lacks a batch in every epoch."""
    _, folder, _ = two
    rows = [rank["rows"]["hard"] for rank in facts_of(folder)["ranks"]]
    assert [len(batches) for batches in rows] == [16, 16]  # 8 steps of 2
    assert sum(ids == ["stand-in"] for ids in rows[1]) == 4  # 7 batches an epoch
    assert not any(ids == ["stand-in"] for ids in rows[0])
    empty = column(one / "hard", "num_empty")
    assert empty[-1] >= 4 * 2  # 5 rows are in at most 5 of 7 batches
    assert column(folder / "hard", "num_empty") == empty
    for key in ("loss", "grad_norm", "valid/loss"):
        assert column(folder / "hard", key) == pytest.approx(column(one / "hard", key), rel=1e-5)
    for name, tensor in weights(folder / "hard").items():
        torch.testing.assert_close(tensor, weights(one / "hard")[name], rtol=1e-5, atol=1e-5)


def test_p58_logits_of_more_than_one_chunk_never_exist_on_any_rank(two: Any) -> None:
    facts = facts_of(two[1])
    assert [rank["most_logits"] for rank in facts["ranks"]] == [CHUNK, CHUNK]


def test_p60_p61_target_is_as_it_was_and_the_drafter_in_training_mode(two: Any) -> None:
    _, folder, _ = two
    for rank in facts_of(folder)["ranks"]:
        assert set(rank["changed"]) == {
            "straight", "resumed", "crossed", "sharded", "poisoned", "hard"
        }  # fmt: skip
        assert not any(rank["changed"].values())
        assert all(rank["training"].values())
    assert len(column(folder / "resumed", "valid/loss")) == 4  # steps 12, 15, 18, 20
    moments = {  # what the optimizer steps, after a fresh start and after resuming
        name: load_file(folder / name / "checkpoints/step-20/moments.safetensors").keys()
        for name in ("straight", "resumed", "crossed")
    }
    assert moments["straight"] == moments["resumed"] == moments["crossed"]
    assert not any("embed" in name for name in moments["straight"])


def test_p64_p66_each_epoch_reads_every_row_once_in_an_order_of_its_own(two: Any) -> None:
    _, folder, _ = two
    ranks = [rank["rows"] for rank in facts_of(folder)["ranks"]]

    def read(name: str) -> list[str]:
        pairs = zip(*(rank[name] for rank in ranks), strict=True)
        return [row_id for pair in pairs for ids in pair for row_id in ids]

    straight = read("straight")
    epochs = [straight[start : start + 14] for start in (0, 14)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(train_rows(folder / "straight"))] * 2
    assert epochs[0] != epochs[1]
    assert read("resumed") == read("crossed") == straight[20:]  # 10 steps of 2, in mid-epoch
    shuffled = [ids for ids in read("hard") if ids != "stand-in"]
    assert sorted(shuffled) == sorted(4 * train_rows(folder / "hard"))


def test_p70_folder_that_cannot_be_made_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = launched([*TORCHRUN, "train/distill.py", SMOKE, f"output_dir={tmp_path}/file/out"])
    assert done.returncode != 0
    assert f"error: cannot make the folder {tmp_path}/file/out/smoke/data: Not a dir" in done.stderr


def test_data_is_prepared_by_processes_that_share_a_target(one: Path, tmp_path: Path) -> None:
    more = [f"output_dir={tmp_path}", "target.placement=sharded", *DATA]
    done = launched([*TORCHRUN, "data/prepare.py", SMOKE, *more])
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"data: {tmp_path}/smoke/data\n"
    rows, expected = (
        (folder / "data/rows.jsonl").read_text()
        for folder in (tmp_path / "smoke", one / "straight")
    )
    assert rows == expected
    ours, theirs = (
        stored_states(folder / "data") for folder in (tmp_path / "smoke", one / "straight")
    )
    for row_id in train_rows(one / "straight"):
        ours_hidden, expected_hidden = ours.get(row_id).hidden_SH, theirs.get(row_id).hidden_SH
        torch.testing.assert_close(ours_hidden, expected_hidden, rtol=1e-5, atol=1e-5)


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


def test_too_many_skipped_steps_stop_the_run(one: Path, tmp_path: Path) -> None:
    shutil.copytree(one / "poisoned/data", tmp_path / "bad/data")
    row_id = (one / "row.txt").read_text()
    message = rf"rows {row_id}. 1 steps were skipped, train.max_skipped"
    with poison(row_id), pytest.raises(UserError, match=message):
        alone(tmp_path, "bad", "train.max_skipped_steps=0")


def test_other_step_size_is_refused_with_the_mend(one: Path, tmp_path: Path) -> None:
    shutil.copytree(one / "straight/data", tmp_path / "other/data")
    shutil.copytree(one / "straight/checkpoints", tmp_path / "other/checkpoints")
    with pytest.raises(UserError, match=r"its steps have 2 micro-batches .* 4 .*accumulation=2"):
        alone(tmp_path, "other", "train.gradient_accumulation=4", resume=True)
