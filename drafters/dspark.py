"""DSpark: a DFlash block with a sequential head over it and a head that predicts acceptance.

Source: deepseek-ai/DeepSpec (deepspec/modeling/dspark/{common,loss,markov_head}.py).

Dimension letters: as drafters.dflash; R rank of the sequential head, X blocks of a step.

The backbone gives every slot a state h and base logits. The sequential head adds a low-rank bias
W2 f, where f depends on the token before (e = W1[token], a row of R numbers) and so lets a token
be drafted in the light of the one before it:
    vanilla: f = e
    gated:   f = sigmoid(gate [h ; e]) * e
    rnn:     g, c, o = rnn [s ; e ; h];  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  f = tanh(o)
The confidence head predicts alpha = sum_v min(p, q) of a slot from h and e, both known before the
slot's token is drawn. Stopping where the product of the predictions falls below a threshold is
therefore exact: whether a token is proposed does not depend on which one it would be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.attention import thin_linear
from data.batch import Batch
from drafters.anchors import anchors_of, supervised_slots
from drafters.base import Head, Proposal, Sampling, Slots
from drafters.blocks import pack_blocks
from drafters.dflash import DFlash, DFlashConfig, DFlashState
from drafters.drafting import Draft
from drafters.layers import Linear

HeadKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Shape of a DSpark drafter.

    sample_from_anchor: the anchor's slot drafts too, so a block drafts block_size tokens; else
        block_size - 1, as DFlash.
    confidence_threshold: decoding stops a draft where its predicted survival is below; 0 = never.
    confidence_temperatures: one a drafted token, which the logits of the prediction are divided by
        (see train.calibration); None = 1 each. Decoding only.
    """

    block_size: int = 7
    markov_rank: int = 256
    markov_head_type: HeadKind = "vanilla"
    confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True
    confidence_threshold: float = 0.0
    confidence_temperatures: tuple[float, ...] | None = None

    @property
    def first_slot(self) -> int:
        return 0 if self.sample_from_anchor else 1


class MarkovHead(nn.Module):
    """The sequential head; `forward` is one step of it, for any number of rows."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        H, R = config.hidden_size, config.markov_rank
        self.kind, self.rank = config.markov_head_type, R
        self.markov_w1 = nn.Embedding(config.vocab_size, R)
        self.markov_w2 = Linear(R, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate = Linear(H + R, R)
        elif self.kind == "rnn":
            self.rnn = Linear(2 * R + H, 3 * R)

    def forward(self, embeds_R: Tensor, hidden_H: Tensor, state_R: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 reads, and the state for the next token [..., R] (used by rnn alone)."""
        if self.kind == "gated":
            gate_R = self.gate(torch.cat([hidden_H, embeds_R], -1)).sigmoid()
            return gate_R * embeds_R, state_R
        if self.kind == "rnn":
            joined = torch.cat([state_R, embeds_R, hidden_H], -1)
            keep_R, new_R, out_R = self.rnn(joined).chunk(3, -1)
            keep_R = keep_R.sigmoid()
            return out_R.tanh(), keep_R * state_R + (1 - keep_R) * new_R.tanh()
        return embeds_R, state_R


