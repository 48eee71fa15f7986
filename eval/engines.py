"""Served engines: start one or attach to one, ask it, and note times, token ids and counters.

vLLM is asked by its OpenAI-compatible API (completions with token ids, or chat); SGLang by its own
/generate, which gives counters with every version. Answers are streamed: the time of every message
is what a client sees.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, Literal

import httpx

from data.http_calls import async_client, tls_context
from eval.engine_metrics import EngineRounds, sglang_rounds, vllm_rounds
from recipes.errors import UserError

EngineName = Literal["vllm", "sglang"]
Prompt = list[int] | dict[str, Any]  # token ids, or the keys of a chat request that make the prompt
REQUEST_SECONDS = 600.0
START_TIMEOUT = 900  # seconds that a server may take to load


@dataclass(frozen=True)
class Server:
    """A server that answers. model: the name under which it serves the target."""

    engine: EngineName
    url: str
    version: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """How every prompt is to be answered."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass
class Answer:
    """What came back for one prompt. Times are of one clock, in seconds.

    num_tokens: by the engine's own count, the prefill's token included.
    ids: empty where the engine gives no token ids.
    rounds: None where it gives no counters.
    error: why there is no answer.
    """

    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    rounds: EngineRounds | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        """From the first message with tokens to the last: decoding without the prefill."""
        return self.last - self.first


def attach(engine: EngineName, url: str) -> Server:
    """Find out what a running server is.

    Raises:
        UserError: nothing answers there, or it is no such server.
    """
    url = url.rstrip("/").removesuffix("/v1")
    paths = {"vllm": "/version", "sglang": "/server_info"}
    try:
        with httpx.Client(base_url=url, timeout=30, verify=tls_context()) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            about = client.get(paths[engine])
            if engine == "sglang" and about.status_code == httpx.codes.NOT_FOUND:
                about = client.get("/get_server_info")  # its older name
            version = str(about.raise_for_status().json()["version"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{url}: no {engine} server answers here: {error!r}") from error
    return Server(engine, url, version, model)


def metrics_text(server: Server) -> str:
    """The text of /metrics, empty where the server has none."""
    try:
        response = httpx.get(
            f"{server.url}/metrics", timeout=30, follow_redirects=True, verify=tls_context()
        )
    except httpx.HTTPError:
        return ""
    return response.text if response.is_success else ""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start_vllm(command: str, model: str, flags: Sequence[str], log: Path) -> Iterator[Server]:
    """A vLLM server for the length of a `with`; its output goes to `log`.

    Args:
        command: what starts one, such as "vllm serve"; the model and flags come behind it.

    Raises:
        UserError: it cannot be started, ends, or is not ready in time.
    """
    port = free_port()
    words = shlex.split(command)
    # Only `vllm serve MODEL` takes it by place; the module that starts a server ignores it there.
    words += [model] if words[-1:] == ["serve"] else ["--model", model]
    words += ["--host", "127.0.0.1", "--port", str(port), *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(
                f"cannot start {words[0]!r}: {error.strerror}; name the command that starts vLLM "
                "with --engine-command, or attach to a server with --server URL"
            ) from error
    try:
        _wait_until_ready(process, port, log)
        yield attach("vllm", f"http://127.0.0.1:{port}")
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = monotonic() + START_TIMEOUT
    while monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise UserError(f"vLLM ended while starting: {' '.join(last)} (all of it: {log})")
        try:
            if httpx.get(
                f"http://127.0.0.1:{port}/health", timeout=5, verify=tls_context()
            ).is_success:
                return
        except httpx.HTTPError:
            pass
        sleep(0.5)
    raise UserError(f"vLLM was not ready after {START_TIMEOUT} s; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and what it started: they are one session of ours."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def ask_all(
    server: Server, prompts: Sequence[Prompt], request: Request, concurrency: int
) -> tuple[list[Answer], float]:
    """Answers in the order of the prompts, and the seconds from the first to the last of them.

    At most `concurrency` requests are in flight; the next starts when one ends.
    """
    return asyncio.run(_ask_all(server, prompts, request, concurrency))


async def _ask_all(
    server: Server, prompts: Sequence[Prompt], request: Request, concurrency: int
) -> tuple[list[Answer], float]:
    slots = asyncio.Semaphore(concurrency)
    async with async_client(concurrency, REQUEST_SECONDS) as client:

        async def one(prompt: Prompt) -> Answer:
            async with slots:
                return await ask(client, server, prompt, request)

        started = perf_counter()
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return list(answers), perf_counter() - started


async def ask(
    client: httpx.AsyncClient, server: Server, prompt: Prompt, request: Request
) -> Answer:
    """One streamed answer; what fails is said in it."""
    path, payload, take = _protocol(server, prompt, request)
    answer = Answer(sent=perf_counter())
    try:
        async with client.stream("POST", server.url + path, json=payload) as response:
            if not response.is_success:
                detail = (await response.aread()).decode(errors="replace")[:300]
                raise ValueError(f"HTTP {response.status_code}: {detail}")
            async for message in _messages(response):
                if take(answer, message):
                    answer.last = perf_counter()
                    answer.first = answer.first or answer.last
        if not answer.num_tokens:
            raise ValueError("the stream ended without a number of tokens")
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
        answer.error = str(error) or repr(error)
        answer.rounds = None
    return answer


async def _messages(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of an event stream, up to [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            message = json.loads(data)
            if "error" in message:
                raise ValueError(str(message["error"]))
            yield message


def _protocol(server: Server, prompt: Prompt, request: Request) -> tuple[str, dict[str, Any], Any]:
    """Path, body, and what takes a message in (it says whether tokens came with it)."""
    # All that is drawn is set here: servers take defaults from the model's generation config.
    law: dict[str, Any] = {"temperature": request.temperature, "top_p": request.top_p}
    law |= {"top_k": request.top_k or -1, "min_p": request.min_p}
    law |= {"repetition_penalty": request.repetition_penalty}
    if server.engine == "sglang":
        law["max_new_tokens"] = request.max_tokens
        return "/generate", {"input_ids": prompt, "sampling_params": law, "stream": True}, _sglang
    payload = {
        "model": server.model,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **law,
    }
    if isinstance(prompt, dict):
        return "/v1/chat/completions", {**payload, **prompt}, _openai
    return "/v1/completions", {**payload, "prompt": prompt}, _openai


def _openai(answer: Answer, message: Mapping[str, Any]) -> bool:
    usage = message.get("usage")
    if usage is not None:
        answer.num_tokens = int(usage["completion_tokens"])
    if message.get("metrics") is not None:
        answer.rounds = vllm_rounds(message["metrics"])
    if not message["choices"]:
        return False
    choice = message["choices"][0]
    text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    ids = choice.get("token_ids") or []
    answer.text += text
    answer.ids += ids
    return bool(ids or text)


def _sglang(answer: Answer, message: Mapping[str, Any]) -> bool:
    """Each message repeats the answer so far, or adds to it (--incremental-streaming-output)."""
    meta, ids = message["meta_info"], message.get("output_ids") or []
    before, answer.num_tokens = answer.num_tokens, int(meta["completion_tokens"])
    whole = len(ids) == answer.num_tokens
    answer.ids = list(ids) if whole else answer.ids + ids
    text = message.get("text") or ""
    answer.text = text if whole else answer.text + text
    answer.rounds = sglang_rounds(meta)
    return answer.num_tokens > before
