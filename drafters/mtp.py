"""Multi-token prediction in the form of MiMo (vllm/model_executor/models/mimo_mtp.py).

Dimension letters: B rows, S positions, H width, F captured width.

Row t joins the target's last state at position t (before its final norm) with the embedding of
token t+1, each normed, the state first; one decoder layer of the target's own shape and a norm of
its own follow, and the target's head reads the result. What the head reads is the state of the next
step. Alignment, cache and rollout are EAGLE-3's. At position 0 the embedding is zero, as MiMo.

Where such a layer lives among the target's own tensors, and which engine runs it: mtp_stitch.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.attention import thin_linear
from data.target import Target
from drafters.base import TrainedDrafter
from drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Layer, rotary_of
from drafters.layers import Attend, Attention, Linear, RMSNorm


@dataclass(frozen=True, kw_only=True)
class MTPConfig(Eagle3Config):
    """EAGLE-3's shape, without its switches, and what the target's attention has.

    qkv_bias: of queries, keys and values (MiMo, Qwen2). qk_norm: of each head (Qwen3).
    """

    qkv_bias: bool = False
    qk_norm: bool = False


class MTPLayer(Eagle3Layer):
    """A decoder layer of the target's shape."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config, first=False)
        H, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.self_attn = Attention(
            H,
            H,
            heads,
            config.num_key_value_heads,
            head_dim,
            bias=config.qkv_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        )
        if config.qkv_bias:
            self.self_attn.o_proj = Linear(heads * head_dim, H, bias=False)


class MTP(Eagle3):
    """The drafter; see the module's text."""

    method = "mtp"
    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        TrainedDrafter.__init__(self)
        H, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.aux_layers = config, config.aux_layers
        self.embed_norm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.fc = Linear(2 * H, H, bias=False)
        self.layers = nn.ModuleList([MTPLayer(config)])
        self.norm = RMSNorm(H, eps)
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        self._rope = [rotary_of(config)]
        self._embeddings: list[Tensor] = []
        self._target: list[Target] = []

    def use_target(self, target: Target) -> None:
        """Borrow its embedding and its head."""
        self.use_embeddings(target.embed_weight_VH)
        self._target = [target]

    def head_weights(self) -> list[Tensor]:
        return [self._target[0].head_weight_VH]

    def fuse(self, aux_BSF: Tensor) -> Tensor:
        """The target's state, which `step` norms."""
        return aux_BSF.to(self.fc.weight.dtype)

    def step(
        self, ids_BS: Tensor, hidden_BSH: Tensor, positions_BS: Tensor, attends: list[Attend]
    ) -> Tensor:
        embeds_BSH = self.embed(ids_BS)
        cos, sin = self.rope(embeds_BSH, positions_BS)
        embeds_BSH = embeds_BSH.masked_fill((positions_BS == 0)[..., None], 0.0)
        joined = torch.cat([self.hidden_norm(hidden_BSH), self.embed_norm(embeds_BSH)], -1)
        layer, attend = self.layers[0], attends[0]
        return self.norm(layer(embeds_BSH, self.fc(joined), cos, sin, attend))

    def head_input(self, state_H: Tensor) -> Tensor:
        return state_H

    def head_logits(self, state_H: Tensor) -> Tensor:
        weight = self._target[0].head_weight_VH
        return thin_linear(state_H.to(weight.dtype), weight)
