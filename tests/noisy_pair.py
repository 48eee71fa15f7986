"""A pair of tables: the target of tests/scripted.py and a drafter that knows it but for noise.

Dimension letters: B rows, K proposed tokens, V vocabulary.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from data.sampling import sample
from drafters.base import DecodingDrafter, DraftLaws, Proposal, Sampling
from tests.scripted import ScriptedTarget


class NoisyTable(DecodingDrafter):
    """Its logits for the next token are a row of a table, chosen by the token before."""

    def __init__(self, table_VV: Tensor) -> None:
        self.table_VV = table_VV

    def start(self, prompts: list[list[int]], max_length: int) -> SimpleNamespace:
        return SimpleNamespace(last_B=torch.tensor([p[-1] for p in prompts]))

    def keep(self, state: SimpleNamespace, rows: list[int]) -> SimpleNamespace:
        return SimpleNamespace(last_B=state.last_B[rows])

    def observe(
        self, state: SimpleNamespace, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        newest_B = next_ids_BN.gather(1, (num_B - 1).clamp(min=0)[:, None])[:, 0]
        state.last_B = torch.where(num_B > 0, newest_B, state.last_B)

    def propose(
        self,
        state: SimpleNamespace,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        last_B, tokens, probs, laws = state.last_B, [], [], []
        for k in range(num_draft):
            logits_BV = self.table_VV[last_B]
            q_BV = sampling.law(logits_BV)
            laws.append((q_BV, sampling.unfiltered(logits_BV)))
            if sampling.draft_sampled:
                assert uniforms_BK is not None
                last_B = sample(q_BV, uniforms_BK[:, k])
                probs.append(q_BV)
            else:
                last_B = q_BV.argmax(-1)
            tokens.append(last_B)
        return Proposal(
            torch.stack(tokens, 1),
            torch.full((len(state.last_B),), num_draft),
            torch.stack(probs, 1) if probs else None,
            DraftLaws(*(torch.stack(part, 1) for part in zip(*laws, strict=True))),
        )


def noisy_pair(vocab_size: int = 24, noise: float = 1.0) -> tuple[ScriptedTarget, NoisyTable]:
    """Random tables; the answers end at their cap."""
    generator = torch.Generator().manual_seed(0)
    table_VV = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator)
    noise_VV = torch.randn(vocab_size, vocab_size, generator=generator)
    return ScriptedTarget(table_VV, []), NoisyTable(table_VV + noise * noise_VV)
