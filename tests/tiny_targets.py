"""Tiny random targets of several architectures, small enough to build in a test."""

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data.embedded import byte_tokenizer
from data.target import Target

KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 5,
        },
    ),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "sliding_window": 5,
            "attn_logit_softcapping": 0.8,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
}


def tiny_model(kind: str = "llama", **changes: Any) -> Any:
    """3 layers, 32 wide, 4 query heads on 2 kv heads; large weights, so that mistakes show."""
    config_class, model_class, special = KINDS[kind]
    fields = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    torch.manual_seed(0)
    return model_class(config_class(**(fields | special | changes))).eval()


def tiny_target(kind: str = "llama", **changes: Any) -> Target:
    return Target(tiny_model(kind, **changes), byte_tokenizer(), f"tiny-{kind}", "none")
