"""A local HTTP server that speaks as vLLM or SGLang do, about answers that a script fixes.

Messages have the keys of vLLM 0.32 (entrypoints/openai/completion/protocol.py and
entrypoints/generate/base/protocol.py, as recorded from a running server) and of SGLang
(sgl-project/sglang at 001067f, python/sglang/srt/managers/tokenizer_manager.py: meta_info of a
streamed /generate).
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

K = 3
STEPS = (3, 0, 1)  # accepted at each verification, over and over; each emits one token more


@dataclass
class Stub:
    """What the server does. Answers are `length` tokens long, or less where the cap is lower.

    steps: None = a server without speculation. level: of vLLM's per-request metrics.
    failing: prompts (by their first id) that are answered with HTTP 500.
    """

    engine: str = "vllm"
    steps: tuple[int, ...] | None = STEPS
    level: str = "detailed"
    length: int = 1000
    failing: tuple[int, ...] = ()
    pause: float = 0.0  # seconds between messages
    incremental: bool = False  # SGLang: messages add to the answer instead of repeating it
    old_names: bool = False  # SGLang: the keys of earlier versions
    seen: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    drafts: int = 100  # counters do not start at zero
    accepted: list[int] = field(default_factory=lambda: [60, 30, 10])

    def groups(self, first: int, max_tokens: int) -> tuple[list[list[int]], list[int]]:
        """Tokens of each message, and what each verification accepted before any cut."""
        length = min(self.length, max_tokens)
        ids = [(first + i) % 97 for i in range(length)]
        groups, taken, place = [ids[:1]], [], 1
        while place < length:
            a = self.steps[len(taken) % len(self.steps)] if self.steps else 0
            groups.append(ids[place : place + a + 1])
            taken.append(a)
            place += a + 1
        return groups, taken if self.steps else []

    def count(self, taken: list[int]) -> None:
        self.drafts += len(taken)
        self.accepted = [n + sum(a > i for a in taken) for i, n in enumerate(self.accepted)]

    def metrics(self) -> str:
        if self.engine == "sglang":
            return (
                "# TYPE sglang:spec_accept_length gauge\n"
                'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.25\n'
            )
        if self.steps is None:
            return 'vllm:num_requests_running{engine="0"} 0.0\n'
        name, label = "vllm:spec_decode_num", 'engine="0",model_name="m"'
        lines = [
            f"# TYPE {name}_drafts_total counter",
            f"{name}_drafts_total{{{label}}} {float(self.drafts)}",
            f"{name}_drafts_created{{{label}}} 1.7e+09",
            f"{name}_draft_tokens_total{{{label}}} {float(self.drafts * K)}",
            f"{name}_accepted_tokens_total{{{label}}} {float(sum(self.accepted))}",
        ]
        for i, n in enumerate(self.accepted):
            place = f'{label},position="{i}"'
            lines.append(f"{name}_accepted_tokens_per_pos_total{{{place}}} {float(n)}")
        return "\n".join(lines) + "\n"

    def speculative(self, taken: list[int]) -> dict[str, Any] | None:
        if self.steps is None or self.level == "none":
            return None
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + sum(taken) / len(taken) if taken else 1.0,
            "acceptance_histogram": [taken.count(j) for j in range(K + 1)],
            "num_spec_steps": len(taken),
            "num_accepted_draft_tokens": sum(taken),
            "num_draft_tokens": K * len(taken),
            "num_spec_tokens": K,
        }
        if self.level == "detailed" and taken:
            found |= {"per_step_accepted": taken, "per_step_drafted": [K] * len(taken)}
        return found

    def openai(self, body: dict[str, Any], chat: bool) -> list[dict[str, Any]]:
        first = len(body["messages"]) if chat else body["prompt"][0]
        groups, taken = self.groups(first, body["max_tokens"])
        self.count(taken)
        messages: list[dict[str, Any]] = []
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            messages.append({"id": "x", "choices": [role]})
        for ids in groups:
            text = "".join(f"<{i}>" for i in ids)
            told = {"delta": {"content": text}} if chat else {"text": text}
            messages.append({"id": "x", "choices": [{"index": 0, **told, "token_ids": ids}]})
        num = sum(map(len, groups))
        last: dict[str, Any] = {"id": "x", "choices": [], "usage": {"completion_tokens": num}}
        found = self.speculative(taken)
        return [
            *messages,
            last if found is None else {**last, "metrics": {"speculative_decoding": found}},
        ]

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        groups, taken = self.groups(body["input_ids"][0], body["sampling_params"]["max_new_tokens"])
        messages, ids = [], []
        for group in groups:
            ids = ids + group
            meta: dict[str, Any] = {"id": "r", "completion_tokens": len(ids), "finish_reason": None}
            shown = group if self.incremental else ids
            text = "".join(f"<{i}>" for i in shown)
            messages.append({"text": text, "output_ids": shown, "meta_info": meta})
        if taken:
            histogram = [taken.count(j) for j in range(K + 1)]
            names = ("spec_accept_histogram", "spec_accept_token_num", "spec_draft_token_num")
            if not self.old_names:
                names = ("spec_correct_drafts_histogram", "spec_num_correct_drafts",
                         "spec_num_proposed_drafts")  # fmt: skip
            messages[-1]["meta_info"] |= {
                "finish_reason": {"type": "length"},
                "spec_verify_ct": len(taken),
                "spec_accept_length": len(ids) / len(taken),
                names[0]: histogram,
                names[1]: sum(taken),
                names[2]: K * len(taken),
            }
        return messages

    def respond(self, path: str, body: dict[str, Any]) -> Any:
        """A JSON object, a text, messages to stream, or None for a path that is not there."""
        simple = {"/v1/models": {"data": [{"id": "m"}]}, "/metrics": self.metrics()}
        if self.engine == "vllm":
            simple |= {"/version": {"version": "0.32.0"}}
        else:
            simple |= {"/server_info": {"version": "0.5.9"}}
        if path in simple:
            return simple[path]
        self.seen.append({"path": path, **body})
        if self.engine == "vllm" and path == "/v1/completions":
            return self.openai(body, chat=False)
        if self.engine == "vllm" and path == "/v1/chat/completions":
            return self.openai(body, chat=True)
        if self.engine == "sglang" and path == "/generate":
            return self.generate(body)
        return None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = next(
            (int(line.split(":")[1]) for line in head.lower().splitlines()
             if line.startswith("content-length:")), 0,
        )  # fmt: skip
        body = json.loads(await reader.readexactly(length) or b"{}")
        prompt = body.get("prompt") or body.get("input_ids") or []
        self.in_flight += bool(body)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if prompt and prompt[0] in self.failing:
            writer.write(b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\nout of luck")
        else:
            answer = self.respond(path, body)
            status = "404 Not Found" if answer is None else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
            if isinstance(answer, list):
                for message in answer:
                    writer.write(f"data: {json.dumps(message)}\n\n".encode())
                    await writer.drain()
                    await asyncio.sleep(self.pause)
                writer.write(b"data: [DONE]\n\n")
            else:
                text = answer if isinstance(answer, str) else json.dumps(answer)
                writer.write(text.encode())
        await writer.drain()
        writer.close()
        self.in_flight -= bool(body)


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The stub's address, for the length of a `with`."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(stub.handle, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
