"""Medusa (Cai et al. 2401.10774): heads that each guess one of the next tokens, all at once.

Dimension letters: B rows, S positions, H width, V target vocabulary, N slots, G heads.

Head k reads the target's state (after its final norm) at the position that predicted the anchor,
and guesses the token k + 1 places behind the anchor: h + SiLU(W h) in each block, then a head.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.attention import thin_linear
from data.batch import Batch
from data.compiled import Parted, part
from data.target import Target
from drafters.anchors import supervised_slots
from drafters.base import Proposal, Sampling, Slots, TrainedDrafter
from drafters.drafting import Draft
from drafters.layers import Linear
from recipes.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shape of the heads.

    num_heads: G, tokens drafted a round. num_layers: residual blocks of each head; bias: theirs.
    shared_head: every head ends in the target's own output head; else each has one of its own.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = True
    shared_head: bool = True
    aux_layers: tuple[int, ...]

    @property
    def draft_vocab_size(self) -> int:
        """Always the whole vocabulary."""
        return self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"aux_layers": list(self.aux_layers)}


class MedusaBlock(Parted):
    """The residual blocks of one head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.layers = nn.ModuleList([Linear(H, H, config.bias) for _ in range(config.num_layers)])

    @part
    def forward(self, hidden_NH: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_NH = hidden_NH + F.silu(layer(hidden_NH))
        return hidden_NH


class Medusa(TrainedDrafter):
    """The heads; see the module's text."""

    method = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config, self.aux_layers = config, config.aux_layers
        H, V, G = config.hidden_size, config.vocab_size, config.num_heads
        self.blocks = nn.ModuleList([MedusaBlock(config) for _ in range(G)])
        if config.shared_head:  # never trained, but engines want it in the folder
            self.lm_head = Linear(H, V, bias=False).requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList([Linear(H, V, bias=False) for _ in range(G)])
        self.register_buffer("d2t", torch.zeros(V, dtype=torch.int64))
        self._target: list[Target] = []

    def use_target(self, target: Target) -> None:
        """Borrow its final norm, and its head (without a copy) where that is shared."""
        self._target = [target]
        if self.config.shared_head:
            self.lm_head.weight = nn.Parameter(target.head_weight_VH, requires_grad=False)

    def head_weights(self) -> list[Tensor]:
        if self.config.shared_head:
            return [self.lm_head.weight]
        return [head.get_parameter("weight") for head in self.lm_heads]

    def slots(self, batch: Batch, num_depths: int) -> Slots:
        assert batch.aux_BSF is not None, "states are attached before the step"
        if num_depths > self.config.num_heads:
            raise UserError(
                f"{num_depths} tokens a draft, but drafter.num_heads is {self.config.num_heads}: "
                "a Medusa head drafts one token each; lower loss.num_steps, or train more heads"
            )
        anchor_N, depth_N = supervised_slots(batch, num_depths)
        feature_MH = self._feature(batch.aux_BSF.flatten(0, 1))
        blocks = list(self.blocks)[:num_depths]
        parts = [block(feature_MH[anchor_N[depth_N == k] - 1]) for k, block in enumerate(blocks)]
        return Slots(torch.cat(parts), anchor_N, depth_N)

    def _feature(self, aux_NF: Tensor) -> Tensor:
        return self._target[0].final_norm(aux_NF).to(self._weight.dtype)

    @property
    def _weight(self) -> Tensor:
        return self.get_parameter("blocks.0.layers.0.weight")

    # Decoding: the state is the feature of the newest committed position, [B, H].

    def start(self, prompts: list[list[int]], max_length: int) -> list[Tensor]:
        return [self._weight.new_zeros(len(prompts), self.config.hidden_size)]

    def keep(self, state: list[Tensor], rows: list[int]) -> list[Tensor]:
        return [state[0][rows]]

    @torch.no_grad()
    def observe(
        self, state: list[Tensor], next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        rows_B = torch.arange(len(num_B), device=num_B.device)
        newest_BH = self._feature(aux_BNF[rows_B, (num_B - 1).clamp(min=0)])
        state[0] = torch.where((num_B > 0)[:, None], newest_BH, state[0])

    @torch.no_grad()
    def propose(
        self,
        state: list[Tensor],
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        num_draft = min(num_draft, self.config.num_heads)
        heads = self.head_weights()
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for k in range(num_draft):
            hidden_BH = self.blocks[k](state[0])
            weight_VH = heads[k if len(heads) > 1 else 0]
            draft.draw(thin_linear(hidden_BH.to(weight_VH.dtype), weight_VH))
        return draft.proposal()
