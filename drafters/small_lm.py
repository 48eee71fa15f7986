"""An independent small language model as the drafter, and its parallel form.

Dimension letters: B rows, S positions, H drafter width, W width of what the head reads (H, and one
more for a head with a bias), N slots or newly committed tokens, K proposed tokens, V vocabulary, T
places that attention sees.

The model is one of transformers' own, run on the project's attention, so that any architecture
whose layers are all attention serves. It reads tokens alone: at the anchor it predicts the token
after it, and so on over its own draft. Trained on the target's distribution this is DistillSpec
(Zhou et al. 2310.08461).

PARD (An et al. 2504.18583) drafts all tokens in one pass: behind the anchor stand mask tokens, and
the one of depth k predicts token s+1+k from the text up to the anchor and the masks before it.
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from data.attention import ATTENTION, thin_linear, use_thin_linears
from data.batch import Batch
from data.cache import KVCache
from data.compiled import CompiledPass, compile_forward
from data.target import Target
from data.target_config import cache_for, head_scale
from drafters.anchors import (
    anchors_of,
    by_stretch,
    drop_by_depth,
    supervised_anchors,
    supervised_slots,
)
from drafters.base import Proposal, Sampling, Slots, TrainedDrafter
from drafters.drafting import Draft
from drafters.rollout_attention import rollout_attention
from recipes.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SmallLMConfig:
    """model: the config of a transformers text model, as a dict with its model_type."""

    model: dict[str, Any]
    aux_layers: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def hidden_size(self) -> int:
        return int(self.model["hidden_size"])

    def to_dict(self) -> dict[str, Any]:
        """The model's own keys beside the others; its dtype is that of some file, not its shape."""
        fields = asdict(self)
        model = {name: value for name, value in fields.pop("model").items() if name != "dtype"}
        return model | fields | {"aux_layers": list(self.aux_layers)}


@dataclass(frozen=True, kw_only=True)
class PardConfig(SmallLMConfig):
    """A small LM's shape and: mask_token_id, which stands for a token that is not known yet.

    keep_ratio, min_keep_ratio: of the anchors, the share max(keep_ratio^d, min_keep_ratio) trains
    depth d (conditional drop); num_anchors: a row, None = all. They matter in training alone.
    """

    mask_token_id: int
    keep_ratio: float = 1.0
    min_keep_ratio: float = 0.0
    num_anchors: int | None = None


@dataclass
class SmallLMState:
    """The cache over all committed tokens, and what the head reads at the newest one.

    first_B: the first token of each prompt, until it has been run over.
    """

    cache: KVCache
    last_BW: Tensor
    first_B: Tensor | None


