"""A drafter that grows trees from a table, for the target of tests/scripted.py.

Dimension letters: B rows, S positions, H = V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.layers import Attend
from tests.scripted import ScriptedTarget


class TableEagle(Eagle3):
    """Its state is the last token, and its logits are a row of a table, chosen by that token."""

    def __init__(self, table_VV: Tensor) -> None:
        V = table_VV.shape[0]
        super().__init__(
            Eagle3Config(
                target_hidden_size=1,
                hidden_size=V,
                intermediate_size=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=2,
                vocab_size=V,
                draft_vocab_size=V,
                aux_layers=(1,),
            )
        )
        self.lm_head.weight.data = table_VV.T.contiguous()

    def fuse(self, aux_BSF: Tensor) -> Tensor:
        return aux_BSF.new_zeros(*aux_BSF.shape[:2], self.config.hidden_size)

    def step(
        self, ids_BS: Tensor, hidden_BSH: Tensor, positions_BS: Tensor, attends: list[Attend]
    ) -> Tensor:
        return F.one_hot(ids_BS, self.config.vocab_size).float()

    def head_input(self, state_H: Tensor) -> Tensor:
        return state_H


def table_pair(vocab_size: int = 24, noise: float = 1.0) -> tuple[ScriptedTarget, TableEagle]:
    """The tables of tests/noisy_pair.py."""
    generator = torch.Generator().manual_seed(0)
    table_VV = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator)
    noise_VV = torch.randn(vocab_size, vocab_size, generator=generator)
    return ScriptedTarget(table_VV, []), TableEagle(table_VV + noise * noise_VV)
