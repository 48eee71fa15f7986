"""Every drafter in a real vLLM: it loads, the text is the target's, drafts and counters are ours.

Both sides decode the same prompts greedily in float32. Ours runs here; the engine's in the
interpreter of VLLM_ENV (tests/vllm/engine_half.py), which has its own transformers.

What is compared, exactly:

- Drafts, round by round. The engine drafts once more when an answer is already complete; that
  draft is compared as well.
- Counters. Near the end of an answer our loop drafts no more than there is room for and counts
  only what it keeps; the engine always drafts K and counts before it cuts. So our answers are
  decoded K + 1 tokens longer, and the rounds that begin before the engine's last token are counted:
  in those our loop has room for K, and keeps what it accepts.
- A round in which nothing was drafted (n-gram lookup without a hit) is none for the engine.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data.target import Target
from eval.decode import Round
from recipes.drafter_sections import (
    DFlashSection,
    Eagle1Section,
    Eagle3Section,
    MedusaSection,
    PardSection,
    PEagleSection,
    SmallLMSection,
)
from tests.tiny_exports import edit_config, edit_tensors
from tests.vllm.ours_half import (
    MAX_MODEL_LEN,
    MAX_TOKENS,
    NUM_DRAFT,
    TARGETS,
    Ours,
    decode_all,
    make_prompts,
    make_target,
    ngram,
    trained,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
NORMS = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
FOUR_AUX = {"aux_layers": [0, 3, 6, 8]}  # the embeddings and the last layer before the final norm

# Blocks of as many tokens as the engine drafts, and the last committed one.
BLOCK: dict[str, Any] = {
    "num_layers": 2,
    "num_aux_layers": 3,
    "block_size": NUM_DRAFT + 1,
    "mask_token_id": 5,
}

# The table. A method whose drafter, section and export form are in drafters.methods is a line here.
CASES = {
    "eagle3": trained(Eagle3Section()),
    "eagle3_speculators": trained(Eagle3Section(), "speculators"),
    "eagle3_whole_vocab": trained(Eagle3Section(draft_vocab_size=None)),
    "eagle3_norms": trained(Eagle3Section(**NORMS)),
    "eagle3_norms_speculators": trained(Eagle3Section(**NORMS), "speculators"),
    "eagle3_norm_before_fc": trained(Eagle3Section(norm_before_fc=True)),
    "eagle3_norm_before_fc_speculators": trained(Eagle3Section(norm_before_fc=True), "speculators"),
    "eagle3_2_layers": trained(Eagle3Section(num_layers=2)),
    "eagle3_4_aux": trained(Eagle3Section(**FOUR_AUX)),
    "eagle3_4_aux_speculators": trained(Eagle3Section(**FOUR_AUX), "speculators"),
    "eagle3_qwen3": trained(Eagle3Section(), target="qwen3"),
    "p_eagle": trained(PEagleSection(num_layers=2)),
    "p_eagle_speculators": trained(PEagleSection(num_layers=2), "speculators"),
    "dflash": trained(DFlashSection(**BLOCK, draft_vocab_size=32)),
    "dflash_speculators": trained(DFlashSection(**BLOCK, draft_vocab_size=32), "speculators"),
    "dflash_whole_vocab_causal": trained(DFlashSection(**BLOCK, causal=True), target="qwen3"),
    "eagle1": trained(Eagle1Section()),
    "medusa": trained(MedusaSection(num_heads=NUM_DRAFT)),
    "medusa_own_heads": trained(MedusaSection(num_heads=NUM_DRAFT, shared_head=False)),
    "small_lm": trained(SmallLMSection(num_layers=2)),
    "small_lm_qwen3": trained(SmallLMSection(num_layers=2), target="qwen3"),
    "pard": trained(PardSection(num_layers=2, mask_token_id=300)),
    "pard_qwen3": trained(PardSection(num_layers=2, mask_token_id=300), target="qwen3"),
    "ngram": ngram(),
}


def shift_aux_layers(folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        shifted = [k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]]
        config["eagle_aux_hidden_state_layer_ids"] = shifted
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = shifted

    edit_config(folder, change)


def zero_d2t(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors["d2t"].zero_())


def flip_norm_before_residual(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(norm_before_residual=True))


# Planted in the export of "eagle3" after our side has run: the engine must draft something else.
FAULTS: dict[str, Callable[[Path], None]] = {
    "aux_layers_off_by_one": shift_aux_layers,
    "d2t_zeroed": zero_d2t,
    "norm_before_residual_flipped": flip_norm_before_residual,
}


class Both(NamedTuple):
    ours: dict[str, Ours]
    engine: dict[str, dict[str, Any]]


def run_ours(folder: Path, names: list[str]) -> dict[str, Ours]:
    targets: dict[str, Target] = {}
    plain: dict[str, list[list[int]]] = {}
    for kind in TARGETS:
        targets[kind] = make_target(kind, folder / kind)
        plain[kind] = [a.ids for a in decode_all(targets[kind], None, MAX_TOKENS)]
    ours = {}
    for name in names:
        case = CASES[name]
        target = targets[case.target]
        drafter = case.make(target)
        if case.save is not None:
            case.save(drafter, folder / name, target)
        with torch.inference_mode():
            answers = decode_all(target, drafter, MAX_TOKENS + case.num_draft + 1, case.num_draft)
        ours[name] = Ours(case, folder / name, answers, plain[case.target])
    return ours


def job(folder: Path, target: str, config: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "model": str(folder / target),
        "speculative_config": config,
        "prompts": make_prompts(),
        "max_tokens": MAX_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
    }


def engine_config(ours: Ours, folder: Path) -> dict[str, Any]:
    config = {**ours.case.config, "num_speculative_tokens": ours.case.num_draft}
    return config if ours.case.save is None else {**config, "model": str(folder)}


def run_engine(jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    python = Path(os.environ["VLLM_ENV"]) / "bin" / "python"
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [python, HERE / "engine_half.py", folder / "jobs.json", folder / "results.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Both sides, of the cases and faults that were selected (pytest -k)."""
    selected = " ".join(item.nodeid for item in request.session.items)
    faults = [fault for fault in FAULTS if f"[{fault}]" in selected]
    names = [n for n in CASES if f"[{n}]" in selected or (n == "eagle3" and faults)]
    folder = tmp_path_factory.mktemp("vllm")
    ours = run_ours(folder, names)
    jobs = {f"plain_{kind}": job(folder, kind, None) for kind in TARGETS}
    for name, side in ours.items():
        jobs[name] = job(folder, side.case.target, engine_config(side, side.folder))
    for fault in faults:
        side, damaged = ours["eagle3"], folder / fault
        shutil.copytree(side.folder, damaged)
        FAULTS[fault](damaged)
        jobs[fault] = job(folder, side.case.target, engine_config(side, damaged))
    return Both(ours, run_engine(jobs, folder))


