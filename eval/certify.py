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

import torch
from typing_extensions import TypedDict

from data.target import Target
from drafters.base import DecodingDrafter
from drafters.lookup import UNTRAINED
from eval.arms import unseen
from eval.broken import FAULTS, Fault
from eval.decode import decode
from eval.lossless import GreedyComparison, ks_distance, pit_p_value, tokens_needed
from eval.measure import decode_settings
from eval.replays import CONTROL, Replays
from eval.rounding import Floor, half_precision
from eval.rounds import DecodeSettings
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
    p_value: float
    caught: bool  # p_value < LEVEL
    distance: float  # of its law to the target's: largest KS distance of the three orders
    tokens_needed: int  # to catch it in 95% of runs, from the distance (eval.lossless)
    at_least: bool  # the distance is within what chance alone gives: tokens_needed is a bound


class Certificate(TypedDict):
    """All findings on one drafter; `line` says them in one line."""

    drafter: str
    passed: bool
    line: str
    greedy_identical: str | None  # "8/8" in float32
    floor: Floor | None
    laws: list[Law]
    pit_p_value: float | None  # the smallest of laws, times their number
    pit_num_tokens: int
    control_p_value: float | None  # of the right rule, replayed as the broken ones are
    power: list[Caught]


def certificate_settings(
    section: EvalSection, draws: bool
) -> list[tuple[DecodeSettings, dict[str, Fault]]]:
    """How tokens are drawn for a certificate, and which faults are replayed there.

    The first setting is the recipe's, at its highest temperature (1 if it has none above 0). Most
    faults show only with drafts that were drawn, two a round and cut by top-p; where the recipe
    has not all of that, a second setting has. `draws`: whether the drafter can draw.
    """
    temperature = max(section.temperatures) or 1.0
    measured = decode_settings(section, temperature)
    measured = replace(measured, sampling=replace(measured.sampling, keep_laws=True))
    if not draws:
        return [(measured, FAULTS)]
    sampling = measured.sampling
    drawn = replace(
        measured,
        num_draft=max(2, measured.num_draft),
        sampling=replace(sampling, draft_sampled=True, top_p=min(0.9, sampling.top_p)),
    )
    chosen = replace(measured, sampling=replace(sampling, draft_sampled=False))
    of_chosen = {"argmax_as_drawn": FAULTS["argmax_as_drawn"]}
    of_drawn = {name: fault for name, fault in FAULTS.items() if name not in of_chosen}
    if measured == drawn:
        return [(drawn, of_drawn), (chosen, of_chosen)]
    if measured == chosen:
        return [(chosen, of_chosen), (drawn, of_drawn)]
    return [(measured, {}), (drawn, of_drawn), (chosen, of_chosen)]


def describe(settings: DecodeSettings) -> str:
    """A setting in words, such as "T=1, top-p 0.9, 2 drafts drawn"."""
    s = settings.sampling
    filters = [f"top-p {s.top_p:g}"] if s.top_p < 1 else []
    filters += [f"top-k {s.top_k}"] if s.top_k else []
    how = "drawn" if s.draft_sampled else "chosen outright"
    return ", ".join([f"T={s.temperature:g}", *filters, f"{settings.num_draft} drafts {how}"])


def draw_tokens(
    target: Target,
    drafter: DecodingDrafter,
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
    batch_size: int,
    num_tokens: int,
    advance: Callable[[int], None] = unseen,
) -> list[list[float]]:
    """Answer the prompts, again and again with other seeds, until there are num_tokens or more.

    Returns:
        The transforms of all emitted tokens (Decoded.pit).
    """
    pit: list[list[float]] = []
    place = 0
    while len(pit) < num_tokens:
        first = place % len(prompts)
        batch = list(prompts[first : first + batch_size])
        rows, _ = decode(target, drafter, batch, settings, range(place, place + len(batch)))
        place += len(batch)
        new = [value for row in rows for value in row.pit]
        pit += new
        advance(min(len(new), num_tokens - (len(pit) - len(new))))
    return pit


def judge(replays: Replays, setting: str, num_tokens: int) -> list[Caught]:
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
    for settings, faults in certificate_settings(section, name not in UNTRAINED):
        replays = Replays(settings.verify, faults, NUM_REPLAYS, section.seed)
        with_replays = replace(settings, verifier=replays) if faults else settings
        pit = draw_tokens(
            target, drafter, prompts, with_replays, section.batch_size, num_tokens, advance
        )
        text = describe(settings)
        laws.append({"setting": text, "num_tokens": len(pit), "p_value": pit_p_value(pit)})
        power += judge(replays, text, num_tokens)
        controls += replays.pooled(CONTROL, 1)
    known = [law["p_value"] for law in laws if law["p_value"] is not None]
    certificate: Certificate = {
        "drafter": name,
        "passed": False,
        "line": "",
        "greedy_identical": greedy and f"{greedy.num_identical}/{greedy.num_prompts}",
        "floor": None,
        "laws": laws,
        "pit_p_value": min(1.0, len(known) * min(known)) if known else None,
        "pit_num_tokens": sum(law["num_tokens"] for law in laws),
        "control_p_value": pit_p_value(controls),
        "power": power,
    }
    if target.dtype != torch.float32 and section.greedy_check_prompts:
        few = list(prompts[: section.greedy_check_prompts])
        certificate["floor"] = half_precision(
            target, drafter, few, decode_settings(section, 0.0), section.batch_size
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
    """
    c = certificate
    greedy, p_value, control, floor = (
        c["greedy_identical"],
        c["pit_p_value"],
        c["control_p_value"],
        c["floor"],
    )
    caught = [fault for fault in c["power"] if fault["caught"]]
    bad = []
    if greedy is not None and len(set(greedy.split("/"))) != 1:
        bad.append("greedy tokens differ from the target's")
    if p_value is None or p_value < LEVEL:
        bad.append("drawn tokens do not follow the target")
    if control is not None and control < LEVEL:
        bad.append("the control was rejected")
    if floor is not None and floor["p_value"] < LEVEL:
        bad.append(f"more divergences in {floor['dtype']} than rounding makes")
    if not caught:
        bad.append("no broken verifier was caught")
    parts = [f"greedy {greedy}" if greedy else "greedy not compared"]
    if p_value is not None:
        parts[0] += f", PIT p={p_value:.2g} over {c['pit_num_tokens']:,} tokens"
    parts.append(f"{len(caught)} of {len(c['power'])} broken verifiers caught")
    for fault in c["power"]:
        if not fault["caught"]:
            about = "at least" if fault["at_least"] else "about"
            parts.append(f"{fault['verifier']} takes {about} {fault['tokens_needed']:,} tokens")
    verdict = "FAIL: " + ", ".join(bad) if bad else "PASS"
    line = f"losslessness certificate: {verdict} ({'; '.join(parts)})"
    return {**c, "passed": not bad, "line": line}
