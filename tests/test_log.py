"""Metrics, run record and progress lines."""

import json
import logging
import math
import socket
import subprocess
import time

import pytest

from data.progress import progress
from data.provenance import git_state
from recipes.errors import UserError
from recipes.schema import LogSection, Recipe, load_recipe
from train.log import MetricsLog, result_line, write_run_record


def make_recipe(tmp_path):
    return Recipe(
        name="toy",
        output_dir=tmp_path,
        target={"model": "random:qwen3-tiny"},
        data={"sources": ["book"], "num_prompts": 4},
    )


def make_log(tmp_path, resume_step=None, enabled=True, **section):
    recipe = make_recipe(tmp_path)
    return MetricsLog(recipe.run_dir, LogSection(**section), recipe, resume_step, enabled)


def read_lines(tmp_path):
    text = (tmp_path / "toy" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_line_on_the_console_and_in_the_file(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="draftsmith"), make_log(tmp_path) as log:
        log.log(1, {"loss": 0.123456, "survival": [0.5, 0.25], "tokens": 70})
    assert caplog.messages == ["step 1  loss 0.1235  survival [0.5 0.25]  tokens 70"]
    (line,) = read_lines(tmp_path)
    assert abs(line.pop("time") - time.time()) < 60
    assert line == {"step": 1, "loss": 0.123456, "survival": [0.5, 0.25], "tokens": 70}


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="draftsmith"), make_log(tmp_path) as log:
        log.log(1, {"loss": math.nan, "norms": [math.inf, 1.0]})
    assert "loss nan" in caplog.text
    (line,) = read_lines(tmp_path)
    assert (line["loss"], line["norms"]) == (None, [None, 1.0])


