"""DFlash: one pass over a block of masks drafts all its tokens.

Source: z-lab/dflash (dflash/model.py), SpecForge (algorithms/common/dflash_family_model.py), vLLM
(models/qwen3_dflash.py).

Dimension letters: B rows, S positions, A blocks a row, L slots of a block, H width, F captured
width, D draft vocabulary, K proposed tokens, N newly committed positions or slots, W head input.

A block behind the anchor at position s reads the anchor's embedding and then L - 1 times that of
the mask token, at positions s, s + 1, ... Every layer attends over keys and values that it makes
of the target's captured states before s (one projection `fc` and norm for all layers, then the
layer's own key and value projections), and over the block itself. Slot j drafts token s + j: its
depth is j - 1, and the anchor's own slot drafts nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.attention import masked_attention, thin_linear
from data.batch import Batch
from data.cache import KVCache, TreeNodes
from data.compiled import CompiledPass, Parted, part
from data.target import Target
from drafters.anchors import anchors_of, choose_anchors, supervised_slots
from drafters.base import Head, Proposal, Sampling, Slots, TrainedDrafter
from drafters.blocks import Blocks, block_attention, block_ids, block_positions, pack_blocks
from drafters.drafting import Draft
from drafters.layers import MLP, Attend, Attention, Linear, RMSNorm, rotary_table
from recipes.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Shape of a DFlash drafter.

    block_size: slots of a block, the anchor's included.
    mask_token_id: whose embedding, the target's, the other slots read.
    causal: slots see only those before them in their block, not all.
    attention_bias: biases in the four projections of attention.
    """

    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    num_layers: int = 5
    causal: bool = False
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    max_position_embeddings: int = 2048

    @property
    def first_slot(self) -> int:
        """The slot that drafts depth 0."""
        return 1

    @property
    def max_draft(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - self.first_slot

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"aux_layers": list(self.aux_layers)}


