"""Rounds of the first answers as token texts, for the report's round viewer."""

from collections.abc import Sequence

from typing_extensions import TypedDict

from data.prompt_rows import Prompt
from data.target import Target
from eval.arms import TurnAnswer

NUM_SAMPLES = 3  # answers a task whose rounds are kept


class SampleRound(TypedDict):
    """Token texts of one round; next is "" where it ended inside the draft.

    p, q: of the drafted tokens that are shown, accepted ones first. next_p: the target's
    probability of `next`, null where there is none.
    """

    accepted: list[str]
    rejected: list[str]
    next: str
    p: list[float]
    q: list[float]
    next_p: float | None


class Sample(TypedDict):
    """One answer, for the report; its first round is the token that the prefill gave."""

    prompt: str
    turn: int
    rounds: list[SampleRound]


def make_samples(
    target: Target, prompts: Sequence[Prompt], turns: Sequence[TurnAnswer]
) -> list[Sample]:
    """Rounds of the first answers as token texts."""
    samples: list[Sample] = []
    for turn in turns[:NUM_SAMPLES]:
        prompt = prompts[turn.prompt_index]
        asked = [str(prompt["messages"][-1]["content"]), *prompt.get("turns", [])][turn.turn]
        samples.append({"prompt": asked, "turn": turn.turn, "rounds": _rounds(target, turn)})
    return samples


def _rounds(target: Target, turn: TurnAnswer) -> list[SampleRound]:
    texts = [_text(target, token) for token in turn.decoded.ids]
    first = SampleRound(accepted=[], rejected=[], next=texts[0], p=[], q=[], next_p=None)
    rounds, place = [first], 1
    for r in turn.decoded.rounds:
        kept = texts[place : place + r.emitted]
        place += r.emitted
        stopped = r.emitted == r.accepted  # what was drafted behind a stop is not shown
        shown = r.accepted if stopped else r.proposed
        rounds.append(
            {
                "accepted": kept[: r.accepted],
                "rejected": [_text(target, token) for token in r.drafted_ids[r.accepted : shown]],
                "next": "" if stopped else kept[-1],
                "p": [_short(p) for p in r.p[:shown]],
                "q": [_short(q) for q in r.q[:shown]],
                "next_p": None if stopped or r.next_p is None else _short(r.next_p),
            }
        )
    return rounds


def _text(target: Target, token: int) -> str:
    return str(target.tokenizer.decode([token]))


def _short(value: float) -> float:
    """Four digits: a record is read by people, too."""
    return float(f"{value:.4g}")
