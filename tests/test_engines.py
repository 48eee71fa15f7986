"""eval/engines.py against a local server: what is sent, what is read, what fails."""

import sys

import pytest

from eval.engine_metrics import EngineRounds
from eval.engines import Request, ask_all, attach, free_port, start_vllm
from recipes.errors import UserError
from tests.engine_stub import Stub, serving

REQUEST = Request(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=3)
# 9 tokens: 1 from the prefill, then 4, 1, 2 and the first of the next 4.
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_vllm_answers_with_ids_counters_and_times():
    stub = Stub(pause=0.002)
    with serving(stub) as url:
        server = attach("vllm", url + "/v1/")
        (answer,), seconds = ask_all(server, [[5, 1]], REQUEST, 1)
    assert (server.version, server.model, server.url) == ("0.32.0", "m", url)
    assert (answer.ids, answer.num_tokens, answer.error) == (IDS, 9, None)
    assert answer.rounds == EngineRounds([3] * 4, [3, 0, 1, 3], ordered=True)
    assert answer.sent < answer.first < answer.last < answer.sent + seconds
    sent = stub.seen[0]
    assert sent["path"] == "/v1/completions" and sent["prompt"] == [5, 1] and sent["stream"]
    # Nothing is left to the defaults of the model's generation config.
    law = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.0}
    assert law.items() <= sent.items() and (sent["seed"], sent["max_tokens"]) == (3, 9)


def test_chat_sends_messages_and_does_not_count_the_role_as_a_token():
    stub = Stub(pause=0.002)
    with serving(stub) as url:
        messages = [{"role": "user", "content": "hi"}]
        (answer,), _ = ask_all(attach("vllm", url), [{"messages": messages}], REQUEST, 1)
    assert stub.seen[0]["path"] == "/v1/chat/completions"
    assert stub.seen[0]["messages"] == messages
    assert (answer.ids[:2], answer.num_tokens) == ([1, 2], 9)
    assert answer.text.startswith("<1><2>")


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("old_names", [False, True])
def test_sglang_generate(incremental, old_names):
    stub = Stub(engine="sglang", incremental=incremental, old_names=old_names)
    with serving(stub) as url:
        server = attach("sglang", url)
        (answer,), _ = ask_all(server, [[5, 1]], REQUEST, 1)
    assert server.version == "0.5.9"
    assert (answer.ids, answer.num_tokens, answer.error) == (IDS, 9, None)
    assert answer.text == "".join(f"<{i}>" for i in IDS)
    assert answer.rounds == EngineRounds([3] * 4, [0, 1, 3, 3], ordered=False)
    assert stub.seen[0]["input_ids"] == [5, 1]
    assert stub.seen[0]["sampling_params"]["max_new_tokens"] == 9


@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_answers_keep_their_order_and_no_more_than_asked_are_in_flight(concurrency):
    stub = Stub(pause=0.001)
    with serving(stub) as url:
        prompts = [[i] for i in range(8)]
        answers, _ = ask_all(attach("vllm", url), prompts, REQUEST, concurrency)
    assert [a.ids[0] for a in answers] == list(range(8))
    assert stub.most_in_flight == min(concurrency, 8)


def test_p101_failed_requests_are_said_and_have_no_counters():
    with serving(Stub(failing=(1,))) as url:
        answers, _ = ask_all(attach("vllm", url), [[0], [1], [2]], REQUEST, 3)
    assert [a.error for a in answers] == [None, "HTTP 500: out of luck", None]
    assert (answers[1].rounds, answers[1].num_tokens) == (None, 0)


def test_server_that_is_not_there_or_is_another_one():
    with pytest.raises(UserError, match=r"no vllm server answers here"):
        attach("vllm", f"http://127.0.0.1:{free_port()}")
    with serving(Stub(engine="sglang")) as url, pytest.raises(UserError, match="no vllm server"):
        attach("vllm", url)


def test_command_that_is_not_there(tmp_path):
    starting = start_vllm("no-such-vllm serve", "m", [], tmp_path / "log")
    with pytest.raises(UserError, match=r"cannot start 'no-such-vllm'.*--engine-command"), starting:
        pass


def test_server_that_ends_while_starting_shows_its_last_line(tmp_path):
    command = f"{sys.executable} -c \"import sys; sys.exit('bad flag')\""
    starting = start_vllm(command, "m", [], tmp_path / "log")
    with pytest.raises(UserError, match=r"ended while starting: bad flag \(all of it: "), starting:
        pass


def test_started_server_is_ready_and_ends_with_the_block(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        "import json, sys\n"
        "from http.server import BaseHTTPRequestHandler, HTTPServer\n"
        "class Handler(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "        model = sys.argv[sys.argv.index('--model') + 1]\n"
        "        body = {'data': [{'id': model}], 'version': '9'}\n"
        "        self.wfile.write(json.dumps(body).encode())\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n"
    )
    command = f"{sys.executable} {script}"
    with start_vllm(command, "the-model", ["--flag"], tmp_path / "log") as server:
        assert (server.model, server.version) == ("the-model", "9")
    with pytest.raises(UserError):
        attach("vllm", server.url)


def test_stub_groups_by_hand():
    groups, taken = Stub().groups(5, 9)
    assert (groups, taken) == ([[5], [6, 7, 8, 9], [10], [11, 12], [13]], [3, 0, 1, 3])
