"""The study at equal budget: its table, its rules, and a whole one on a tiny target."""

import json
import signal
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from data.batch import Batch, Row
from data.hidden_states import StateStore, capture_pass, manifest_of
from data.pipeline import aux_layers_of, data_dir, prepare
from data.target import Target
from drafters.lookup import Lookup
from eval.metrics import PromptRecord
from recipes.errors import UserError
from recipes.schema import TargetSection
from tests.benchmarks import study, study_numbers, study_plot, study_table, study_text
from tests.benchmarks.study_heldout import heldout_parts, with_stored_states
from tests.tiny_targets import tiny_target

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
heldout: 0
arms:
  lookup: {eval: {drafters: [lookup]}}
  eagle3: {drafter: {method: eagle3, draft_vocab_size: 128}}
  medusa: {drafter: {method: medusa, num_heads: 2}, loss: {num_steps: 2}}
joined: [medusa]
contrasts:
  a head a token or one for all: [eagle3, medusa]
speed: {tasks: ["heldout:2"], num_draft_tokens: [1, 2], max_new_tokens: 6}
"""


def row(name: str, ids: list[int]) -> Row:
    """The last two tokens are supervised."""
    mask = [place >= len(ids) - 2 for place in range(len(ids))]
    return Row(id=name, ids_S=torch.tensor(ids), mask_S=torch.tensor(mask))


def arm(
    name: str, tau: list[float], speedup: list[float] | None, num_params: int = 0
) -> dict[str, Any]:
    speed = speedup and {"1": {"speedup": {"chat": speedup}, "cost": 0.25}}
    return {
        "name": name,
        "num_params": num_params,
        "num_tokens": 5000,
        "minutes": 8.0,
        "hardware": "a chip",
        "commit": "c0ffee",
        "tau": {"chat": tau},
        "sums": {"chat": [[tau[0] * rounds, rounds] for rounds in (20, 30)]},
        "accepted": [[0.5, 0.4, 0.6], None],
        "speed": speed,
        "alpha": None,
    }


def trained(name: str, tau: list[float], speedup: list[float] | None) -> dict[str, Any]:
    curve = [
        {"minutes": 2.0 * q, "tokens": 1000 * q, "loss": 4.0 - q, "top1": [0.1 * q, 0.0]}
        for q in (1, 2, 3, 4)
    ]
    curve[1] = {"minutes": 4.0, "tokens": None, "loss": None, "top1": None}
    return arm(name, tau, speedup, 2_000_000) | {
        "alpha": [[0.45, 0.4, 0.5], [0.2, 0.1, 0.3]],
        "top1": [[0.4, 0.35, 0.45], [0.2, 0.1, 0.3]],
        "top1_untrained": [[0.05, 0.0, 0.1], [0.0, 0.0, 0.0]],
        "rise": [0.35, 0.3, 0.4],
        "over_ngram": [0.01, -0.1, 0.12],
        "alpha_over_ngram": [0.02, 0.01, 0.03],
        "curve": curve,
    }


def study_of(arms: list[dict[str, Any]], contrasts: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "minutes": 8,
        "target": "a target",
        "num_rows": 100,
        "num_train_tokens": 2000,
        "num_heldout_rows": 40,
        "num_draft_tokens": 2,
        "speed": {"tasks": ["chat:5"], "num_draft_tokens": [1, 2]},
        "contrasts": contrasts,
        "arms": {arm["name"]: arm for arm in arms},
    }


def test_shipped_table_is_valid_and_shares_its_answers(tmp_path: Path) -> None:
    table = study_table.read_table(study.TABLE, 20, tmp_path)
    assert {name for name, recipe in table.arms.items() if not study_table.is_trained(recipe)} == {
        "lookup",
        "suffix",
    }
    assert {recipe.drafter.method for recipe in table.arms.values()} == {
        *("eagle3", "p_eagle", "eagle1", "mtp", "medusa", "dflash", "dspark", "small_lm", "pard"),
    }
    assert "lookup+eagle3" in table.arms and table.speed.num_draft_tokens == [1, 2]
    assert {recipe.train.max_minutes for recipe in table.arms.values()} == {20.0}
    assert table.arms["eagle3-tv"].loss.name == "tv"
    assert table.arms["pard-small_lm"].drafter.model == f"{tmp_path}/small_lm/export"
    assert table.arms["eagle3-random"].drafter.init == "random"


def test_arm_of_other_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE.replace("contrasts:", "contrasts:\n  none: [eagle1]"))
    with pytest.raises(UserError, match=r"contrast 'none': no arm eagle1"):
        study_table.read_table(path, 1, tmp_path)
    path.write_text(TABLE.replace("  medusa: {", "  medusa: {data: {seed: 1}, "))
    with pytest.raises(UserError, match=r"arm medusa: target, data and eval are those of all arms"):
        study_table.read_table(path, 1, tmp_path)


def test_one_is_ahead_where_intervals_are_apart_on_every_task() -> None:
    a = {"chat": [1.5, 1.4, 1.6], "code": [2.0, 1.9, 2.1]}
    b = {"chat": [1.2, 1.1, 1.3], "code": [1.7, 1.6, 1.8]}
    touching = {"chat": [1.2, 1.1, 1.3], "code": [1.8, 1.7, 1.95]}
    assert study_numbers.ahead(a, b)
    assert not study_numbers.ahead(b, a)
    assert not study_numbers.ahead(a, touching) and not study_numbers.ahead(touching, a)
    assert study_numbers.mean(a) == 1.75


def test_gain_of_alpha_and_its_interval() -> None:
    counts = np.full((8, 1), 10.0)
    before, after = np.full((8, 1), 2.0), np.full((8, 1), 7.0)
    assert study_numbers.gain((before, counts), (after, counts)) == pytest.approx([0.5, 0.5, 0.5])
    mixed = np.array([[1.0], [3.0]] * 4)
    rise, low, high = study_numbers.gain((before, counts), (mixed, counts))
    assert rise == pytest.approx(0.0) and low < 0 < high


def test_rates_by_depth_with_intervals_over_rows() -> None:
    sums, counts = np.array([[1.0, 0.0]] * 4), np.array([[4.0, 0.0]] * 4)
    assert study_numbers.rates(sums, counts) == [[0.25, 0.25, 0.25], None]
    value, low, high = study_numbers.rates(np.array([[1.0], [3.0]] * 4), np.full((8, 1), 4.0))[0]
    assert value == 0.5 and 0.25 <= low < 0.5 < high <= 0.75


def test_accepted_positions_are_conditional_and_pooled_over_prompts() -> None:
    records = [  # of 4 + 4 rounds 6 accept the first token, of these 2 the second
        PromptRecord("a", None, 0, [2] * 4, [2, 1, 1, 0]),
        PromptRecord("b", None, 0, [2] * 2, [1, 0]),
        PromptRecord("b", None, 1, [2] * 2, [2, 1]),
    ]
    first, second, third = study_numbers.accepted(records, 3)
    assert first[0] == 0.75 and second[0] == pytest.approx(1 / 3)
    assert third is not None and third[0] == 0.0  # reached by two rounds, accepted by none


def test_tau_is_compared_prompt_by_prompt() -> None:
    one = [
        PromptRecord("a", None, 0, accepted=[1, 0], num_tokens=3),
        PromptRecord("b", None, 0, accepted=[2], num_tokens=3),
        PromptRecord("a", None, 1, accepted=[0, 1], num_tokens=3),
    ]
    assert study_numbers.tokens_and_rounds(one) == [[6.0, 4.0], [3.0, 1.0]]  # a, b
    # Prompts differ far more (1 to 3) than the arms do on each of them (by 0.2 to 0.4).
    old = [[10.0 * k, 10.0] for k in (1, 2, 3)] * 4
    new = [[10.0 * k + d, 10.0] for k, d in ((1, 2), (2, 3), (3, 4))] * 4
    value, low, high = study_numbers.tau_gain(old, new)
    assert value == pytest.approx(0.3) and 0.2 < low < 0.3 < high < 0.4
    back = study_numbers.tau_gain(new, old)
    assert back == pytest.approx([-value, -high, -low])


def test_first_guesses_of_lookup_are_compared_with_the_target() -> None:
    target = tiny_target()
    ids = torch.tensor([[7, 8, 9, 7, 8, 9, 1]])
    mask = torch.tensor([[False, False, False, True, True, True, True]])
    argmax = torch.tensor([[0, 0, 7, 8, 9, 7, 0]])
    states = target.forward(ids, None, ())
    p_SV = target.logits(states.hidden_BSH[0]).softmax(-1)
    batch = Batch(
        row_ids=["a"],
        ids_BS=ids,
        mask_BS=mask,
        lengths_B=torch.tensor([7]),
        hidden_BSH=states.hidden_BSH,
        lse_BS=target.logits(states.hidden_BSH).logsumexp(-1),
        argmax_BS=argmax,
    )
    # Drafts start behind tokens 3, 4 and 5; lookup knows what followed "7 8" and "8 9" before.
    alpha, hits, num = study_numbers._first_guesses(target, batch, Lookup(2, 4))
    assert (hits, num) == (2.0, 3.0)
    assert alpha == pytest.approx(float(p_SV[4, 9] + p_SV[5, 7]), rel=1e-5)
    # Of five tokens before, none stood twice: no guess anywhere, and no chance to accept one.
    assert study_numbers._first_guesses(target, batch, Lookup(5, 5)) == (0.0, 0.0, 3.0)


def test_learning_curve_is_the_means_of_quarters(tmp_path: Path) -> None:
    minutes, losses = [1.0, 2.0, 3.0, 8.0], [4.0, 2.0, 1.5, 1.0]
    lines = [
        {
            "minutes": m,
            "loss": x,
            "alpha_by_step": [x / 10, 0.1],
            "top1_by_step": [0.5, 0.0],
            "num_tokens": 10 * m,
        }
        for m, x in zip(minutes, losses, strict=True)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in [*lines, {"valid/loss": 9.0}]))
    curve = study_numbers.learning_curve(path)
    assert [point["loss"] for point in curve] == [3.0, 1.5, None, 1.0]
    assert curve[0]["alpha"] == pytest.approx([0.3, 0.1]) and curve[0]["tokens"] == 20
    assert curve[3]["top1"] == [0.5, 0.0] and curve[2]["top1"] is None


def test_advice_follows_the_intervals() -> None:
    arms = [
        arm("big", [2.0, 1.9, 2.1], [1.3, 1.2, 1.4], 9),
        arm("small", [1.5, 1.4, 1.6], [1.25, 1.15, 1.35], 2),
        arm("slow", [1.4, 1.3, 1.5], [0.8, 0.7, 0.9], 1),
        arm("untimed", [1.0, 0.9, 1.1], None, 1),
    ]
    # As 1.4, but on the first prompt it is ahead of small and on the second behind.
    arms[2]["sums"] = {"chat": [[1.7 * 20, 20], [1.2 * 30, 30]]}
    contrasts = {
        "size": ["big", "small"],
        "speed": ["small", "slow", "untimed"],
        "else": ["x", "big"],
    }
    assert study_text.advice(study_of(arms, contrasts)) == [
        "Most tokens a round: big, 2.00 tokens a round, ahead of all others.",
        "Fastest on this machine at 1 draft token: big, 1.30x; not apart from small. Of these "
        "small has the fewest weights.",
        "Faster than the target alone on every task, at 1 draft token: big, small; slower: slow; "
        "not timed: untimed.",
        "Speed at 2 draft tokens: not run.",
        "Size: big and small: tau 2.00 and 1.50, big is ahead (chat +0.50 [+0.50, +0.50]); speedup "
        "at 1 1.30 and 1.25, not apart.",
        "Speed: small and slow: tau 1.50 and 1.40, not apart (chat +0.10 [-0.20, +0.30]); speedup "
        "at 1 1.25 and 0.80, small is ahead.",
        "Speed: small and untimed: tau 1.50 and 1.00, small is ahead (chat +0.50 [+0.50, +0.50]).",
    ]


def test_tables_say_what_was_not_run() -> None:
    lookup = arm("lookup", [1.2, 1.1, 1.3], [1.1, 1.05, 1.2]) | {"top1": [[0.2, 0.1, 0.3]]}
    study = study_of([lookup, trained("head", [1.5, 1.4, 1.6], None)], {})
    lines = study_text.to_markdown(study, "curves.svg").split("\n")
    assert "| head | 1.50 [1.40, 1.60] | 0.50 [0.40, 0.60], - |" in lines
    assert "| arm | 1: chat | 1: cost c | 2: chat | 2: cost c |" in lines
    assert "| head | not run | not run | not run | not run |" in lines
    assert "| lookup | 1.10 [1.05, 1.20] | 0.25 | not run | not run |" in lines
    assert "| head | 2.0M | 5,000 | 8.0 | 0.45 [0.40, 0.50], 0.20 [0.10, 0.30] |" in lines
    assert (
        "| head | 3.00, 0.10 | -, - | 1.00, 0.30 | 0.00, 0.40 | 0.05 [0.00, 0.10] | "
        "0.35 [0.30, 0.40]: better | 0.01 [-0.10, 0.12]: not apart | "
        "0.02 [0.01, 0.03]: better | 0.30 [0.30, 0.30]: better |"
        in lines  # more on each prompt alike
    )
    assert "![top-1 agreement against minutes, a panel an arm](curves.svg)" in lines


def test_plot_has_a_panel_for_each_trained_arm() -> None:
    lookup = arm("lookup", [1.2, 1.1, 1.3], None) | {"top1": [[0.2, 0.1, 0.3]]}
    root = ElementTree.fromstring(
        study_plot.to_svg(study_of([lookup, trained("a<b", [1.5, 1.4, 1.6], None)], {}))
    )
    space = "{http://www.w3.org/2000/svg}"
    (panel,) = root.iter(f"{space}g")
    assert panel.find(f"{space}text").text == "a<b"
    # Axes of 176 x 114 from (34, 140): 8 minutes wide, 0 to 1 high.
    hollow, full = panel.iter(f"{space}circle")
    assert (hollow.get("cx"), hollow.get("cy"), hollow.get("fill")) == ("34.0", "134.3", "white")
    assert (full.get("cx"), full.get("cy")) == ("210.0", "94.4")
    dashed, curve = list(panel.iter(f"{space}polyline"))[-2:]
    assert dashed.get("points") == "34.0,117.2 210.0,117.2" and dashed.get("stroke-dasharray")
    assert curve.get("points") == "78.0,128.6 166.0,105.8 210.0,94.4"  # quarters 1, 3 and 4


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


def test_prompts_left_without_answers_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE)
    recipe = study_table.read_table(path, 1, tmp_path).arms["eagle3"]
    target = Target.load(recipe.target)
    prepared = prepare(recipe, target)
    answers = data_dir(recipe) / "responses.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:11]))  # as if time had run out before the last 5 of 16
    left = {json.loads(line)["id"] for line in lines[11:]}
    assert heldout_parts(recipe, prepared, target, 0) == [(prepared.heldout, data_dir(recipe))]
    parts = heldout_parts(recipe, prepared, target, 5)
    assert parts[0][0] == prepared.heldout
    assert {name for rows, _ in parts[1:] for name in rows.ids} == left
    layers = aux_layers_of(recipe, target)
    found = with_stored_states(parts, target, layers, "float32")
    assert len(found) == len(prepared.heldout) + 5
    for one in found:  # stored while the answers were written
        states = target.forward(one.ids_S[None], None, layers)
        ours, theirs = one.states.aux_SF[:-1], states.aux_BSF[0, :-1]  # nothing reads the last
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"asks for 6 prompts, the shared answers left 5 over"):
        heldout_parts(recipe, prepared, target, 6)
    answers.write_text("".join(lines))  # now they are learned from
    with pytest.raises(UserError, match=r"heldout-5/data: the arms learn from some of its prompts"):
        heldout_parts(recipe, prepared, target, 5)


@pytest.mark.parametrize("value", ["-1", "yes", "0.5"])
def test_number_of_held_out_prompts_is_checked(tmp_path: Path, value: str) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE.replace("heldout: 0", f"heldout: {value}"))
    with pytest.raises(UserError, match=r"heldout: .* is no number of prompts, 0 or more"):
        study_table.read_table(path, 1, tmp_path)


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
    rest = list(map(str, words[5:]))
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, words)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert study.main() == 0
        folder = tmp_path / "out"
        found = json.loads((folder / "study.json").read_text())
        assert list(found["arms"]) == ["lookup", "medusa"]
        medusa = found["arms"]["medusa"]
        assert medusa["minutes"] > 0 and medusa["num_tokens"] > 0 and medusa["speed"] is None
        assert len(medusa["alpha"]) == 2 and len(medusa["curve"]) == 4
        before, after = medusa["top1_untrained"][0][0], medusa["top1"][0][0]
        assert after - before == pytest.approx(medusa["rise"][0])
        ngram = found["arms"]["lookup"]["top1"][0][0]
        assert after - ngram == pytest.approx(medusa["over_ngram"][0])
        assert 0 <= medusa["alpha"][0][0] - medusa["alpha_over_ngram"][0] < 1  # p of its guesses
        assert found["arms"]["lookup"]["num_params"] == 0 < medusa["num_params"]
        text = docs.read_text()
        assert text.startswith("# Study\n") and "| medusa | " in text
        assert docs.with_suffix(".svg").read_text().count("<g ") == 1
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
        # Speed of one arm, and another arm behind: neither changes what the others say.
        monkeypatch.setattr(sys, "argv", ["study.py", *map(str, words), "--speed", "medusa"])
        assert study.main() == 0
        monkeypatch.setattr(
            sys, "argv", ["study.py", *map(str, words[:2]), "--arms", "lookup+medusa", *rest]
        )
        assert study.main() == 0
        again = json.loads((folder / "study.json").read_text())["arms"]
        assert list(again) == ["lookup", "medusa", "lookup+medusa"]
        speed = again["medusa"].pop("speed")
        assert list(speed) == ["1", "2"] and speed["2"]["speedup"]["heldout:2"][0] > 0
        assert again["medusa"] | {"speed": None} == medusa
        assert again["lookup"] == found["arms"]["lookup"]
        assert again["lookup+medusa"]["speed"] is None and again["lookup+medusa"]["alpha"] is None
        assert {p: p.stat().st_mtime_ns for p in written} == written
    finally:
        signal.signal(signal.SIGTERM, handler)
