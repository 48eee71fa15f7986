"""The frozen target model, defined once for data preparation, training and decoding.

Dimension letters: B rows, S tokens, H hidden width, F captured width (number of layers x H),
V vocabulary.

Layer ids: `k` is the residual stream after k decoder layers: 0 = embeddings, n = after the last
layer and *before* the final norm. (transformers' `hidden_states[k]` is the same for k < n, but its
last entry has passed the final norm; that difference is why captured states come from hooks here.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from data import conversations, embedded
from data.attention import ATTENTION, thin_linear, use_thin_linears
from data.cache import KVCache, TreeNodes
from data.compiled import CompiledPass
from data.documents import Documents
from data.target_config import (
    cache_for,
    check_layers,
    head_scale,
    resolve_device,
    resolve_dtype,
    revision_of,
)
from data.target_ends import load_ends
from data.target_parts import Parts, join_parts, load_in_parts, whole_tensor
from recipes.errors import UserError
from recipes.schema import TargetSection

# Why our logits may differ from a model's own; the architecture stands in the braces.
HEAD = "{} scales its head in a way that is not supported yet"
ATTENDS = "the attention of {} is not supported yet"


class HeadRows(NamedTuple):
    """Some rows of the target's output head."""

    weight_DH: Tensor
    bias_D: Tensor | None


@dataclass
class TargetStates:
    """What one forward pass leaves: hidden_BSH before the final norm, aux_BSF captured layers."""

    hidden_BSH: Tensor
    aux_BSF: Tensor


