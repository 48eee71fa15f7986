"""Conversations that are being answered: what to ask next, and what became of each.

A prompt's later user turns are answered one after another. Each turn is rendered as a server would
render it, history included; where that repeats what the target saw and wrote before, the turns make
one training row, and where a template rewrites history (Qwen3 drops earlier thinking) one row each.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations import BadRow, render, render_prompt
from data.files import stable_hash
from data.prompt_rows import Prompt
from data.regenerate import Request
from data.source_rows import spans_of
from data.turns import Message
from recipes.data_section import DataSection

TOO_LONG = "prompt longer than data.max_prompt_tokens"


@dataclass
class Talk:
    """One conversation. answers: those so far, as they stand in responses.jsonl.

    messages: with every answer so far; a turn of the user is added when it is asked.
    """

    prompt: Prompt
    messages: list[Message]
    answers: list[dict[str, Any]] = field(default_factory=list)
    temperature: float = 0.0
    seed: int = 0

    @property
    def id(self) -> str:
        return self.prompt["id"]

    def request(self, tokenizer: PreTrainedTokenizerBase, section: DataSection) -> Request | None:
        """The next answer to ask for; None where the conversation is at its end.

        Raises:
            BadRow: the first turn cannot be asked: too long, or refused by the template.
        """
        turn = len(self.answers)
        later = self.prompt.get("turns", [])[: section.max_turns - 1]
        if turn > len(later) or (turn and self._is_closed()):
            return None
        messages = [*self.messages]
        if turn:
            messages.append({"role": "user", "content": later[turn - 1]})
        try:
            ids = render_prompt(
                tokenizer, messages, self.prompt.get("tools"), section.template_kwargs
            )
        except BadRow:
            if turn:
                return None
            raise
        room = section.max_length - len(ids)
        if room < 1 or (turn == 0 and len(ids) > section.max_prompt_tokens):
            if turn:
                return None
            raise BadRow(TOO_LONG)
        self.messages = messages
        return Request(
            id=self.id,
            prompt_ids=ids,
            max_new_tokens=min(section.max_new_tokens, room),
            temperature=self.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            seed=(self.seed + turn) % 2**62,
        )

    def _is_closed(self) -> bool:
        """Whether nobody can go on: the answer was cut, or it calls a tool that is not run here."""
        return self.answers[-1]["finish"] != "stop" or self._calls_a_tool()

    def _calls_a_tool(self) -> bool:
        if self.messages[-1].get("tool_calls"):
            return True
        names = [t.get("function", t).get("name") for t in self.prompt.get("tools", [])]
        return any(f'"{name}"' in self.messages[-1]["content"] for name in names)

    def take(self, message: Message, answer: dict[str, Any]) -> None:
        """Add an answer. `finish` is "stop", "length" or "tool_calls"."""
        self.messages = [*self.messages, message]
        self.answers.append(answer)

    def record(self) -> dict[str, Any]:
        """The line of responses.jsonl."""
        unasked = len(self.prompt.get("turns", [])) + 1 - len(self.answers)
        tools = {"tools": self.prompt["tools"]} if "tools" in self.prompt else {}
        return {
            "id": self.id,
            "source": self.prompt["source"],
            "messages": self.messages,
            **tools,
            "answers": self.answers,
            "finish": self.answers[-1]["finish"],
            "ends_with_a_call": self._calls_a_tool(),
            "turns_not_asked": unasked,
            "temperature": self.temperature,
        }


def start(prompt: Prompt, section: DataSection) -> Talk:
    """A conversation before its first answer; how it is sampled depends on its id and the seed."""
    number = int(stable_hash([prompt["id"], section.seed]), 16)
    greedy = number % 10_000 < 10_000 * section.greedy_share
    return Talk(
        prompt=prompt,
        messages=prompt["messages"],
        temperature=0.0 if greedy else section.temperature,
        seed=number % 2**62,
    )


class TalkQueue:
    """Requests of many conversations for `generate`: those that go on come before new ones.

    Iterating gives a Request, or None while there is nothing to ask until an answer is taken.

    Args:
        left_out: prompts that cannot be asked are counted here, by reason.
    """

    def __init__(
        self,
        prompts: Iterator[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        section: DataSection,
        left_out: Counter[str],
    ) -> None:
        self._prompts, self._tokenizer, self._section = prompts, tokenizer, section
        self._left_out = left_out
        self._open: dict[str, Talk] = {}
        self._ready: list[Request] = []

    def __iter__(self) -> Iterator[Request | None]:
        return self

    def __next__(self) -> Request | None:
        if self._ready:
            return self._ready.pop()
        for prompt in self._prompts:
            talk = start(prompt, self._section)
            try:
                request = talk.request(self._tokenizer, self._section)
            except BadRow as bad:
                self._left_out[bad.reason] += 1
                continue
            assert request is not None  # every prompt has a first turn
            self._open[talk.id] = talk
            return request
        if self._open:
            return None
        raise StopIteration

    def take(self, row_id: str, message: Message, answer: dict[str, Any]) -> Talk | None:
        """Add an answer; the conversation when it is at its end, else None."""
        talk = self._open[row_id]
        talk.take(message, answer)
        request = talk.request(self._tokenizer, self._section)
        if request is None:
            return self._open.pop(row_id)
        self._ready.append(request)
        return None

    def unfinished(self) -> list[Talk]:
        """Conversations that time ran out for, with an answer at least."""
        return [talk for talk in self._open.values() if talk.answers]


def rows_of(
    record: dict[str, Any], section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """Training rows of a line of responses.jsonl, in the form of rows.jsonl (without `split`).

    An answer that was cut is left out unless data.keep_truncated. The first row bears the record's
    id, the others `ID+2`, `ID+3` by turn.

    Raises:
        BadRow: an answer that came as text cannot be rendered.
    """
    answers = record["answers"]
    if answers[-1]["finish"] == "length" and not section.keep_truncated:
        answers = answers[:-1]
    if not answers:
        return
    roles = [m["role"] for m in record["messages"]]
    ends = [i + 1 for i, role in enumerate(roles) if role == "assistant"][-len(record["answers"]) :]
    shared = {"tools": record["tools"]} if "tools" in record else {}
    if "answer_ids" not in answers[0]:
        messages = record["messages"][: ends[len(answers) - 1]]
        row = render(
            tokenizer,
            messages,
            record.get("tools"),
            section.template_kwargs,
            section.max_length,
            section.supervise,
            section.train_on_thinking,
        )
        spans, finish = spans_of(row.mask), answers[-1]["finish"]
        yield {
            "id": record["id"],
            "ids": row.ids,
            "spans": spans,
            "finish": finish,
            "messages": messages,
            **shared,
        }
        return
    rows: list[dict[str, Any]] = []
    for turn, (answer, end) in enumerate(zip(answers, ends, strict=False), start=1):
        prompt, ids = answer["prompt_ids"], answer["prompt_ids"] + answer["answer_ids"]
        if rows and prompt[: len(rows[-1]["ids"])] == rows[-1]["ids"]:
            row_id, spans = rows[-1]["id"], rows.pop()["spans"]
        else:
            row_id, spans = record["id"] + (f"+{turn}" if turn > 1 else ""), []
        rows.append(
            {
                "id": row_id,
                "ids": ids,
                "spans": [*spans, [len(prompt), len(ids)]],
                "finish": answer["finish"],
                "messages": record["messages"][:end],
                **shared,
            }
        )
    yield from rows