def model_config(fields: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config that a dict describes."""
    rest = {name: value for name, value in fields.items() if name != "model_type"}
    return AutoConfig.for_model(fields["model_type"], **copy.deepcopy(rest))


class SmallLM(TrainedDrafter):
    """The drafter; see the module's text."""

    method = "small_lm"
    config: SmallLMConfig

    def __init__(self, config: SmallLMConfig) -> None:
        super().__init__()
        self.config, self.aux_layers = config, ()
        shape = model_config(config.model)
        self.lm: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        self.lm.set_attn_implementation(ATTENTION)
        use_thin_linears(self.lm)
        if self.tied:  # the head is the embedding; a second name for it would be saved twice
            self.lm.lm_head = None
        self._scale, softcap = head_scale(config.model)
        if softcap:
            raise UserError(
                f"the drafter's architecture {shape.model_type} caps its logits, which no loss "
                "here knows; choose another one"
            )
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.config.model.get("tie_word_embeddings"))

    def use_target(self, target: Target) -> None:
        """Nothing is borrowed; the vocabulary must be the same."""
        if target.vocab_size != self.config.vocab_size:
            raise UserError(
                f"the drafter has {self.config.vocab_size} tokens, the target {target.name} has "
                f"{target.vocab_size}: a small LM needs the target's vocabulary"
            )

    def vocabulary_weights(self) -> list[nn.Parameter]:
        """The embedding and, where it is not tied, the head with its bias."""
        embedding = list(self.lm.get_input_embeddings().parameters())
        return embedding if self.tied else embedding + list(self.lm.lm_head.parameters())

    # The head: linear in what `states` gives, also where the model scales or shifts its logits.

    def head_weights(self) -> list[Tensor]:
        weight, bias = self._head()
        return [weight if bias is None else torch.cat([weight, bias[:, None]], 1)]

    def _head(self) -> tuple[Tensor, Tensor | None]:
        if self.tied:
            return self.lm.get_input_embeddings().weight, None
        return self.lm.lm_head.weight, self.lm.lm_head.bias

    def head_logits(self, state_NW: Tensor) -> Tensor:
        """What the head reads -> logits [N, V]."""
        return thin_linear(state_NW, self.head_weights()[0])

    def states(self, ids_BS: Tensor, **kwargs: Any) -> Tensor:
        """What the head reads [B, S, W], after the model's own final norm."""
        decoder = self.lm.get_decoder()
        out = decoder(input_ids=ids_BS, use_cache=False, **kwargs).last_hidden_state * self._scale
        return out if self._head()[1] is None else F.pad(out, (0, 1), value=1.0)

    # Training.

    def slots(self, batch: Batch, num_depths: int) -> Slots:
        """The row at s + k is the slot of depth k, since drafted tokens are the row's own.

        So depths beyond 0 train nothing new: a row's own token counts once with one depth.
        """
        anchor_N, depth_N = supervised_slots(batch, num_depths)
        documents = batch.documents
        packed = {} if documents is None else documents.model_inputs()
        states_BSW = self.states(batch.ids_BS, **packed)
        return Slots(states_BSW.flatten(0, 1)[anchor_N + depth_N], anchor_N, depth_N)

    def compile_training(self, mode: str, key: str) -> None:
        """Norms and MLPs; attention is transformers' own code around ours, and stays as it is."""
        decoder = self.lm.get_decoder()
        layers = [child for layer in decoder.layers for child in layer.children()]
        for module in [*layers, decoder.norm]:
            if "layer_idx" not in vars(module):
                compile_forward(module, mode, key)

    # Decoding: `observe` runs over what was committed, the anchor too; `propose` goes on from it.

    def start(self, prompts: list[list[int]], max_length: int) -> SmallLMState:
        weight = self.lm.get_input_embeddings().weight
        first_B = torch.tensor([prompt[0] for prompt in prompts], device=weight.device)
        return SmallLMState(
            # One place more than the target's cache: that one never holds the newest token.
            cache_for(
                self.lm.config,
                len(prompts),
                max_length + 1,
                weight.dtype,
                weight.device,
                self._compiled is not None,
            ),
            weight.new_zeros(len(prompts), self.head_weights()[0].shape[1]),
            first_B,
        )

    def keep(self, state: SmallLMState, rows: list[int]) -> SmallLMState:
        state.cache.keep_rows(rows)
        first_B = None if state.first_B is None else state.first_B[rows]
        return SmallLMState(state.cache, state.last_BW[rows], first_B)

    def _cached(self, cache: KVCache, ids_BN: Tensor) -> Tensor:
        cache.begin(ids_BN.shape[1])
        if self._compiled is not None and cache.fixed:
            return self._compiled(cache, ids_BN)
        return self._over_cache(cache, ids_BN)

    def compile_passes(self, mode: str, key: str) -> None:
        self._compiled = CompiledPass(self._over_cache, mode, key)

    def _over_cache(self, cache: KVCache, ids_BN: Tensor) -> Tensor:
        return self.states(ids_BN, position_ids=cache.positions_BS, kv_cache=cache)

    @torch.no_grad()
    def observe(
        self, state: SmallLMState, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        """Run over the newly committed tokens; the last one is the anchor."""
        if state.first_B is not None:
            next_ids_BN, num_B = torch.cat([state.first_B[:, None], next_ids_BN], 1), num_B + 1
            state.first_B = None
        states_BNW = self._cached(state.cache, next_ids_BN)
        state.cache.advance(num_B)
        newest_BW = states_BNW[state.cache.rows_B, (num_B - 1).clamp(min=0)]
        state.last_BW = torch.where((num_B > 0)[:, None], newest_BW, state.last_BW)

    @torch.no_grad()
    def propose(
        self,
        state: SmallLMState,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """The model's own continuation; the cache ends as it was."""
        committed_B = state.cache.lengths_B.clone()
        state_BW = state.last_BW
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for k in range(num_draft):
            token_B = draft.draw(self.head_logits(state_BW))
            if k + 1 < num_draft:
                state_BW = self._cached(state.cache, token_B[:, None])[:, 0]
                state.cache.advance(1)
        state.cache.rollback(committed_B)
        return draft.proposal()


class ChainKeys:
    """Attention of one row's S tokens and the N masks of its drafts (data.attention.Chains).

    A token sees those up to itself; a mask the tokens up to its anchor and, of its own draft, the
    masks up to itself. Put at the row of its anchor, a mask of depth d sees what that row sees at
    step d of EAGLE-3's rollout: so the same kernel serves, and memory stays linear.
    """

    def __init__(self, num_tokens: int, anchors: list[Tensor]) -> None:
        """anchors[d - 1] are the anchors of depth d; each set lies within the one before."""
        self.num_tokens, self.anchors = num_tokens, anchors
        self.anchor_N = torch.cat(anchors)
        depths = [torch.full_like(part, d) for d, part in enumerate(anchors, 1)]
        self.depth_N = torch.cat(depths)
        places_S = torch.arange(num_tokens, device=self.anchor_N.device)
        self.positions_T = torch.cat([places_S, self.anchor_N + self.depth_N])
        self.longest = num_tokens + len(anchors)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[1, heads, S + N, D]; see data.attention.Chains."""
        S, D = self.num_tokens, query.shape[-1]
        if scaling is not None and scaling != D**-0.5:  # the kernel has one of its own
            query = query * (scaling * D**0.5)
        sizes = [S, *(len(part) for part in self.anchors)]
        asked, own_keys, own_values = (x.split(sizes, 2) for x in (query, key, value))
        keys, values = [own_keys[0]], [own_values[0]]
        out = [rollout_attention(asked[0], keys, values)]
        for d, at_A in enumerate(self.anchors, 1):
            if not len(at_A):
                break
            keys.append(at_rows(own_keys[d], at_A, S))
            values.append(at_rows(own_values[d], at_A, S))
            out.append(rollout_attention(at_rows(asked[d], at_A, S), keys, values)[:, :, at_A])
        return torch.cat(out, 2)

    def append(self, _layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing was there before."""
        return keys, values

    def mask_BST(self, sliding_window: int | None = None) -> Tensor:
        """True where a row may look; a window counts positions."""
        anchor_N, depth_N = self.anchor_N, self.depth_N
        places_S = torch.arange(self.num_tokens, device=anchor_N.device)
        own_NN = anchor_N[:, None] == anchor_N
        own_NN = own_NN & (depth_N <= depth_N[:, None])
        text_NS = places_S <= anchor_N[:, None]
        tokens_ST = F.pad(places_S <= places_S[:, None], (0, len(anchor_N)))
        mask_TT = torch.cat([tokens_ST, torch.cat([text_NS, own_NN], 1)])
        if sliding_window is None:
            return mask_TT[None]
        oldest_T1 = self.positions_T[:, None] - sliding_window
        return (mask_TT & (self.positions_T > oldest_T1))[None]


def at_rows(x: Tensor, at_A: Tensor, num_rows: int) -> Tensor:
    """[1, heads, A, D] -> [1, heads, num_rows, D], each at its row; zeros elsewhere."""
    return x.new_zeros(*x.shape[:2], num_rows, x.shape[3]).index_copy(2, at_A, x)


class Pard(SmallLM):
    """The parallel form; see the module's text."""

    method = "pard"
    config: PardConfig

    def __init__(self, config: PardConfig) -> None:
        super().__init__(config)
        self.num_anchors = config.num_anchors

    def slots(self, batch: Batch, num_depths: int) -> Slots:
        """Depth 0 is the token's own row, deeper ones are masks, fewer and fewer of them."""
        stretches = batch.stretches  # rows, or documents of a packed row
        ids = batch.ids_BS.flatten().split(stretches)
        allowed = supervised_anchors(batch.mask_BS, num_depths)
        generator = torch.Generator().manual_seed(batch.seed)
        config = self.config
        heads, anchors, depths = [], [], []
        start = 0
        for row_A, ids_S in zip(by_stretch(anchors_of(batch), stretches), ids, strict=True):
            S = len(ids_S)
            sets = drop_by_depth(
                row_A, allowed, generator, config.keep_ratio, config.min_keep_ratio
            )
            keys = ChainKeys(S, [part - start for part in sets])
            ids_T = torch.cat([ids_S, self._masks(len(keys.anchor_N))])
            positions_1T = keys.positions_T[None]
            states_TW = self.states(ids_T[None], position_ids=positions_1T, chains=keys)[0]
            heads += [states_TW[row_A - start], states_TW[S:]]
            anchors += [row_A, keys.anchor_N + start]
            depths += [torch.zeros_like(row_A), keys.depth_N]
            start += S
        return Slots(torch.cat(heads), torch.cat(anchors), torch.cat(depths))

    def _masks(self, num: int) -> Tensor:
        return torch.full((num,), self.config.mask_token_id, device=self.d2t.device)

    @torch.no_grad()
    def propose(
        self,
        state: SmallLMState,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """One pass over the masks behind the anchor; the cache ends as it was."""
        rows_BKW = state.last_BW[:, None]
        if num_draft > 1:
            ids_BK = self._masks(num_draft - 1).expand(len(state.last_BW), -1)
            rows_BKW = torch.cat([rows_BKW, self._cached(state.cache, ids_BK)], 1)
        draft = Draft(self, sampling, uniforms_BK, seen_BV)
        for logits_BV in self.head_logits(rows_BKW).unbind(1):
            draft.draw(logits_BV)
        return draft.proposal()
