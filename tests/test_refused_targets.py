"""Targets whose state cannot be rolled back are refused when they are loaded."""

from typing import Any

import pytest
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from data.embedded import byte_tokenizer
from data.target import Target
from data.target_config import check_layers
from recipes.errors import UserError
from recipes.schema import TargetSection
from tests.tiny_targets import tiny_model

SMALL: dict[str, Any] = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def mamba2():
    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    return Mamba2ForCausalLM(Mamba2Config(**SMALL, **sizes))


def rwkv():
    return RwkvForCausalLM(RwkvConfig(**SMALL, attention_hidden_size=32))


def jamba():
    sizes = {"intermediate_size": 48, "num_experts": 2, "use_mamba_kernels": False}
    return JambaForCausalLM(JambaConfig(**SMALL, **HEADS, **sizes))


def qwen3_next():
    sizes = {"intermediate_size": 48, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    layers = ["linear_attention", "full_attention"]
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **HEADS, **sizes, layer_types=layers))


def lfm2():
    layers = ["conv", "full_attention"]
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, **HEADS, intermediate_size=48, layer_types=layers))


@pytest.mark.parametrize("make", [mamba2, rwkv, jamba, qwen3_next, lfm2])
def test_recurrent_target_is_refused(make, tmp_path):
    make().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    section = TargetSection(model=str(tmp_path))
    wanted = f"target.model {tmp_path}: {make.__name__} keeps a recurrent state.*cannot be rolled"
    with pytest.raises(UserError, match=wanted):
        Target.load(section)


def test_attention_of_an_unknown_kind_is_refused_for_what_it_is():
    config = tiny_model().config
    config.layer_types = ["chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(UserError, match=r"llama has chunked_attention layers, .*not supported yet"):
        check_layers("org/tiny", config, stateful=False)