def test_resume_drops_lines_past_the_checkpoint(tmp_path):
    with make_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": 1.0})
    with (tmp_path / "toy" / "metrics.jsonl").open("a") as file:
        file.write("3\n{}\n")  # damage
        file.write('{"step": 1, "lo')  # a killed run's last line
    with make_log(tmp_path, resume_step=2) as log:
        log.log(3, {"loss": 2.0})
    assert [(line["step"], line["loss"]) for line in read_lines(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]
    with make_log(tmp_path) as log:  # a run from the start has a file of its own
        log.log(1, {"loss": 5.0})
    assert len(read_lines(tmp_path)) == 1


def test_other_ranks_write_nothing(tmp_path):
    with make_log(tmp_path, enabled=False, wandb="offline", tensorboard=True) as log:
        log.log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_off_needs_no_tracker(tmp_path):
    with make_log(tmp_path) as log:
        assert log.sinks == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_stays_in_the_run_folder_and_off_the_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    hosts = []
    connect = socket.socket.connect

    def watch(self, address):
        hosts.append(address[0] if isinstance(address, tuple) else "local")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watch)
    for resume_step in (None, 1):
        with make_log(tmp_path, resume_step, wandb="offline") as log:
            log.log(1 + (resume_step or 0), {"loss": 1.0, "survival": [0.5]})
    run_id = (tmp_path / "toy" / "wandb_run_id").read_text()
    names = [path.name for path in (tmp_path / "toy" / "wandb").glob("offline-run-*")]
    assert names
    assert all(name.endswith(run_id) for name in names)  # resumed under the same id
    assert set(hosts) <= {"local", "127.0.0.1", "::1"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_online_without_network_says_so_and_does_not_wait(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr("train.log.START_SECONDS", 2.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    start = time.monotonic()
    with pytest.raises(UserError, match=r"wandb did not start.*log\.wandb=offline"):
        make_log(tmp_path, wandb="online")
    assert time.monotonic() - start < 60  # its own patience is 90 s


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    write_run_record(make_recipe(tmp_path))
    page = tmp_path / "step-1.html"
    page.write_text("<p>x</p>")
    with make_log(tmp_path, tensorboard=True) as log:
        log.log(1, {"loss": 1.0, "survival": [0.5, 0.2], "note": "x"})
        log.attach(1, "samples", page)
    (path,) = (tmp_path / "toy" / "tensorboard").iterdir()
    events = path.read_bytes()
    assert b"survival/1" in events
    assert b"random:qwen3-tiny" in events  # the resolved recipe
    assert b"git" in events and str(page).encode() in events


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_takes_recipe_record_and_samples(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    artefacts, log_artifact = [], wandb.Run.log_artifact

    def watch(run, path, **fields):
        artefacts.append((path, fields["name"]))
        return log_artifact(run, path, **fields)

    monkeypatch.setattr(wandb.Run, "log_artifact", watch)
    write_run_record(make_recipe(tmp_path))
    page = tmp_path / "step-1.html"
    page.write_text("<p>coloured</p>")
    with make_log(tmp_path, wandb="offline") as log:
        log.log(1, {"loss": 1.0})
        log.attach(1, "samples", page)
    (run,) = (tmp_path / "toy" / "wandb").glob("offline-run-*")
    (copy,) = run.glob("files/media/html/samples_1_*.html")
    assert "coloured" in copy.read_text()
    folder = tmp_path / "toy"
    assert artefacts == [
        (str(folder / "recipe.yaml"), "toy-recipe"),
        (str(folder / "run.json"), "toy-run"),
    ]


def test_the_end_of_a_run_in_one_line(tmp_path):
    line = result_line(tmp_path / "drafter", 1200, 345678, 90.0, 2.3456, decoded=True)
    assert line == (
        "result: best validated tau 2.346, 1,200 steps, 345,678 supervised tokens, 1.5 minutes; "
        f"drafter in {tmp_path}/drafter"
    )
    line = result_line(tmp_path, 1, 2, 6.0, None, decoded=True)
    assert line.startswith("result: 1 steps, 2 supervised")
    line = result_line(tmp_path, 1, 2, 6.0, 1.5, decoded=False)
    assert line.startswith("result: best teacher-forced tau (nothing was decoded) 1.500, 1 steps")


def test_run_record(tmp_path):
    recipe = make_recipe(tmp_path)
    record = json.loads(write_run_record(recipe).read_text())
    assert load_recipe(recipe.run_dir / "recipe.yaml") == recipe
    assert record["recipe"]["target"]["model"] == "random:qwen3-tiny"
    assert record["versions"]["torch"].startswith("2.")
    assert record["hardware"]["num_cores"] >= 1
    assert record["command"]
    assert set(record["git"]) == {"commit", "dirty", "diff_sha256", "num_untracked"}


def test_git_state_tells_changed_from_clean(tmp_path):
    assert git_state(tmp_path)["commit"] is None

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    (tmp_path / "a.txt").write_text("one")
    git("init", "-q")
    git("add", "a.txt")
    git("commit", "-q", "-m", "one", "--no-verify")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], clean["diff_sha256"]) == (False, None)
    (tmp_path / "a.txt").write_text("two")
    (tmp_path / "new.txt").write_text("x")
    changed = git_state(tmp_path)
    assert changed["commit"] == clean["commit"]
    assert changed["dirty"]
    assert len(changed["diff_sha256"]) == 64
    assert changed["num_untracked"] == 1


def test_progress_without_a_terminal_is_plain_lines(caplog):
    with (
        caplog.at_level(logging.INFO, logger="draftsmith"),
        progress(4, "answers", log_seconds=0.0) as advance,
    ):
        advance(1)
        advance(3)
    assert caplog.messages == ["answers 1/4  0 s, about 0 s left", "answers 4/4  0 s"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="draftsmith"), progress(None, "rows") as advance:
        advance(5)
    assert caplog.messages == ["rows 5  0 s"]


def test_progress_of_a_resumed_run_and_of_other_ranks(caplog):
    with (
        caplog.at_level(logging.INFO, logger="draftsmith"),
        progress(10, "steps", math.inf, num_done=8) as advance,
    ):
        advance(2)
    assert caplog.messages == ["steps 10/10  0 s"]
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="draftsmith"),
        progress(10, "steps", 0.0, enabled=False) as advance,
    ):
        advance(10)
    assert caplog.messages == []
