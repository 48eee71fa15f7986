"""The frozen target model, defined once for data preparation, training and decoding.

Dimension letters: B rows, S tokens, H hidden width, F captured width (number of layers x H),
V vocabulary.

Layer ids: `k` is the residual stream after k decoder layers: 0 = embeddings, n = after the last
layer and *before* the final norm. (transformers' `hidden_states[k]` is the same for k < n, but its
last entry has passed the final norm; that difference is why captured states come from hooks here.)
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
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
from data.files import stable_hash
from data.target_ends import load_ends
from data.target_parts import Parts, join_parts, load_in_parts, whole_tensor
from recipes.errors import UserError
from recipes.schema import TargetSection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HeadRows(NamedTuple):
    """Some rows of the target's output head."""

    weight_DH: Tensor
    bias_D: Tensor | None


@dataclass
class TargetStates:
    """What one forward pass leaves: hidden_BSH before the final norm, aux_BSF captured layers."""

    hidden_BSH: Tensor
    aux_BSF: Tensor


def resolve_device(name: str) -> torch.device:
    """The device that "auto" stands for, or the named one if it is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("target.device is 'cuda', but torch sees no CUDA device; use 'auto'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it (CUDA, CPUs with AVX512-BF16), else fp32.

    Without those instructions a bf16 product on a CPU costs as much as its rows one by one, so
    nothing would be gained from verifying several tokens in one pass.
    """
    if name != "auto":
        return DTYPES[name]
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


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
        common = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
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
        ids_BS = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            expected = self.model(input_ids=ids_BS, use_cache=False).logits.float()
        hook.remove()
        worst = float((self.logits(seen[0]) - expected).abs().max())
        tolerance = (1e-4 if self.dtype == torch.float32 else 5e-2) * float(expected.abs().max())
        if not worst <= tolerance:
            raise UserError(
                f"target {self.name}: logits rebuilt from a state differ from its own by "
                f"{worst:.3g}; this architecture ({self.config.model_type}) scales its head in a "
                "way that is not supported yet"
            )

    def _check_conventions(self) -> None:
        """Our states and head must give the model's own logits, or nothing later is right."""
        cache = self.new_cache(1, 8)
        ids_BS = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            expected = self.model(input_ids=ids_BS, use_cache=False).logits.float()
        ours = self.logits(self.forward(ids_BS).hidden_BSH)
        tolerance = (1e-4 if self.dtype == torch.float32 else 5e-2) * float(expected.abs().max())
        worst = float((ours - expected).abs().max())
        if not worst <= tolerance:
            raise UserError(
                f"target {self.name}: logits rebuilt from its last state differ from its own by "
                f"{worst:.3g}; this architecture ({self.config.model_type}) scales its head in a "
                "way that is not supported yet"
            )
        for part_BS in ids_BS.split(4, 1):
            cached = self.logits(self.forward(part_BS, cache).hidden_BSH)
            cache.advance(4)
        worst = float((cached - expected[:, 4:]).abs().max())
        if not worst <= tolerance:
            raise UserError(
                f"target {self.name}: logits computed over a cache differ from its own by "
                f"{worst:.3g}; the attention of this architecture ({self.config.model_type}) is "
                "not supported yet"
            )


def cache_for(
    config: PreTrainedConfig,
    batch_size: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed_width: bool = False,
) -> KVCache:
    """An empty cache of the shape that a text model's config asks for."""
    heads = int(config.num_attention_heads)
    return KVCache(
        int(config.num_hidden_layers),
        batch_size,
        max_length,
        int(config.num_key_value_heads or heads),
        int(config.to_dict().get("head_dim") or config.hidden_size // heads),
        dtype,
        device,
        fixed_width,
    )


def head_scale(fields: dict[str, Any]) -> tuple[float, float | None]:
    """What a text model's config says of its logits: their factor, and where they are capped."""
    scale = fields.get("logit_scale") or 1.0 / (fields.get("logits_scaling") or 1.0)
    return float(scale), fields.get("final_logit_softcapping")


def check_layers(name: str, config: PreTrainedConfig, stateful: bool) -> None:
    """Refuse layers that keep no keys and values by position, and kinds of attention not known.

    Args:
        config: of the text model.
        stateful: transformers' own mark of models with a recurrent state.

    Raises:
        UserError: rejected tokens could not be taken back, or would be masked wrongly.
    """
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    recurrent = [kind for kind in unknown if not kind.endswith("attention")]
    if stateful or recurrent or "linear_attention" in unknown:
        layers = f" ({', '.join(unknown)} layers)" if unknown else ""
        raise UserError(
            f"target.model {name}: {config.model_type} keeps a recurrent state{layers}, which "
            "cannot be rolled back when drafted tokens are rejected; choose a target whose layers "
            "are all full or sliding attention"
        )
    if unknown:
        raise UserError(
            f"target.model {name}: {config.model_type} has {', '.join(unknown)} layers, which are "
            "not supported yet; choose a target with full or sliding attention"
        )


def revision_of(path: str, config: Any) -> str:
    """The hub commit, or a hash of a local folder's config and weight sizes."""
    folder = Path(path)
    if not folder.is_dir():
        return str(config._commit_hash)
    sizes = {f.name: f.stat().st_size for f in sorted(folder.glob("*.safetensors"))}
    return stable_hash([json.loads((folder / "config.json").read_text()), sizes])
