"""The repairs of vLLM's CPU build, by hand (tests/vllm/plugin; vLLM itself is not needed)."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file


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
    output.zero_()
    repairs.expand(output, temperatures, ends, 0.0, 1.0, 8)  # as vLLM's dispatcher calls it
    assert output.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]


def test_keys_are_normed_with_their_own_layers_weights(repairs):
    weights = torch.tensor([[1.0, 1.0], [2.0, 10.0]])
    model = SimpleNamespace(_rms_norm_eps=0.0, _k_norm_weights=weights)
    keys = torch.tensor([3.0, -3.0]).expand(2, 4, 1, 2)  # 2 layers, 4 tokens, 1 head
    normed = repairs.norm_context_keys(model, keys)
    assert normed[0, 0, 0].tolist() == [1.0, -1.0]
    assert normed[1, 3, 0].tolist() == [2.0, -10.0]


def test_states_are_those_of_a_requests_blocks(repairs, tmp_path):
    cache = torch.arange(4 * 2 * 3 * 2.0).reshape(4, 2, 3, 2)  # blocks, layers, tokens, width
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_WRONLY)
    connector = SimpleNamespace(
        _is_tp_rank_zero=True, _kv_cache=cache, _lock_fds={"r": lock}, _req_copy_events={}
    )
    pending = SimpleNamespace(
        req_id="r",
        filename=str(tmp_path / "new" / "r.safetensors"),
        token_ids=torch.tensor([7, 8, 9, 10]),
        block_ids=[2, 0],
    )
    repairs.write_states(connector, pending)
    states = load_file(pending.filename)["hidden_states"]
    assert states.shape == (4, 2, 2)  # tokens, layers, width
    assert torch.equal(states[0], cache[2, :, 0]) and torch.equal(states[2], cache[2, :, 2])
    assert torch.equal(states[3], cache[0, :, 0])
    assert connector._lock_fds == {} and connector._req_copy_events["r"].query()
