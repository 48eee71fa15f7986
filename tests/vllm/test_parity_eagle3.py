"""EAGLE-3 and P-EAGLE in a real vLLM, in every shape that an engine reads otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eval.check_export import Checked, EngineRun, against_engine, to_text
from recipes.drafter_sections import Eagle3Section, PEagleSection
from tests.tiny_exports import edit_config, edit_tensors
from tests.vllm.ours_half import Case, make_prompts, trained
from tests.vllm.parity import Parity, counted_rounds, result_of
from tests.vllm.settings import MARKS

pytestmark = MARKS

# The embeddings and the last layer before the final norm; all switches of norms.
WIDE: dict[str, Any] = {
    "aux_layers": [0, 3, 6, 8],
    "norm_before_residual": True,
    "fc_norm": True,
    "norm_output": True,
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


class TestEagle3(Parity):
    CASES: ClassVar[dict[str, Case]] = {
        "eagle3": trained(Eagle3Section()),
        "eagle3_speculators": trained(Eagle3Section(), "speculators"),
        "eagle3_qwen3_whole_vocab": trained(Eagle3Section(draft_vocab_size=None), target="qwen3"),
        "eagle3_4_aux_norms": trained(Eagle3Section(**WIDE)),
        "eagle3_4_aux_norms_speculators": trained(Eagle3Section(**WIDE), "speculators"),
        "eagle3_2_layers_norm_before_fc": trained(Eagle3Section(num_layers=2, norm_before_fc=True)),
        "eagle3_norm_before_fc_speculators": trained(
            Eagle3Section(norm_before_fc=True), "speculators"
        ),
        "p_eagle": trained(PEagleSection(num_layers=2)),
        "p_eagle_speculators": trained(PEagleSection(num_layers=2), "speculators"),
    }
    FAULTS: ClassVar[dict[str, tuple[str, Callable[[Path], None]]]] = {
        "p34_aux_layers_off_by_one": ("eagle3", shift_aux_layers),
        "p24_d2t_zeroed": ("eagle3", zero_d2t),
        "norm_before_residual_flipped": ("eagle3", flip_norm_before_residual),
    }

    @pytest.mark.parametrize(
        ("fault", "cause"),
        [
            pytest.param("p34_aux_layers_off_by_one", "layer ids", id="p34_aux_layers_off_by_one"),
            pytest.param("p24_d2t_zeroed", "d2t", id="p24_d2t_zeroed"),
            pytest.param(
                "norm_before_residual_flipped", "norm switches", id="norm_before_residual_flipped"
            ),
        ],
    )
    def test_a_planted_fault_gives_other_drafts_the_same_text_and_is_named(
        self, both, fault, cause
    ):
        ours, result = both.ours["eagle3"], result_of(both, fault)
        assert result["outputs"] == ours.plain
        first = [drafts[0] for drafts in result["drafts"]]
        assert first != [rounds[0].drafted_ids for rounds in counted_rounds(ours)]
        healthy = result_of(both, "eagle3")["counters"]["num_accepted_tokens"]
        assert result["counters"]["num_accepted_tokens"] < healthy
        found, run = Checked(), EngineRun(result["outputs"], result["drafts"])
        against_engine(
            found, "vLLM", ours.target, ours.drafter, make_prompts(), run, ours.case.num_draft
        )
        assert found.causes == [cause], to_text(found)
