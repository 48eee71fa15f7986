"""P-EAGLE: EAGLE-3 that drafts every token of a round in one pass.

Sources: SpecForge's peagle (training), vLLM's eagle3 with parallel_drafting (decoding).

Dimension letters: B rows, S positions, H drafter width, F captured width, A anchors of one row,
N chain rows of one row, J chain rows that one sees (itself included), K proposed tokens,
Q heads, M kv heads, E head width.

Depth 0 is EAGLE-3's own row: the states at s-1 with the embedding of the anchor. A chain follows
it: rows of depth 1, 2, ... read the mask token's embedding and a learned state in place of what is
not known yet. A chain row sees the depth-0 rows up to its anchor's and the shallower rows of its
own chain; nothing feeds back from one depth to the next, so one pass gives all of them.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.batch import Batch
from drafters.anchors import anchors_of, by_stretch, drop_by_depth, supervised_anchors
from drafters.base import DecodingDrafter, Proposal, Sampling, Slots
from drafters.drafting import Draft
from drafters.eagle3 import Eagle3, Eagle3Config, Eagle3State
from drafters.layers import Attend


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """EAGLE-3's shape and: mask_token_id, whose embedding stands for a token not known yet.

    keep_ratio, min_keep_ratio: of the anchors, the share max(keep_ratio^d, min_keep_ratio) trains
    depth d (COD sampling); they matter in training alone.
    """

    mask_token_id: int
    keep_ratio: float = 1.0
    min_keep_ratio: float = 0.0


class Chains:
    """The chain rows of one row of a batch, in packed order: depth after depth.

    anchor_N, depth_N: position s of the anchor, and the depth (1, 2, ...). sees: for each depth
    the chain rows [n_d, d] that its rows see, themselves included.
    """

    def __init__(self, anchors: list[Tensor]) -> None:
        """anchors[d - 1] are the anchors of depth d; each set lies within the one before."""
        self.anchor_N = torch.cat(anchors)
        depths = [torch.full_like(part, d) for d, part in enumerate(anchors, 1)]
        self.depth_N = torch.cat(depths)
        self.sees: list[Tensor] = []
        start, before = 0, anchors[0]
        seen = torch.zeros(len(before), 0, dtype=torch.int64, device=before.device)
        for part in anchors:
            own = torch.arange(start, start + len(part), device=part.device)
            _, place = (part[:, None] == before[None]).nonzero(as_tuple=True)  # one depth ago
            seen = torch.cat([seen[place], own[:, None]], 1)
            self.sees.append(seen)
            start, before = start + len(part), part


def chain_attention(query: Tensor, key: Tensor, value: Tensor, chains: Chains) -> Tensor:
    """Causal attention of the S depth-0 rows, and of the chain rows behind them.

    Costs S * (S + N) products and no [S + N, S + N] mask.

    Args:
        query: [1, Q, S + N, E]; key, value: [1, M, S + N, E].

    Returns:
        [1, Q, S + N, E].
    """
    S = query.shape[2] - len(chains.anchor_N)
    first = F.scaled_dot_product_attention(
        query[:, :, :S], key[:, :, :S], value[:, :, :S], is_causal=True, enable_gqa=True
    )
    parts, start = [first], S
    M, E = key.shape[1], key.shape[3]
    keys_MSE, values_MSE = key[0, :, :S], value[0, :, :S]
    places_S = torch.arange(S, device=query.device)
    for seen_NJ in chains.sees:
        num = len(seen_NJ)
        rows = slice(start, start + num)
        asked = query[0, :, rows].reshape(M, query.shape[1] // M, num, E)
        own_key = key[0, :, S:][:, seen_NJ]  # [M, n, J, E]
        own_value = value[0, :, S:][:, seen_NJ]
        scores = asked @ keys_MSE[:, None].transpose(-1, -2)
        # The anchor's own row is s - 1: it holds the anchor as the token that follows.
        later = places_S >= chains.anchor_N[start - S : start - S + num, None]
        scores = scores.masked_fill(later, float("-inf"))
        own_scores = torch.einsum("mgne,mnje->mgnj", asked, own_key)
        weights = torch.cat([scores, own_scores], -1).float().mul(E**-0.5).softmax(-1)
        weights = weights.to(query.dtype)
        out = weights[..., :S] @ values_MSE[:, None]
        out = out + torch.einsum("mgnj,mnje->mgne", weights[..., S:], own_value)
        parts.append(out.reshape(1, query.shape[1], num, E))
        start += num
    return torch.cat(parts, 2)


class PEagle(Eagle3):
    """The drafter; see the module's text."""

    method = "p_eagle"
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        width = len(config.aux_layers) * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width))

    # Training: all anchors at once.

    def slots(self, batch: Batch, num_depths: int) -> Slots:
        assert batch.aux_BSF is not None, "states are attached before the step"
        stretches = batch.stretches  # rows, or documents of a packed row
        ids = batch.ids_BS.flatten().split(stretches)
        fused = self.fuse(batch.aux_BSF).flatten(0, 1).split(stretches)
        allowed = supervised_anchors(batch.mask_BS, num_depths)
        generator = torch.Generator().manual_seed(batch.seed)
        config = self.config
        heads, anchors, depths = [], [], []
        start = 0
        for row_A, ids_S, fused_SH in zip(
            by_stretch(anchors_of(batch), stretches), ids, fused, strict=True
        ):
            sets = drop_by_depth(
                row_A, allowed, generator, config.keep_ratio, config.min_keep_ratio
            )
            chains = Chains([part - start for part in sets])
            out_NH = self._pass(ids_S, fused_SH, chains)
            heads += [out_NH[row_A - start - 1], out_NH[len(ids_S) :]]
            anchors += [row_A, chains.anchor_N + start]
            depths += [torch.zeros_like(row_A), chains.depth_N]
            start += len(ids_S)
        return Slots(torch.cat(heads), torch.cat(anchors), torch.cat(depths))

    def _pass(self, ids_S: Tensor, fused_SH: Tensor, chains: Chains) -> Tensor:
        """Head inputs [S + N, H] of one row's depth-0 rows and chain rows."""
        S, num = len(ids_S), len(chains.anchor_N)
        shifted_S = F.pad(ids_S[1:], (0, 1))
        ids_1N = torch.cat([shifted_S, self._mask_ids(num)])[None]
        mask_H = self.fuse(self.mask_hidden)[0, 0]
        hidden_1NH = torch.cat([fused_SH, mask_H.expand(num, -1)])[None]
        places_S = torch.arange(S, device=ids_S.device)
        positions_1N = torch.cat([places_S, chains.anchor_N - 1 + chains.depth_N])[None]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return chain_attention(query, key, value, chains)

        attends: list[Attend] = [attend] * len(self.layers)
        return self.head_input(self.step(ids_1N, hidden_1NH, positions_1N, attends))[0]

    def _mask_ids(self, num: int) -> Tensor:
        return torch.full((num,), self.config.mask_token_id, device=self.mask_hidden.device)

    # Decoding: one pass a round. `start` and `observe` are EAGLE-3's.

    @torch.no_grad()
    def propose(
        self,
        state: Eagle3State,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """The chain behind the newest row; the cache ends as it was."""
        rows_BKH = state.last_hidden_BH[:, None]
        if num_draft > 1:
            committed_B = state.cache.lengths_B.clone()
            B = len(committed_B)
            ids_BK = self._mask_ids(num_draft - 1).expand(B, -1)
            hidden_BKH = self.fuse(self.mask_hidden).expand(B, num_draft - 1, -1)
            chain_BKH = self._cached_step(state, ids_BK, hidden_BKH)
            rows_BKH = torch.cat([rows_BKH, chain_BKH], 1)
            state.cache.rollback(committed_B)
        logits_BKD = self.lm_head(self.head_input(rows_BKH))
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for k in range(num_draft):
            draft.draw(logits_BKD[:, k])
        return draft.proposal()


def rolls_out(drafter: DecodingDrafter) -> TypeGuard[Eagle3]:
    """Whether it drafts step by step from its own last state, as EAGLE-1, EAGLE-3 and MTP do.

    P-EAGLE is made of EAGLE-3's parts and drafts all tokens in one pass.
    """
    return isinstance(drafter, Eagle3) and not isinstance(drafter, PEagle)
