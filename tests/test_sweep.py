"""What bench.py measures in one go: files that never collide, plans, interruptions, all turns."""

import json
from types import SimpleNamespace

import pytest
import torch

from data.prompt_rows import make_prompt
from data.target_config import find_revision
from data.vocab import full_vocab
from drafters.base import Sampling
from drafters.export_info import export_hash
from drafters.lookup import Lookup, LookupThen
from drafters.methods import build_drafter
from eval import costs, serving, sweep
from eval.measure import measure
from eval.results import Plan, is_done, result_path, train_minutes
from eval.roofline import DEVICES, drafter_work, weights_read
from eval.tasks import Task
from eval.theory import Costs
from recipes.drafter_sections import MTPSection
from recipes.errors import UserError
from recipes.lm_sections import SmallLMSection
from recipes.schema import Recipe
from tests.exports_of_all import export, four_layer_target, make
from tests.scripted import ScriptedTarget
from tests.test_measure import make_eagle, make_target, make_task, section
from tests.tiny_exports import make as make_tiny
from tests.tiny_exports import write


def plan_of(tmp_path, **changes) -> Plan:
    fields = {"drafters": ["lookup"], "tasks": ["mt_bench:2"], "temperatures": [0.0, 1.0]}
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "target": {"model": "random:qwen3-tiny", "dtype": "float32"},
            "data": {"sources": ["book"], "num_prompts": 1},
            "eval": fields | changes,
        }
    )
    return Plan(recipe, "tiny", tmp_path, tmp_path / "export", tmp_path / "results")


def test_results_of_different_settings_never_share_a_file(tmp_path):
    changes = [
        {}, {"batch_size": 2}, {"num_draft_tokens": 2}, {"verification": "block"},
        {"verification": "tree", "drafters": ["drafter"]},
        {"verification": "tree", "drafters": ["drafter"], "tree": "3,2"},
        {"tasks": ["mt_bench:3"]}, {"tasks": ["mt_bench:2", "humaneval"]}, {"top_p": 0.9},
        {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"turns": "first"}, {"seed": 1},
        {"max_new_tokens": 64}, {"lookup_max": 5}, {"draft_sampling": "sampled"},
    ]  # fmt: skip
    paths = [
        result_path(plan_of(tmp_path, **change), "lookup", temperature)
        for change in changes
        for temperature in (0.0, 1.0)
    ]
    assert len(set(paths)) == len(paths) == 2 * len(changes)
    assert paths[0].name.startswith("lookup_T0_K4_B1_")
    assert paths[6].name.startswith("lookup_T0_K4_B1_block_")
    assert paths[0] == result_path(plan_of(tmp_path), "lookup", 0.0)  # the same every time


def test_another_drafters_record_is_not_this_ones(tmp_path):
    """Weights decide, not dates: b's file is older than the record of a."""
    plans = {}
    for name, content in (("a", b"1"), ("b", b"2")):
        export = tmp_path / name
        export.mkdir()
        (export / "model.safetensors").write_bytes(content)
        plans[name] = plan_of(tmp_path)._replace(export=export)
    assert len({result_path(plan, "drafter", 0.0) for plan in plans.values()}) == 2
    assert len({result_path(plan, "lookup", 0.0) for plan in plans.values()}) == 1
    hashes = {name: export_hash(plan.export) for name, plan in plans.items()}
    assert hashes["a"] != hashes["b"]
    (tmp_path / "a" / "README.md").write_text("the card is written by the measurement")
    assert export_hash(tmp_path / "a") == hashes["a"]
    (tmp_path / "a" / "model.safetensors").write_bytes(b"2")
    assert export_hash(tmp_path / "a") == hashes["b"]


