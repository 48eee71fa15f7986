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
from eval.arms import Arm, TurnAnswer, middle, run_arms
from eval.costs import PassTimes
from eval.decode import Decoded, DecodeSettings, Round
from eval.measure import check_prompts, greedy_check, measure, num_batches
from eval.metrics import aggregate
from eval.record import validate
from eval.results import make_lossless
from eval.round_texts import make_samples
from eval.task_result import loop_costs, make_records, predicted_curve, speedup_by_repeat
from eval.tasks import Task
from eval.turns import TurnBatch
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
        split = result["ms_per_round"]
        assert all(value > 0 for value in split.values())
        assert split["other"] == pytest.approx(split["sampling"] + split["bookkeeping"])
        assert result["cost_ratio"] > 0
        assert 0 <= result["top1_agreement"] <= 1
        assert result["tau_before_stop"] >= result["tau"]
        assert result["per_turn"] == [
            {"turn": 1, "tau": result["tau"], "num_rounds": result["num_rounds"]}
        ]
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


def batch_of(answers, seconds, start=0) -> TurnBatch:
    indices = list(range(start, start + len(answers)))
    return TurnBatch(0, indices, [[i] for i in indices], answers, seconds)


def rounds_of(*accepted: int, proposed: int = 3) -> list[Round]:
    return [Round(proposed, a, a + 1, [0] * proposed) for a in accepted]


@pytest.mark.parametrize("level", [1.0, 0.6])
def test_predictions_use_what_the_loop_cost(level):
    """Passes timed alone, faster than in the loop and wrong at one size, only lead to others."""
    baseline, arm = Arm(), Arm()
    plain = Decoded(ids=[0] * 5, rounds=rounds_of(0, 0, 0, 0, proposed=0))
    baseline.add([[batch_of([plain], loop.Seconds(verify=0.400, sampling=0.008))]])
    drafted = Decoded(ids=[0] * 5, rounds=rounds_of(1, 1, proposed=1))
    arm.add([[batch_of([drafted], loop.Seconds(draft=0.02, verify=0.21, sampling=0.01))]])
    # Measured: a token 102 ms; a round of one drafted token 10 + 105 + 5 ms.
    verify = {1: 130.0 * level, 2: 105.0 * level, 3: 110.0 * level}
    times = PassTimes(verify, {"x": {1: 20.0 * level, 2: 40.0 * level}})
    first, second, *_ = predicted_curve(baseline, arm, [0.5], times, "x")
    assert first["tau"] == 1.5
    assert first["speedup"] == pytest.approx(1.5 * 102 / 120)
    # Two tokens: draft 20, verify 110, loop 2 -> 5 -> 8 ms; c_2 is taken to be c_1.
    assert second["tau"] == 1.75
    assert second["speedup"] == pytest.approx(1.75 * 102 / (20 + 110 + 8))


def test_rounds_without_drafts_say_nothing_of_their_cost():
    """Nine of ten rounds propose nothing: the loop's 11 ms stay those of a plain token."""
    baseline, arm = Arm(), Arm()
    plain = Decoded(ids=[0] * 11, rounds=rounds_of(*[0] * 10, proposed=0))
    baseline.add([[batch_of([plain], loop.Seconds(verify=0.100, sampling=0.010))]])
    rounds = [*rounds_of(2, proposed=3), *rounds_of(*[0] * 9, proposed=0)]
    mixed = Decoded(ids=[0] * 13, rounds=rounds)
    arm.add([[batch_of([mixed], loop.Seconds(draft=0.001, verify=0.116, sampling=0.011))]])
    times = PassTimes({1: 10.0, 2: 15.0, 4: 26.0}, {"x": {1: 0.1, 3: 0.1}})
    costs = loop_costs(baseline, arm, times, "x")
    assert costs.plain_ms == pytest.approx(11.0)
    assert (costs.verify(2), costs.verify(4)) == (15.0, 26.0)
    curve = predicted_curve(baseline, arm, [0.1, 0.1, 0.0], times, "x")
    assert curve[2]["speedup"] == pytest.approx(1.2 * 11 / (0.1 + 26 + 1))


