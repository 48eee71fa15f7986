"""The study at equal budget: its table, its rules, and a whole one on a tiny target."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.batch import Row
from data.hidden_states import StateStore, capture_pass, manifest_of
from data.target import Target
from recipes.errors import UserError
from recipes.schema import TargetSection
from tests.benchmarks import study, study_numbers, study_text

TABLE = """
recipe:
  target: {model: "random:qwen3-tiny", dtype: float32, device: cpu}
  data:
    sources: [book]
    num_prompts: 16
    max_prompt_tokens: 320
    max_new_tokens: 12
    max_length: 384
    batch_size: 16
    heldout_fraction: 0.25
    states: cached
    states_dtype: float32
  loss: {num_steps: 1, renormalize: false}
  train: {lr: 1.0e-2, epochs: 100, micro_batch_size: 4, validate_prompts: 0}
  eval:
    tasks: ["heldout:3"]
    temperatures: [0.0]
    num_draft_tokens: 2
    max_new_tokens: 8
    drafters: [drafter]
  log: {every: 1}
arms:
  lookup: {eval: {drafters: [lookup]}}
  eagle3: {drafter: {method: eagle3, draft_vocab_size: 128}}
  medusa: {drafter: {method: medusa, num_heads: 2}, loss: {num_steps: 2}}
contrasts:
  a head a token or one for all: [eagle3, medusa]
