"""The certificate: broken verifiers are caught by 10,000 tokens, the right one passes."""

from functools import cache
from typing import Any

import pytest
import torch

from data.embedded import byte_tokenizer
from data.sampling import sample
from data.target import Target
from drafters.lookup import Lookup
from eval import rounds
from eval.broken import RULES, Fault, faults_of
from eval.broken_tree import OF_DRAWN, OF_TOP
from eval.certify import LEVEL, Caught, Certificate, certify, conclude, draw_tokens, num_drawn
from eval.certify_settings import Setting, certificate_settings
from eval.lossless import GreedyComparison, ks_distance, pit_p_value, tokens_needed
from eval.rounding import half_precision, rate_p_value
from eval.rounds import DecodeSettings
from eval.verify import Verdict, verify_token
from recipes.schema import EvalSection
from tests.noisy_pair import NoisyTable, noisy_pair
from tests.scripted import ScriptedTarget
from tests.table_trees import TableEagle, table_pair
from tests.tiny_targets import tiny_model

NUM_TOKENS = 10_000
PROMPTS = [[i % 24] for i in range(160)]
SECTION = EvalSection(
    temperatures=[0.0, 1.0], num_draft_tokens=3, max_new_tokens=64, batch_size=160
)
CHAIN_FAULTS = list(faults_of(RULES["token"]))


def section(**changes: Any) -> EvalSection:
    return SECTION.model_copy(update=changes)


DRAWN = {"draft_sampling": "sampled", "top_p": 0.9}  # one setting has all faults
TREES = {
    "top": section(verification="tree", tree="6/3/3"),
    "with_replacement": section(
        verification="tree", tree="3,2", siblings="with_replacement", **DRAWN
    ),
    "without_replacement": section(
        verification="tree", tree="3,2", siblings="without_replacement", **DRAWN
    ),
}
SECTIONS = {"token": SECTION, "block": section(verification="block"), **TREES}


@cache
def certificate(kind: str = "token") -> Certificate:
    target, drafter = table_pair() if kind in TREES else noisy_pair()
    greedy = GreedyComparison(8, 8, [])
    return certify(target, "drafter", drafter, PROMPTS, SECTIONS[kind], greedy, NUM_TOKENS)


def setting_of(fault: str, kind: str = "token") -> Setting:
    return next(s for s in certificate_settings(SECTIONS[kind], True) if fault in s.faults)


def in_the_loop(fault: Fault[Any], rule: Any) -> Any:
    """Right in rounds where it does not apply (no guess, say)."""
    return lambda x: fault.verify(x) if bool(x.judged_B.any()) and fault.applies(x) else rule(x)


def test_a_right_loop_passes_and_all_faults_are_caught() -> None:
    found = certificate()
    assert found["passed"]
    assert found["pit_num_tokens"] == 2 * 160 * 64
    assert found["line"].endswith("20,480 tokens; 6 of 6 broken verifiers caught)")
    start = "losslessness certificate (chain, token verification): PASS (greedy 8/8, PIT p="
    assert found["line"].startswith(start)
    assert not found["certain"]
    assert [law["setting"] for law in found["laws"]] == [
        "T=1, 3 drafts chosen outright",
        "T=1, top-p 0.9, 3 drafts drawn",
    ]
    assert found["control_p_value"] is not None and found["control_p_value"] > LEVEL


IN_LOOP = [
    *[("token", name) for name in CHAIN_FAULTS],
    ("block", "early_bonus"),
    ("top", "siblings_as_drawn"),
    ("without_replacement", "wrong_branch"),
]


@pytest.mark.parametrize(("kind", "name"), IN_LOOP)
def test_fault_in_the_loop_is_rejected_and_its_replay_is_like_it(kind: str, name: str) -> None:
    target, drafter = table_pair() if kind in TREES else noisy_pair()
    setting = setting_of(name, kind)
    broken = in_the_loop(setting.faults[name], setting.rule)
    pit = draw_tokens(target, drafter, PROMPTS, setting, broken, 160, NUM_TOKENS)[:NUM_TOKENS]
    p_value, replayed = (
        pit_p_value(pit),
        next(fault for fault in certificate(kind)["power"] if fault["verifier"] == name),
    )
    assert p_value is not None and p_value < LEVEL
    assert replayed["p_value"] < LEVEL
    assert 9_000 < replayed["num_tokens"] <= NUM_TOKENS
    distance = max(ks_distance(column) for column in zip(*pit, strict=True))
    assert distance == pytest.approx(replayed["distance"], abs=0.02)  # chance: about 0.01 each
    assert replayed["tokens_needed"] < NUM_TOKENS


@pytest.mark.parametrize("kind", ["block", *TREES])
def test_block_and_trees_pass_and_their_faults_are_caught(kind: str) -> None:
    found = certificate(kind)
    assert found["passed"], found["line"]
    faults = {"block": CHAIN_FAULTS, "top": OF_TOP}.get(kind, OF_DRAWN)
    assert {fault["verifier"] for fault in found["power"]} == set(faults)
    missed = {fault["verifier"] for fault in found["power"] if not fault["caught"]}
    small = "other_replacement" if faults is OF_DRAWN else ""
    assert missed <= {small}, found["line"]
    for fault in found["power"]:
        assert fault["num_other"] > 0
        assert (fault["tokens_needed"] > 10_000) >= (fault["verifier"] in missed)
    words = {
        "block": "chain, block verification",
        "top": "tree 6/3/3, siblings chosen outright",
        "with_replacement": "tree 3,2, siblings drawn with replacement",
        "without_replacement": "tree 3,2, siblings drawn without replacement",
    }
    assert f"losslessness certificate ({words[kind]}): PASS (greedy 8/8" in found["line"]


