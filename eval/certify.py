"""The losslessness certificate of one drafter: does the loop emit what the target would?

Three findings, each with what it could have seen:
    greedy: tokens equal the target's own in float32. In half precision they need not, because a
        pass over K + 1 tokens rounds otherwise than a pass over one; the floor is how often the
        target disagrees with itself that way, and the drafter's rate is tested against it.
    law: Kolmogorov-Smirnov tests on the transforms of all sampled tokens (eval.lossless).
    power: the same test on tokens of verifiers that are broken on purpose (eval.broken).

The broken verifiers are replayed beside the right loop, see eval.replays.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import NotRequired, TypedDict

from data.target import Target
from drafters.base import DecodingDrafter
from drafters.lookup import UNTRAINED
from eval.arms import unseen
from eval.certify_settings import (
    ChainSetting,
    Setting,
    certificate_settings,
    certified,
)
from eval.decode import decode
from eval.decode_tree import decode_tree
from eval.lossless import GreedyComparison, ks_distance, pit_p_value, tokens_needed
from eval.measure import decode_settings, tree_of
from eval.record import Identity
from eval.replays import CONTROL, Replays
from eval.rounding import Floor, half_precision
from recipes.schema import EvalSection

LEVEL = 1e-3  # a right loop fails at most this often, a broken one must be below it
NUM_TOKENS = 10_000
NUM_REPLAYS = 2


class Law(TypedDict):
    """Tokens that the loop drew in one setting; p_value: that they follow the target."""

    setting: str
    num_tokens: int
    p_value: float | None


class Caught(TypedDict):
    """What became of one broken verifier."""

    verifier: str
    what: str
    setting: str
    num_tokens: int
    num_rounds: int  # that it judged, over all replays
    num_other: int  # of these, it emitted other tokens than the right rule with the same numbers
    p_value: float
    caught: bool  # p_value < LEVEL
    distance: float  # of its law to the target's: largest KS distance of the three orders
    tokens_needed: int  # to catch it in 95% of runs, from the distance (eval.lossless)
    at_least: bool  # the distance is within what chance alone gives: tokens_needed is a bound


class Certificate(TypedDict):
    """All findings on one drafter; `line` says them in one line."""

    drafter: str
    identity: NotRequired[Identity]  # of the target, the weights and the code
    certified: str  # what it is of, in words
    verification: str
    tree: str | None
    siblings: str | None
    passed: bool
    line: str
    greedy_identical: str | None  # "8/8" in float32
    floor: Floor | None
    laws: list[Law]
    pit_p_value: float | None  # the smallest of laws, times their number
    pit_num_tokens: int
    control_p_value: float | None  # of the right rule, replayed as the broken ones are
    certain: bool  # drafter and target agreed at every position: nothing could be rejected
    power: list[Caught]


def draw_tokens(
    target: Target,
    drafter: DecodingDrafter,
    prompts: Sequence[list[int]],
    setting: Setting,
    verify: Callable[[Any], Any],
    batch_size: int,
    num_tokens: int,
    advance: Callable[[int], None] = unseen,
) -> list[list[float]]:
    """Answer the prompts, again and again with other seeds, until there are num_tokens or more.

    Args:
        verify: judges every round.

    Returns:
        The transforms of all emitted tokens (Decoded.pit).
    """
    pit: list[list[float]] = []
    place = 0
    while len(pit) < num_tokens:
        first = place % len(prompts)
        batch = list(prompts[first : first + batch_size])
        seeds = range(place, place + len(batch))
        if isinstance(setting, ChainSetting):
            settings = replace(setting.settings, verifier=verify)
            rows, _ = decode(target, drafter, batch, settings, seeds)
        else:
            rows, _ = decode_tree(
                target, drafter, batch, setting.settings, setting.spec, seeds, verify=verify
            )
        place += len(batch)
        new = [value for row in rows for value in row.pit]
        pit += new
        advance(min(len(new), num_tokens - (len(pit) - len(new))))
    return pit


def judge(replays: Replays[Any], setting: str, num_tokens: int) -> list[Caught]:
    """What the test said about num_tokens of each broken verifier that was replayed."""
    found: list[Caught] = []
    for name, rule in replays.rules.items():
        first = replays.pooled(name, 1)[:num_tokens]
        p_value = pit_p_value(first)
        if name == CONTROL or p_value is None:
            continue
        pooled = replays.pooled(name)
        distance = max(ks_distance(column) for column in zip(*pooled, strict=True))
        found.append(
            {
                "verifier": name,
                "what": rule.what,
                "setting": setting,
                "num_tokens": len(first),
                "num_rounds": replays.num_rounds[name],
                "num_other": replays.num_other[name],
                "p_value": p_value,
                "caught": p_value < LEVEL,
                "distance": distance,
                "tokens_needed": tokens_needed(distance, LEVEL),
                "at_least": (pit_p_value(pooled) or 0.0) > 0.05,
            }
        )
    return found


def certify(
    target: Target,
    name: str,
    drafter: DecodingDrafter,
    prompts: Sequence[list[int]],
    section: EvalSection,
    greedy: GreedyComparison | None,
    num_tokens: int = NUM_TOKENS,
    advance: Callable[[int], None] = unseen,
) -> Certificate:
    """Test one drafter's decoding and what the test can see.

    Args:
        name: of the drafter; those without weights never draw their drafts.
        prompts: token ids.
        greedy: its greedy tokens against the target's in float32; None = not compared.
        num_tokens: drawn in each setting.
        advance: told how many more tokens are drawn; num_drawn says of how many.
    """
    laws: list[Law] = []
    power: list[Caught] = []
    controls: list[list[float]] = []
    certain = True
    for setting in certificate_settings(section, name not in UNTRAINED):
        replays = setting.replays(NUM_REPLAYS, section.seed)
        pit = draw_tokens(
            target, drafter, prompts, setting, replays, section.batch_size, num_tokens, advance
        )
        text = str(setting)
        laws.append({"setting": text, "num_tokens": len(pit), "p_value": pit_p_value(pit)})
        power += judge(replays, text, num_tokens)
        certain &= replays.certain
        if setting.faults:
            controls += replays.pooled(CONTROL, 1)
    known = [law["p_value"] for law in laws if law["p_value"] is not None]
    certificate: Certificate = {
        "drafter": name,
        "certified": certified(section),
        "verification": section.verification,
        "tree": section.tree if section.verification == "tree" else None,
        "siblings": section.siblings if section.verification == "tree" else None,
        "passed": False,
        "line": "",
        "greedy_identical": greedy and f"{greedy.num_identical}/{greedy.num_prompts}",
        "floor": None,
        "laws": laws,
        "pit_p_value": min(1.0, len(known) * min(known)) if known else None,
        "pit_num_tokens": sum(law["num_tokens"] for law in laws),
        "control_p_value": pit_p_value(controls),
        "certain": certain,
        "power": power,
    }
    if target.dtype != torch.float32 and section.greedy_check_prompts:
        few = list(prompts[: section.greedy_check_prompts])
        certificate["floor"] = half_precision(
            target,
            drafter,
            few,
            decode_settings(section, 0.0),
            section.batch_size,
            tree_of(section),
        )
    return conclude(certificate)


def num_drawn(section: EvalSection, name: str, num_tokens: int = NUM_TOKENS) -> int:
    """How many tokens `certify` tells `advance`."""
    return num_tokens * len(certificate_settings(section, name not in UNTRAINED))


def conclude(certificate: Certificate) -> Certificate:
    """Set `passed` and `line`.

    It fails if greedy tokens differ in float32, if the drawn tokens or the control are rejected,
    if the drafter leaves the target's path more often than rounding does, or if no broken
    verifier is caught (a test that sees nothing certifies nothing). A fault too small for this
    many tokens fails nothing; the line says how many it takes.

    One kind of fault can be caught by no number of tokens: where the broken verifier emits what
    the right one does, in every round and with the same random numbers. On a pair with q = p,
    say, nothing is rejected, so it does not matter what comes after a rejection. If all of them
    are of that kind, there was nothing to catch, and that fails nothing either; the line says so.
    """
    c = certificate
    greedy, p_value, control, floor = (
        c["greedy_identical"],
        c["pit_p_value"],
        c["control_p_value"],
        c["floor"],
    )
    caught = [fault for fault in c["power"] if fault["caught"]]
    nothing_to_catch = bool(c["power"]) and all(changes_nothing(f) for f in c["power"])
    bad = []
    if greedy is not None and len(set(greedy.split("/"))) != 1:
        bad.append("greedy tokens differ from the target's")
    if p_value is None or p_value < LEVEL:
        bad.append("drawn tokens do not follow the target")
    if control is not None and control < LEVEL:
        bad.append("the control was rejected")
    if floor is not None and floor["p_value"] < LEVEL:
        bad.append(f"more divergences in {floor['dtype']} than rounding makes")
    if not caught and not nothing_to_catch:
        bad.append("no broken verifier was caught")
    parts = [f"greedy {greedy}" if greedy else "greedy not compared"]
    if p_value is not None:
        parts[0] += f", PIT p={p_value:.2g} over {c['pit_num_tokens']:,} tokens"
    if c["certain"] and c["power"]:
        parts.append("drafter and target agree at every position, so nothing can be rejected")
    parts += ["nothing to catch"] if nothing_to_catch else []
    parts += power_in_words(c["power"])
    verdict = "FAIL: " + ", ".join(bad) if bad else "PASS"
    line = f"losslessness certificate ({c['certified']}): {verdict} ({'; '.join(parts)})"
    return {**c, "passed": not bad, "line": line}


def changes_nothing(fault: Caught) -> bool:
    """Whether it emitted what the right rule did in every round, with the same random numbers."""
    return not fault["num_other"] and not fault["caught"]


def power_in_words(power: list[Caught]) -> list[str]:
    """How many were caught, and what is to be said of the others."""
    alike = [fault for fault in power if changes_nothing(fault)]
    parts = []
    if len(alike) < len(power) or not power:
        num_caught = sum(fault["caught"] for fault in power)
        parts.append(f"{num_caught} of {len(power) - len(alike)} broken verifiers caught")
    for fault in power:
        if not fault["caught"] and fault not in alike:
            about = "at least" if fault["at_least"] else "about"
            parts.append(f"{fault['verifier']} takes {about} {fault['tokens_needed']:,} tokens")
    if alike:
        names = ", ".join(fault["verifier"] for fault in alike)
        rounds = min(fault["num_rounds"] for fault in alike)
        parts.append(f"in all of {rounds:,} rounds these emit what the right rule does: {names}")
    return parts
