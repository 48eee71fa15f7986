"""train/export.py: what it prints, when it skips, and its errors."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.export_info import export_hash
from drafters.vllm_format import load, load_origin, serve_command
from tests.tiny_exports import ORIGIN, ROOT, TARGET, make, write


@pytest.fixture
def export(monkeypatch, capsys):
    """Run the script in this process (importing torch anew takes seconds)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        script = str(ROOT / "train" / "export.py")
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        code = 0
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_script_exports_once_and_says_how_to_serve(tmp_path, export):
    run = tmp_path / "run"
    write(make(), run / "drafter")
    code, out, _ = export(run)
    first, serve = out.splitlines()
    assert code == 0 and "bfloat16 weights" in first  # auto = the target's
    assert serve == serve_command(run / "export", TARGET, {"method": "eagle3"}, 3)
    assert load(run / "export").fc.weight.dtype == torch.bfloat16
    assert load_origin(run / "export") == (TARGET, ORIGIN)

    before = (run / "export" / "model.safetensors").stat().st_mtime_ns
    assert "up to date" in export(run)[1]
    assert (run / "export" / "model.safetensors").stat().st_mtime_ns == before
    assert "up to date" not in export(run, "--force")[1]
    assert "speculators form" in export(run, "--format", "speculators", "--dtype", "float32")[1]
    assert torch.equal(load(run / "export").fc.weight, make().fc.weight)


def test_script_exports_again_after_training(tmp_path, export):
    run = tmp_path / "run"
    write(make(), run / "drafter")
    export(run)
    write(make(), run / "drafter")
    assert "up to date" not in export(run)[1]


def test_script_exports_again_where_other_weights_lie(tmp_path, export):
    run, other = tmp_path / "run", tmp_path / "other"
    best, last = make(), make()
    with torch.no_grad():
        best.fc.weight.mul_(2)
    write(last, run / "drafter")
    write(best, run / "drafter-best")
    write(make(num_layers=2), other / "drafter")  # all older than what is exported below
    export(run, "--checkpoint", "best", "--dtype", "float32")
    assert "up to date" not in export(run, "--dtype", "float32")[1]
    assert torch.equal(load(run / "export").fc.weight, last.fc.weight)
    assert "up to date" not in export(run, "--dtype", "float32", "--checkpoint", "best")[1]
    assert torch.equal(load(run / "export").fc.weight, best.fc.weight)
    assert "up to date" in export(run, "--dtype", "float32", "--checkpoint", "best")[1]
    assert "up to date" not in export(other, "--out", run / "export", "--dtype", "float32")[1]
    assert load(run / "export").config.num_layers == 2


def put_results(run: Path, tau: float, drafter: str, drafter_hash: str | None, target: str) -> None:
    """A record, the certificate and the plan as a measurement of some drafter leaves them."""
    identity = {"target": target, "method": "eagle3", "drafter_hash": drafter_hash}
    if drafter_hash is None:
        del identity["drafter_hash"]
    settings = {"temperature": 0.0, "num_draft_tokens": 3, "batch_size": 1, "engine": "torch",
                "dtype": "float32"}  # fmt: skip
    task = {"tau": tau, "tau_ci95": None, "mean_accepted": tau - 1, "alpha": None, "speedup": None,
            "speedup_ci95": None}  # fmt: skip
    table = {"temperature": 0.0, "batch_size": 1, "speedup": tau}
    plan = {"target": target, "drafter": drafter, "drafter_hash": drafter_hash,
            "num_draft_tokens": round(tau) + 5, "tables": [table]}  # fmt: skip
    files = {
        f"drafter_T0_{tau}": {"identity": identity, "settings": settings, "tasks": {"chat": task}},
        "certificate_drafter": {"identity": identity, "line": f"certificate of tau {tau}"},
        "plan": plan,
    }
    (run / "results").mkdir(exist_ok=True)
    for name, value in files.items():
        (run / "results" / f"{name}.json").write_text(json.dumps(value))


def test_the_card_tells_of_these_very_weights_alone(tmp_path, export):
    run = tmp_path / "run"
    best, last = make(), make()
    with torch.no_grad():
        best.fc.weight.mul_(2)
    write(best, run / "drafter-best")
    write(last, run / "drafter")
    card = run / "export" / "README.md"
    export(run)
    ours, name, target = export_hash(run / "export"), ORIGIN.recipe["name"], "org/tiny"
    put_results(run, 1.25, name, ours, target)
    export(run)  # up to date: the card alone is written
    assert "| chat | 0 | 3 | 1 | torch | float32 | 1.25 |" in card.read_text()
    assert "certificate of tau 1.25" in card.read_text()
    assert "Planned: 6 draft tokens, predicted speedup 1.25" in card.read_text()
    assert export_hash(run / "export") == ours
    beside = run / "results" / "certificate_drafter.json"
    moved = beside.rename(beside.with_name("certificate_drafter_0123abcd.json"))
    export(run)  # a certificate by `--drafter` of a folder elsewhere that holds these weights
    assert "certificate of tau 1.25" in card.read_text()
    moved.rename(beside)
    with_card = card.read_text()
    export(run, "--force")
    assert card.read_text() == with_card

    # The best weights in the place of the last: the number to serve with stays, no result does.
    export(run, "--checkpoint", "best")
    text = card.read_text()
    assert "Not measured yet" in text and "Lossless: not certified" in text
    assert "Planned" not in text and '"num_speculative_tokens": 6' in text

    export(run)
    for other_hash, other_target in (("0" * 16, target), (None, target), (ours, "org/other")):
        shutil.rmtree(run / "results")
        put_results(run, 2.25, "other", other_hash, other_target)
        export(run)
        text = card.read_text()
        assert "Not measured yet" in text and "Lossless: not certified" in text
        assert "Planned" not in text and '"num_speculative_tokens": 3' in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run train/distill.py first"),
        (["--checkpoint", "best"], "train.validate_every"),
        (["--out", "drafter"], "holds the trained weights themselves"),
    ],
)
def test_script_says_what_is_wrong_in_one_line(tmp_path, monkeypatch, export, arguments, message):
    monkeypatch.chdir(tmp_path)
    if "--out" in arguments:
        write(make(), tmp_path / "drafter")
    code, out, err = export(".", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and message in err
