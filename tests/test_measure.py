"""Measuring: arms that take turns, counts that add up, costs off the clock, result files."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.prompt_rows import make_prompt
from data.vocab import DraftVocab
from drafters.export_info import Origin, TargetInfo
from drafters.lookup import Lookup, LookupThen
from drafters.methods import build_drafter
from drafters.vllm_format import save
from eval import decode as loop
from eval.decode import Decoded, DecodeSettings, Round
from eval.measure import (
    Arm,
    check_prompts,
    greedy_check,
    make_records,
    make_samples,
    measure,
    num_batches,
    run_arms,
)
from eval.metrics import aggregate
from eval.record import validate
from eval.report import make_samples as read_samples
from eval.results import make_lossless
from eval.tasks import Task
from recipes.drafter_sections import Eagle3Section
from recipes.schema import EvalSection
from tests.scripted import Oracle, ScriptedTarget
from tests.tiny_targets import tiny_target

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["one two three one two", "a", "xyzxyzxyzxy", "again and again and"]


def make_task(texts=TEXTS) -> Task:
    return Task("made", 1, "0" * 16, [make_prompt("made", text) for text in texts])


def section(**changes) -> EvalSection:
    fields = {"num_draft_tokens": 3, "max_new_tokens": 12, "lookup_min": 1}
    return EvalSection.model_validate(fields | changes)


def make_target():
    return tiny_target("qwen3", eos_token_id=[257, 10, 20, 30, 40])


def make_eagle(target):
    vocab = DraftVocab(torch.arange(264), 264)
    return build_drafter(Eagle3Section(), target, (1, 2, 3), vocab, seed=0).eval()


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_of_all_arms_add_up(temperature, batch_size):
    target, told = make_target(), []
    eagle = make_eagle(target)
    drafters = {
        "drafter": eagle,
        "lookup": Lookup(1, 4),
        "lookup+drafter": LookupThen(Lookup(1, 4), eagle),
    }
    task = make_task()
    measured = measure(
        target, drafters, task, section(batch_size=batch_size), temperature, None, told.append
    )
    assert list(measured) == ["drafter", "lookup", "lookup+drafter"]
    assert sum(told) == num_batches(4, 3, batch_size) == {1: 16, 3: 8}[batch_size]
    for found in measured.values():
        result = found.result
        assert (result["num_prompts"], result["num_missing"], result["turns"]) == (4, 0, 1)
        # The first token of each answer belongs to the prefill, in tokens as in time.
        assert result["tau"] == pytest.approx(result["num_tokens"] / result["num_rounds"])
        assert result["num_accepted"] <= result["num_proposed"]
        assert all(value > 0 for value in result["ms_per_round"].values())
        assert result["speedup"] == pytest.approx(
            result["tokens_per_second"] / result["baseline_tokens_per_second"]
        )
        assert result["predicted_speedup"] > 0
        assert len(found.pit) == (0 if temperature == 0 else result["num_tokens"] + 4)
        if temperature == 0:
            assert result["same_as_baseline"] == "4/4"
            assert result["other_lengths"] == []
            assert found.comparison.divergences == []
    lossless = make_lossless(target, list(measured.values()), None)
    assert lossless["greedy_identical"] == ("12/12" if temperature == 0 else None)
    assert (lossless["pit_p_value"] is None) == (temperature == 0)
    if temperature == 1:
        assert lossless["pit_p_value"] > 0.001


def rounds_of(*accepted: int, proposed: int = 3) -> list[Round]:
    return [Round(proposed, a, a + 1, [0] * proposed) for a in accepted]


def test_p99_all_rounds_of_all_prompts_count():
    lists = [(3, 0), (1,), (3, 2, 0)]
    arm = Arm()
    for accepted in lists:
        answer = Decoded(ids=[0] * (1 + sum(accepted) + len(accepted)), rounds=rounds_of(*accepted))
        arm.add([answer], loop.Seconds(draft=1.0))
    records = make_records(make_task(["a", "b", "c"]).prompts, arm)
    assert [r.accepted for r in records] == [[3, 0], [1], [3, 2, 0]]
    assert [r.num_tokens for r in records] == [5, 2, 8]
    rates = aggregate(records)
    assert (rates["num_rounds"], rates["num_accepted"], rates["num_tokens"]) == (6, 9, 15)
    assert rates["tau"] == 2.5
    assert arm.num_steps == 6


def test_time_of_a_batch_is_shared_and_its_rounds_run_together():
    arm = Arm()
    answers = [Decoded(rounds=rounds_of(1, 1)), Decoded(rounds=rounds_of(3))]
    spent = loop.Seconds(prefill=9.0, draft=1.0, verify=2.0, sampling=0.5, bookkeeping=0.5)
    arm.add(answers, spent)
    assert arm.seconds == [2.0, 2.0]
    assert arm.num_steps == 2
    assert arm.total.decode == 4.0


def test_p101_no_round_is_null_and_never_one():
    target = make_target()
    found = measure(target, {"lookup": Lookup(1, 4)}, make_task(), section(max_new_tokens=1), 0.0)[
        "lookup"
    ].result
    unknown = ("tau", "tau_ci95", "acceptance_rate", "alpha", "speedup", "tokens_per_second",
               "predicted_speedup", "predicted_from_alpha", "baseline_ms_per_token")  # fmt: skip
    assert {key: found[key] for key in unknown} == dict.fromkeys(unknown)
    assert (found["num_rounds"], found["num_tokens"], found["num_missing"]) == (0, 0, 0)
    nothing = measure(target, {"lookup": Lookup(1, 4)}, make_task([]), section(), 0.0)
    assert nothing["lookup"].result["tau"] is None


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def costly_arms(clock, num_prompts, warm_up):
    """A target and a drafter whose first pass costs 1 s and all later ones 10 ms."""
    chain = {i: i + 1 for i in range(30)}

    def cost(num_passes: int) -> None:
        clock.now += 1.0 if num_passes == 0 else 0.01

    target = ScriptedTarget.chain(chain, [])
    target.cost = cost
    prompts = [[i] for i in range(num_prompts)]
    drafter = Oracle({(i,): list(range(i + 1, 30)) for i in range(num_prompts)}, 64, [0])
    propose, calls = drafter.propose, []

    def slow_once(*arguments):
        clock.now += 0.0 if calls else 1.0
        calls.append(1)
        return propose(*arguments)

    drafter.propose = slow_once
    settings = DecodeSettings(max_new_tokens=9, num_draft=3)
    arms = run_arms(target, {"drafter": drafter}, prompts, settings, 1, warm_up)
    return arms["baseline"].total.decode, arms["drafter"].total.decode


@pytest.mark.parametrize("num_prompts", [1, 2, 3])  # the arm that goes first changes
def test_p103_every_arm_is_warmed_up(num_prompts, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(loop, "time", clock)
    baseline, drafter = costly_arms(clock, num_prompts, warm_up=True)
    assert baseline == pytest.approx(0.08 * num_prompts)  # 8 rounds of 10 ms, prefill apart
    assert drafter / baseline == pytest.approx(1.0, abs=0.02)
    _, cold = costly_arms(clock, num_prompts, warm_up=False)
    assert cold > 1.0


def test_p103_arms_take_turns(monkeypatch):
    order = []
    names = {}

    def fake(_target, drafter, prompts, _settings, indices=None):
        order.append((names[drafter], indices and list(indices)))
        return [Decoded(ids=[1]) for _ in prompts], loop.Seconds()

    drafters = {"a": Lookup(1, 2), "b": Lookup(2, 3)}
    names = {None: "baseline", drafters["a"]: "a", drafters["b"]: "b"}
    monkeypatch.setattr("eval.measure.decode", fake)
    run_arms(make_target(), drafters, [[1]] * 3, DecodeSettings(max_new_tokens=4), 2)
    warm_up = [("baseline", None), ("a", None), ("b", None)]
    first = [("baseline", [0, 1]), ("a", [0, 1]), ("b", [0, 1])]
    second = [("a", [2]), ("b", [2]), ("baseline", [2])]
    assert order == warm_up + first + second


def test_samples_show_what_was_accepted_rejected_and_added():
    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))
    rounds = [Round(3, 1, 2, [11, 55, 56]), Round(3, 2, 2, [13, 14, 57])]  # 14 ends the answer
    answer = Decoded(ids=[10, 11, 12, 13, 14], finish="stop", rounds=rounds)
    samples = make_samples(target, make_task(["Hi"]).prompts, [answer])
    assert samples == [
        {
            "prompt": "Hi",
            "rounds": [
                {"accepted": [], "rejected": [], "next": "<10>"},
                {"accepted": ["<11>"], "rejected": ["<55>", "<56>"], "next": "<12>"},
                {"accepted": ["<13>", "<14>"], "rejected": [], "next": ""},
            ],
        }
    ]


def test_greedy_check_takes_prompts_of_all_tasks_in_turn():
    tasks = [make_task(["a1", "a2", "a3"]), make_task(["b1"])]
    prompts = check_prompts(tasks, 3)
    assert [p["messages"][0]["content"] for p in prompts] == ["a1", "b1", "a2"]
    target = make_target()
    found = greedy_check(target, {"drafter": make_eagle(target)}, prompts, section())
    assert (found["drafter"].num_identical, found["drafter"].num_prompts) == (3, 3)


# The script


def bench(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "eval" / "bench.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A target folder, a random drafter exported for it, and held-out rows."""
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    target.name = str(tmp_path / "target")
    recipe = {"data": {"regenerate": True, "sources": ["book"]}, "train": {"epochs": 1.0}}
    origin = Origin(
        recipe=recipe, commit=None, versions={}, num_trained_tokens=7, num_draft_tokens=3
    )
    run = tmp_path / "tiny"
    save(make_eagle(target), run / "export", "vllm", torch.float32, TargetInfo.of(target), origin)
    rows = [
        {
            "id": str(i),
            "split": "heldout" if i else "train",
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "no"},
            ],
        }
        for i, text in enumerate(TEXTS)
    ]
    (run / "data").mkdir()
    (run / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.mark.slow
def test_bench_writes_records_and_skips_what_is_done(run_folder, tmp_path):
    arguments = ["--target", tmp_path / "target", "--drafter", run_folder / "export",
                 "--tasks", "heldout:2", "--num-draft-tokens", "2", "--max-new-tokens", "8",
                 "eval.lookup_min=1", "target.dtype=bfloat16"]  # fmt: skip
    done = bench(*arguments, "--temperature", "0,1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = ["drafter", "lookup", "lookup+drafter"]
    files = [run_folder / "results" / f"{n}_T{t}.json" for n in names for t in (0, 1)]
    assert sorted(files) == sorted((run_folder / "results").iterdir())
    for file in files:
        record = validate(json.loads(file.read_text()), str(file))
        assert record["settings"]["num_draft_tokens"] == 2
        assert record["tasks"]["heldout:2"]["num_prompts"] == 2
        assert len(read_samples(record, "x")) == 2
        greedy = record["settings"]["temperature"] == 0
        assert record["lossless"]["greedy_identical"] == ("2/2" if greedy else None)  # in fp32
        assert (record["lossless"]["pit_num_tokens"] is None) == greedy
    identity = json.loads(files[0].read_text())["identity"]
    assert (identity["drafter"], identity["method"]) == ("tiny", "eagle3")
    assert identity["trained_tokens"] == 7

    before = [file.stat().st_mtime_ns for file in files]
    again = bench(*arguments, "--temperature", "0,1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("up to date") == 6
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.slow
def test_bench_without_an_export_names_the_command(tmp_path):
    done = bench(ROOT / "recipes" / "smoke.yaml", f"output_dir={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2
    assert "python train/export.py" in done.stderr
    assert len(done.stderr.splitlines()) == 1
