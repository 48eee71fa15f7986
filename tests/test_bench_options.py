"""Options of eval/bench.py: none is ignored, none is misread, and a stop says what it kept."""

import os
import sys
from pathlib import Path

import pytest

from eval import bench
from recipes.errors import UserError

SMOKE = "recipes/smoke.yaml"


def plan_of(monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    arguments = bench.parse_arguments()
    plan = bench.make_plan(arguments)
    bench.refuse_ignored(arguments, plan.recipe.eval)
    return plan


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-new-tokens 4,8", "eval.max_new_tokens: '4,8' is not valid"),
        ("--repeats 1,3", "eval.repeats: '1,3' is not valid"),
        ("--certify --batch-size 2,8", "--certify takes one --batch-size, not 2,8"),
        ("--certify --temperature 0,1", "--certify takes one --temperature"),
        ("--certify --engine vllm", "--certify goes without --engine"),
        ("--certify --plan", "--certify goes without --plan"),
        ("--plan --num-draft-tokens 1", "--plan goes without --num-draft-tokens"),
        ("--plan --force", "--plan goes without --force"),
        ("--oracle --temperature 1", "oracle times a perfect drafter"),
        ("--oracle eval.drafters=[lookup]", "oracle times a perfect drafter"),
        ("--oracle eval.verification=tree", "oracle times a perfect drafter"),
        ("eval.verification=tree --num-draft-tokens 5", "is not for trees"),
        ("--plan eval.verification=tree", "--plan predicts chains, but eval.verification is tree"),
        ("eval.seed=-1", "eval.seed: -1 is not valid"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(monkeypatch, SMOKE, *words.split())


def test_a_drafter_from_elsewhere_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of(monkeypatch, SMOKE).name == "smoke"
    for folder, name in (("runs/mine/export", "mine"), ("heads/theirs", "theirs")):
        assert plan_of(monkeypatch, SMOKE, "--drafter", folder).name == name
        words = ["--target", "random:qwen3-tiny", "--drafter", folder]
        assert plan_of(monkeypatch, *words).name == name


def test_names_of_task_files_are_no_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(monkeypatch, SMOKE, "--tasks", "my #1.jsonl, @x.jsonl,mt_bench:2")
    assert plan.recipe.eval.tasks == ["my #1.jsonl", "@x.jsonl", "mt_bench:2"]


@pytest.mark.parametrize("force", [False, True])
def test_a_stop_says_what_is_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, force: bool
) -> None:
    plan = plan_of(monkeypatch, SMOKE, "--tasks", "mt_bench:2", "--out", str(tmp_path))
    points = bench.make_points(plan, [1], [1, 2])
    for point in points:  # all are there, from long ago
        point.path.write_text("{}")
        os.utime(point.path, (1, 1))

    def stopped(todo, _tasks):
        todo[0].path.write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_points", stopped)
    monkeypatch.setattr(bench, "find_todo", lambda points, _tasks: points[1:])
    with pytest.raises(SystemExit) as stop:
        bench.measure_all(points, plan, force)
    assert stop.value.code == 130
    said, num = capsys.readouterr().err, len(points)
    if force:
        assert f"stopped: 1 of {num} results are measured again" in said and "anew" in said
    else:
        assert f"stopped: 1 of {num} results are written" in said and "goes on" in said
