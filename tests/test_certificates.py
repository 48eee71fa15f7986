"""Certificates of a run: files and text, from models on disk."""

import json
from pathlib import Path

import pytest

from eval.certificates import certificate_path, run_certificates, to_text
from eval.results import Plan
from eval.tasks import load_task
from recipes.errors import UserError
from recipes.schema import load_recipe
from tests.tiny_targets import tiny_target

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    target = tiny_target("qwen3")
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    changes = [
        f"target.model={tmp_path / 'target'}",
        "target.dtype=bfloat16",
        "eval.drafters=[lookup]",
        "eval.lookup_min=1",
        "eval.num_draft_tokens=2",
        "eval.max_new_tokens=12",
        "eval.batch_size=4",
        "eval.greedy_check_prompts=4",
    ]
    recipe = load_recipe(ROOT / "recipes" / "smoke.yaml", changes)
    return Plan(recipe, "tiny", tmp_path, tmp_path / "export", tmp_path / "results")


def test_certificate_is_written_and_told(plan: Plan, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "prompt": f"{word} {word}"} for i, word in enumerate("abcd")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [found] = run_certificates(plan, [load_task(str(prompts))], num_tokens=60)
    assert json.loads(certificate_path(plan, "lookup").read_text()) == found
    assert found["greedy_identical"] == "4/4"  # in float32
    assert found["floor"] is not None and found["floor"]["dtype"] == "bfloat16"
    assert found["pit_num_tokens"] >= 60
    text = to_text(found).split("\n")
    assert text[0] == "lookup:"
    assert text[1].startswith("  drawn at T=1, 2 drafts chosen outright: ")
    assert text[-1] == found["line"]
    assert text[-1].startswith("losslessness certificate: ")


def test_no_prompts_is_a_message(plan: Plan) -> None:
    with pytest.raises(UserError, match=r"eval\.tasks: no prompts to certify on"):
        run_certificates(plan, [])
