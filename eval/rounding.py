"""Greedy answers in half precision: how often rounding alone changes them, and how often a drafter.

A pass over K + 1 tokens rounds otherwise than a pass over one, so the target disagrees with itself
now and then. That rate is the floor for any drafter: it is measured by letting the loop verify the
target's own answers (eval.oracle).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import comb

from typing_extensions import TypedDict

from data.target import Target
from drafters.base import DecodingDrafter
from eval.decode import decode
from eval.decode_tree import decode_tree
from eval.lossless import greedy_identical
from eval.oracle import Replay
from eval.rounds import DecodeSettings
from eval.tree import TreeSpec


class Floor(TypedDict):
    """First divergences in half precision; tokens are counted up to the first of each answer."""

    dtype: str
    num_prompts: int
    target_diverged: int  # K + 1 tokens a pass against one, both the target
    target_tokens: int
    drafter_diverged: int  # the drafter's answers against the target's own
    drafter_tokens: int
    p_value: float  # that the drafter's rate is no higher than the target's own


def half_precision(
    target: Target,
    drafter: DecodingDrafter,
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
    batch_size: int,
    tree: TreeSpec | None = None,
) -> Floor:
    """How often answers leave the target's greedy path, by rounding alone and with the drafter.

    Args:
        tree: what the drafter grows; the target's own passes are over chains as deep.
    """
    if tree is not None:
        settings = replace(settings, num_draft=tree.depth)
    plain, own, drafted = [], [], []
    for start in range(0, len(prompts), batch_size):
        batch = list(prompts[start : start + batch_size])
        answers = [row.ids for row in decode(target, None, batch, settings)[0]]
        knows = {tuple(prompt): ids for prompt, ids in zip(batch, answers, strict=True)}
        plain += answers
        own += [r.ids for r in decode(target, Replay(drafter, knows), batch, settings)[0]]
        if tree is None:
            rows, _ = decode(target, drafter, batch, settings)
        else:
            rows, _ = decode_tree(target, drafter, batch, settings, tree)
        drafted += [row.ids for row in rows]
    target_diverged, target_tokens = _divergences(own, plain)
    drafter_diverged, drafter_tokens = _divergences(drafted, plain)
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_prompts": len(plain),
        "target_diverged": target_diverged,
        "target_tokens": target_tokens,
        "drafter_diverged": drafter_diverged,
        "drafter_tokens": drafter_tokens,
        "p_value": rate_p_value(drafter_diverged, drafter_tokens, target_diverged, target_tokens),
    }


def _divergences(outputs: list[list[int]], expected: list[list[int]]) -> tuple[int, int]:
    """First divergences, and the tokens up to and with them."""
    found = greedy_identical(outputs, expected).divergences
    first = {d.prompt: d.position + 1 for d in found}
    return len(found), sum(first.get(i, len(ids)) for i, ids in enumerate(expected))


def rate_p_value(num_a: int, size_a: int, num_b: int, size_b: int) -> float:
    """Exact one-sided test that events in a are no more frequent than in b.

    Given their sum, the events in a are binomial with share size_a / (size_a + size_b).
    """
    total, share = num_a + num_b, size_a / (size_a + size_b)
    return sum(
        comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(num_a, total + 1)
    )
