"""Answers by a running server: many conversations in flight, failures tried again.

Protocols: vLLM's completions with token ids in and out (`return_token_ids`, vLLM 0.32), SGLang's
/generate, and any OpenAI-compatible chat API that also takes top_k, min_p and repetition_penalty.
"""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from data.conversations import BadRow, Message, normalize
from data.http_calls import NoAnswerError, async_client, describe, first_model, post
from data.prompt_rows import Prompt
from data.regenerate import Request
from data.talks import Talk, start
from recipes.data_section import DataSection, ServerSection
from recipes.errors import UserError

log = logging.getLogger("draftsmith")

FATAL = {401, 403, 404, 405}
RATE_SECONDS = 30.0
NO_ANSWER = "no answer from the server"
DOWN_AFTER = 20  # conversations that fail one after another, or as many as are in flight


@dataclass
class _Reply:
    message: Message
    answer: dict[str, Any]
    num_tokens: int


class _Server:
    """One client and how it asks; sums up what it got."""

    def __init__(
        self, section: DataSection, tokenizer: PreTrainedTokenizerBase, client: httpx.AsyncClient
    ) -> None:
        assert section.server is not None
        self.server: ServerSection = section.server
        self.section, self.tokenizer, self.client = section, tokenizer, client
        self.url = self.server.url.rstrip("/").removesuffix("/v1")
        self.model = self.server.model
        self.num_tokens = self.num_retries = self.num_failed = self.num_done = 0
        self.failed_in_a_row = 0

    async def find_model(self) -> None:
        """The name of the first model served, where the recipe gives none."""
        if self.model is not None or self.server.api == "generate":
            return
        try:
            self.model = await first_model(self.client, self.url)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"data.server.url {self.server.url}: no list of models there ({error!r}); start "
                "the server, or set data.server.model"
            ) from error

    async def ask(self, talk: Talk, request: Request) -> _Reply:
        """One answer.

        Raises:
            NoAnswerError: still none after data.server.retries further tries.
            BadRow: the server refuses this prompt, or the answer cannot be used.
            UserError: the server refuses everybody, or does not speak data.server.api.
        """
        path, body, read = self._protocol(talk, request)
        url = self.url + path
        response = await post(self.client, url, body, self.server.retries, self._tried_again)
        if response.is_success:
            return self._read(response, read)
        if response.status_code in FATAL:
            raise UserError(f"data.server {url} answers {describe(response)}")
        raise BadRow(f"refused by the server (HTTP {response.status_code})")

    def _tried_again(self) -> None:
        self.num_retries += 1

    def _read(self, response: httpx.Response, read: Callable[[Any], _Reply]) -> _Reply:
        try:
            return read(response.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"data.server {self.url}: an answer that is not of data.server.api "
                f"{self.server.api} ({error!r}): {response.text[:200]}; a server that gives no "
                "token ids is asked with api: chat"
            ) from error

    def _protocol(
        self, talk: Talk, request: Request
    ) -> tuple[str, dict[str, Any], Callable[[Any], _Reply]]:
        # All that is drawn is set here: servers take defaults from the model's generation config.
        law: dict[str, Any] = {"temperature": request.temperature, "top_p": request.top_p}
        law |= {"top_k": request.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
        api, cap = self.server.api, request.max_new_tokens

        def by_ids(ids: list[int], finish: str) -> _Reply:
            if not ids or not all(isinstance(i, int) for i in ids):
                raise ValueError("no token ids")
            self._check_end(ids, finish)
            answer = {"prompt_ids": request.prompt_ids, "answer_ids": ids, "finish": finish}
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            return _Reply({"role": "assistant", "content": text}, answer, len(ids))

        if api == "generate":
            law["max_new_tokens"] = cap
            law["no_stop_trim"] = True  # the token that stopped it is part of the answer
            body = {"input_ids": request.prompt_ids, "sampling_params": law}
            return (
                "/generate",
                body,
                lambda reply: by_ids(
                    reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]
                ),
            )
        law |= {"model": self.model, "max_tokens": cap, "seed": request.seed % 2**31}
        if api == "completions":
            law |= {"prompt": request.prompt_ids}
            law |= {"return_token_ids": True, "skip_special_tokens": False}
            return (
                "/v1/completions",
                law,
                lambda reply: by_ids(
                    reply["choices"][0]["token_ids"],
                    reply["choices"][0]["finish_reason"],
                ),
            )
        law |= {"messages": [openai_message(m) for m in talk.messages]}
        if self.section.template_kwargs:
            law["chat_template_kwargs"] = self.section.template_kwargs
        if "tools" in talk.prompt:
            law["tools"] = talk.prompt["tools"]
        return "/v1/chat/completions", law, _by_chat

    def _check_end(self, ids: list[int], finish: str) -> None:
        """An answer that stopped ends with the token that stopped it; none is put there."""
        if finish not in ("stop", "length"):
            raise ValueError(f"finish reason {finish!r}")
        special = self.tokenizer.added_tokens_decoder
        if finish == "stop" and ids[-1] not in special:
            raise ValueError(
                f"it stopped at token {ids[-1]}, which ends no turn: start the server without "
                "stop strings, and let it return the last token"
            )

    def failed(self, talk: Talk, reason: str) -> None:
        """Count a conversation without an answer.

        Raises:
            UserError: so many in a row that the server must be down.
        """
        self.num_failed += 1
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= max(DOWN_AFTER, self.server.concurrency):
            raise UserError(
                f"data.server {self.url}: {self.failed_in_a_row} conversations failed one after "
                f"another, the last with {reason}; what is answered is kept, the same command "
                "goes on"
            )


