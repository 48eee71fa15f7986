"""eval/bench.py --engine vllm on a real server: its record counts what our own loop counts."""

import json
from typing import Any

import pytest

from data.embedded import byte_tokenizer
from data.prompt_rows import make_prompt
from data.target import Target
from eval.decode import DecodeSettings, decode
from eval.results import Plan, make_drafters
from eval.served import ServeOptions, bench_served, render_task
from eval.tasks import Task
from recipes.drafter_sections import Eagle3Section
from recipes.schema import Recipe, TargetSection
from tests.vllm.ours_half import NUM_DRAFT, make_target, rows_of, trained
from tests.vllm.settings import MARKS, VLLM_PYTHON

pytestmark = MARKS

NUM_TOKENS = 24
TEXTS = ["abc", "Why is it so?", "abababab", "1 2 3"]
FLAGS = "--enforce-eager --max-model-len 256 --max-num-seqs 4"


TASK = Task("texts", 1, "hash", [make_prompt("test", text, category="x") for text in TEXTS])


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("served")
    made = make_target("llama", folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    recipe = Recipe.model_validate(
        {
            "name": "served",
            "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
            "data": {"sources": ["book"], "num_prompts": 1},
            "eval": {
                "temperatures": [0.0],
                "num_draft_tokens": NUM_DRAFT,
                "max_new_tokens": NUM_TOKENS,
                "turns": "first",
            },
        }
    )
    case = trained(Eagle3Section())
    drafter = case.make(made, rows_of(made, render_task(recipe, TASK, "completions")))
    assert case.save is not None
    case.save(drafter, folder / "export", made)
    return Plan(recipe, "served", folder, folder / "export", folder / "results")


def our_counts(plan: Plan) -> dict[str, Any]:
    """The same prompts in our loop, from the same folders."""
    target = Target.load(TargetSection(model=plan.recipe.target.model, dtype="float32"))
    drafter = make_drafters(plan, target, ["drafter"])["drafter"]
    settings = DecodeSettings(max_new_tokens=NUM_TOKENS, num_draft=NUM_DRAFT)
    rounds = []
    for ids in render_task(plan.recipe, TASK, "completions"):
        rounds += decode(target, drafter, [ids], settings)[0][0].rounds
    return {
        "num_rounds": len(rounds),
        "num_proposed": sum(r.proposed for r in rounds),
        "num_accepted": sum(r.accepted for r in rounds),
        "num_tokens": sum(r.emitted for r in rounds),
        "tau": pytest.approx(sum(r.emitted for r in rounds) / len(rounds)),
    }


def test_served_record_counts_what_our_loop_counts(plan, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = ServeOptions(
        engine="vllm",
        command=f"{VLLM_PYTHON} -m vllm.entrypoints.openai.api_server",
        flags=FLAGS,
        concurrency=(1, 4),
    )
    expected = our_counts(plan)
    assert expected["num_accepted"] > 0
    for path in bench_served(plan, [TASK], options):
        record = json.loads(path.read_text())
        task, served = record["tasks"]["texts"], record["tasks"]["texts"]["served"]
        assert record["settings"]["engine"].startswith("vllm 0.")
        assert {key: task[key] for key in expected} == expected
        assert record["lossless"]["greedy_identical"] == f"{len(TEXTS)}/{len(TEXTS)}"
        assert (served["num_failed"], served["num_uncut"], task["num_missing"]) == (0, 0, 0)
        # The engine's own counters: at least what we keep, over the same steps or one fewer each.
        assert served["engine"]["num_accepted_tokens"] >= task["num_accepted"]
        assert 0 <= task["num_rounds"] - served["engine"]["num_drafts"] <= len(TEXTS)
        assert task["speedup"] > 0 and served["throughput_speedup"] > 0
        assert served["ttft_ms"]["p50"] > 0 and served["tpot_ms"]["p99"] > 0