class ConfidenceHead(nn.Module):
    """Logit of the predicted acceptance."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = Linear(width, 1)

    def forward(self, hidden_H: Tensor, embeds_R: Tensor) -> Tensor:
        inputs = torch.cat([hidden_H, embeds_R], -1) if self.with_markov else hidden_H
        return self.proj(inputs)[..., 0]


@dataclass
class DSparkSlots(Slots):
    """confidence_N: logits of the confidence head; None without one."""

    confidence_N: Tensor | None = None


class DSpark(DFlash):
    """The drafter.

    confidence_weight, confidence_decay: the loss of the confidence head at depth k counts
    confidence_weight * confidence_decay^k. Training only.
    """

    method = "dspark"
    config: DSparkConfig
    confidence_weight: float = 1.0
    confidence_decay: float = 1.0

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None

    def head_weights(self) -> Sequence[Head]:
        """Head and W2 side by side, not joined: logits = head h + W2 f."""
        return [(self.head_DH, self.markov_head.markov_w2.weight)]

    # Training.

    def slots(self, batch: Batch, num_depths: int) -> DSparkSlots:
        """The sequential head reads the row's own tokens (teacher forcing)."""
        batch = self.with_anchors(batch, num_depths)
        anchors_X = anchors_of(batch)
        blocks = pack_blocks(anchors_X, batch.ids_BS.shape, batch.documents)
        first = self.config.first_slot
        hidden_XKH = self.run_blocks(batch, blocks)[:, first : first + num_depths]
        # Depth k stands behind token s + k; past the document's end there is no slot.
        ids_BS = F.pad(batch.ids_BS, (0, num_depths))
        offsets_K = torch.arange(num_depths, device=ids_BS.device)
        at_BQ = (blocks.place_BA[..., None] + offsets_K).flatten(1)
        embeds_XKR = self.markov_head.markov_w1(ids_BS.gather(1, at_BQ)).view(
            *hidden_XKH.shape[:2], -1
        )
        state_XR = torch.zeros_like(embeds_XKR[:, 0])
        features = []
        for k in range(num_depths):
            feature_XR, state_XR = self.markov_head(embeds_XKR[:, k], hidden_XKH[:, k], state_XR)
            features.append(feature_XR)
        anchor_N, depth_N = supervised_slots(batch, num_depths)
        at = (blocks.index_X[anchor_N], depth_N)
        hidden_NH = hidden_XKH[at]
        confidence_N = None
        if self.confidence_head is not None:
            confidence_N = self.confidence_head(hidden_NH, embeds_XKR[at])
        head_NW = torch.cat([hidden_NH, torch.stack(features, 1)[at]], -1)
        return DSparkSlots(head_NW, anchor_N, depth_N, confidence_N)

    def extra_loss(self, batch: Batch, slots: Slots, alpha_N: Tensor) -> Tensor | None:
        """Binary cross-entropy of the confidence head against alpha."""
        assert isinstance(slots, DSparkSlots)
        if slots.confidence_N is None:
            return None
        weight_N = self.confidence_weight * self.confidence_decay ** slots.depth_N.float()
        return F.binary_cross_entropy_with_logits(
            slots.confidence_N.float(), alpha_N.clamp(0, 1), weight_N, reduction="sum"
        )

    # Decoding.

    @torch.no_grad()
    def propose(
        self,
        state: DFlashState,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """One pass, then token by token through the sequential head.

        A row whose predicted survival is below `confidence_threshold` proposes no further.
        """
        config, markov = self.config, self.markov_head
        hidden_BKH = self.run_block(state)[:, : min(num_draft, config.max_draft)]
        logits_BKD = self.logits(hidden_BKH).float()
        token_B = state.anchor_B
        state_BR = hidden_BKH.new_zeros(len(token_B), config.markov_rank)
        survival_B = torch.ones_like(token_B, dtype=torch.float32)
        num_proposed_B = torch.zeros_like(token_B)
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for k in range(hidden_BKH.shape[1]):
            embeds_BR = markov.markov_w1(token_B)
            if self.confidence_head is not None and config.confidence_threshold > 0:
                confidence_B = self.confidence_head(hidden_BKH[:, k], embeds_BR)
                if config.confidence_temperatures is not None:
                    confidence_B = confidence_B / config.confidence_temperatures[k]
                survival_B = survival_B * confidence_B.float().sigmoid()
                going_B = survival_B >= config.confidence_threshold
                if not bool(going_B.any()):
                    break
                num_proposed_B += going_B
            else:
                num_proposed_B += 1
            feature_BR, state_BR = markov(embeds_BR, hidden_BKH[:, k], state_BR)
            bias_BD = thin_linear(feature_BR, markov.markov_w2.weight)
            token_B = draft.draw(logits_BKD[:, k] + bias_BD.float())
        if not draft.tokens:
            return Proposal(token_B[:, None][:, :0], num_proposed_B)
        return draft.proposal(num_proposed_B)
