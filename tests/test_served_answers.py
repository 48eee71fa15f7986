"""Answers by a server: what is asked and kept, failures and retries, kill and resume, turns, tools.

The server is a local stub that speaks as vLLM, SGLang or a chat API do. Its text is the number of
the request's tokens, so that every expected answer is in sight.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data import http_calls
from data.embedded import byte_tokenizer
from data.pipeline import prepare
from data.served_answers import ask_server
from data.talks import Talk, rows_of, start
from data.target import Target
from recipes.data_section import DataSection
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe
from tests.answer_stub import Answerer, AnswerStub, Reply, answering
from tests.chat_tokenizers import CHATML, QWEN3, chat_tokenizer

ROOT = Path(__file__).resolve().parents[1]
BYTES = byte_tokenizer()  # that of the random target
END = 257  # its <|im_end|>
# Said in every request: a server would take them from the model's generation config.
LAW = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(load_recipe(ROOT / "recipes/smoke.yaml").target)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "FIRST_WAIT", 0.01)


def served(folder: Path, source: Path, url: str, *overrides: str) -> Recipe:
    values = [
        f"output_dir={folder}",
        f"data.sources=[{source}]",
        f"data.server.url={url}",
        "data.states=online",
        "data.decontaminate=[]",
        "data.num_prompts=40",
        "data.server.concurrency=8",
    ]
    return load_recipe(ROOT / "recipes/smoke.yaml", [*values, *overrides])


def write_prompts(path: Path, count: int = 40) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(count)))
    return path


def ids_of(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False)["input_ids"]


def by_ids(body: dict[str, Any]) -> Reply:
    """vLLM's completions: the number of prompt tokens in digits, then <|im_end|>."""
    text = str(len(body["prompt"]))
    ids = [*ids_of(text), END]
    return Reply({"choices": [{"text": text, "token_ids": ids, "finish_reason": "stop"}]})


def records(recipe: Recipe) -> list[dict[str, Any]]:
    path = recipe.run_dir / "data/responses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(recipe: Recipe) -> dict[str, Any]:
    return json.loads((recipe.run_dir / "data/report.json").read_text())


def failing_first(times: int, failure: Reply) -> Answerer:
    """Every conversation's first `times` requests fail."""
    tries: Counter[str] = Counter()

    def answer(body: dict[str, Any]) -> Reply:
        tries[str(body["prompt"])] += 1
        return failure if tries[str(body["prompt"])] <= times else by_ids(body)

    return answer


def test_answers_are_the_servers_ids_and_many_are_in_flight(tmp_path: Path, target: Target) -> None:
    with answering(by_ids) as stub:
        stub.hold = 8  # waits for as many requests as may be in flight
        recipe = served(tmp_path, write_prompts(tmp_path / "p.jsonl"), stub.url)
        prepared = prepare(recipe, target)
    assert stub.most_in_flight == 8
    assert len(prepared.train) + len(prepared.heldout) == len(stub.seen) == 40
    path, body, headers = stub.seen[0]
    assert path == "/v1/completions" and body["model"] == "first-model"
    assert body["return_token_ids"] is True and body["max_tokens"] == 24
    assert LAW.items() <= body.items()
    assert "authorization" not in headers
    for record in records(recipe):
        (answer,) = record["answers"]
        text = str(len(answer["prompt_ids"]))
        assert answer["answer_ids"] == [*ids_of(text), END] and answer["finish"] == "stop"
        assert record["messages"][-1] == {"role": "assistant", "content": text}
    temperatures = {body["temperature"] for _, body, _ in stub.seen}
    assert temperatures == {0.0, 0.7}  # data.greedy_share is a half


@pytest.mark.parametrize(
    "failure",
    [
        Reply("busy", status=429, headers={"retry-after": "0"}),
        Reply("broken", status=500),
        Reply("gone", hang_up=True),
        Reply("late", seconds=0.5),
    ],
    ids=["429", "500", "hang-up", "timeout"],
)
def test_failures_are_tried_again_without_a_loss(
    tmp_path: Path, target: Target, failure: Reply
) -> None:
    with answering(failing_first(2, failure)) as stub:
        source = write_prompts(tmp_path / "p.jsonl", 6)
        recipe = served(tmp_path, source, stub.url, "data.server.timeout=0.25")
        prepare(recipe, target)
    assert len(stub.seen) == 18  # two failures and an answer each
    assert len({r["id"] for r in records(recipe)}) == 6


