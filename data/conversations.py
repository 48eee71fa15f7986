"""Conversations to token ids and the loss mask: what the assistant wrote, and nothing else.

`normalize` (data/raw_rows.py) brings the usual shapes of chat data into one. `render` turns a
conversation into ids and a mask by the tokenizer's own chat template, with or without generation
tags; `append_answer` does so for an answer that the target has just generated, from its ids.

A row's `ids` and `mask` are lists of S ints; mask 1 = supervised: the answer (reasoning and tool
calls included) with its end-of-turn token; not the generation prompt, not an empty think block
that the template puts in, not the newline after the end-of-turn token.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from data.raw_rows import Conversation, normalize
from data.turn_checks import check_tags, check_texts, skip_thought
from data.turns import BadRow, Message, locate_turns
from recipes.errors import UserError

__all__ = ["BadRow", "Conversation", "Message", "normalize"]

MASK_RULE = "answer+end-of-turn/2"
"""Name of the rule above; part of the cache keys, so change it with the rule."""

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Row(NamedTuple):
    """Token ids and loss mask (1 = supervised), both of length S."""

    ids: list[int]
    mask: list[int]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Ids of the conversation with the generation prompt: what a server sends to the target."""
    messages, kwargs = _split(messages, template_kwargs)
    text = _apply(tokenizer, messages, tools, kwargs, generation_prompt=True)
    _check_system(messages, text)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    max_length: int | None = None,
    supervise: Literal["all", "last"] = "all",
    train_on_thinking: bool = True,
) -> Row:
    """Ids and loss mask of a conversation.

    A turn cut by `max_length` keeps the mask on what is left of it. A message with `truncated` (the
    answer hit the token cap) gets no end-of-turn token; as the last message it ends the row.

    Args:
        tokenizer: a fast one, with a chat template.
        messages: in the common form (`normalize`).
        tools: the tools that the assistant may call.
        template_kwargs: arguments of the template, e.g. enable_thinking.
        max_length: tokens kept.
        supervise: learn from all answers, or from the last one alone.
        train_on_thinking: learn what the assistant thought too, or read it only.

    Raises:
        BadRow: no assistant turn, nothing supervised within `max_length`, or the template refuses.
        UserError: no chat template, or it does not show where the answers lie.
    """
    messages, kwargs = _split(messages, template_kwargs)
    roles = [m["role"] for m in messages if m["role"] != "system"]
    if "assistant" not in roles:
        raise BadRow("no assistant turn")
    if roles[0] == "assistant":
        raise BadRow("starts with the turn of the assistant")
    if not tokenizer.is_fast:
        raise UserError(f"{_name(tokenizer)} is a slow tokenizer; the loss mask needs a fast one")
    text = _apply(tokenizer, messages, tools, kwargs)
    _check_system(messages, text)

    special = _special_pattern(tokenizer, len(tokenizer))
    turns = locate_turns(
        lambda part, prompt: _apply(tokenizer, part, tools, kwargs, prompt),
        messages,
        text,
        special,
        _name(tokenizer),
    )
    if _TAG.search(tokenizer.get_chat_template(tools=tools)):
        turns = check_tags(
            text, turns, _tagged(tokenizer, messages, tools, kwargs), _tag_error(tokenizer)
        )
    check_texts(text, turns, messages, tokenizer.eos_token)
    if turns[-1].stop == len(text) == turns[-1].end and not messages[-1].get("truncated"):
        text += _closing(tokenizer, messages, tools, kwargs, text, special)
        turns[-1] = turns[-1]._replace(stop=len(text))
    answers = [m for m in messages if m["role"] == "assistant"]
    if not train_on_thinking:
        pairs = zip(turns, answers, strict=True)
        turns = [skip_thought(text, turn, answer) for turn, answer in pairs]
    spans = [
        (turn.start, turn.end if answer.get("truncated") else turn.stop)
        for turn, answer in zip(turns, answers, strict=True)
    ]
    if messages[-1].get("truncated"):
        text = text[: spans[-1][1]]
    if supervise == "last":
        spans = spans[-1:]

    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoding["input_ids"][:max_length]
    mask = span_mask(encoding["offset_mapping"][:max_length], spans)
    if not any(mask):
        raise BadRow("nothing supervised within max_length" if max_length else "nothing supervised")
    return Row(ids, mask)


def append_answer(
    prompt_ids: list[int], answer_ids: list[int], max_length: int | None = None
) -> Row:
    """Row of a generated answer: exactly what the target saw and wrote, never tokenised again.

    Args:
        prompt_ids: from `render_prompt`.
        answer_ids: as generated; they end with an end-of-sequence id unless the cap cut them.
        max_length: tokens kept.
    """
    ids = [*prompt_ids, *answer_ids][:max_length]
    mask = [0] * len(prompt_ids) + [1] * len(answer_ids)
    return Row(ids, mask[:max_length])


def span_mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """1 for each token whose characters all lie in one of the spans.

    Args:
        offsets: S half-open character ranges, one a token.
        spans: half-open character ranges, in order and disjoint.
    """
    mask = [0] * len(offsets)
    starts = [start for start, _ in offsets]
    for begin, stop in spans:
        first = bisect_left(starts, begin)
        last = bisect_left(starts, stop, lo=first)
        while last > first and offsets[last - 1][1] > stop:  # begins inside, ends behind
            last -= 1
        mask[first:last] = [1] * (last - first)
    return mask


