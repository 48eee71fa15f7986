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
from recipes.errors import UserError

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


def ids_of(
    target: Target,
    messages: list[Message],
    prompt: Prompt,
    template_kwargs: dict[str, Any] | None,
    max_new_tokens: int,
) -> list[int]:
    """Ids of a conversation so far, with the generation prompt.

    Raises:
        UserError: they and the answer do not fit into the target's context.
    """
    ids = render_prompt(target.tokenizer, messages, prompt.get("tools"), template_kwargs)
    longest = int(target.config.max_position_embeddings)
    if len(ids) + max_new_tokens > longest:
        raise UserError(
            f"prompt {prompt['id']} ({prompt['source']}): {len(ids)} tokens and an answer of "
            f"{max_new_tokens} are more than the {longest} of the target's context; leave the "
            "prompt out, or lower eval.max_new_tokens"
        )
    return ids


def decode_turns(
    target: Target,
    prompts: Sequence[Prompt],
    decode_batch: DecodeBatch,
    template_kwargs: dict[str, Any] | None = None,
    indices: Sequence[int] | None = None,
    max_new_tokens: int = 1,
) -> list[TurnBatch]:
    """Answer the last user message of every prompt, then each of its follow-up `turns`.

    Args:
        decode_batch: called once a turn with the conversations that still have one.
        indices: a number for each prompt; None = its place.
        max_new_tokens: what an answer may be long, for the check of the context.

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
        ids = [ids_of(target, talks[i], prompts[i], template_kwargs, max_new_tokens) for i in going]
        answers, seconds = decode_batch(ids, [numbers[i] + turn * TURN_STEP for i in going])
        done.append(TurnBatch(turn, [numbers[i] for i in going], ids, answers, seconds))
        for i, answer in zip(going, answers, strict=True):
            ended = answer.ids[-1] in target.eos_ids
            said = answer.ids[:-1] if ended else answer.ids
            text = target.tokenizer.decode(said, skip_special_tokens=True)
            talks[i].append({"role": "assistant", "content": text})
    return done
