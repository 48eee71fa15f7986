"""Certificates of a run: files and text, from models on disk."""

import json
import re
from pathlib import Path

import pytest

from data.target import Target
from drafters.base import DecodingDrafter
from eval.certificates import certificate_path, run_certificates, to_text
from eval.results import Plan
from eval.tasks import Task, load_task
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


def with_eval(plan: Plan, **changes: object) -> Plan:
    section = plan.recipe.eval.model_copy(update=changes)
    return plan._replace(recipe=plan.recipe.model_copy(update={"eval": section}))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_certificate_is_written_and_told(rule: str, plan: Plan, tmp_path: Path) -> None:
    plan = with_eval(plan, verification=rule)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "prompt": f"{word} {word}"} for i, word in enumerate("abcd")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [found] = run_certificates(plan, [load_task(str(prompts))], num_tokens=60)
    ending = "" if rule == "token" else "_block"
    assert certificate_path(plan, "lookup").name == f"certificate_lookup{ending}.json"
    assert json.loads(certificate_path(plan, "lookup").read_text()) == found
    assert found["greedy_identical"] == "4/4"  # in float32
    identity = found["identity"]
    assert (identity["target"], identity["drafter_hash"]) == (str(tmp_path / "target"), None)
    assert found["floor"] is not None and found["floor"]["dtype"] == "bfloat16"
    assert found["pit_num_tokens"] >= 60
    text = to_text(found).split("\n")
    assert text[0] == f"lookup, chain, {rule} verification:"
    block = ", block verification" if rule == "block" else ""
    assert text[1].startswith(f"  drawn at T=1, 2 drafts chosen outright{block}: ")
    assert text[-1] == found["line"]
    assert text[-1].startswith(f"losslessness certificate (chain, {rule} verification): ")


def test_of_trees_the_trained_drafter_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = with_eval(plan, verification="tree", drafters=["lookup", "drafter"], tree="3,2")
    asked: list[str] = []

    def make(_plan: Plan, _target: Target, names: list[str]) -> dict[str, DecodingDrafter]:
        asked.extend(names)
        return {}

    monkeypatch.setattr("eval.certificates.make_drafters", make)
    task = Task(
        "one",
        1,
        "0" * 16,
        [{"id": "0", "source": "one", "messages": [{"role": "user", "content": "a"}]}],
    )
    assert run_certificates(with_eval(tree, greedy_check_prompts=0), [task]) == []
    assert asked == ["drafter"]
    assert certificate_path(tree, "drafter").name == "certificate_drafter_tree.json"


def test_certificate_of_another_folder_leaves_that_of_the_run(plan: Plan, tmp_path: Path) -> None:
    other = plan._replace(export=tmp_path / "other" / "export")
    mine, theirs = certificate_path(plan, "drafter"), certificate_path(other, "drafter")
    assert mine.name == "certificate_drafter.json"
    assert re.fullmatch("certificate_drafter_[0-9a-f]{8}.json", theirs.name)
    assert certificate_path(other, "lookup") == certificate_path(plan, "lookup")


def test_no_prompts_is_a_message(plan: Plan) -> None:
    with pytest.raises(UserError, match=r"eval\.tasks: no prompts to certify on"):
        run_certificates(plan, [])