def test_what_a_killed_run_answered_is_not_asked_again(tmp_path: Path, target: Target) -> None:
    asked: list[str] = []

    def dies(body: dict[str, Any]) -> Reply:
        asked.append(str(body["prompt"]))
        return by_ids(body) if len(asked) <= 15 else Reply("no", status=401)

    with answering(dies) as stub:
        recipe = served(tmp_path, write_prompts(tmp_path / "p.jsonl"), stub.url)
        with pytest.raises(UserError, match="401"):
            prepare(recipe, target)
        first = {r["id"] for r in records(recipe)}
        assert 1 <= len(first) <= 15
        path = recipe.run_dir / "data/responses.jsonl"
        path.write_text(path.read_text() + '{"id": "cut in the mid')  # as a kill leaves it
        stub.answer = by_ids
        seen = len(stub.seen)
        prepare(recipe, target)
    assert len(stub.seen) - seen == 40 - len(first)
    ids = [r["id"] for r in records(recipe)]
    assert len(ids) == len(set(ids)) == 40 and first < set(ids)


def test_answers_removed_by_hand_are_asked_again_and_said(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(by_ids) as stub:
        recipe = served(tmp_path, write_prompts(tmp_path / "p.jsonl"), stub.url)
        prepare(recipe, target)
        path = recipe.run_dir / "data/responses.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:30]))
        prepare(recipe, target)
        assert len(stub.seen) == 50
    assert "holds 30 answers, manifest.json says 40" in caplog.text
    assert len(records(recipe)) == 40


def test_conversations_without_an_answer_are_counted_and_asked_next_time(
    tmp_path: Path, target: Target
) -> None:
    broken = {0}

    def answer(body: dict[str, Any]) -> Reply:
        bad = broken and f"Question {min(broken)}?" in BYTES.decode(body["prompt"])
        return Reply("broken", status=503) if bad else by_ids(body)

    with answering(answer) as stub:
        source = write_prompts(tmp_path / "p.jsonl")
        recipe = served(tmp_path, source, stub.url, "data.server.retries=1")
        prepare(recipe, target)
        assert report(recipe)["num_left_out"] == {"no answer from the server": 1}
        assert len(records(recipe)) == 39
        broken.clear()
        prepare(recipe, target)
    assert len(records(recipe)) == 40 and report(recipe)["num_left_out"] == {}


def test_a_server_that_is_down_stops_the_run_by_name(tmp_path: Path, target: Target) -> None:
    with answering(lambda _body: Reply("broken", status=500)) as stub:
        source = write_prompts(tmp_path / "p.jsonl", 40)
        recipe = served(tmp_path, source, stub.url, "data.server.retries=0")
        with pytest.raises(UserError, match="20 conversations failed one after another"):
            prepare(recipe, target)
        assert 20 <= len(stub.seen) <= 28  # not all of the 40
    gone = served(tmp_path, source, "http://127.0.0.1:9", "data.server.retries=0")
    with pytest.raises(UserError, match="no list of models there"):
        prepare(gone, target)


def test_prompts_that_the_server_refuses_are_counted(tmp_path: Path, target: Target) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        refused = "Question 7?" in BYTES.decode(body["prompt"])
        return Reply("too long", status=400) if refused else by_ids(body)

    with answering(answer) as stub:
        recipe = served(tmp_path, write_prompts(tmp_path / "p.jsonl"), stub.url)
        prepare(recipe, target)
    assert report(recipe)["num_left_out"] == {"refused by the server (HTTP 400)": 1}
    assert len(stub.seen) == 40  # not tried again


def test_the_key_comes_from_the_environment(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(by_ids) as stub:
        source = write_prompts(tmp_path / "p.jsonl", 3)
        recipe = served(tmp_path, source, stub.url, "data.server.api_key_env=OUR_KEY")
        with pytest.raises(UserError, match="no environment variable OUR_KEY"):
            prepare(recipe, target)
        monkeypatch.setenv("OUR_KEY", "sesame")
        prepare(recipe, target)
    assert stub.seen[0][2]["authorization"] == "Bearer sesame"
    assert "sesame" not in (recipe.run_dir / "data/manifest.json").read_text()


def test_a_server_without_token_ids_is_told_apart(tmp_path: Path, target: Target) -> None:
    plain = {"choices": [{"text": "12", "finish_reason": "stop"}]}
    with answering(lambda _body: Reply(plain)) as stub:
        recipe = served(tmp_path, write_prompts(tmp_path / "p.jsonl", 3), stub.url)
        with pytest.raises(UserError, match="api: chat"):
            prepare(recipe, target)


def test_an_end_of_turn_is_never_put_there(tmp_path: Path, target: Target) -> None:
    # A server that trims the token that stopped it would leave rows without an end.
    trimmed = {"choices": [{"text": "12", "token_ids": [49, 50], "finish_reason": "stop"}]}
    with answering(lambda _body: Reply(trimmed)) as stub:
        recipe = served(tmp_path, write_prompts(tmp_path / "p.jsonl", 3), stub.url)
        with pytest.raises(UserError, match="stopped at token 50, which ends no turn"):
            prepare(recipe, target)


def test_sglang_generate(tmp_path: Path, target: Target) -> None:
    def answer(_body: dict[str, Any]) -> Reply:
        meta = {"finish_reason": {"type": "length", "length": 2}}
        return Reply({"text": "ab", "output_ids": [97, 98], "meta_info": meta})

    with answering(answer) as stub:
        source = write_prompts(tmp_path / "p.jsonl", 4)
        recipe = served(tmp_path, source, stub.url, "data.server.api=generate")
        prepared = prepare(recipe, target)
    path, body, _ = stub.seen[0]
    assert path == "/generate" and body["sampling_params"]["max_new_tokens"] == 24
    assert LAW.items() <= body["sampling_params"].items()
    row = prepared.train[0]
    assert row.ids_S[row.mask_S].tolist() == [97, 98]  # cut: no end of turn
    assert prepared.report["num_truncated"] == 4


# --- conversations --------------------------------------------------------------------------


def section(**values: Any) -> DataSection:
    defaults = {"sources": ["book"], "num_prompts": 9, "decontaminate": [], "max_length": 4096}
    server = {"url": "http://x", "api": "chat", "concurrency": 2, "retries": 0}
    return DataSection.model_validate({**defaults, "server": server, **values})


def converse(stub: AnswerStub, prompt: dict[str, Any], tokenizer: Any, **values: Any) -> Any:
    """The record of one conversation, and the reasons for which it was left out."""
    server = {"url": stub.url, "api": "chat", "concurrency": 2, "retries": 0}
    written: list[Talk] = []
    left_out: Counter[str] = Counter()
    base = {"id": "r", "source": "s", "messages": [{"role": "user", "content": "one"}]}
    ask_server(
        section(server={**server, **values.pop("server", {})}, **values),
        tokenizer,
        iter([{**base, **prompt}]),  # type: ignore[list-item]
        left_out,
        written.append,
        lambda: False,
    )
    return (written[0].record() if written else None), dict(left_out)


def chat(**message: Any) -> Reply:
    finish = message.pop("finish", "stop")
    message = {"role": "assistant", "content": "", **message}
    choice = {"message": message, "finish_reason": finish}
    return Reply({"choices": [choice], "usage": {"completion_tokens": 5}})


def learned(row: dict[str, Any], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row["ids"][a:b]) for a, b in row["spans"]]


def test_turns_are_answered_one_after_another() -> None:
    def answer(body: dict[str, Any]) -> Reply:
        return chat(content=f"answer {len(body['messages'])}")

    tokenizer = chat_tokenizer(CHATML)
    with answering(answer) as stub:
        record, _ = converse(stub, {"turns": ["two", "three"]}, tokenizer)
    asked = [[m["content"] for m in body["messages"]] for _, body, _ in stub.seen]
    assert asked == [
        ["one"],
        ["one", "answer 1", "two"],
        ["one", "answer 1", "two", "answer 3", "three"],
    ]
    assert record["turns_not_asked"] == 0
    assert all(LAW.items() <= body.items() for _, body, _ in stub.seen)
    (row,) = rows_of(record, section(), tokenizer)
    ends = ["answer 1<|im_end|>", "answer 3<|im_end|>", "answer 5<|im_end|>"]
    assert learned(row, tokenizer) == ends


def test_p22_finish_reasons_are_kept_and_counted() -> None:
    # One whole answer, one cut at the cap, one whose tool call cannot be read.
    call = {"type": "function", "function": {"name": "sum", "arguments": '{"a": 1'}}
    replies = {
        "whole": chat(content="done"),
        "cut": chat(content="not do", finish="length"),
        "tool": chat(tool_calls=[call], finish="stop"),
    }
    tokenizer, rows, reasons = chat_tokenizer(CHATML), {}, {}
    for name, reply in replies.items():
        with answering(lambda _body, reply=reply: reply) as stub:
            record, reasons[name] = converse(stub, {"turns": ["two"]}, tokenizer, max_turns=1)
        if record is not None:
            assert record["finish"] == {"whole": "stop", "cut": "length"}[name]
            rows[name] = list(rows_of(record, section(), tokenizer))
            dropped = list(rows_of(record, section(keep_truncated=False), tokenizer))
            assert len(dropped) == (name == "whole")
    assert learned(rows["whole"][0], tokenizer) == ["done<|im_end|>"]
    assert learned(rows["cut"][0], tokenizer) == ["not do"]  # no end of turn to learn
    assert reasons == {"whole": {}, "cut": {}, "tool": {"tool call arguments are not JSON": 1}}


def test_a_cut_answer_and_a_tool_call_end_a_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
    tokenizer = chat_tokenizer(QWEN3)
    with answering(lambda _body: chat(tool_calls=[call], finish="tool_calls")) as stub:
        record, _ = converse(stub, {"turns": ["two"], "tools": tools}, tokenizer)
    assert stub.seen[0][1]["tools"] == tools and len(stub.seen) == 1
    assert record["ends_with_a_call"] and record["turns_not_asked"] == 1
    (row,) = rows_of(record, section(), tokenizer)
    (text,) = learned(row, tokenizer)
    assert '{"name": "sum", "arguments": {"a": 1}}' in text and text.endswith("<|im_end|>")
    with answering(lambda _body: chat(content="cu", finish="length")) as stub:
        record, _ = converse(stub, {"turns": ["two"]}, tokenizer)
    assert len(stub.seen) == 1 and record["finish"] == "length"


def test_thinking_mode_goes_to_the_server_and_thoughts_are_kept() -> None:
    tokenizer = chat_tokenizer(QWEN3)

    def answer(body: dict[str, Any]) -> Reply:
        thinks = body["chat_template_kwargs"]["enable_thinking"]
        return chat(content="4", **({"reasoning_content": "2 and 2"} if thinks else {}))

    texts = {}
    for thinks in (True, False):
        with answering(answer) as stub:
            kwargs = {"enable_thinking": thinks}
            record, _ = converse(stub, {}, tokenizer, template_kwargs=kwargs)
        (row,) = rows_of(record, section(template_kwargs=kwargs), tokenizer)
        texts[thinks] = learned(row, tokenizer)
    assert texts == {True: ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"], False: ["4<|im_end|>"]}


def test_history_that_the_template_rewrites_makes_rows_of_their_own() -> None:
    # Qwen3 drops the thinking of earlier answers: the second turn does not go on from the first.
    tokenizer, ids = chat_tokenizer(QWEN3), {}

    def answer(body: dict[str, Any]) -> Reply:
        text = f"<think>\nhm\n</think>\n\nanswer {len(ids)}"
        told = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
        ids[len(ids)] = body["prompt"]
        return Reply({"choices": [{"text": text, "token_ids": told, "finish_reason": "stop"}]})

    with answering(answer) as stub:
        server = {"api": "completions", "model": "m"}
        record, _ = converse(stub, {"turns": ["two"]}, tokenizer, server=server)
    first, second = rows_of(record, section(), tokenizer)
    assert (first["id"], second["id"]) == ("r", "r+2")
    assert "hm" not in tokenizer.decode(ids[1])
    for row, text in ((first, "answer 0"), (second, "answer 1")):
        assert learned(row, tokenizer) == [f"<think>\nhm\n</think>\n\n{text}<|im_end|>"]
    # A template that leaves history alone makes one row of both.
    tokenizer, ids = chat_tokenizer(CHATML), {}
    with answering(answer) as stub:
        record, _ = converse(stub, {"turns": ["two"]}, tokenizer, server=server)
    (row,) = rows_of(record, section(), tokenizer)
    assert len(row["spans"]) == 2 and row["id"] == "r"


def test_a_turn_that_fails_leaves_the_conversation_for_the_next_run() -> None:
    def answer(body: dict[str, Any]) -> Reply:
        return chat(content="a") if len(body["messages"]) == 1 else Reply("x", status=500)

    with answering(answer) as stub, pytest.raises(UserError, match="1 of 1 conversations"):
        converse(stub, {"turns": ["two"]}, chat_tokenizer(CHATML))


def test_sampling_depends_on_the_id_and_the_seed_alone() -> None:
    settings = section(greedy_share=0.25, temperature=0.9)
    prompts = [
        {"id": str(i), "source": "s", "messages": [{"role": "user", "content": "x"}]}
        for i in range(800)
    ]
    talks = [start(prompt, settings) for prompt in prompts]  # type: ignore[arg-type]
    share = sum(talk.temperature == 0 for talk in talks) / 800
    assert 0.2 < share < 0.3 and {talk.temperature for talk in talks} == {0.0, 0.9}
    again = [start(prompt, settings) for prompt in reversed(prompts)]  # type: ignore[arg-type]
    assert [t.seed for t in reversed(again)] == [t.seed for t in talks]
    assert start(prompts[0], section(seed=1)).seed != talks[0].seed  # type: ignore[arg-type]
