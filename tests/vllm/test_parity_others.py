"""Every other drafter in a real vLLM.

Suffix decoding is not among them: vLLM takes it from a package without a build for CPUs alone.
"""

from typing import Any, ClassVar

from recipes.drafter_sections import (
    DFlashSection,
    Eagle1Section,
    MedusaSection,
    MTPSection,
    PardSection,
    SmallLMSection,
)
from tests.vllm.ours_half import NUM_DRAFT, Case, ngram, trained
from tests.vllm.parity import Parity
from tests.vllm.settings import MARKS

pytestmark = MARKS

# Blocks of as many tokens as the engine drafts, and the last committed one.
BLOCK: dict[str, Any] = {
    "num_layers": 2,
    "num_aux_layers": 3,
    "block_size": NUM_DRAFT + 1,
    "mask_token_id": 5,
}


class TestOthers(Parity):
    CASES: ClassVar[dict[str, Case]] = {
        "dflash": trained(DFlashSection(**BLOCK, draft_vocab_size=32)),
        "dflash_speculators": trained(DFlashSection(**BLOCK, draft_vocab_size=32), "speculators"),
        "dflash_qwen3_whole_vocab_causal": trained(
            DFlashSection(**BLOCK, causal=True), target="qwen3"
        ),
        "eagle1": trained(Eagle1Section()),
        "medusa": trained(MedusaSection(num_heads=NUM_DRAFT)),
        "medusa_own_heads": trained(MedusaSection(num_heads=NUM_DRAFT, shared_head=False)),
        "mtp": trained(MTPSection()),
        "small_lm": trained(SmallLMSection(num_layers=2)),
        "pard_qwen3": trained(PardSection(num_layers=2, mask_token_id=300), target="qwen3"),
        "ngram": ngram(),  # last: it brings numba, and what starts next takes longer
    }
