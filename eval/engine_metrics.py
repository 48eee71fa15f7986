"""What serving engines count, and how their counts become rounds of ours.

vLLM (0.32; config/observability.py, v1/metrics/stats.py, v1/spec_decode/metrics.py): with
`--per-request-spec-decode-metrics` the last message of a stream holds metrics.speculative_decoding;
the whole server's counters are on /metrics as vllm:spec_decode_*. A verification step counts when
something was drafted, and accepted tokens are counted before the answer is cut at its end.

SGLang (sgl-project/sglang, python/sglang/srt/managers/tokenizer_manager.py at 001067f): meta_info
of the last message holds spec_verify_ct and, by version, histograms and totals under several names.
Its spec_accept_length is completion_tokens / spec_verify_ct: the prefill's token counts there.

A counter that is missing is None, never 0 or 1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# SGLang's names of one thing, newest first.
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
POSITION = re.compile(r'position="(\d+)"')
PREFIX = "vllm:spec_decode_"


@dataclass(frozen=True)
class EngineRounds:
    """Verification steps of one request as its engine counts them.

    ordered: in order of time; else only how often each number was accepted is known.
    """

    proposed: list[int]
    accepted: list[int]
    ordered: bool


class OurRounds(NamedTuple):
    """Rounds by our definitions (eval.metrics.PromptRecord). cut: the answer's end was applied."""

    proposed: list[int]
    accepted: list[int]
    ends_inside_draft: bool
    cut: bool


@dataclass(frozen=True)
class ServerCounters:
    """Totals of a vLLM server since it started; those of a run are a difference."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    accepted_by_position: list[int]

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """What was counted after `before`."""
        earlier = before.accepted_by_position + [0] * len(self.accepted_by_position)
        return ServerCounters(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted - before.num_accepted,
            [a - b for a, b in zip(self.accepted_by_position, earlier, strict=False)],
        )

    def rates(self) -> dict[str, Any]:
        """The engine's own figures: null where nothing was drafted."""
        drafts = self.num_drafts
        return {
            "num_drafts": drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted,
            "mean_acceptance_length": 1 + self.num_accepted / drafts if drafts else None,
            "per_position": [a / drafts for a in self.accepted_by_position] if drafts else None,
        }


def vllm_rounds(metrics: object) -> EngineRounds | None:
    """From the `metrics` of a response; None where it says nothing of speculation.

    At the level "summary" only a histogram is there. Which steps drafted fewer tokens than the
    others is then unknown; the shortage is put on those that accepted least.
    """
    found = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    accepted, proposed = found.get("per_step_accepted"), found.get("per_step_drafted")
    if accepted is not None and proposed is not None:
        return EngineRounds(list(proposed), list(accepted), ordered=True)
    histogram, total = found.get("acceptance_histogram"), found.get("num_draft_tokens")
    return None if histogram is None or total is None else _from_histogram(histogram, total)


def sglang_rounds(meta_info: object) -> EngineRounds | None:
    """From the meta_info of a response; None without a histogram of accepted tokens."""
    if not isinstance(meta_info, Mapping):
        return None
    histogram = _first(meta_info, HISTOGRAMS)
    total = _first(meta_info, PROPOSED)
    return None if histogram is None or total is None else _from_histogram(histogram, total)


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _from_histogram(histogram: list[int], num_proposed: int) -> EngineRounds:
    accepted = [j for j, count in enumerate(histogram) for _ in range(count)]
    if not accepted:
        return EngineRounds([], [], ordered=True)
    most = max(-(-num_proposed // len(accepted)), accepted[-1])
    shortage, proposed = most * len(accepted) - num_proposed, []
    for a in accepted:
        missing = min(shortage, most - a)
        proposed.append(most - missing)
        shortage -= missing
    return EngineRounds(proposed, accepted, ordered=len(set(accepted)) == 1)


def in_our_terms(rounds: EngineRounds, num_tokens: int, max_tokens: int) -> OurRounds:
    """Rounds as our loop would have counted them.

    Ours drafts no more than the answer has room for, does not count what lies behind its end, and
    has a round also where nothing was drafted. All that follows from the order of the steps;
    without it the last round is left as it is.

    Args:
        num_tokens: tokens of the answer, the prefill's included.
        max_tokens: the cap it was asked for.
    """
    left = max(num_tokens - 1, 0)
    if not rounds.ordered:
        emitted = sum(rounds.accepted) + len(rounds.accepted)
        idle = [0] * max(left - emitted, 0)
        cut = emitted <= left
        return OurRounds(rounds.proposed + idle, rounds.accepted + idle, False, cut)
    proposed, accepted, inside = [], [], False
    for k, a in zip(rounds.proposed, rounds.accepted, strict=True):
        if not left:
            break
        room = max_tokens - (num_tokens - left) - 1
        kept = min(a + 1, left)
        proposed.append(min(k, room))
        accepted.append(min(a, room, kept))
        inside = accepted[-1] == kept
        left -= kept
    return OurRounds(proposed + [0] * left, accepted + [0] * left, inside and not left, True)


def vllm_counters(text: str) -> ServerCounters | None:
    """From the text of /metrics, all engines of the server together; None without speculation."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None or not match["name"].startswith(PREFIX):
            continue
        name, value = match["name"].removeprefix(PREFIX).removesuffix("_total"), match["value"]
        place = POSITION.search(match["labels"] or "")
        if name == "num_accepted_tokens_per_pos" and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + float(value)
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    if not all(name in totals for name in names):
        return None
    drafts, drafted, accepted = (int(totals[name]) for name in names)
    by_position = [int(positions[i]) for i in sorted(positions)]
    return ServerCounters(drafts, drafted, accepted, by_position)


def sglang_gauges(text: str) -> dict[str, float] | None:
    """Averages that SGLang shows on /metrics (--enable-metrics); None where they are not there.

    They are gauges of the latest interval, so they cannot be taken apart by run.
    """
    wanted = {"sglang:spec_accept_length", "sglang:spec_accept_rate"}
    found = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match and match["name"] in wanted:
            found[match["name"].removeprefix("sglang:")] = float(match["value"])
    return found or None
