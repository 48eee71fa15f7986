"""Every drafter in a real vLLM: it loads, the text is the target's, drafts and counters are ours.

Both sides decode the same prompts greedily in float32. Ours runs here; the engine's in the
interpreter of VLLM_ENV (eval/vllm_drafts.py), which has its own transformers: all engines of a
class of tests start in one process, as importing vLLM takes longer than several starts.

What is compared, exactly:

- Drafts, round by round. The engine drafts once more when an answer is already complete; that
  draft is compared as well.
- Counters. Near the end of an answer our loop drafts no more than there is room for and counts
  only what it keeps; the engine always drafts K and counts before it cuts. So our answers are
  decoded K + 1 tokens longer, and the rounds that begin before the engine's last token are counted:
  in those our loop has room for K, and keeps what it accepts.
- A round in which nothing was drafted (n-gram lookup without a hit) is none for the engine.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from data.target import Target
from drafters.export_info import WITH_TARGET
from eval.ask_vllm import ask_vllm
from eval.decode import Round
from tests.vllm.ours_half import (
    MAX_MODEL_LEN,
    MAX_TOKENS,
    TARGETS,
    Case,
    Ours,
    decode_all,
    make_prompts,
    make_target,
    rows_of,
)
from tests.vllm.settings import VLLM_PYTHON

Plant = Callable[[Path], None]


class Both(NamedTuple):
    """Our side and the engine's, by the names of the cases."""

    ours: dict[str, Ours]
    engine: dict[str, dict[str, Any]]


def run_ours(folder: Path, cases: dict[str, Case]) -> dict[str, Ours]:
    """Train, export and decode; one target of each kind for all of its drafters."""
    targets: dict[str, Target] = {}
    plain, rows = {}, {}
    for kind in {case.target for case in cases.values()}:
        targets[kind] = make_target(kind, folder / kind)
        plain[kind] = [a.ids for a in decode_all(targets[kind], None, MAX_TOKENS)]
        rows[kind] = rows_of(targets[kind], make_prompts())
    ours = {}
    for name, case in cases.items():
        target = targets[case.target]
        drafter = case.make(target, rows[case.target])
        if case.save is not None:
            case.save(drafter, folder / name, target)
        with torch.inference_mode():
            answers = decode_all(target, drafter, MAX_TOKENS + case.num_draft + 1, case.num_draft)
        ours[name] = Ours(case, target, drafter, folder / name, answers, plain[case.target])
    return ours


def make_job(model: str, config: dict[str, Any] | None) -> dict[str, Any]:
    """See eval/vllm_drafts.py."""
    return {
        "model": model,
        "speculative_config": config,
        "prompts": make_prompts(),
        "max_tokens": MAX_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
    }


def drafter_job(ours: Ours, folder: Path) -> dict[str, Any]:
    """The engine with the drafter of a folder."""
    config = {**ours.case.config, "num_speculative_tokens": ours.case.num_draft}
    if ours.case.joined:
        return make_job(f"{folder}{WITH_TARGET}", config)
    if ours.case.save is not None:
        config["model"] = str(folder)
    return make_job(ours.target.name, config)


def run_both(folder: Path, cases: dict[str, Case], faults: dict[str, tuple[str, Plant]]) -> Both:
    """Both sides; each fault is planted in the export of its case after our side has run."""
    ours = run_ours(folder, cases)
    kinds = [kind for kind in TARGETS if (folder / kind).is_dir()]
    jobs = {f"plain_{kind}": make_job(str(folder / kind), None) for kind in kinds}
    for name, side in ours.items():
        jobs[name] = drafter_job(side, side.folder)
    for fault, (name, plant) in faults.items():
        shutil.copytree(ours[name].folder, folder / fault)
        plant(folder / fault)
        jobs[fault] = drafter_job(ours[name], folder / fault)
    return Both(ours, ask_vllm(VLLM_PYTHON, jobs)["jobs"])


def result_of(both: Both, name: str) -> dict[str, Any]:
    """What the engine did; its error is this test's."""
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


class Parity:
    """The tests of every case in CASES (conftest.py gives them the names).

    FAULTS: name: (case, what is planted in its folder).
    """

    CASES: ClassVar[dict[str, Case]]
    FAULTS: ClassVar[dict[str, tuple[str, Plant]]] = {}

    def test_engine_loads_it(self, both, name, record_property):
        seconds = result_of(both, name)["seconds"]
        record_property("seconds", round(seconds, 1))
        assert seconds > 0

    def test_text_is_that_of_the_target_alone(self, both, name):
        ours = both.ours[name]
        assert result_of(both, f"plain_{ours.case.target}")["outputs"] == ours.plain
        assert result_of(both, name)["outputs"] == ours.plain
        assert [a.ids[:MAX_TOKENS] for a in ours.answers] == ours.plain

    def test_drafts_are_ours_token_for_token(self, both, name):
        ours = both.ours[name]
        for answer, rounds, drafts in zip(
            ours.answers, counted_rounds(ours), result_of(both, name)["drafts"], strict=True
        ):
            assert [r.drafted_ids for r in rounds] == drafts[: len(rounds)]
            assert len(drafts) <= len(rounds) + 1
            if len(drafts) > len(rounds) and len(answer.rounds) > len(rounds):
                after = answer.rounds[len(rounds)].drafted_ids  # ours may have had less room
                assert after == drafts[-1][: len(after)]

    def test_counters_are_those_of_our_loop(self, both, name):
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