def check_mask_share(num_supervised: int, num_tokens: int, minimum: float, name: str) -> float:
    """Share of supervised tokens in a data set, refused where no right mask can have it.

    Args:
        num_supervised: tokens with mask 1.
        num_tokens: all tokens.
        minimum: data.min_supervised_share.
        name: of the tokenizer or template, for the message.

    Raises:
        UserError: no tokens, none or all of them supervised, or a share below `minimum`.
    """
    if num_tokens == 0:
        raise UserError("no tokens to train on: every row was dropped; see the reasons above")
    share = num_supervised / num_tokens
    if num_supervised in (0, num_tokens):
        raise UserError(
            f"{share:.0%} of {num_tokens} tokens are supervised under the chat template of {name}; "
            "the loss mask cannot be right: set data.chat_template to a template whose generation "
            "prompt and end-of-turn token stand around each answer"
        )
    if share < minimum:
        raise UserError(
            f"{share:.2%} of {num_tokens} tokens are supervised under the chat template of {name}, "
            f"less than data.min_supervised_share {minimum:.2%}: use data with longer answers or "
            "shorter prompts, or lower the limit"
        )
    return share


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: list[int] | None = None
) -> None:
    """Refuse a tokenizer that can give ids the weights have no row for.

    More rows than tokens is fine: many targets pad their embedding.

    Raises:
        UserError: too many tokens, or an end-of-sequence id outside [0, vocab_size).
    """
    if len(tokenizer) > vocab_size:
        raise UserError(
            f"tokenizer and weights disagree: {_name(tokenizer)} has {len(tokenizer)} tokens, the "
            f"target {vocab_size} embedding rows; load both from the same model and revision"
        )
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for token_id in [*own, *(eos or [])]:
        if not 0 <= token_id < vocab_size:
            raise UserError(
                f"end-of-sequence id {token_id} of {_name(tokenizer)} is outside the target's "
                f"vocabulary of {vocab_size}; load both from the same model and revision"
            )


def eos_ids(
    generation_config: GenerationConfig | None,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """All ids that end an answer: the first of the three sources that names any.

    The order is that of `generate`, so that we stop where the target's own defaults stop.
    """
    own = None if generation_config is None else generation_config.eos_token_id
    for value in (own, config.to_dict().get("eos_token_id"), tokenizer.eos_token_id):
        if value is not None and value != []:
            return [int(value)] if isinstance(value, int) else [int(v) for v in value]
    raise UserError(f"{_name(tokenizer)}: no end-of-sequence token; set eos_token_id in its config")


def pad_token_id(tokenizer: PreTrainedTokenizerBase, eos: list[int]) -> int:
    """One id to pad with. It may be an end-of-sequence id: padding is told by length, never id."""
    pad = tokenizer.pad_token_id
    return int(pad) if isinstance(pad, int) else eos[0]


def _split(
    messages: list[Message], template_kwargs: dict[str, Any] | None
) -> tuple[list[Message], dict[str, Any]]:
    """Messages for the template and its arguments; a `reasoning_effort` message is one of those."""
    kwargs = dict(template_kwargs or {})
    for message in messages:
        if message["role"] == "reasoning_effort":
            kwargs["reasoning_effort"] = message["content"]
    return [m for m in messages if m["role"] != "reasoning_effort"], kwargs


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
    generation_prompt: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"{_name(tokenizer)} has no chat template; set data.chat_template to a file with one"
        )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,  # type: ignore[arg-type]  # list is invariant
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **kwargs,
        )
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template of {_name(tokenizer)} is broken: {error}") from error
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise BadRow(f"refused by the chat template: {error}") from error
    return str(text)


def _check_system(messages: list[Message], text: str) -> None:
    for message in messages:
        if message["role"] == "system" and message["content"].strip() not in text:
            raise BadRow("the chat template leaves out the system turn")


def _tagged(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> list[tuple[int, int]]:
    """Character ranges of the tokens inside the template's generation tags."""
    rendered: Any = tokenizer.apply_chat_template(
        messages,
        tools=tools,  # type: ignore[arg-type]  # list is invariant
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        **kwargs,
    )
    pairs = zip(rendered["offset_mapping"], rendered["assistant_masks"], strict=True)
    return [(a, b) for (a, b), flag in pairs if flag]


def _tag_error(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], UserError]:
    return lambda where: UserError(
        f"{_name(tokenizer)}: the generation tags of the chat template disagree with its "
        f"assistant turns ({where}); mend the tags or set data.chat_template to a template "
        "without them"
    )


def _closing(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
    text: str,
    special: re.Pattern[str],
) -> str:
    """The special token that the template writes behind the last answer once the talk goes on.

    Some templates (GLM, Apertus) end a turn only when the next begins, and the model stops there by
    that token. Empty where the next turn brings none. The answer is replaced by a marker, since
    templates drop the thinking of an answer that is no longer the last.
    """
    if messages[-1].get("tool_calls"):
        return ""
    marker = "zq0turn0qz"
    while marker in text:
        marker += "qz"
    talk = [
        *messages[:-1],
        {"role": "assistant", "content": marker},
        {"role": "user", "content": "-"},
    ]
    try:
        longer = _apply(tokenizer, talk, tools, kwargs)
    except BadRow:
        return ""
    closing = special.match(longer, longer.rfind(marker) + len(marker))
    return closing.group() if closing and marker in longer else ""


@lru_cache(maxsize=8)
def _special_pattern(tokenizer: PreTrainedTokenizerBase, _num_tokens: int) -> re.Pattern[str]:
    """Matches a special token that may close a turn: any of them but the one that opens a text."""
    names = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    names |= {str(token) for token in tokenizer.all_special_tokens}
    if tokenizer.bos_token != tokenizer.eos_token:
        names.discard(str(tokenizer.bos_token))
    return re.compile(
        "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) or r"(?!)"
    )


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path!r}" if tokenizer.name_or_path else "the tokenizer"
