"""EAGLE-3 (Li et al. 2503.01840; layer shapes as in the authors' code and vLLM's llama_eagle3).

Dimension letters: B rows, S positions, H drafter width, F captured width, D draft vocabulary,
V target vocabulary, K proposed tokens, N newly committed positions.

Row t joins the target's captured states at position t with the embedding of token t+1 and predicts
the target's distribution for token t+2. At rollout step k the state is the row's own output of step
k-1, the token is t+1+k, the rotary position t+k, and the prediction is for token t+2+k.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.attention import masked_attention
from data.batch import Batch
from data.cache import KVCache
from data.compiled import CompiledPass, Parted, part
from data.documents import Documents
from data.target import Target
from drafters.anchors import supervised_slots
from drafters.base import Proposal, Sampling, Slots, TrainedDrafter
from drafters.drafting import Draft
from drafters.layers import MLP, Attend, Attention, Linear, RMSNorm, rotary_table
from drafters.rollout_attention import rollout_attention


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape of an EAGLE-3 drafter; the `norm_*` switches are those of EAGLE-3.1 and vLLM.

    norm_before_residual: the residual carries the normed state instead of the state.
    norm_before_fc: one RMSNorm over the concatenated captured states.
    fc_norm: one RMSNorm for each captured state.
    norm_output: the state handed to the next step has passed the final norm.
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
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"aux_layers": list(self.aux_layers)}


def rotary_of(config: Eagle3Config) -> LlamaRotaryEmbedding:
    """The drafter's rotary table, kept in a list so that no cast rounds it."""
    return rotary_table(
        config.head_dim, config.max_position_embeddings, dict(config.rope_parameters)
    )