def test_p99_all_rounds_of_all_prompts_count():
    lists = [(3, 0), (1,), (3, 2, 0)]
    arm = Arm()
    for number, accepted in enumerate(lists):
        answer = Decoded(ids=[0] * (1 + sum(accepted) + len(accepted)), rounds=rounds_of(*accepted))
        arm.add([[batch_of([answer], loop.Seconds(draft=1.0), number)]])
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
    arm.add([[batch_of(answers, spent)]])
    assert [turn.seconds for turn in arm.turns] == [2.0, 2.0]
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


def first_turns(target, prompts):
    """Answers prompts that are token ids already."""

    def answer(drafter, indices, settings):
        batch = [prompts[i] for i in indices]
        answers, seconds = loop.decode(target, drafter, batch, settings, indices)
        return [TurnBatch(0, list(indices), batch, answers, seconds)]

    return answer


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def costly_arms(clock, num_prompts, warm_up, repeats=1):
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
    answer = first_turns(target, prompts)
    arms = run_arms(
        answer, {"drafter": drafter}, num_prompts, settings, 1, repeats, warm_up=warm_up
    )
    return arms["baseline"].total.decode, arms["drafter"].total.decode


@pytest.mark.parametrize("num_prompts", [1, 2, 3])  # the arm that goes first changes
def test_p103_every_arm_is_warmed_up(num_prompts, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("eval.rounds.time", clock)
    baseline, drafter = costly_arms(clock, num_prompts, warm_up=True)
    assert baseline == pytest.approx(0.08 * num_prompts)  # 8 rounds of 10 ms, prefill apart
    assert drafter / baseline == pytest.approx(1.0, abs=0.02)
    _, cold = costly_arms(clock, num_prompts, warm_up=False)
    assert cold > 1.0


def test_p103_arms_take_turns():
    order = []
    drafters = {"a": Lookup(1, 2), "b": Lookup(2, 3)}
    names = {None: "baseline", drafters["a"]: "a", drafters["b"]: "b"}

    def fake(drafter, indices, _settings):
        order.append((names[drafter], list(indices)))
        return [batch_of([Decoded(ids=[1]) for _ in indices], loop.Seconds(), indices[0])]

    run_arms(fake, drafters, 3, DecodeSettings(max_new_tokens=4), 2, repeats=2)
    warm_up = [("baseline", [0, 1]), ("a", [0, 1]), ("b", [0, 1])]
    first = [("baseline", [0, 1]), ("a", [0, 1]), ("b", [0, 1])]
    second = [("a", [2]), ("b", [2]), ("baseline", [2])]
    again = [("a", [0, 1]), ("b", [0, 1]), ("baseline", [0, 1])]
    last = [("b", [2]), ("baseline", [2]), ("a", [2])]
    assert order == warm_up + first + second + again + last


def test_p103_the_middle_of_repeats_counts_and_their_spread_is_kept():
    times = [loop.Seconds(draft=d, verify=1.0) for d in (9.0, 1.0, 2.0)]
    assert middle(times).draft == 2.0
    assert middle(times[:2]).draft == 5.0  # of two their mean
    answer = Decoded(ids=[0, 0, 0], rounds=rounds_of(1))  # two tokens in a round
    arm, baseline = Arm(), Arm()
    arm.add([[batch_of([answer], seconds)] for seconds in times])
    plain = [loop.Seconds(verify=v) for v in (10.0, 4.0, 3.0)]
    baseline.add([[batch_of([answer], seconds)] for seconds in plain])
    assert (arm.total.decode, baseline.total.decode) == (3.0, 4.0)
    records = [make_records(make_task(["a"]).prompts, a) for a in (baseline, arm)]
    assert speedup_by_repeat(records[0], baseline, records[1], arm) == [1.0, 2.0, 1.0]


def test_oracle_is_accepted_whole_and_never_runs_before_the_baseline():
    target = make_target()
    drafters = {"drafter": make_eagle(target), "lookup": Lookup(1, 4)}
    wanted = section(oracle=True, drafters=["drafter", "lookup"])
    found = measure(target, drafters, make_task(), wanted, 0.0)
    result = found["drafter"].result
    assert list(found) == ["drafter", "lookup"]
    assert result["oracle_speedup"] > 0
    assert result["oracle_share"] == pytest.approx(result["speedup"] / result["oracle_speedup"])
    assert "oracle_share" not in found["lookup"].result
    drawn = measure(target, drafters, make_task(), wanted, 1.0)["drafter"].result
    assert "oracle_share" not in drawn  # drawn answers are not known beforehand

    prompts = [[5], [6, 7], [8]]  # the order of arms moves on three times
    settings = DecodeSettings(max_new_tokens=9, num_draft=3)
    arms = run_arms(
        first_turns(target, prompts), drafters, 3, settings, 1, oracle=drafters["drafter"]
    )
    assert [a.ids for a in arms["oracle"].answers] == [a.ids for a in arms["baseline"].answers]
    rounds = [r for answer in arms["oracle"].answers for r in answer.rounds]
    assert all(r.accepted == r.proposed for r in rounds)
    assert sum(r.proposed for r in rounds) > len(rounds)


def test_time_outside_a_round_is_not_in_it(monkeypatch):
    """Prefill apart: 10 s in every prefill, 10 ms in every round."""
    clock = FakeClock()
    monkeypatch.setattr("eval.rounds.time", clock)
    target = ScriptedTarget.chain({i: i + 1 for i in range(30)}, [])
    forward = target.forward

    def slow(ids_BS, cache, aux_layers=()):
        clock.now += 10.0 if not int(cache.lengths_B.sum()) else 0.01
        return forward(ids_BS, cache, aux_layers)

    target.forward = slow
    settings = DecodeSettings(max_new_tokens=9)
    arms = run_arms(first_turns(target, [[1], [2]]), {}, 2, settings, 1)
    assert arms["baseline"].total.prefill == pytest.approx(20.0)
    assert arms["baseline"].total.decode == pytest.approx(0.16)


def test_samples_show_what_was_accepted_rejected_and_added():
    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))
    rounds = [
        Round(3, 1, 2, [11, 55, 56], p=[0.5, 0.12345, 0.0], q=[1.0, 0.5, 0.25], next_p=0.75),
        Round(3, 2, 2, [13, 14, 57], p=[0.5, 0.5, 0.5], q=[1.0, 1.0, 1.0], next_p=0.5),
    ]  # 14 ends the answer
    answer = Decoded(ids=[10, 11, 12, 13, 14], finish="stop", rounds=rounds)
    turns = [TurnAnswer(0, 0, [1], answer, 1.0)]
    samples = make_samples(target, make_task(["Hi"]).prompts, turns)
    none = {"p": [], "q": [], "next_p": None}
    first = {"p": [0.5, 0.1235, 0.0], "q": [1.0, 0.5, 0.25], "next_p": 0.75}
    second = {"p": [0.5, 0.5], "q": [1.0, 1.0], "next_p": None}
    assert samples == [
        {
            "prompt": "Hi",
            "turn": 0,
            "rounds": [
                {"accepted": [], "rejected": [], "next": "<10>", **none},
                {"accepted": ["<11>"], "rejected": ["<55>", "<56>"], "next": "<12>", **first},
                {"accepted": ["<13>", "<14>"], "rejected": [], "next": "", **second},
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
    files = sorted((run_folder / "results").iterdir())
    starts = sorted(f"{n}_T{t}_K2_B1_" for n in names for t in (0, 1))
    assert [file.name[:-13] for file in files] == starts  # eight hex characters and .json
    for file in files:
        record = validate(json.loads(file.read_text()), str(file))
        assert record["settings"]["num_draft_tokens"] == 2
        assert record["tasks"]["heldout:2"]["num_prompts"] == 2
        assert len(record["samples"]) == 2
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