class Target:
    """A causal language model that is only ever read.

    Args:
        config: of the text model with all its layers, where `model` has the last one alone
            (target.weights: ends); with embedding, final norm and head that is what training on
            stored states needs. `whole` is False then.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str,
        config: PreTrainedConfig | None = None,
        parts: Parts | None = None,
    ) -> None:
        self._parts = parts
        self.config = config or model.config.get_text_config()
        check_layers(name, self.config, bool(model._is_stateful))
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name, self.revision = name, revision
        self.model.set_attn_implementation(ATTENTION)
        use_thin_linears(model)
        self.decoder: Any = self.model.get_decoder()
        try:
            num_loaded, _ = len(self.decoder.layers), self.decoder.norm
        except AttributeError as error:
            raise UserError(
                f"target {name}: architecture {self.config.model_type} is not supported: "
                f"no layers and final norm where Llama, Qwen and Gemma have them ({error})"
            ) from error
        self.num_layers = int(self.config.num_hidden_layers)
        self.whole = num_loaded == self.num_layers
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        self.eos_ids = conversations.eos_ids(self.model.generation_config, self.config, tokenizer)
        self.pad_id = conversations.pad_token_id(tokenizer, self.eos_ids)
        self._wanted: set[int] = set()
        self._states: dict[int, Tensor] = {}
        self._compiled: CompiledPass | None = None
        for index, layer in enumerate(self.decoder.layers):
            layer.register_forward_hook(self._hook(index + 1))
        self._logit_scale, self._softcap = head_scale(self.config.to_dict())
        if self.whole:
            first = self.decoder.layers[0]
            first.register_forward_pre_hook(self._embedding_hook, with_kwargs=True)
            self._check_conventions()
        else:
            self._check_ends()

    @classmethod
    def load(cls, section: TargetSection, dtype: str | None = None) -> "Target":
        """Load `section.model` (embedded, folder or hub id); `dtype` overrides the section's."""
        path = embedded.resolve(section.model)
        device = resolve_device(section.device)
        kind = resolve_dtype(dtype or section.dtype, device)
        common: dict[str, Any] = {
            "revision": section.revision,
            "trust_remote_code": section.trust_remote_code,
        }
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **common)
            config: Any = AutoConfig.from_pretrained(path, **common)
            text = deepcopy(config.get_text_config())
            text.dtype = kind
            loaded: Any
            parts = join_parts(device) if section.placement == "sharded" else None
            if section.weights == "ends":
                loaded, parts = load_ends(path, config, kind, section.revision), None
            elif parts is not None:
                loaded = load_in_parts(path, config, kind, device, parts, **common)
            else:
                loaded = AutoModelForCausalLM.from_pretrained(
                    path, dtype=kind, output_loading_info=True, **common
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"target.model {section.model!r} cannot be loaded: {error}") from error
        model, report = loaded
        if missing := sorted(report["missing_keys"]):  # random numbers stand there now
            raise UserError(
                f"target.model {section.model!r} cannot be loaded: {len(missing)} weights that its "
                f"config asks for are missing, such as {missing[0]}"
            )
        conversations.check_tokenizer(tokenizer, int(text.vocab_size))
        revision = revision_of(path, config)
        cut = text if section.weights == "ends" else None
        if parts is None:
            model = model.to(device)
        return cls(model, tokenizer, section.model, revision, cut, parts)

    @property
    def device(self) -> torch.device:
        return self.embed_weight_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight_VH.dtype

    @property
    def embed_weight_VH(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight_VH(self) -> Tensor:
        """Rows of the output head (the embedding itself when the target ties them)."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for `batch_size` rows of at most `max_length` tokens."""
        fixed = self._compiled is not None
        return cache_for(self.config, batch_size, max_length, self.dtype, self.device, fixed)

    def compile_passes(self, mode: str, key: str) -> None:
        """Run short passes over caches made from now on through torch.compile (data.compiled)."""

        def run(cache: KVCache, ids_BS: Tensor, aux_layers: tuple[int, ...]) -> Any:
            kwargs = {"position_ids": cache.positions_BS, "kv_cache": cache}
            states = self._run_layers(ids_BS, aux_layers, kwargs)
            return states.hidden_BSH, states.aux_BSF

        self._compiled = CompiledPass(run, mode, key)

    @torch.no_grad()
    def forward(
        self,
        ids_BS: Tensor,
        cache: KVCache | None = None,
        aux_layers: tuple[int, ...] = (),
        nodes: TreeNodes | None = None,
        documents: Documents | None = None,
    ) -> TargetStates:
        """Run the decoder over new tokens.

        Args:
            ids_BS: token ids; rows are padded on the right (what stands there has no effect on
                what stands before it).
            cache: appended to at each row's own length; the caller then calls `cache.advance`.
            aux_layers: layer ids to capture, concatenated in this order.
            nodes: how the new tokens hang together where they are a tree (needs a cache).
            documents: what a packed row holds (without a cache); none sees another.

        Raises:
            UserError: the layers are not loaded.
        """
        if not self.whole:
            raise UserError(
                f"target {self.name} is loaded without most of its layers (target.weights: ends): "
                "it can neither write nor give states; set target.weights: whole"
            )
        kwargs: dict[str, Any] = {}
        if cache is not None:
            cache.begin(ids_BS.shape[1], nodes)
            if self._compiled is not None and cache.fixed:
                return TargetStates(*self._compiled(cache, ids_BS, aux_layers))
            kwargs = {"position_ids": cache.positions_BS, "kv_cache": cache}
        elif documents is not None:
            kwargs = documents.model_inputs()
        if self._parts is not None:
            self._parts.begin_pass(self.decoder.layers)
        return self._run_layers(ids_BS, aux_layers, kwargs)

    def _run_layers(
        self, ids_BS: Tensor, aux_layers: tuple[int, ...], kwargs: dict[str, Any]
    ) -> TargetStates:
        self._wanted = {*aux_layers, self.num_layers}
        self.decoder(input_ids=ids_BS, use_cache=False, **kwargs)
        states, self._states = self._states, {}
        hidden_BSH = states[self.num_layers]
        aux_BSF = (
            torch.cat([states[k] for k in aux_layers], -1) if aux_layers else hidden_BSH[..., :0]
        )
        return TargetStates(hidden_BSH, aux_BSF)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Within, ranks may call `forward` different numbers of times, also where it is sharded.

        All ranks enter and leave it, and nothing else that they do together stands in it.
        """
        if self._parts is None:
            yield
            return
        one_BS = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with self._parts.uneven(lambda: self.forward(one_BS)):
            yield

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """Whole weights of a decoder layer by their names in it. All ranks call it."""
        weights = self.decoder.layers[index].state_dict()
        return {name: whole_tensor(values) for name, values in weights.items()}

    @torch.no_grad()
    def final_norm(self, hidden_H: Tensor) -> Tensor:
        """States before the final norm -> what the head reads, in the target's dtype."""
        return self.decoder.norm(hidden_H.to(self.dtype))

    def head_rows(self, token_ids: Tensor) -> "HeadRows":
        """The rows of the output head that belong to some tokens, for `logits`."""
        bias = self.model.get_output_embeddings().bias
        return HeadRows(self.head_weight_VH[token_ids], None if bias is None else bias[token_ids])

    @torch.no_grad()
    def logits(self, hidden_H: Tensor, rows: "HeadRows | None" = None) -> Tensor:
        """fp32 logits [..., V] of states before the final norm, or of some tokens only."""
        if rows is None:
            rows = HeadRows(self.head_weight_VH, self.model.get_output_embeddings().bias)
        logits = thin_linear(self.decoder.norm(hidden_H), rows.weight_DH, rows.bias_D)
        logits = logits.float() * self._logit_scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def _hook(self, k: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if k in self._wanted:
                self._states[k] = output if isinstance(output, Tensor) else output[0]

        return keep

    def _embedding_hook(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if 0 in self._wanted:
            self._states[0] = args[0] if args else kwargs["hidden_states"]

    def _check_ends(self) -> None:
        """Our norm and head must give the logits that the model's own code makes of any state."""
        seen: list[Tensor] = []
        hook = self.decoder.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        _, expected = self._probe()
        hook.remove()
        self._require_near(self.logits(seen[0]), expected, "rebuilt from a state", HEAD)

    def _check_conventions(self) -> None:
        """Our states and head must give the model's own logits, or nothing later is right."""
        ids_BS, expected = self._probe()
        ours = self.logits(self.forward(ids_BS).hidden_BSH)
        self._require_near(ours, expected, "rebuilt from its last state", HEAD)
        cache = self.new_cache(1, 8)
        for part_BS in ids_BS.split(4, 1):
            cached = self.logits(self.forward(part_BS, cache).hidden_BSH)
            cache.advance(4)
        self._require_near(cached, expected[:, 4:], "computed over a cache", ATTENDS)

    @torch.no_grad()
    def _probe(self) -> tuple[Tensor, Tensor]:
        """Eight tokens, and the logits that the model's own code makes of them."""
        ids_BS = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        return ids_BS, self.model(input_ids=ids_BS, use_cache=False).logits.float()

    def _require_near(self, ours: Tensor, expected: Tensor, made: str, cause: str) -> None:
        tolerance = (1e-4 if self.dtype == torch.float32 else 5e-2) * float(expected.abs().max())
        worst = float((ours - expected).abs().max())
        if not worst <= tolerance:
            architecture = cause.format(f"this architecture ({self.config.model_type})")
            raise UserError(
                f"target {self.name}: logits {made} differ from its own by {worst:.3g}; "
                + architecture
            )