"""


def row(name: str, ids: list[int]) -> Row:
    """The last two tokens are supervised."""
    mask = [place >= len(ids) - 2 for place in range(len(ids))]
    return Row(id=name, ids_S=torch.tensor(ids), mask_S=torch.tensor(mask))


def arm(name: str, tau: list[float], speedup: list[float], num_params: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "num_params": num_params,
        "tau": {"chat": tau},
        "speedup": {"chat": speedup},
    }


def test_shipped_table_is_valid_and_shares_its_answers(tmp_path: Path) -> None:
    table = study.read_table(study.TABLE, 20, tmp_path)
    assert {name for name, recipe in table.arms.items() if not study.is_trained(recipe)} == {
        "lookup",
        "suffix",
    }
    assert {recipe.drafter.method for recipe in table.arms.values()} == {
        *("eagle3", "p_eagle", "eagle1", "mtp", "medusa", "dflash", "dspark", "small_lm", "pard"),
    }
    assert {recipe.train.max_minutes for recipe in table.arms.values()} == {20.0}
    assert table.arms["eagle3-tv"].loss.name == "tv"
    assert table.arms["eagle3-random"].drafter.init == "random"


def test_arm_of_other_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE.replace("{lookup}", "") + "  none: [eagle1]\n")
    with pytest.raises(UserError, match=r"contrast 'none': no arm eagle1"):
        study.read_table(path, 1, tmp_path)
    path.write_text(TABLE.replace("  medusa: {", "  medusa: {data: {seed: 1}, "))
    with pytest.raises(UserError, match=r"arm medusa: target, data and eval are those of all arms"):
        study.read_table(path, 1, tmp_path)


def test_one_is_ahead_where_intervals_are_apart_on_every_task() -> None:
    a = {"chat": [1.5, 1.4, 1.6], "code": [2.0, 1.9, 2.1]}
    b = {"chat": [1.2, 1.1, 1.3], "code": [1.7, 1.6, 1.8]}
    touching = {"chat": [1.2, 1.1, 1.3], "code": [1.8, 1.7, 1.95]}
    assert study_numbers.ahead(a, b) and study_numbers.behind(b, a)
    assert not study_numbers.ahead(b, a)
    assert not study_numbers.ahead(a, touching) and not study_numbers.behind(touching, a)
    assert study_numbers.mean(a) == 1.75


def test_best_number_is_the_mean_over_tasks_up_to_the_measured() -> None:
    def curve(*speedups: float) -> dict[str, Any]:
        points = enumerate(speedups, 1)
        return {"predicted_curve": [{"num_draft_tokens": k, "speedup": s} for k, s in points]}

    record = {
        "settings": {"num_draft_tokens": 3},
        "tasks": {"chat": curve(1.0, 1.3, 1.1, 9.0), "code": curve(1.4, 1.2, 1.2, 9.0)},
    }
    assert study_numbers.best_num_draft(record) == 2  # means 1.2, 1.25, 1.15


def test_gain_of_alpha_and_its_interval() -> None:
    counts = np.full((8, 1), 10.0)
    before, after = np.full((8, 1), 2.0), np.full((8, 1), 7.0)
    assert study_numbers.gain((before, counts), (after, counts)) == pytest.approx([0.5, 0.5, 0.5])
    mixed = np.array([[1.0], [3.0]] * 4)
    rise, low, high = study_numbers.gain((before, counts), (mixed, counts))
    assert rise == pytest.approx(0.0) and low < 0 < high
    assert study_numbers.ratio(np.array([[1.0, 0.0]]), np.array([[4.0, 0.0]])) == [0.25, None]


def test_learning_curve_is_the_means_of_quarters(tmp_path: Path) -> None:
    minutes, losses = [1.0, 2.0, 3.0, 8.0], [4.0, 2.0, 1.5, 1.0]
    lines = [
        {"minutes": m, "loss": x, "alpha_by_step": [x / 10, 0.1], "num_tokens": 10 * m}
        for m, x in zip(minutes, losses, strict=True)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in [*lines, {"valid/loss": 9.0}]))
    curve = study_numbers.learning_curve(path)
    assert [point["loss"] for point in curve] == [3.0, 1.5, None, 1.0]
    assert curve[0]["alpha"] == pytest.approx([0.3, 0.1]) and curve[0]["tokens"] == 20


def test_advice_follows_the_intervals() -> None:
    arms = {
        "big": arm("big", [2.0, 1.9, 2.1], [1.3, 1.2, 1.4], 9),
        "small": arm("small", [1.5, 1.4, 1.6], [1.25, 1.15, 1.35], 2),
        "slow": arm("slow", [1.4, 1.3, 1.5], [0.8, 0.7, 0.9], 1),
    }
    contrasts = {"size": ["big", "small"], "speed": ["small", "slow"], "else": ["other", "big"]}
    assert study_text.advice({"arms": arms, "contrasts": contrasts}) == [
        "Fastest on this machine: big, 1.30x; its intervals are not apart from those of small. Of "
        "these small has the fewest weights.",
        "Most tokens a round: big, 2.00 tokens a round, its intervals above those of all others.",
        "Faster than the target alone on every task: big, small.",
        "Slower than it on every task, even at their best number: slow.",
        "Size: big and small: tau 2.00 and 1.50, big is ahead; speedup 1.30 and 1.25, not apart.",
        "Speed: small and slow: tau 1.50 and 1.40, not apart; speedup 1.25 and 0.80, small is "
        "ahead.",
    ]


def test_only_text_between_the_markers_is_replaced() -> None:
    begin, end = study_text.BEGIN, study_text.END
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert study_text.insert(text, "new", "x.md") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(UserError, match=r"x\.md: needs one line"):
        study_text.insert("before", "new", "x.md")


def test_stored_states_serve_any_of_their_layers(tmp_path: Path) -> None:
    section = TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu")
    target = Target.load(section)
    last = target.num_layers
    rows = [row("a", [5, 6, 7, 8, 9]), row("b", [4, 3, 2])]
    store = StateStore(tmp_path, manifest_of(target, (1, 2, 3), "float32"))
    capture_pass(target, rows, [5, 3], store.aux_layers, store)
    H = target.hidden_size
    whole = store.get("a")
    for layers in [(2,), (1, 3), (2, last), (last,), (1, 2, 3)]:
        part = StateStore(tmp_path, manifest_of(target, layers, "float32"))
        assert part.missing(["a", "b"]) == []
        states = part.get("a")
        aux = {k: whole.aux_SF[:, (k - 1) * H : k * H] for k in (1, 2, 3)} | {last: whole.hidden_SH}
        assert torch.equal(states.aux_SF, torch.cat([aux[k] for k in layers], dim=-1)), layers
        assert torch.equal(states.hidden_SH, whole.hidden_SH)
        assert part.aux_layers == (1, 2, 3)  # what a row that is added must hold
    none = StateStore(tmp_path, manifest_of(target, (), "float32"))
    assert none.get("b").aux_SF.shape == (3, 0)
    other = StateStore(tmp_path, manifest_of(target, (0, 1), "float32"))
    assert other.missing(["a", "b"]) == ["a", "b"]


@pytest.mark.slow
def test_whole_study_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, docs = tmp_path / "table.yaml", tmp_path / "study.md"
    table.write_text(TABLE)
    docs.write_text(f"# Study\n\n{study_text.BEGIN}\n{study_text.END}\n")
    words = [
        "--minutes",
        "0.03",
        "--arms",
        "lookup",
        "medusa",
        "--table",
        table,
        "--out",
        tmp_path / "out",
        "--docs",
        docs,
    ]
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, words)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert study.main() == 0
        folder = tmp_path / "out"
        found = json.loads((folder / "study.json").read_text())
        assert list(found["arms"]) == ["lookup", "medusa", "lookup+medusa"]
        medusa = found["arms"]["medusa"]
        assert medusa["minutes"] > 0 and medusa["num_tokens"] > 0
        assert len(medusa["alpha"]) == 2 and len(medusa["curve"]) == 4
        assert medusa["alpha"][0] - medusa["alpha_untrained"][0] == pytest.approx(
            medusa["alpha_gain"][0]
        )
        assert found["arms"]["lookup"]["num_params"] == 0 < medusa["num_params"]
        text = docs.read_text()
        assert text.startswith("# Study\n") and "| medusa | " in text
        shared = folder / "0.03min" / "shared" / "data"
        assert (folder / "0.03min" / "medusa" / "data").resolve() == shared
        manifest = json.loads((shared / "states" / "manifest.json").read_text())
        last = manifest["num_layers"]  # stored anyway: what medusa reads
        assert len(manifest["aux_layers"]) == 3 and last not in manifest["aux_layers"]
        shards = list((shared / "states").glob("shard-*"))
        written = {p: p.stat().st_mtime_ns for p in [*shards, *folder.rglob("model.safetensors")]}
        assert shards and study.main() == 0
        assert {p: p.stat().st_mtime_ns for p in written} == written
        assert json.loads((folder / "study.json").read_text()) == found
    finally:
        signal.signal(signal.SIGTERM, handler)