class Eagle3Layer(Parted):
    """A decoder layer; the first one reads [embedding ; state], so its projections are 2H wide."""

    def __init__(self, config: Eagle3Config, first: bool) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.first, self.norm_before_residual = first, config.norm_before_residual
        self.self_attn = Attention(
            2 * H if first else H,
            H,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.mlp = MLP(H, config.intermediate_size)
        self.input_layernorm = RMSNorm(H, eps)
        self.post_attention_layernorm = RMSNorm(H, eps)
        if first:
            self.hidden_norm = RMSNorm(H, eps)

    def forward(
        self, embeds_BSH: Tensor, hidden_BSH: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        residual_BSH, *heads = self.before(embeds_BSH, hidden_BSH, cos, sin)
        return self.after(residual_BSH, attend(*heads))

    @part
    def before(
        self, embeds_BSH: Tensor, hidden_BSH: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual [B, S, H], queries, keys and values."""
        residual_BSH = hidden_BSH
        if self.first:
            normed_BSH = self.hidden_norm(hidden_BSH)
            if self.norm_before_residual:
                residual_BSH = normed_BSH
            x = torch.cat([self.input_layernorm(embeds_BSH), normed_BSH], -1)
        else:
            x = self.input_layernorm(hidden_BSH)
        return residual_BSH, *self.self_attn.heads(x, cos, sin)

    @part
    def after(self, residual_BSH: Tensor, out_BMSD: Tensor) -> Tensor:
        """What follows attention."""
        hidden_BSH = residual_BSH + self.self_attn.join(out_BMSD)
        return hidden_BSH + self.mlp(self.post_attention_layernorm(hidden_BSH))


@dataclass
class Eagle3State:
    """Cache of the committed positions and the output (unnormed) at the last of each row."""

    cache: KVCache
    last_hidden_BH: Tensor


class Eagle3(TrainedDrafter):
    """The drafter. `use_target` lends it the target's embedding, which it never trains.

    recompute: keep of a rollout step only its state, keys and values; the backward pass runs it
        again.
    """

    method = "eagle3"
    recompute = False

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.aux_layers = config.aux_layers
        num_aux, H = len(config.aux_layers), config.hidden_size
        F_width, eps = num_aux * config.target_hidden_size, config.rms_norm_eps
        self.fc = Linear(F_width, H, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(F_width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                [RMSNorm(config.target_hidden_size, eps) for _ in range(num_aux)]
            )
        self.layers = nn.ModuleList(
            [Eagle3Layer(config, first=i == 0) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(H, eps)
        self.lm_head = Linear(H, config.draft_vocab_size, bias=False)
        # target id = draft id + d2t[draft id]; an identity map when nothing is left out.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._rope = [rotary_of(config)]
        self._embeddings: list[Tensor] = []

    def use_embeddings(self, embed_weight_VH: Tensor) -> None:
        """Share the target's (frozen) embedding matrix [V, H]."""
        if embed_weight_VH.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"the target's embeddings are {embed_weight_VH.shape[1]} wide, the drafter "
                f"{self.config.hidden_size}: leave drafter.hidden_size out"
            )
        self._embeddings = [embed_weight_VH]

    def use_target(self, target: Target) -> None:
        self.use_embeddings(target.embed_weight_VH)

    def head_weights(self) -> list[Tensor]:
        return [self.lm_head.weight]

    @property
    def rope(self) -> LlamaRotaryEmbedding:
        """Rotary tables: (x, positions) -> cos, sin."""
        return self._rope[0]

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embeddings[0]).to(self.fc.weight.dtype)

    def fuse(self, aux_BSF: Tensor) -> Tensor:
        """Captured target states [B, S, F] -> the state of rollout step 0 [B, S, H]."""
        aux_BSF = aux_BSF.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            aux_BSF = self.input_norm(aux_BSF)
        if self.config.fc_norm:
            parts = aux_BSF.chunk(len(self.fc_norm), -1)
            aux_BSF = torch.cat([norm(p) for norm, p in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux_BSF)

    def step(
        self, ids_BS: Tensor, hidden_BSH: Tensor, positions_BS: Tensor, attends: list[Attend]
    ) -> Tensor:
        """One pass of the layers: the state handed on [B, S, H] (see `norm_output`)."""
        embeds_BSH = self.embed(ids_BS)
        cos, sin = self.rope(embeds_BSH, positions_BS)
        for layer, attend in zip(self.layers, attends, strict=True):
            hidden_BSH = layer(embeds_BSH, hidden_BSH, cos, sin, attend)
        return self.norm(hidden_BSH) if self.config.norm_output else hidden_BSH

    def head_input(self, state_H: Tensor) -> Tensor:
        """The state of a step -> what the head reads."""
        return state_H if self.config.norm_output else self.norm(state_H)

    def head_logits(self, state_H: Tensor) -> Tensor:
        """The state of a step -> logits over the draft vocabulary."""
        return self.lm_head(self.head_input(state_H))

    # Training: all rows at once.

    def features(self, aux_BSF: Tensor, _seed: int) -> Tensor:
        """What training gives the rows of step 0; what decoding gives them is `fuse`."""
        return self.fuse(aux_BSF)

    def rollout(
        self,
        ids_BS: Tensor,
        aux_BSF: Tensor,
        num_steps: int,
        seed: int = 0,
        documents: Documents | None = None,
    ) -> list[Tensor]:
        """Head inputs [B, S, H] of rollout steps 0..num_steps-1 (section 3.2: training-time test).

        Rows whose token t+1+k lies past the end of the row are computed on padding, or on what
        follows their document in a packed row; the caller's mask must leave them out. (Only they
        see it: no earlier row looks at them.)
        """
        S = ids_BS.shape[1]
        positions_1S = torch.arange(S, device=ids_BS.device)[None]
        if documents is not None:
            positions_1S = documents.position_1S
        hidden_BSH, outputs = self.features(aux_BSF, seed), []
        past: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.layers]
        for k in range(num_steps):
            shifted_BS = F.pad(ids_BS[:, 1 + k :], (0, min(1 + k, S)))
            step = (shifted_BS, hidden_BSH, positions_1S + k, past, documents)
            if self.recompute and torch.is_grad_enabled():
                hidden_BSH, past = checkpoint(
                    self._rollout_step, *step, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden_BSH, past = self._rollout_step(*step)
            outputs.append(self.head_input(hidden_BSH))
        return outputs

    def _rollout_step(
        self,
        ids_BS: Tensor,
        hidden_BSH: Tensor,
        positions_BS: Tensor,
        past: list[tuple[list[Tensor], list[Tensor]]],
        documents: Documents | None,
    ) -> tuple[Tensor, list[tuple[list[Tensor], list[Tensor]]]]:
        """One step of the rollout: its state, and `past` (keys, values of each layer) with its own.

        It changes nothing that it is given, so that a backward pass may run it again.
        """
        extended = [(list(keys), list(values)) for keys, values in past]

        def attend_in(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys, values = extended[layer]
                keys.append(key)
                values.append(value)
                return rollout_attention(query, keys, values, documents)

            return attend

        attends = [attend_in(i) for i in range(len(self.layers))]
        return self.step(ids_BS, hidden_BSH, positions_BS, attends), extended

    def slots(self, batch: Batch, num_depths: int) -> Slots:
        """Row t drafts behind anchor t + 1; rollout step k is depth k."""
        assert batch.aux_BSF is not None, "states are attached before the step"
        anchor_N, depth_N = supervised_slots(batch, num_depths)
        heads = self.rollout(batch.ids_BS, batch.aux_BSF, num_depths, batch.seed, batch.documents)
        parts = [h.flatten(0, 1)[anchor_N[depth_N == k] - 1] for k, h in enumerate(heads)]
        return Slots(torch.cat(parts), anchor_N, depth_N)

    # Decoding: step by step.

    def start(self, prompts: list[list[int]], max_length: int) -> Eagle3State:
        config, weight = self.config, self.fc.weight
        cache = KVCache(
            config.num_layers,
            len(prompts),
            max_length,
            config.num_key_value_heads,
            config.head_dim,
            weight.dtype,
            weight.device,
            self._compiled is not None,
        )
        return Eagle3State(cache, weight.new_zeros(len(prompts), config.hidden_size))

    def keep(self, state: Eagle3State, rows: list[int]) -> Eagle3State:
        state.cache.keep_rows(rows)
        return Eagle3State(state.cache, state.last_hidden_BH[rows])

    def _cached_step(self, state: Eagle3State, ids_BS: Tensor, hidden_BSH: Tensor) -> Tensor:
        state.cache.begin(ids_BS.shape[1])
        run: Callable[..., Tensor] = self._over_cache
        if self._compiled is not None and state.cache.fixed:
            run = self._compiled
        return run(state.cache, ids_BS, hidden_BSH)

    def compile_passes(self, mode: str, key: str) -> None:
        self._compiled = CompiledPass(self._over_cache, mode, key)

    def _over_cache(self, cache: KVCache, ids_BS: Tensor, hidden_BSH: Tensor) -> Tensor:
        mask_BST = cache.mask_BST()

        def attend_in(layer: int) -> Attend:
            return lambda query, key, value: masked_attention(
                query, *cache.append(layer, key, value), mask_BST
            )

        attends = [attend_in(i) for i in range(len(self.layers))]
        return self.step(ids_BS, hidden_BSH, cache.positions_BS, attends)

    @torch.no_grad()
    def observe(
        self, state: Eagle3State, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        """Rollout step 0 on the newly committed positions, with the target's own states."""
        out_BNH = self._cached_step(state, next_ids_BN, self.fuse(aux_BNF))
        state.cache.advance(num_B)
        last_B = (num_B - 1).clamp(min=0)
        newest_BH = out_BNH[state.cache.rows_B, last_B]
        state.last_hidden_BH = torch.where((num_B > 0)[:, None], newest_BH, state.last_hidden_BH)

    @torch.no_grad()
    def propose(
        self,
        state: Eagle3State,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """Rollout steps 1, 2, ... on its own tokens and states; the cache ends as it was."""
        committed_B = state.cache.lengths_B.clone()
        hidden_BH = state.last_hidden_BH
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for k in range(num_draft):
            token_B = draft.draw(self.head_logits(hidden_BH))
            if k + 1 < num_draft:
                hidden_BH = self._cached_step(state, token_B[:, None], hidden_BH[:, None])[:, 0]
                state.cache.advance(1)
        state.cache.rollback(committed_B)
        return draft.proposal()
