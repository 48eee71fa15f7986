"""A local HTTP server that answers each POST by a function of the test, with what it saw."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What comes back: a status other than 200 goes with `body` as its text."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # before it comes
    hang_up: bool = False  # no reply at all


Answerer = Callable[[dict[str, Any]], Reply]


@dataclass
class AnswerStub:
    """seen: (path, body, headers) of every POST, in the order in which they came.

    hold: no answer goes out before so many POSTs have come.
    """

    answer: Answerer
    url: str = ""
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    hold: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    reply = Reply({"data": [{"id": "first-model"}]})
                else:
                    body = json.loads(raw)
                    self.seen.append((path, body, headers))
                    reply = self.answer(body)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                await asyncio.sleep(reply.seconds)
                while method == "POST" and len(self.seen) < self.hold:
                    await asyncio.sleep(0.005)
                self.in_flight -= 1
                if reply.hang_up:
                    break
                data = json.dumps(reply.body).encode()
                head = [f"HTTP/1.1 {reply.status} X", f"content-length: {len(data)}"]
                head += [f"{k}: {v}" for k, v in reply.headers.items()]
                writer.write("\r\n".join([*head, "", ""]).encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@contextmanager
def answering(answer: Answerer) -> Iterator[AnswerStub]:
    """Such a server on a free port for the length of a `with`."""
    stub, ready = AnswerStub(answer), threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append((asyncio.get_running_loop(), stop := asyncio.Event()))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield stub
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
