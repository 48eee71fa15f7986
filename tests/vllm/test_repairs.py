"""The repairs of vLLM's CPU build, by hand (tests/vllm/plugin; vLLM itself is not needed)."""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def repairs() -> ModuleType:
    path = Path(__file__).parent / "plugin" / "vllm_cpu_repairs.py"
    spec = importlib.util.spec_from_file_location("vllm_cpu_repairs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_requests_value_is_repeated_for_its_tokens(repairs):
    output = torch.zeros(5)
    temperatures, ends = torch.tensor([0.5, 0.0]), torch.tensor([2, 5], dtype=torch.int32)
    repairs.expand(output, temperatures, ends, 0.0, 1.0, MAX_NUM_TOKENS=8)
    assert output.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]  # 0 is replaced by 1
    assert temperatures.tolist() == [0.5, 0.0]


def test_keys_are_normed_with_their_own_layers_weights(repairs):
    weights = torch.tensor([[1.0, 1.0], [2.0, 10.0]])
    model = SimpleNamespace(_rms_norm_eps=0.0, _k_norm_weights=weights)
    keys = torch.tensor([3.0, -3.0]).expand(2, 4, 1, 2)  # 2 layers, 4 tokens, 1 head
    normed = repairs.norm_context_keys(model, keys)
    assert normed[0, 0, 0].tolist() == [1.0, -1.0]
    assert normed[1, 3, 0].tolist() == [2.0, -10.0]