def result_of(both: Both, name: str) -> dict[str, Any]:
    result = both.engine[name]
    assert "error" not in result, result["error"][-4000:]
    return result


def counted_rounds(ours: Ours) -> list[list[Round]]:
    """Of each prompt the rounds that begin before the engine's cap (see the module's text)."""
    counted = []
    for answer in ours.answers:
        length, rounds = 1, []  # the first token comes from the prefill
        for r in answer.rounds:
            if length >= MAX_TOKENS:
                break
            rounds.append(r)
            length += r.emitted
        counted.append(rounds)
    return counted


@pytest.mark.parametrize("name", CASES)
def test_engine_loads_it(both, name):
    assert result_of(both, name)["seconds"] > 0


@pytest.mark.parametrize("kind", TARGETS)
def test_target_alone_says_the_same_in_both(both, kind):
    plain = [o.plain for o in both.ours.values() if o.case.target == kind]
    assert all(p == result_of(both, f"plain_{kind}")["outputs"] for p in plain)


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_the_target_alone(both, name):
    ours = both.ours[name]
    assert result_of(both, name)["outputs"] == ours.plain
    assert [a.ids[:MAX_TOKENS] for a in ours.answers] == ours.plain


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_ours_token_for_token(both, name):
    ours = both.ours[name]
    for answer, rounds, drafts in zip(
        ours.answers, counted_rounds(ours), result_of(both, name)["drafts"], strict=True
    ):
        assert [r.drafted_ids for r in rounds] == drafts[: len(rounds)]
        assert len(drafts) <= len(rounds) + 1
        if len(drafts) > len(rounds) and len(answer.rounds) > len(rounds):
            after = answer.rounds[len(rounds)].drafted_ids  # ours may have had less room
            assert after == drafts[-1][: len(after)]


@pytest.mark.parametrize("name", CASES)
def test_counters_are_those_of_our_loop(both, name):
    rounds = [r for rs in counted_rounds(both.ours[name]) for r in rs if r.proposed]
    num_draft = both.ours[name].case.num_draft
    survivors = [sum(r.accepted > i for r in rounds) for i in range(num_draft)]
    assert result_of(both, name)["counters"] == {
        "num_drafts": len(rounds),
        "num_draft_tokens": sum(r.proposed for r in rounds),
        "num_accepted_tokens": sum(r.accepted for r in rounds),
        "num_accepted_tokens_per_pos": survivors,
    }
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_gives_other_drafts_but_the_same_text(both, fault):
    ours, result = both.ours["eagle3"], result_of(both, fault)
    assert result["outputs"] == ours.plain
    first = [drafts[0] for drafts in result["drafts"]]
    assert first != [rounds[0].drafted_ids for rounds in counted_rounds(ours)]
    healthy = result_of(both, "eagle3")["counters"]["num_accepted_tokens"]
    assert result["counters"]["num_accepted_tokens"] < healthy
