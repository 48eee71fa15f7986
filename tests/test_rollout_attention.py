"""Attention of the training-time test: equal to one softmax under an explicit mask, in O(S)."""

import pytest
import torch
from torch import Tensor

from drafters import rollout_attention as module
from drafters.rollout_attention import rollout_attention

Parts = tuple[Tensor, list[Tensor], list[Tensor]]


def brute_force(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over all (k + 1) S keys under an explicit mask."""
    length, D = query.shape[2:]
    groups = query.shape[1] // keys[0].shape[1]
    key = torch.cat(keys, 2).repeat_interleave(groups, 1)
    value = torch.cat(values, 2).repeat_interleave(groups, 1)
    mask = torch.zeros(length, len(keys) * length, dtype=torch.bool, device=query.device)
    for t in range(length):
        mask[t, : t + 1] = True
        for j in range(1, len(keys)):
            mask[t, j * length + t] = True
    scores = (query @ key.transpose(-1, -2)) / D**0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def parts_of(k: int, heads: int, kv_heads: int, S: int = 6, **kind: object) -> Parts:
    torch.manual_seed(0)

    def make(num: int) -> Tensor:
        x = torch.randn(2, S, num, 8, **kind).transpose(1, 2)  # type: ignore[call-overload]
        return x.requires_grad_()  # as projections give it

    steps = range(k + 1)
    return make(heads), [make(kv_heads) for _ in steps], [make(kv_heads) for _ in steps]


def assert_equal_with_gradients(parts: Parts, **tolerance: float) -> None:
    query, keys, values = parts
    got, expected = rollout_attention(*parts), brute_force(*parts)
    torch.testing.assert_close(got, expected, **tolerance)
    leaves, weight = [query, *keys, *values], torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        **tolerance,
    )


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
def test_equals_brute_force(k: int, heads: int, kv_heads: int) -> None:
    assert_equal_with_gradients(parts_of(k, heads, kv_heads))
    assert_equal_with_gradients(
        parts_of(k, heads, kv_heads, dtype=torch.float64), rtol=1e-10, atol=1e-10
    )


def test_long_rows_and_large_scores() -> None:
    query, keys, values = parts_of(2, 2, 1, S=700)
    assert_equal_with_gradients(
        ((query * 20).detach().requires_grad_(), keys, values), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("k", [1, 3])
def test_chunks_where_there_is_no_flash_kernel(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = parts_of(k, 4, 2, S=11)
    weight = torch.randn(2, 4, 11, 8)
    leaves = [query, *keys, *values]
    with_kernel = rollout_attention(query, keys, values)
    expected = torch.autograd.grad((with_kernel * weight).sum(), leaves)
    # The device test decides; a stand-in device type sends the CPU down the other way.
    monkeypatch.setattr(module, "FLASH_DEVICES", ())
    monkeypatch.setattr(module, "CHUNK", 4)
    chunked = rollout_attention(query, keys, values)
    torch.testing.assert_close(chunked, with_kernel)
    torch.testing.assert_close(torch.autograd.grad((chunked * weight).sum(), leaves), expected)


def test_bf16_and_autocast_stay_near_fp32() -> None:
    query, keys, values = parts_of(3, 4, 2, S=40)
    exact = brute_force(query, keys, values)
    halves = [[x.bfloat16() for x in xs] for xs in (keys, values)]
    torch.testing.assert_close(
        rollout_attention(query.bfloat16(), *halves).float(), exact, rtol=0.05, atol=0.05
    )
    with torch.autocast("cpu", torch.bfloat16):
        mixed = rollout_attention(query, keys, values)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), exact, rtol=0.05, atol=0.05)


def test_what_is_kept_grows_with_the_row_not_with_its_square() -> None:
    def kept(S: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            rollout_attention(*parts_of(2, 2, 2, S=S))
        return sum(sizes.values())

    # query, output, 3 keys, 3 values: 8 tensors of [2, 2, S, 8] and the logsumexp, in 4 bytes.
    assert kept(512) == 4 * 512 * (8 * 32 + 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_equals_brute_force(dtype: torch.dtype) -> None:
    parts = parts_of(3, 4, 2, S=200, device="cuda", dtype=dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert_equal_with_gradients(parts, rtol=tolerance, atol=tolerance)
