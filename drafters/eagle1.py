"""EAGLE-1 (Li et al. 2401.15077; also the head of EAGLE-2, which differs in decoding only).

Dimension letters: B rows, S positions, H width, V target vocabulary, N slots.

Row t joins the target's last state at position t (after its final norm: the feature) with the
embedding of token t+1, and predicts the feature at t+1; the target's own head turns that into the
distribution of token t+2. Everything else is EAGLE-3's: the alignment, the cache, the rollout over
its own outputs. Trained with one step it is EAGLE-1; more steps train it on its own features, seen
as decoding sees them, as HASS (Zhang et al. 2408.15766) harmonises them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.attention import thin_linear
from data.batch import Batch
from data.target import Target
from drafters.base import Slots, TrainedDrafter
from drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Layer, rotary_of
from drafters.layers import Attend, Attention, Linear


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(Eagle3Config):
    """EAGLE-3's shape, without its switches, and what training adds to it.

    feature_weight: of the smooth L1 distance to the target's feature, beside the loss.
    noise: features are shifted in training by uniform noise of this half-width.
    """

    feature_weight: float = 0.0
    noise: float = 0.0


class Eagle1Layer(Eagle3Layer):
    """A decoder layer; the first one has no norm before its attention."""

    def __init__(self, config: Eagle1Config, first: bool) -> None:
        super().__init__(config, first=False)
        H = config.hidden_size
        shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.self_attn = Attention(H, H, *shape)
        if first:
            del self.input_layernorm
            self.add_module("input_layernorm", nn.Identity())


class Eagle1(Eagle3):
    """The drafter; see the module's text."""

    method = "eagle1"
    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        TrainedDrafter.__init__(self)
        H = config.hidden_size
        self.config, self.aux_layers = config, config.aux_layers
        self.fc = Linear(2 * H, H, bias=False)
        self.layers = nn.ModuleList(
            [Eagle1Layer(config, first=i == 0) for i in range(config.num_layers)]
        )
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        self._rope = [rotary_of(config)]
        self._embeddings: list[Tensor] = []
        self._target: list[Target] = []

    def use_target(self, target: Target) -> None:
        """Borrow its embedding, its final norm and its head."""
        self.use_embeddings(target.embed_weight_VH)
        self._target = [target]

    def head_weights(self) -> list[Tensor]:
        return [self._target[0].head_weight_VH]

    def fuse(self, aux_BSF: Tensor) -> Tensor:
        """The target's state before its final norm -> the feature."""
        return self._target[0].final_norm(aux_BSF).to(self.fc.weight.dtype)

    def step(
        self, ids_BS: Tensor, hidden_BSH: Tensor, positions_BS: Tensor, attends: list[Attend]
    ) -> Tensor:
        embeds_BSH = self.embed(ids_BS)
        cos, sin = self.rope(embeds_BSH, positions_BS)
        hidden_BSH = self.fc(torch.cat([embeds_BSH, hidden_BSH], -1))
        for layer, attend in zip(self.layers, attends, strict=True):
            hidden_BSH = layer(embeds_BSH, hidden_BSH, cos, sin, attend)
        return hidden_BSH

    def head_input(self, state_H: Tensor) -> Tensor:
        return state_H

    def head_logits(self, state_H: Tensor) -> Tensor:
        weight = self._target[0].head_weight_VH
        return thin_linear(state_H.to(weight.dtype), weight)

    def features(self, aux_BSF: Tensor, seed: int) -> Tensor:
        """The features, with uniform noise in training (as the authors' code)."""
        feature_BSH = self.fuse(aux_BSF)
        if not self.training or not self.config.noise:
            return feature_BSH
        generator = torch.Generator().manual_seed(seed)
        noise_BSH = 2 * torch.rand(feature_BSH.shape, generator=generator) - 1
        return feature_BSH + self.config.noise * noise_BSH.to(feature_BSH)

    def extra_loss(self, batch: Batch, slots: Slots, alpha_N: Tensor) -> Tensor | None:
        """Smooth L1 distance to the target's features, mean over the width, sum over slots."""
        if not self.config.feature_weight:
            return None
        assert batch.hidden_BSH is not None
        wanted_NH = self.fuse(batch.hidden_BSH.flatten(0, 1)[slots.anchor_N + slots.depth_N])
        distance_N = F.smooth_l1_loss(slots.head_NW, wanted_NH, reduction="none").mean(-1)
        return self.config.feature_weight * distance_N.sum()