class BlockLayer(Parted):
    """A decoder layer of the Qwen3 shape; what it attends over is the caller's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            H,
            H,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=eps,
        )
        self.mlp = MLP(H, config.intermediate_size)
        self.input_layernorm = RMSNorm(H, eps)
        self.post_attention_layernorm = RMSNorm(H, eps)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.after(x_BSH, attend(*self.before(x_BSH, cos, sin)))

    @part
    def before(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.self_attn.heads(self.input_layernorm(x_BSH), cos, sin)

    @part
    def after(self, x_BSH: Tensor, out_BMSD: Tensor) -> Tensor:
        """What follows attention."""
        x_BSH = x_BSH + self.self_attn.join(out_BMSD)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


@dataclass
class DFlashState:
    """Keys and values of the committed positions, and the token behind them."""

    cache: KVCache
    anchor_B: Tensor


class DFlash(TrainedDrafter):
    """The drafter. Embedding and, for a whole draft vocabulary, head are the target's.

    A reduced vocabulary has a head of its own, made of the target's rows.
    """

    method = "dflash"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.aux_layers = config.aux_layers
        H, D = config.hidden_size, config.draft_vocab_size
        self.fc = Linear(len(config.aux_layers) * config.target_hidden_size, H, bias=False)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.lm_head = Linear(H, D, bias=False) if config.vocab_size > D else None
        self.register_buffer("d2t", torch.zeros(D, dtype=torch.int64))
        # In lists, so that they are no part of the module: the rotary table must not be rounded
        # with it, embedding and head are the target's.
        self._rope = [
            rotary_table(config.head_dim, config.max_position_embeddings, config.rope_parameters)
        ]
        self._embedding: list[Tensor] = []
        self._target_head: list[Tensor] = []

    def use_target(self, target: Target) -> None:
        self.use_weights(target.embed_weight_VH, target.head_weight_VH)

    def use_weights(self, embed_weight_VH: Tensor, head_weight_VH: Tensor) -> None:
        """Share the target's (frozen) embedding and head [V, H]."""
        if embed_weight_VH.shape[1] != self.config.hidden_size:
            raise UserError(
                f"the target's embeddings are {embed_weight_VH.shape[1]} wide, the drafter "
                f"{self.config.hidden_size}: leave drafter.hidden_size out"
            )
        self._embedding, self._target_head = [embed_weight_VH], [head_weight_VH]

    @property
    def block_layers(self) -> list[BlockLayer]:
        """The layers, under their own type."""
        return cast(list[BlockLayer], list(self.layers))

    @property
    def head_DH(self) -> Tensor:
        """The head over the draft vocabulary."""
        return self._target_head[0] if self.lm_head is None else self.lm_head.weight

    def head_weights(self) -> Sequence[Head]:
        return [self.head_DH]

    def logits(self, x_H: Tensor) -> Tensor:
        """Outputs of the last norm -> logits over the draft vocabulary."""
        return thin_linear(x_H.to(self.head_DH.dtype), self.head_DH)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embedding[0]).to(self.fc.weight.dtype)

    def context(self, aux_BSF: Tensor) -> Tensor:
        """Captured target states [B, S, F] -> what all layers make keys and values of [B, S, H]."""
        return self.hidden_norm(self.fc(aux_BSF.to(self.fc.weight.dtype)))

    def sees_LL(self) -> Tensor:
        """Which slots of its block each slot sees."""
        L = self.config.block_size
        ones_LL = torch.ones(L, L, dtype=torch.bool, device=self.fc.weight.device)
        return ones_LL.tril() if self.config.causal else ones_LL

    # Training: all blocks at once.

    def run_blocks(self, batch: Batch, blocks: Blocks) -> Tensor:
        """Outputs of the last norm at every slot of every block [B * A, L, H]."""
        assert batch.aux_BSF is not None, "states are attached before the step"
        L, sees_LL = self.config.block_size, self.sees_LL()
        context_BSH = self.context(batch.aux_BSF)
        before = self._rope[0](context_BSH, batch.position_1S)
        x_BQH = self.embed(block_ids(batch.ids_BS, blocks, self.config.mask_token_id, L))
        cos, sin = self._rope[0](x_BQH, block_positions(blocks, L))
        for layer in self.block_layers:
            context = layer.self_attn.keys_values(context_BSH, *before)

            def attend(
                query: Tensor,
                key: Tensor,
                value: Tensor,
                context: tuple[Tensor, Tensor] = context,
            ) -> Tensor:
                return block_attention(query, context, key, value, blocks, sees_LL)

            x_BQH = layer(x_BQH, cos, sin, attend)
        return self.norm(x_BQH).view(-1, L, self.config.hidden_size)

    def with_anchors(self, batch: Batch, num_depths: int) -> Batch:
        """The batch with anchors (as many as a training step has, also where none were chosen)."""
        most = self.config.max_draft
        if num_depths > most:
            raise UserError(
                f"loss.num_steps {num_depths}: a block of drafter.block_size "
                f"{self.config.block_size} drafts {most} tokens; give {most} at most"
            )
        if batch.anchors_A is not None:
            return batch
        return replace(
            batch,
            anchors_A=choose_anchors(batch.mask_BS, self.num_anchors, batch.seed, batch.stretches),
        )

    def slots(self, batch: Batch, num_depths: int) -> Slots:
        batch = self.with_anchors(batch, num_depths)
        blocks = pack_blocks(anchors_of(batch), batch.ids_BS.shape, batch.documents)
        outputs_XLH = self.run_blocks(batch, blocks)
        anchor_N, depth_N = supervised_slots(batch, num_depths)
        head_NH = outputs_XLH[blocks.index_X[anchor_N], depth_N + self.config.first_slot]
        return Slots(head_NH, anchor_N, depth_N)

    # Decoding: a block a round.

    def start(self, prompts: list[list[int]], max_length: int) -> DFlashState:
        config, weight = self.config, self.fc.weight
        cache = KVCache(
            config.num_layers,
            len(prompts),
            max_length + config.block_size,
            config.num_key_value_heads,
            config.head_dim,
            weight.dtype,
            weight.device,
            self._compiled is not None,
        )
        return DFlashState(cache, torch.zeros_like(cache.lengths_B))

    def keep(self, state: DFlashState, rows: list[int]) -> DFlashState:
        state.cache.keep_rows(rows)
        return DFlashState(state.cache, state.anchor_B[rows])

    @torch.no_grad()
    def observe(
        self, state: DFlashState, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        """Keys and values of the newly committed positions, once and for all."""
        cache, context_BNH = state.cache, self.context(aux_BNF)
        cache.begin(next_ids_BN.shape[1])
        cos, sin = self._rope[0](context_BNH, cache.positions_BS)
        for i, layer in enumerate(self.block_layers):
            cache.append(i, *layer.self_attn.keys_values(context_BNH, cos, sin))
        cache.advance(num_B)
        last_B1 = (num_B - 1).clamp(min=0)[:, None]
        newest_B = next_ids_BN.gather(1, last_B1)[:, 0]
        state.anchor_B = torch.where(num_B > 0, newest_B, state.anchor_B)

    def run_block(self, state: DFlashState) -> Tensor:
        """Outputs of the last norm at the slots that draft [B, max_draft, H].

        The block is always a whole one, as in training: with fewer masks the same slots would
        say something else. Its keys are forgotten with the next append.
        """
        cache, L, rows = state.cache, self.config.block_size, len(state.anchor_B)
        ids_BL = state.anchor_B.new_full((rows, L), self.config.mask_token_id)
        ids_BL[:, 0] = state.anchor_B
        # The cache's word for "new places that see each other by a table" is a tree.
        depths_BL = torch.arange(L, device=ids_BL.device).expand(rows, -1)
        cache.begin(L, TreeNodes(depths_BL, self.sees_LL().expand(rows, -1, -1)))
        if self._compiled is not None and cache.fixed:
            return self._compiled(cache, ids_BL)
        return self._over_cache(cache, ids_BL)

    def compile_passes(self, mode: str, key: str) -> None:
        self._compiled = CompiledPass(self._over_cache, mode, key)

    def _over_cache(self, cache: KVCache, ids_BL: Tensor) -> Tensor:
        x_BLH, mask_BLT = self.embed(ids_BL), cache.mask_BST()
        cos, sin = self._rope[0](x_BLH, cache.positions_BS)
        for i, layer in enumerate(self.block_layers):

            def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                return masked_attention(query, *cache.append(i, key, value), mask_BLT)

            x_BLH = layer(x_BLH, cos, sin, attend)
        return self.norm(x_BLH[:, self.config.first_slot :])

    @torch.no_grad()
    def propose(
        self,
        state: DFlashState,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """One pass; each token is drawn from the distribution of its own slot."""
        num_draft = min(num_draft, self.config.max_draft)
        logits_BKD = self.logits(self.run_block(state)[:, :num_draft])
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for k in range(num_draft):
            draft.draw(logits_BKD[:, k])
        return draft.proposal()
