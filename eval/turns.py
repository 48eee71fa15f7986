"""Conversations answered turn after turn: each answer is part of the next prompt.

The next prompt is rendered again from the messages, as a chat client does: templates rewrite
history (they drop the thinking of earlier answers), so what the cache holds need not be its prefix.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from data.conversations import Message, render_prompt
from data.prompt_rows import Prompt
from data.target import Target
from eval.rounds import Decoded, Seconds

# Indices of one turn differ from those of another: random numbers must not come back (the indices
# of eval.decode are seeds, and its seeds lie 1_000_003 apart).
TURN_STEP = 1_000_003 << 20


class TurnBatch(NamedTuple):
    """One turn of some conversations, decoded side by side.

    indices: of the conversations, as given. prompts: token ids, the answers so far included.
    """

    turn: int
    indices: list[int]
    prompts: list[list[int]]
    answers: list[Decoded]
    seconds: Seconds


DecodeBatch = Callable[[list[list[int]], Sequence[int]], tuple[list[Decoded], Seconds]]
"""(prompts, indices that seed their random numbers) -> answers, time; e.g. a partial `decode`."""


def decode_turns(
    target: Target,
    prompts: Sequence[Prompt],
    decode_batch: DecodeBatch,
    template_kwargs: dict[str, Any] | None = None,
    indices: Sequence[int] | None = None,
) -> list[TurnBatch]:
    """Answer the last user message of every prompt, then each of its follow-up `turns`.

    Args:
        decode_batch: called once a turn with the conversations that still have one.
        indices: a number for each prompt; None = its place.

    Returns:
        One entry a turn. An answer enters the history as its text, without special tokens; where
        the cap cut it, as far as it goes.
    """
    talks: list[list[Message]] = [list(p["messages"]) for p in prompts]
    follow_ups = [p.get("turns", []) for p in prompts]
    numbers = list(range(len(prompts)) if indices is None else indices)
    done: list[TurnBatch] = []
    for turn in range(1 + max((len(texts) for texts in follow_ups), default=-1)):
        going = [i for i, texts in enumerate(follow_ups) if turn <= len(texts)]
        if turn > 0:
            for i in going:
                talks[i].append({"role": "user", "content": follow_ups[i][turn - 1]})
        ids = [
            render_prompt(target.tokenizer, talks[i], prompts[i].get("tools"), template_kwargs)
            for i in going
        ]
        answers, seconds = decode_batch(ids, [numbers[i] + turn * TURN_STEP for i in going])
        done.append(TurnBatch(turn, [numbers[i] for i in going], ids, answers, seconds))
        for i, answer in zip(going, answers, strict=True):
            ended = answer.ids[-1] in target.eos_ids
            said = answer.ids[:-1] if ended else answer.ids
            text = target.tokenizer.decode(said, skip_special_tokens=True)
            talks[i].append({"role": "assistant", "content": text})
    return done