@pytest.mark.parametrize("text", ["[]", "null", '{"schema": 1, "tasks": null}', "{", ""])
def test_a_damaged_record_is_measured_again(tmp_path, caplog, text):
    plan = plan_of(tmp_path)
    path = result_path(plan, "lookup", 0.0)
    path.parent.mkdir()
    path.write_text(text)
    assert not is_done(plan, "lookup", 0.0, [make_task(["a", "b"])])
    assert path.name in caplog.text and "measured again" in caplog.text


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    plan, target = plan_of(tmp_path, max_new_tokens=6), make_target()
    monkeypatch.setattr(sweep, "load_target", lambda *_: target)
    monkeypatch.setattr(sweep, "time_passes", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(target.config, "max_position_embeddings", 40)
    task = make_task(["short", "much too long " * 20])
    with pytest.raises(UserError, match=rf"prompt {task.prompts[1]['id']} .*more than the 40 of"):
        sweep.run_points(sweep.make_points(plan, [1], [1]), [task])


def test_points_of_a_sweep(tmp_path):
    points = sweep.make_points(plan_of(tmp_path), [1, 8], [1, 2, 3])
    assert len(points) == 12
    assert len({point.path for point in points}) == 12
    groups = {point.group for point in points}
    assert (8, 3, 1.0) in groups and len(groups) == 12
    tree = plan_of(tmp_path, verification="tree", drafters=["lookup", "drafter"], tree="9/3/4")
    grown = sweep.make_points(tree, [1], [1, 2])
    assert [(p.name, p.group) for p in grown] == [
        ("drafter", (1, 3, 0.0)),
        ("drafter", (1, 3, 1.0)),
    ]


def test_an_interrupted_sweep_keeps_what_is_written_and_goes_on(tmp_path, monkeypatch):
    plan, tasks = plan_of(tmp_path, max_new_tokens=6), [make_task(["one two one", "b"])]
    points = sweep.make_points(plan, [1], [1, 2])
    target = make_target()
    target.revision = find_revision(plan.recipe.target)
    monkeypatch.setattr(sweep, "load_target", lambda *_: target)
    times = costs.PassTimes({1: 1.0}, {"lookup": {1: 0.1}})
    monkeypatch.setattr(sweep, "time_passes", lambda *_: times)
    run_group, calls = sweep.measure_group, []

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        run_group(*arguments)

    monkeypatch.setattr(sweep, "measure_group", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_points(sweep.find_todo(points, tasks), tasks)
    assert [point.path.is_file() for point in points] == [True, True, False, False]
    todo = sweep.find_todo(points, tasks)
    assert todo == points[2:]
    sweep.run_points(todo, tasks)
    assert sweep.find_todo(points, tasks) == []
    record = json.loads(points[0].path.read_text())
    assert len(record["settings"]["template_hash"]) == 16
    assert record["tasks"]["made"]["contamination"] is None
    assert "predicted_curve" not in record["tasks"]["made"]  # hardly anything was proposed
    more = [Task("made", 1, "1" * 16, make_task().prompts)]
    assert sweep.find_todo(points, more) == points  # of other prompts
    twice = plan_of(tmp_path, max_new_tokens=6, repeats=2, num_draft_tokens=1)
    assert not is_done(twice, "lookup", 0.0, tasks)
    assert record["identity"]["target_revision"] == target.revision
    points[0].path.write_text(json.dumps(with_identity(record, target_revision="another")))
    assert sweep.find_todo(points, tasks) == points[:1]


def with_identity(record, **changes):
    return {**record, "identity": record["identity"] | changes}


def test_minutes_are_those_of_the_same_step_as_the_tokens(tmp_path):
    last = write(make_tiny(), tmp_path / "run" / "drafter").parent  # 12,345 tokens seen
    assert train_minutes(last, 12345) is None
    (last / "trained.json").write_text('{"seconds": 90}')
    assert train_minutes(last, 12345) == 1.5
    assert train_minutes(last, 6000) is None  # the best weights, of an earlier step
    assert train_minutes(last, None) is None  # somebody else's


def test_another_revision_has_a_file_of_its_own(tmp_path):
    plan = plan_of(tmp_path)
    target = plan.recipe.target.model_copy(update={"revision": "abc"})
    other = plan._replace(recipe=plan.recipe.model_copy(update={"target": target}))
    assert result_path(other, "lookup", 0.0) != result_path(plan, "lookup", 0.0)


@pytest.mark.parametrize(
    ("lossless", "is_enough"),
    [
        ({"greedy_identical": None, "greedy_check_prompts": 0}, {0: True, 1: False, 9: False}),
        # Four turns of two prompts; the two are all that the task has.
        ({"greedy_identical": "4/4", "greedy_check_prompts": 2}, {0: True, 2: True, 9: True}),
        ({"greedy_identical": "2/2", "greedy_check_prompts": 1}, {0: True, 1: True, 2: False}),
        ({"greedy_identical": "1/1"}, {0: True, 1: True, 2: False}),  # of an older record
        ({"greedy_identical": None}, {0: True, 1: False}),
        (None, {0: True, 1: False}),
    ],
)
def test_more_prompts_to_check_in_float32_are_measured(tmp_path, monkeypatch, lossless, is_enough):
    tasks, settings = [make_task(["a", "b"])], {"max_new_tokens": 6, "temperatures": [0.0]}
    plan = plan_of(tmp_path, **settings)
    points = sweep.make_points(plan, [1], [1])
    target = make_target()
    target.revision = find_revision(plan.recipe.target)
    monkeypatch.setattr(sweep, "load_target", lambda *_: target)
    monkeypatch.setattr(sweep, "time_passes", lambda *_: None)
    sweep.run_points(points, tasks)
    path = points[0].path
    record = json.loads(path.read_text())
    for dtype in ("bfloat16", "float32"):
        for number, enough in is_enough.items():
            at = plan_of(tmp_path, **settings, num_draft_tokens=1, greedy_check_prompts=number)
            section = at.recipe.target.model_copy(update={"dtype": dtype})
            at = at._replace(recipe=at.recipe.model_copy(update={"target": section}))
            found = {**record, "lossless": lossless and {**record["lossless"], **lossless}}
            if lossless and "greedy_check_prompts" not in lossless:
                del found["lossless"]["greedy_check_prompts"]
            found["settings"] = record["settings"] | {"dtype": dtype}
            result_path(at, "lookup", 0.0).write_text(json.dumps(found))
            assert is_done(at, "lookup", 0.0, tasks) == (enough or dtype == "float32")


@pytest.mark.parametrize(("method", "most"), [("medusa", 3), ("dspark", 4)])
def test_k_of_a_record_is_what_the_drafter_can_draft(method, most, tmp_path, monkeypatch):
    """6 tokens are asked for: 3 heads draft 3, a block of 4 from its anchor 4, lookup 6."""
    names = ["drafter", "lookup", "lookup+drafter"]
    plan = plan_of(
        tmp_path, drafters=names, temperatures=[0.0], num_draft_tokens=6, max_new_tokens=16
    )
    target = four_layer_target(tmp_path / "target", eos_token_id=[])
    target.revision = find_revision(plan.recipe.target)  # for which it stands in
    export(make(method, target), target, plan.export)
    monkeypatch.setattr(sweep, "load_target", lambda *_: target)
    points, tasks = sweep.make_points(plan, [1], [6]), [make_task(["one two one", "b"])]
    sweep.run_points(points, tasks)
    records = {point.name: json.loads(point.path.read_text()) for point in points}
    found = {name: record["settings"]["num_draft_tokens"] for name, record in records.items()}
    assert found == {"drafter": most, "lookup": 6, "lookup+drafter": 6}
    result = records["drafter"]["tasks"]["made"]
    assert len(result["survival"]) == most
    ratio = result["predicted_from_alpha"] / result["predicted_speedup"]
    assert ratio == pytest.approx(
        sum(result["alpha"] ** i for i in range(most + 1)) / result["tau"]
    )
    assert sweep.find_todo(points, tasks) == []


@pytest.mark.parametrize("batch_size", [1, 2])
def test_p99_both_turns_of_every_prompt_count(batch_size):
    target = make_target()
    prompts = [
        make_prompt("made", "one two one two", ["and one two"], "writing"),
        make_prompt("made", "xyzxyz", ["why?"], "math"),
        make_prompt("made", "a b a b", [], "math"),
    ]
    task = Task("made", 1, "0" * 16, prompts)
    found = measure(target, {"lookup": Lookup(1, 4)}, task, section(batch_size=batch_size), 0.0)
    result = found["lookup"].result
    assert (result["num_prompts"], result["turns"]) == (3, 2)
    assert result["same_as_baseline"] == "5/5"
    turns = result["per_turn"]
    assert [turn["turn"] for turn in turns] == [1, 2]
    assert sum(turn["num_rounds"] for turn in turns) == result["num_rounds"]
    categories = result["per_category"]
    assert list(categories) == ["writing", "math"]
    assert sum(c["num_rounds"] for c in categories.values()) == result["num_rounds"]
    assert categories["writing"]["tau_ci95"] is None  # one prompt says nothing of the spread
    assert found["lookup"].samples[1]["turn"] == (1 if batch_size == 1 else 0)
    first = section(batch_size=batch_size, turns="first")
    only = measure(target, {"lookup": Lookup(1, 4)}, task, first, 0.0)["lookup"].result
    assert (only["turns"], len(only["per_turn"])) == (1, 1)
    assert only["num_rounds"] == turns[0]["num_rounds"]


def test_a_tree_and_block_verification_are_measured_like_a_chain():
    target = make_target()
    drafters, results = {"drafter": make_eagle(target)}, {}
    for name in ("token", "block", "tree"):
        oracle = name != "tree"
        wanted = section(verification=name, tree="6/3/2", drafters=["drafter"], oracle=oracle)
        results[name] = measure(target, drafters, make_task(), wanted, 0.0)["drafter"].result
        assert results[name]["same_as_baseline"] == "4/4"
        assert results[name]["num_tokens"] == results["token"]["num_tokens"]
    assert results["tree"]["tau"] >= results["token"]["tau"]  # its branches hold the chain
    assert "predicted_curve" not in results["tree"]
    assert "oracle_share" not in results["tree"]


def test_pass_times_grow_with_what_they_cost():
    """A clock that 1 ms a position moves: what is timed is the pass of that size, nothing else."""
    now = SimpleNamespace(s=0.0)
    target = ScriptedTarget.chain({i: i + 1 for i in range(30)}, [])
    forward = target.forward

    def slow(ids_BS, cache, aux_layers=()):
        now.s += 0.001 * ids_BS.shape[1]
        return forward(ids_BS, cache, aux_layers)

    target.forward = slow
    times = costs.measure_passes(
        target, {"lookup": Lookup(1, 2)}, [[1, 2]], 3, Sampling(), 2, lambda: now.s
    )
    assert times.verify == {r: pytest.approx(float(r)) for r in costs.VERIFY_SIZES}
    assert times.draft == {"lookup": dict.fromkeys(costs.DRAFT_SIZES, 0.0)}
    assert Costs(times.verify, times.draft["lookup"], {0: 0.0}).verify(10) == pytest.approx(10.0)


def test_plan_says_which_number_to_serve_with(tmp_path, monkeypatch):
    target = make_target()
    monkeypatch.setattr(serving, "load_target", lambda *_: target)
    plan = plan_of(tmp_path, max_new_tokens=20, lookup_min=1)
    path, line = serving.make_plan(plan, [make_task()], [1, 2], "H200")
    found = json.loads(path.read_text())
    assert path == tmp_path / "results" / "plan.json"
    assert (found["schema"], found["drafter"], found["device"]["name"]) == (1, "lookup", "H200")
    places = [(t["temperature"], t["batch_size"]) for t in found["tables"]]
    assert places == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]
    table = found["tables"][0]
    assert found["num_draft_tokens"] == table["num_draft_tokens"]
    assert [p["num_draft_tokens"] for p in table["points"]] == list(range(1, 17))
    assert all(p["servable"] for p in table["points"])  # lookup: any number
    fastest = max(table["points"], key=lambda p: p["speedup"])
    if fastest["speedup"] > 1:
        assert f"serve with {fastest['num_draft_tokens']} draft tokens" in line
    else:
        assert "serve without this drafter" in line
    text = serving.to_text(found)
    assert text.count("perfect  share") == 4
    assert "H200" in [device.name for device in DEVICES]
    with pytest.raises(UserError, match="no prompt to plan with"):
        serving.make_plan(plan, [make_task([])], [1])


@pytest.mark.parametrize(
    ("method", "can"),
    [("dflash", [3]), ("dspark", [4]), ("medusa", [1, 2, 3]), ("eagle3", [1, 2, 3, 4, 9])],
)
def test_plan_names_only_numbers_that_an_engine_can_be_told(method, can):
    drafter = make(method, four_layer_target())  # a block of 4, 3 Medusa heads
    assert [k for k in (1, 2, 3, 4, 9) if serving.can_serve(drafter, k)] == can


TABLE = 264 * 32  # an embedding or a head of the tiny target


@pytest.mark.parametrize(
    ("method", "section", "more"),
    [
        ("eagle3", {}, 0),  # a head of its own
        ("medusa", {}, 0),  # three of them
        ("medusa", {"shared_head": True}, 0),  # the target's, which counts among its parameters
        ("eagle1", {}, TABLE),  # the target's head
        ("dflash", {}, 0),
        ("dflash", {"draft_vocab_size": None}, TABLE),  # the target's head
        ("dspark", {}, -264 * 8),  # markov_w1 is looked up
        ("dspark", {"draft_vocab_size": None}, TABLE - 264 * 8),
    ],
)
def test_roofline_reads_every_weight_that_is_multiplied(method, section, more):
    drafter = make(method, four_layer_target(), **section)
    own = sum(weight.numel() for weight in drafter.parameters())
    assert weights_read(drafter) == own + more
    assert drafter_work(drafter, 2) == (2 * (own + more), 2 * (own + more), 0.0, 0.0)


def test_roofline_of_lookup_before_a_head_is_the_heads():
    head = make("eagle3", four_layer_target())
    assert drafter_work(LookupThen(Lookup(1, 2), head), 2) == drafter_work(head, 2) is not None
    assert drafter_work(Lookup(1, 2), 2) is None


@pytest.mark.parametrize(
    ("tied", "bias", "more"), [(True, False, 0), (False, False, -TABLE), (False, True, -TABLE)]
)
def test_roofline_reads_a_small_lms_embedding_only_as_its_head(tied, bias, more):
    target = four_layer_target(tie_word_embeddings=tied)
    section, vocab = SmallLMSection(num_layers=2), full_vocab(264)
    drafter = build_drafter(section, target, (), vocab, seed=0)
    if bias:
        drafter.lm.lm_head.bias = torch.nn.Parameter(torch.zeros(264))
    own = sum(weight.numel() for weight in drafter.parameters())
    assert weights_read(drafter) == own + more


def test_roofline_of_an_mtp_layer_reads_the_targets_head():
    target = four_layer_target()
    drafter = build_drafter(MTPSection(), target, (4,), full_vocab(264), seed=0)
    own = sum(weight.numel() for weight in drafter.parameters())
    assert weights_read(drafter) == own + TABLE


def test_plan_that_advises_against_a_drafter_quotes_what_could_be_served():
    points = [{"speedup": s, "servable": s < 1} for s in (0.8, 0.9, 1.2)]
    table = {"temperature": 0.0, "batch_size": 1, "num_draft_tokens": 0, "points": points}
    assert serving.advice(table).endswith("no number of tokens gains (best 0.90x)")
