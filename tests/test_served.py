"""eval/served.py on local servers: a served record has the definitions of every other record."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from data.prompt_rows import make_prompt
from data.target import Target
from data.vocab import full_vocab
from drafters.export_info import export_hash
from drafters.methods import build_drafter
from drafters.vllm_format import TargetInfo, save
from eval.engines import Server, attach
from eval.record import validate
from eval.report import make_rows
from eval.results import Plan
from eval.served import (
    ServeOptions,
    arm_server,
    bench_served,
    check_options,
    render_task,
    speculative_config,
    with_num_tokens,
)
from eval.tasks import Task
from recipes.drafter_sections import Eagle3Section
from recipes.errors import UserError
from recipes.schema import Recipe, TargetSection
from tests.engine_stub import Stub, serving
from tests.exports_of_all import export, foreign, four_layer_target, make
from tests.tiny_exports import ORIGIN

NUM_TOKENS = 9  # 1 from the prefill, then rounds of 4, 1, 2 and the first of the next 4
# Of ours: 3+1, 0+1, 1+1 and at last no room for a draft beside the target's own token.
PROPOSED, ACCEPTED, ROUNDS = 3 + 3 + 2 + 0, 3 + 0 + 1 + 0, 4
ALPHABET = "abcdefgh"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))
    vocab = full_vocab(target.vocab_size)
    drafter = build_drafter(Eagle3Section(), target, (2, 4, 5), vocab, seed=0)
    folder = tmp_path_factory.mktemp("run")
    save(drafter, folder / "export", "vllm", target.dtype, TargetInfo.of(target), ORIGIN)
    return folder


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes 10 ms: one when a request is sent, one for each message."""
    ticks = count()
    monkeypatch.setattr("eval.engines.perf_counter", lambda: next(ticks) / 100)


def make_plan(run_dir: Path, results: Path, **section: Any) -> Plan:
    recipe = Recipe.model_validate(
        {
            "name": "served",
            "target": {"model": "random:qwen3-tiny", "dtype": "float32", "device": "cpu"},
            "data": {"sources": ["book"], "num_prompts": 1},
            "eval": {
                "temperatures": [0.0],
                "num_draft_tokens": 3,
                "max_new_tokens": NUM_TOKENS,
                **section,
            },
        }
    )
    return Plan(recipe, "served", run_dir, run_dir / "export", results)


def make_task(num_prompts: int = 4) -> Task:
    prompts = [make_prompt("test", letter * 3, category="x") for letter in ALPHABET[:num_prompts]]
    return Task("letters", 1, "hash", prompts)


def bench(plan: Plan, tasks: list[Task], drafted: Stub, plain: Stub | None, **options: Any) -> Any:
    with serving(drafted) as url, serving(plain or Stub(steps=None)) as other:
        baseline = None if plain is None else other
        chosen = ServeOptions(
            engine=drafted.engine, server=url, baseline_server=baseline, **options
        )
        paths = bench_served(plan, tasks, chosen)
    return [json.loads(path.read_text()) for path in paths]