def same_pair(table_VV: torch.Tensor, tree: bool) -> tuple[ScriptedTarget, Any]:
    """q = p, bit by bit."""
    return ScriptedTarget(table_VV, []), (TableEagle if tree else NoisyTable)(table_VV)


@pytest.mark.parametrize("kind", ["token", "block", "without_replacement"])
def test_a_drafter_equal_to_its_target_passes_and_the_line_says_why(kind: str) -> None:
    """One law at every position: no fault can do anything wrong, so none can be caught."""
    row_V = torch.randn(24, generator=torch.Generator().manual_seed(1))
    target, drafter = same_pair(row_V.expand(24, 24).contiguous(), kind in TREES)
    drawn = SECTIONS[kind].model_copy(update=DRAWN)
    found = certify(target, "drafter", drafter, PROMPTS[:32], drawn, None, 1500)
    by_name = {fault["verifier"]: fault for fault in found["power"]}
    by_name.pop("argmax_as_drawn", None)  # of outright drafts, which can be rejected
    assert {name: fault["num_other"] for name, fault in by_name.items()} == dict.fromkeys(
        by_name, 0
    )
    assert found["passed"], found["line"]
    assert "these emit what the right rule does: replacement_from_p, " in found["line"]
    if kind == "without_replacement":
        assert found["certain"]
        assert (
            "agree at every position, so nothing can be rejected; nothing to catch" in found["line"]
        )


@pytest.mark.parametrize("kind", ["token", "top"])
def test_a_target_without_a_choice_passes(kind: str) -> None:
    """All of p on one token: whatever a verifier does, nothing else can be emitted."""
    table_VV = torch.full((24, 24), -1e9).fill_diagonal_(0.0)
    target, drafter = same_pair(table_VV, kind in TREES)
    found = certify(target, "drafter", drafter, PROMPTS[:32], SECTIONS[kind], None, 600)
    assert found["passed"], found["line"]
    assert found["certain"]
    assert "; nothing to catch; in all of " in found["line"]


def test_a_drafter_equal_to_its_target_hides_no_fault_that_does_harm() -> None:
    """Laws that differ from position to position: two faults are ones even with q = p."""
    table_VV = torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    target, drafter = same_pair(table_VV, tree=False)
    found = certify(target, "drafter", drafter, PROMPTS, SECTION, None, NUM_TOKENS)
    caught = {fault["verifier"] for fault in found["power"] if fault["caught"]}
    assert caught == {"previous_q", "early_bonus", "argmax_as_drawn"}
    assert "3 of 3 broken verifiers caught; in all of " in found["line"]
    assert found["line"].endswith(
        "right rule does: replacement_from_p, reused_uniform, unfiltered_q)"
    )


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
        return [(str(s), list(s.faults)) for s in certificate_settings(section(**changes), True)]

    most = [name for name in CHAIN_FAULTS if name != "argmax_as_drawn"]
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
    others = texts(min_p=0.3, repetition_penalty=1.5, top_k=7)
    assert (
        others[0][0] == "T=1, top-k 7, min-p 0.3, repetition penalty 1.5, 3 drafts chosen outright"
    )
    assert texts(verification="block", num_draft_tokens=2)[1] == (
        "T=1, top-p 0.9, 2 drafts drawn, block verification",
        most,
    )
    drawn = {"draft_sampling": "sampled", "siblings": "without_replacement"}
    assert texts(verification="tree", tree="9/3/3") == [
        ("T=1, tree 9/3/3, siblings chosen outright", list(OF_TOP))
    ]
    assert texts(verification="tree", tree="3,2", **drawn) == [
        ("T=1, tree 3,2, siblings drawn without replacement", []),
        ("T=1, top-p 0.9, tree 3,2, siblings drawn without replacement", list(OF_DRAWN)),
    ]
    assert len(texts(verification="tree", tree="3,2", top_p=0.7, **drawn)) == 1


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
        "losslessness certificate (chain, token verification): PASS (greedy 8/8, PIT p=0.41 over "
        "10,240 tokens; 1 of 3 broken verifiers caught; early_bonus takes about 42,000 tokens; "
        "previous_q takes at least 90,000 tokens)",
    )
    assert line(power=[small])[1].count("FAIL: no broken verifier was caught (") == 1
    alike = fault(verifier="unfiltered_q", caught=False, num_other=0, num_rounds=70)
    assert line(power=[small, alike])[1].count("FAIL: no broken verifier was caught (") == 1
    assert "in all of 70 rounds these emit what the right rule does" in line(power=[alike])[1]
    assert line(power=[alike])[0]
    assert not line(power=[])[0]  # nothing was drafted, so nothing was judged
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
