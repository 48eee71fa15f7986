"""Which request comes next when conversations of several turns are answered here."""

from collections import Counter
from typing import Any

import pytest

from data.talks import TOO_LONG, TalkQueue
from recipes.data_section import DataSection
from tests.chat_tokenizers import CHATML, chat_tokenizer

TOKENIZER = chat_tokenizer(CHATML)


def section(**values: Any) -> DataSection:
    return DataSection.model_validate({"sources": ["book"], "num_prompts": 3, **values})


def prompt(name: str, *turns: str, text: str = "one") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"id": name, "source": "s", "messages": messages, "turns": list(turns)}


def queue_of(prompts: list[dict[str, Any]], left_out: Counter[str], **values: Any) -> TalkQueue:
    return TalkQueue(iter(prompts), TOKENIZER, section(**values), left_out)  # type: ignore[arg-type]


def test_later_turns_come_first_and_nothing_is_lost_while_answers_are_awaited() -> None:
    queue = queue_of([prompt("a", "two"), prompt("b", "two")], Counter())
    first, second = next(queue), next(queue)
    assert first is not None and second is not None and (first.id, second.id) == ("a", "b")
    assert next(queue) is None  # both are being written; "a" will go on
    said = {"role": "assistant", "content": "yes"}
    ids = TOKENIZER("yes<|im_end|>", add_special_tokens=False)["input_ids"]
    whole = {"prompt_ids": first.prompt_ids, "answer_ids": ids, "finish": "stop"}
    assert queue.take("a", said, whole) is None
    later = next(queue)
    assert later is not None and later.id == "a" and later.seed != first.seed
    assert later.prompt_ids[: len(first.prompt_ids) + len(ids)] == [*first.prompt_ids, *ids]
    assert "<|im_start|>user\ntwo<|im_end|>" in TOKENIZER.decode(later.prompt_ids)
    cut = queue.take("b", said, {**whole, "finish": "length"})  # nobody goes on from a cut answer
    assert cut is not None and cut.record()["turns_not_asked"] == 1
    done = queue.take("a", said, whole)
    assert done is not None and [m["role"] for m in done.messages] == ["user", "assistant"] * 2
    with pytest.raises(StopIteration):
        next(queue)


def test_prompts_too_long_are_counted_and_turns_have_a_limit() -> None:
    left_out: Counter[str] = Counter()
    prompts = [prompt("long", text="word " * 400), prompt("a", "two", "three")]
    queue = queue_of(prompts, left_out, max_prompt_tokens=100, max_turns=2)
    request = next(queue)
    assert request is not None and request.id == "a" and left_out == {TOO_LONG: 1}
    said, answer = {"role": "assistant", "content": "x"}, {"finish": "stop"}
    assert queue.take("a", said, answer) is None
    talk = queue.take("a", said, answer)
    assert talk is not None and talk.record()["turns_not_asked"] == 1
