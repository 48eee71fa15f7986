"""Arms that answer the same prompts in turn: the target alone, each drafter, a perfect drafter.

Every arm is warmed up. Then they take turns on every batch, in an order that moves on by one each
time; so a machine that slows down slows all of them. All of that is done `repeats` times, and each
time drafters begin without the answers of earlier decodes, as a server that has just started.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from data.prompt_rows import Prompt
from data.target import Target
from drafters.base import DecodingDrafter
from eval.decode import Decoded, DecodeSettings, Seconds, decode
from eval.decode_tree import decode_tree
from eval.oracle import Replay
from eval.tree import TreeSpec
from eval.turns import TurnBatch, decode_turns

BASELINE = "baseline"  # name of the arm without a drafter
ORACLE = "oracle"  # name of the arm whose drafter knows the baseline's answers


def unseen(_num: int) -> None:
    """Progress that nobody looks at."""


Answer = Callable[[DecodingDrafter | None, Sequence[int], DecodeSettings], list[TurnBatch]]
"""(drafter, indices of prompts, settings) -> all their turns in order."""


class TurnAnswer(NamedTuple):
    """One turn of one prompt.

    prompt_index: in the task. seconds: its share of the decoding time of its batch.
    """

    prompt_index: int
    turn: int
    prompt: list[int]
    decoded: Decoded
    seconds: float


@dataclass
class Arm:
    """What one arm did.

    turns: in the order of the prompts and batches; the answers of repeats are the same.
    total: time of all batches, of repeats the middle one. by_repeat: decoding seconds of each
    repeat. num_steps: rounds of the loop; those of a batch run together.
    """

    turns: list[TurnAnswer] = field(default_factory=list)
    total: Seconds = field(default_factory=Seconds)
    by_repeat: list[float] = field(default_factory=list)
    num_steps: int = 0

    @property
    def answers(self) -> list[Decoded]:
        return [turn.decoded for turn in self.turns]

    def add(self, repeats: Sequence[Sequence[TurnBatch]]) -> None:
        """Add one batch of prompts, decoded once or several times."""
        self.by_repeat = self.by_repeat or [0.0] * len(repeats)
        for number, batches in enumerate(repeats):
            self.by_repeat[number] += sum(batch.seconds.decode for batch in batches)
        for same in zip(*repeats, strict=True):
            seconds = middle([batch.seconds for batch in same])
            self.total = added(self.total, seconds)
            batch = same[0]
            self.num_steps += max(len(answer.rounds) for answer in batch.answers)
            share = seconds.decode / len(batch.answers)
            rows = zip(batch.indices, batch.prompts, batch.answers, strict=True)
            self.turns += [TurnAnswer(i, batch.turn, ids, a, share) for i, ids, a in rows]


def added(a: Seconds, b: Seconds) -> Seconds:
    """The sums of all parts."""
    return Seconds(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(Seconds)})


def middle(times: Sequence[Seconds]) -> Seconds:
    """The one with the median of decoding time; of an even number the mean of the middle two."""
    ordered = sorted(times, key=lambda seconds: seconds.decode)
    chosen = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return Seconds(
        **{f.name: statistics.fmean(getattr(s, f.name) for s in chosen) for f in fields(Seconds)}
    )


def answering(
    target: Target,
    prompts: Sequence[Prompt],
    template_kwargs: dict[str, object] | None,
    all_turns: bool = True,
    tree: TreeSpec | None = None,
) -> Answer:
    """How prompts are answered: the follow-up turns as well, or the first alone.

    Args:
        tree: what drafters grow in a round; None = a chain. Plain decoding has no use for it.
    """
    asked = [prompt if all_turns else Prompt({**prompt, "turns": []}) for prompt in prompts]

    def answer(
        drafter: DecodingDrafter | None, indices: Sequence[int], settings: DecodeSettings
    ) -> list[TurnBatch]:
        def decode_batch(
            ids: list[list[int]], seeds: Sequence[int]
        ) -> tuple[list[Decoded], Seconds]:
            if drafter is None or tree is None:
                return decode(target, drafter, ids, settings, seeds)
            return decode_tree(target, drafter, ids, settings, tree, seeds)

        batch = [asked[i] for i in indices]
        return decode_turns(
            target, batch, decode_batch, template_kwargs, indices, settings.max_new_tokens
        )

    return answer


def run_arms(
    answer: Answer,
    drafters: Mapping[str, DecodingDrafter],
    num_prompts: int,
    settings: DecodeSettings,
    batch_size: int,
    repeats: int = 1,
    oracle: DecodingDrafter | None = None,
    warm_up: bool = True,
    advance: Callable[[int], None] = unseen,
) -> dict[str, Arm]:
    """Answer prompts 0 .. num_prompts - 1 with every arm, interleaved.

    Args:
        answer: decodes some of the prompts.
        drafters: by name; the baseline is added.
        repeats: timed runs over all batches.
        oracle: add the arm ORACLE, a perfect drafter at this one's cost. It never goes before the
            baseline, whose answers it knows. For temperature 0.
        warm_up: run every arm over the first batch, for some rounds, before the clock counts.
        advance: told 1 after every batch of every arm.
    """
    known: dict[tuple[int, ...], list[int]] = {}
    run = _noting(answer, known)
    members: list[tuple[str, DecodingDrafter | None]] = [(BASELINE, None), *drafters.items()]
    if oracle is not None:
        members.append((ORACLE, Replay(oracle, known)))
    if warm_up and num_prompts:
        few = min(settings.max_new_tokens, 2 * (settings.num_draft + 1) + 1)
        for _, drafter in members:
            first = range(min(batch_size, num_prompts))
            run(drafter, first, replace(settings, max_new_tokens=few))
    starts = range(0, num_prompts, batch_size)
    done: dict[str, list[list[list[TurnBatch]]]] = {
        name: [[] for _ in starts] for name, _ in members
    }
    for repeat in range(repeats):
        for drafter in drafters.values():
            drafter.forget()
        for number, start in enumerate(starts):
            indices = range(start, min(start + batch_size, num_prompts))
            for name, drafter in _order(members, number + repeat):
                done[name][number].append(run(drafter, indices, settings))
                advance(1)
    arms = {name: Arm() for name, _ in members}
    for name, batches in done.items():
        for same in batches:
            arms[name].add(same)
    return arms


def _noting(answer: Answer, known: dict[tuple[int, ...], list[int]]) -> Answer:
    """The same, and the target's own answers are noted in `known`, by prompt."""

    def run(
        drafter: DecodingDrafter | None, indices: Sequence[int], settings: DecodeSettings
    ) -> list[TurnBatch]:
        batches = answer(drafter, indices, settings)
        for batch in batches if drafter is None else []:
            for prompt, decoded in zip(batch.prompts, batch.answers, strict=True):
                known[tuple(prompt)] = decoded.ids
        return batches

    return run


def _order(
    members: list[tuple[str, DecodingDrafter | None]], number: int
) -> list[tuple[str, DecodingDrafter | None]]:
    """The members, another one first each time; the oracle directly behind the baseline."""
    free = [member for member in members if member[0] != ORACLE]
    first = number % len(free)
    order = free[first:] + free[:first]
    known = [member for member in members if member[0] == ORACLE]
    after = [name for name, _ in order].index(BASELINE) + 1
    return order[:after] + known + order[after:]