def openai_message(message: Message) -> dict[str, Any]:
    """Tool calls as the API wants them: their arguments are JSON text there."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [
        {
            "type": "function",
            "id": call.get("id", f"call_{i}"),
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for i, call in enumerate(calls)
    ]
    return {**message, "tool_calls": written}


def _by_chat(reply: Any) -> _Reply:
    choice = reply["choices"][0]
    finish = choice["finish_reason"]
    if finish not in ("stop", "length", "tool_calls"):
        raise BadRow(f"ended by the server: {finish}")
    raw = {"messages": [{"role": "user", "content": "-"}, choice["message"]]}
    if finish == "length" and choice["message"].get("tool_calls"):
        raise BadRow("a tool call that was cut")
    message = normalize(raw)["messages"][-1]
    if finish == "length":
        message["truncated"] = True
    if not (message["content"] or message.get("reasoning_content") or message.get("tool_calls")):
        raise BadRow("an empty answer")
    num_tokens = int((reply.get("usage") or {}).get("completion_tokens", 0))
    return _Reply(message, {"finish": finish}, num_tokens)


def ask_server(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterator[Prompt],
    left_out: Counter[str],
    write: Callable[[Talk], None],
    out_of_time: Callable[[], bool],
) -> int:
    """Answer all prompts; returns the number of tokens written.

    Args:
        section: with a `server`.
        tokenizer: renders prompts, for the lengths also where the server renders them itself.
        prompts: taken one by one as conversations end.
        left_out: prompts that stay without an answer are counted here, by reason.
        write: called with each conversation that is at its end.
        out_of_time: asked before a conversation is begun.

    Raises:
        UserError: no such server, it is down, or more than data.max_bad_share of the conversations
            failed; what was written stays.
    """
    return asyncio.run(_ask_server(section, tokenizer, prompts, left_out, write, out_of_time))


async def _ask_server(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterator[Prompt],
    left_out: Counter[str],
    write: Callable[[Talk], None],
    out_of_time: Callable[[], bool],
) -> int:
    assert section.server is not None
    concurrency, key = section.server.concurrency, section.server.api_key_env
    if key is not None and key not in os.environ:
        raise UserError(f"data.server.api_key_env: there is no environment variable {key}")
    headers = {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}
    async with async_client(concurrency, section.server.timeout, headers) as client:
        server = _Server(section, tokenizer, client)
        await server.find_model()

        async def worker() -> None:
            for prompt in prompts:  # shared: each takes the next
                if out_of_time():
                    return
                await _converse(server, start(prompt, section), left_out, write)

        tasks = [asyncio.create_task(worker()) for _ in range(concurrency)]
        rate = asyncio.create_task(_show_rate(server))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, rate):
                task.cancel()
            await asyncio.gather(*tasks, rate, return_exceptions=True)
    log.info("%d requests were tried again", server.num_retries)
    num_asked = server.num_done + server.num_failed
    if server.num_failed > section.max_bad_share * num_asked:
        raise UserError(
            f"{server.num_failed} of {num_asked} conversations got no answer from "
            f"{section.server.url}, more than data.max_bad_share; what is answered is kept, the "
            "same command goes on"
        )
    return server.num_tokens


async def _converse(
    server: _Server, talk: Talk, left_out: Counter[str], write: Callable[[Talk], None]
) -> None:
    """All turns of one conversation."""
    try:
        while (request := talk.request(server.tokenizer, server.section)) is not None:
            reply = await server.ask(talk, request)
            server.failed_in_a_row = 0
            server.num_tokens += reply.num_tokens
            talk.take(reply.message, reply.answer)
    except NoAnswerError as error:
        left_out[NO_ANSWER] += 1
        server.failed(talk, str(error))
        return
    except BadRow as bad:
        if not talk.answers:
            left_out[bad.reason] += 1
            return
        talk.messages = talk.messages[:-1]  # the turn that was asked in vain
    server.num_done += 1
    write(talk)


async def _show_rate(server: _Server) -> None:
    """A line every half minute: tokens a second, failures, tries."""
    while True:
        before, began = server.num_tokens, time.monotonic()
        await asyncio.sleep(RATE_SECONDS)
        rate = (server.num_tokens - before) / (time.monotonic() - began)
        log.info(
            "%d conversations, %.0f tokens/s, %d tries again, %d without an answer",
            server.num_done,
            rate,
            server.num_retries,
            server.num_failed,
        )