def test_record_of_vllm_has_our_counts_and_the_engines_beside_them(run_dir, tmp_path):
    drafted, plain = Stub(), Stub(steps=None)  # 5 messages an answer, 9 messages
    (record,) = bench(make_plan(run_dir, tmp_path), [make_task()], drafted, plain)
    task = record["tasks"]["letters"]
    assert record["settings"]["engine"] == "vllm 0.32.0"
    assert record["settings"]["batch_size"] == 1
    assert record["identity"]["versions"]["vllm"] == "0.32.0"
    assert "drafter_hash" not in record["identity"]  # the server may have been started with others
    assert (task["num_rounds"], task["num_proposed"], task["num_accepted"]) == (
        4 * ROUNDS,
        4 * PROPOSED,
        4 * ACCEPTED,
    )
    assert (task["num_tokens"], task["num_missing"]) == (4 * 8, 0)
    assert task["tau"] == 8 / ROUNDS
    assert task["tau_before_stop"] == 1 + 7 / ROUNDS  # 3, 0, 1, 3 accepted by the engine
    assert task["survival"] == [2 / 4, 1 / 4, 1 / 4]
    # The engine counts 3, 0, 1, 3 accepted: before the answer was cut. The warm-up is left out.
    assert task["served"]["engine"] == {
        "num_drafts": 16,
        "num_draft_tokens": 48,
        "num_accepted_tokens": 28,
        "mean_acceptance_length": 1 + 28 / 16,
        "per_position": [3 / 4, 2 / 4, 2 / 4],
    }
    assert task["same_as_baseline"] == "4/4"
    assert record["lossless"]["greedy_identical"] == "4/4"
    # Behind the first message 8 tokens in 4 looks at the clock, the baseline in 8.
    assert task["tokens_per_second"] == pytest.approx(200)
    assert task["baseline_tokens_per_second"] == pytest.approx(100)
    assert task["speedup"] == pytest.approx(2)
    assert task["speedup_ci95"] == pytest.approx([2, 2])
    served = task["served"]
    assert served["ttft_ms"] == pytest.approx({"p50": 10, "p99": 10})
    assert served["tpot_ms"] == pytest.approx({"p50": 5, "p99": 5})
    assert served["baseline"]["tpot_ms"]["p50"] == pytest.approx(10)
    # 36 tokens in 4 x 6 looks and the last one, the baseline in 4 x 10 and the last one.
    assert served["output_tokens_per_second"] == pytest.approx(36 / 0.25)
    assert served["throughput_speedup"] == pytest.approx(41 / 25)
    assert make_rows(validate(record), "x")[0]["engine"] == "vllm 0.32.0"


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of every server that is started; a stub answers in its place."""
    given_to: list[list[str]] = []

    @contextmanager
    def start(_command: str, _model: str, given: list[str], _log: Path) -> Iterator[Server]:
        given_to.append(given)
        drafts = "--speculative-config" in given
        with serving(Stub() if drafts else Stub(steps=None)) as url:
            yield attach("vllm", url)

    monkeypatch.setattr("eval.served.start_vllm", start)
    return given_to


def test_record_of_a_server_started_with_the_export_names_its_weights(
    run_dir: Path, tmp_path: Path, flags: list[list[str]]
) -> None:
    plan, task = make_plan(run_dir, tmp_path), make_task()
    (path,) = bench_served(plan, [task], ServeOptions(engine="vllm"))
    record = json.loads(path.read_text())
    assert record["identity"]["drafter_hash"] == export_hash(run_dir / "export")
    assert not {"engine_flags", "api"} & record["settings"].keys()
    drafting, plain = flags
    config = json.loads(drafting[drafting.index("--speculative-config") + 1])
    assert config["model"] == str(run_dir / "export")
    assert "--speculative-config" not in plain

    # Another drafter and other flags have files of their own in the same folder; again is again.
    copytree(run_dir / "export", tmp_path / "other" / "export")
    other = plan._replace(export=tmp_path / "other" / "export")
    eager = ServeOptions(engine="vllm", flags="--enforce-eager")
    paths = [
        bench_served(plan, [task], ServeOptions(engine="vllm"))[0],
        bench_served(other, [task], ServeOptions(engine="vllm"))[0],
        bench_served(other._replace(name="b"), [task], ServeOptions(engine="vllm"))[0],
        bench_served(plan, [task], eager)[0],
    ]
    assert paths[0] == path and len(set(paths)) == 4
    assert json.loads(paths[3].read_text())["settings"]["engine_flags"] == "--enforce-eager"
    assert "--enforce-eager" in flags[-1] and "--enforce-eager" not in flags[-3]


def test_a_server_is_started_with_the_targets_revision_and_code(
    run_dir: Path, tmp_path: Path, flags: list[list[str]]
) -> None:
    plan, options = make_plan(run_dir, tmp_path), ServeOptions(engine="vllm", flags="--seed 1")
    target = plan.recipe.target.model_copy(update={"revision": "v2", "trust_remote_code": True})
    pinned = plan._replace(recipe=plan.recipe.model_copy(update={"target": target}))
    for each in (plan, pinned):
        with arm_server(each, options, "baseline"):
            pass
    usual = ["--dtype", "float32", "--no-enable-prefix-caching"]
    assert flags[0] == [*usual, "--seed", "1"]
    assert flags[1] == [*usual, "--revision", "v2", "--trust-remote-code", "--seed", "1"]


def test_each_concurrency_and_temperature_is_a_record(run_dir, tmp_path):
    plan = make_plan(run_dir, tmp_path, temperatures=[0.0, 1.0])
    drafted = Stub(pause=0.001)
    records = bench(plan, [make_task(8)], drafted, None, concurrency=(1, 4))
    found = [(r["settings"]["temperature"], r["settings"]["batch_size"]) for r in records]
    assert found == [(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)]
    assert drafted.most_in_flight == 4
    names = sorted(path.name.rpartition("_")[0] for path in tmp_path.glob("*.json"))
    assert names == [f"drafter_{t}_K3_{b}_vllm" for t in ("T0", "T1") for b in ("B1", "B4")]
    task = records[0]["tasks"]["letters"]
    assert task["speedup"] is None and task["baseline_tokens_per_second"] is None
    assert task["tokens_per_second"] > 0 and task["same_as_baseline"] is None


def test_prompts_are_the_ids_that_the_torch_engine_decodes(run_dir, tmp_path):
    plan, task = make_plan(run_dir, tmp_path), make_task(1)
    drafted = Stub()
    bench(plan, [task], drafted, None)
    (ids,) = render_task(plan.recipe, task, "completions")
    assert drafted.seen[-1]["prompt"] == ids
    bench(plan, [task], drafted, None, api="chat")
    assert drafted.seen[-1]["messages"] == [{"role": "user", "content": "aaa"}]
    assert not {"tools", "chat_template_kwargs"} & drafted.seen[-1].keys()


def test_chat_sends_the_template_arguments_and_tools_that_the_record_states(run_dir, tmp_path):
    data = {"sources": ["book"], "num_prompts": 1, "template_kwargs": {"enable_thinking": False}}
    plan, task, drafted = make_plan(run_dir, tmp_path), make_task(1), Stub()
    recipe = Recipe.model_validate({**plan.recipe.model_dump(mode="json"), "data": data})
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "aaa"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    task.prompts[0] |= {"tools": tools, "messages": messages}
    (record,) = bench(plan._replace(recipe=recipe), [task], drafted, None, api="chat")
    sent = drafted.seen[-1]
    assert sent["chat_template_kwargs"] == record["settings"]["template_kwargs"]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["tools"] == tools and record["settings"]["api"] == "chat"
    (told,) = sent["messages"][1]["tool_calls"]
    assert told["function"]["arguments"] == '{"a": 1}'  # JSON text, as the API wants it


def test_chat_by_a_template_of_our_own_is_refused(tmp_path):
    recipe = make_plan(tmp_path, tmp_path).recipe
    data = recipe.data.model_copy(update={"chat_template": tmp_path / "mine.jinja"})
    recipe = recipe.model_copy(update={"data": data})
    check_options(ServeOptions(engine="vllm"), recipe)
    with pytest.raises(UserError, match=r"mine\.jinja: with --api chat a server renders by"):
        check_options(ServeOptions(engine="vllm", api="chat"), recipe)


def test_record_of_sglang(run_dir, tmp_path):
    drafted = Stub(engine="sglang")
    plain = Stub(engine="sglang", steps=None)
    (record,) = bench(make_plan(run_dir, tmp_path), [make_task()], drafted, plain)
    task = record["tasks"]["letters"]
    assert record["settings"]["engine"] == "sglang 0.5.9"
    # Steps come without their order, so the last one is not cut: 3, 0, 1, 3 of 3 each.
    assert (task["num_rounds"], task["num_accepted"]) == (16, 28)
    assert task["tau"] == 1 + 28 / 16
    assert task["served"]["num_uncut"] == 4
    assert task["served"]["engine"] is None
    assert task["served"]["gauges"] == {"spec_accept_length": 2.25}
    assert task["same_as_baseline"] == "4/4"


@pytest.mark.parametrize(
    ("stub", "num_failed"),
    [(Stub(level="none"), 0), (Stub(steps=None), 0), (Stub(failing=tuple(range(300))), 4)],
    ids=["no per-request metrics", "no speculation", "all failed"],
)
def test_p101_missing_counters_are_null_and_counted(run_dir, tmp_path, stub, num_failed):
    (record,) = bench(make_plan(run_dir, tmp_path), [make_task()], stub, Stub(steps=None))
    task = record["tasks"]["letters"]
    assert task["num_missing"] == 4
    for key in ("num_rounds", "num_accepted", "tau", "acceptance_rate", "mean_accepted"):
        assert task[key] is None, key
    assert task["served"]["num_failed"] == num_failed
    if num_failed:
        assert task["served"]["first_error"] == "HTTP 500: out of luck"
        assert (task["speedup"], task["served"]["ttft_ms"]["p50"]) == (None, None)


def test_p101_one_token_answers_and_no_prompts(run_dir, tmp_path):
    plan = make_plan(run_dir, tmp_path, max_new_tokens=1)
    (record,) = bench(plan, [make_task(2), Task("none", 1, "h", [])], Stub(), Stub(steps=None))
    for name in ("letters", "none"):
        task = record["tasks"][name]
        assert (task["tau"], task["speedup"], task["num_missing"]) == (None, None, 0)
    assert record["tasks"]["letters"]["num_rounds"] == 0


def test_p102_shorter_answers_are_no_speedup(run_dir, tmp_path):
    # The drafter's server stops after 5 of 9 tokens, at the same pace a message of 1 token.
    drafted, plain = Stub(length=5, steps=(0,)), Stub(steps=None)
    (record,) = bench(make_plan(run_dir, tmp_path), [make_task(2)], drafted, plain)
    task = record["tasks"]["letters"]
    assert task["speedup"] == pytest.approx(1)  # by wall time it would be 2
    assert task["same_as_baseline"] == "0/2"
    assert [row[1:] for row in task["other_lengths"]] == [[8, 4], [8, 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "sglang"}, "--server URL"),
        ({"engine": "sglang", "server": "x", "api": "chat"}, "no --api chat"),
        ({"engine": "vllm", "baseline_server": "x"}, "goes with --server"),
        ({"engine": "vllm", "server": "x", "flags": "--x"}, "with --server leave them out"),
        ({"engine": "vllm", "concurrency": (0,)}, "at least 1"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        check_options(ServeOptions(**options), make_plan(tmp_path, tmp_path).recipe)


def test_other_rules_than_the_engines_own_are_refused(tmp_path):
    recipe = make_plan(tmp_path, tmp_path, verification="block").recipe
    with pytest.raises(UserError, match=r"eval\.verification=block: the engine has its own rule"):
        check_options(ServeOptions(engine="vllm"), recipe)


@pytest.mark.parametrize(
    ("method", "wanted", "served"),
    [("dflash", 2, 3), ("dspark", 2, 4), ("medusa", 9, 3), ("medusa", 2, 2), ("eagle3", 2, 2)],
)
def test_an_export_is_served_with_as_many_tokens_as_it_drafts(method, wanted, served, tmp_path):
    target = four_layer_target()
    export(make(method, target), target, tmp_path / "export")  # a block of 4, 3 Medusa heads
    plan = with_num_tokens(make_plan(tmp_path, tmp_path, num_draft_tokens=wanted))
    assert speculative_config(plan)["num_speculative_tokens"] == served
    assert plan.recipe.eval.num_draft_tokens == served  # so results say it
    foreign(tmp_path / "export", tmp_path / "theirs")
    theirs = make_plan(tmp_path, tmp_path, num_draft_tokens=wanted)
    theirs = theirs._replace(export=tmp_path / "theirs")
    assert with_num_tokens(theirs) == theirs
