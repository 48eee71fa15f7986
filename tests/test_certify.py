"""The certificate: broken verifiers are caught by 10,000 tokens, the right one passes."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from data.embedded import byte_tokenizer
from data.sampling import sample
from data.target import Target
from drafters.lookup import Lookup
from eval import rounds
from eval.broken import FAULTS
from eval.certify import (
    LEVEL,
    Caught,
    Certificate,
    certificate_settings,
    certify,
    conclude,
    describe,
    draw_tokens,
    num_drawn,
)
from eval.lossless import GreedyComparison, ks_distance, pit_p_value, tokens_needed
from eval.rounding import half_precision, rate_p_value
from eval.rounds import DecodeSettings
from eval.verify import Verdict, verify_token
from recipes.schema import EvalSection
from tests.noisy_pair import noisy_pair
from tests.tiny_targets import tiny_model

NUM_TOKENS = 10_000
PROMPTS = [[i % 24] for i in range(160)]
SECTION = EvalSection(
    temperatures=[0.0, 1.0], num_draft_tokens=3, max_new_tokens=64, batch_size=160
)
SETTINGS = {name: s for s, faults in certificate_settings(SECTION, True) for name in faults}


@cache
def certificate() -> Certificate:
    target, drafter = noisy_pair()
    greedy = GreedyComparison(8, 8, [])
    return certify(target, "drafter", drafter, PROMPTS, SECTION, greedy, NUM_TOKENS)


def caught() -> dict[str, Caught]:
    return {fault["verifier"]: fault for fault in certificate()["power"]}


def test_a_right_loop_passes_and_all_faults_are_caught() -> None:
    found = certificate()
    assert found["passed"]
    assert found["pit_num_tokens"] == 2 * 160 * 64
    assert found["line"].endswith("20,480 tokens; 6 of 6 broken verifiers caught)")
    assert found["line"].startswith("losslessness certificate: PASS (greedy 8/8, PIT p=")
    assert [law["setting"] for law in found["laws"]] == [
        "T=1, 3 drafts chosen outright",
        "T=1, top-p 0.9, 3 drafts drawn",
    ]
    assert found["control_p_value"] is not None and found["control_p_value"] > LEVEL


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_the_loop_is_rejected_and_its_replay_is_like_it(name: str) -> None:
    target, drafter = noisy_pair()
    broken = replace(SETTINGS[name], verifier=FAULTS[name].judge)
    pit = draw_tokens(target, drafter, PROMPTS, broken, 160, NUM_TOKENS)[:NUM_TOKENS]
    p_value, replayed = pit_p_value(pit), caught()[name]
    assert p_value is not None and p_value < LEVEL
    assert replayed["p_value"] < LEVEL
    assert 9_000 < replayed["num_tokens"] <= NUM_TOKENS
    distance = max(ks_distance(column) for column in zip(*pit, strict=True))
    assert distance == pytest.approx(replayed["distance"], abs=0.02)  # chance: about 0.01 each
    assert replayed["tokens_needed"] < NUM_TOKENS


def test_a_broken_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def naive(p_BSV, tokens_BK, num_B, q_BKV, accept_BK, final_B) -> Verdict:
        num_accepted_B, _ = verify_token(p_BSV, tokens_BK, num_B, q_BKV, accept_BK, final_B)
        rows_B = torch.arange(len(num_B))
        return Verdict(num_accepted_B, sample(p_BSV[rows_B, num_accepted_B], final_B))

    monkeypatch.setitem(rounds._RULES, "token", naive)
    target, drafter = noisy_pair()
    told: list[int] = []
    found = certify(target, "drafter", drafter, PROMPTS[:32], SECTION, None, 2000, told.append)
    assert not found["passed"]
    assert "FAIL: drawn tokens do not follow the target (greedy not compared" in found["line"]
    assert sum(told) == num_drawn(SECTION, "drafter", 2000) == 4000


def test_lookup_has_the_faults_of_drafts_chosen_outright() -> None:
    target, _ = noisy_pair()
    found = certify(target, "lookup", Lookup(1, 2), PROMPTS[:32], SECTION, None, 1000)
    assert [law["setting"] for law in found["laws"]] == ["T=1, 3 drafts chosen outright"]
    assert [f["verifier"] for f in found["power"]] == ["replacement_from_p", "early_bonus"]


def test_settings_have_one_in_which_each_fault_is_one() -> None:
    def texts(**changes: object) -> list[tuple[str, list[str]]]:
        section = SECTION.model_copy(update=changes)
        return [(describe(s), list(f)) for s, f in certificate_settings(section, True)]

    most = [name for name in FAULTS if name != "argmax_as_drawn"]
    assert texts(num_draft_tokens=1) == [
        ("T=1, 1 drafts chosen outright", ["argmax_as_drawn"]),
        ("T=1, top-p 0.9, 2 drafts drawn", most),
    ]
    assert texts(draft_sampling="sampled", top_p=0.8, temperatures=[0.0]) == [
        ("T=1, top-p 0.8, 3 drafts drawn", most),
        ("T=1, top-p 0.8, 3 drafts chosen outright", ["argmax_as_drawn"]),
    ]
    assert [text for text, _ in texts(draft_sampling="sampled", temperatures=[0.5])] == [
        "T=0.5, 3 drafts drawn",
        "T=0.5, top-p 0.9, 3 drafts drawn",
        "T=0.5, 3 drafts chosen outright",
    ]


def test_tokens_needed_by_simulation() -> None:
    """F(x) = x + 4 D x (1 - x) is D from uniform, at 1/2. Rejected in 95% of runs, or more."""
    D = 0.1
    n = tokens_needed(D)
    assert n == 846  # ((2.0856 + 0.8225) / 0.1)^2
    torch.manual_seed(0)

    def share_rejected(num_tokens: int) -> float:
        uniforms = torch.rand(100, num_tokens, dtype=torch.float64)
        b = 1 + 4 * D
        drawn = (b - (b * b - 16 * D * uniforms).sqrt()) / (8 * D)  # inverse of F
        other = torch.rand(2, 100, num_tokens, dtype=torch.float64)  # orders that show nothing
        runs = torch.stack([drawn, *other], -1).tolist()
        p_values = [pit_p_value(run) for run in runs]
        return sum(p is not None and p < 1e-3 for p in p_values) / len(runs)

    assert share_rejected(n) >= 0.95
    assert share_rejected(n // 4) < 0.5


def fault(**changes: object) -> Caught:
    found = {**certificate()["power"][0], **changes}
    return found  # type: ignore[return-value]


def line(**changes: object) -> tuple[bool, str]:
    found = conclude({**certificate(), **changes})  # type: ignore[typeddict-item]
    return found["passed"], found["line"]


def test_the_line_names_what_is_wrong_and_what_is_too_small() -> None:
    small = fault(verifier="early_bonus", caught=False, tokens_needed=42_000, at_least=False)
    unseen = fault(verifier="previous_q", caught=False, tokens_needed=90_000, at_least=True)
    assert line(power=[fault(), small, unseen], pit_p_value=0.41, pit_num_tokens=10_240) == (
        True,
        "losslessness certificate: PASS (greedy 8/8, PIT p=0.41 over 10,240 tokens; 1 of 3 broken "
        "verifiers caught; early_bonus takes about 42,000 tokens; previous_q takes at least "
        "90,000 tokens)",
    )
    assert line(power=[small])[1].count("FAIL: no broken verifier was caught (") == 1
    assert "FAIL: greedy tokens differ from the target's" in line(greedy_identical="7/8")[1]
    assert "FAIL: the control was rejected" in line(control_p_value=1e-5)[1]
    assert not line(pit_p_value=None)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_judged_against_the_target_itself(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3", vocab_size=12, eos_token_id=11, pad_token_id=0).to(dtype)
    target = Target(model, byte_tokenizer(), "tiny", "none")
    prompts = [[i % 11, (3 * i) % 11] for i in range(24)]
    settings = DecodeSettings(max_new_tokens=16, num_draft=4)
    found = half_precision(target, Lookup(1, 2), prompts, settings, batch_size=12)
    assert found["num_prompts"] == 24
    assert found["p_value"] > LEVEL
    if dtype == torch.float32:
        assert (found["target_diverged"], found["drafter_diverged"]) == (0, 0)
        assert found["target_tokens"] == found["drafter_tokens"]


def test_rate_p_value_by_hand() -> None:
    assert rate_p_value(1, 10, 0, 10) == pytest.approx(0.5)
    assert rate_p_value(3, 10, 0, 30) == pytest.approx(0.25**3)
    assert rate_p_value(0, 10, 5, 10) == pytest.approx(1.0)
