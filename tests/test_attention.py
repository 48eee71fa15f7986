"""The target's attention and matrix products against those of transformers and torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from data.attention import THIN_ROWS, ThinLinear, thin_linear, use_thin_linears
from data.cache import KVCache
from tests.tiny_targets import KINDS, tiny_model, tiny_target

S = 13  # longer than every sliding window (5)


def ids(batch: int, length: int = S) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def reference(kind: str, ids_BS: torch.Tensor) -> torch.Tensor:
    model = tiny_model(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=ids_BS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind):
    expected = reference(kind, ids(2))
    target = tiny_target(kind)
    assert expected.std() > 0.1
    torch.testing.assert_close(target.logits(target.forward(ids(2)).hidden_BSH), expected)
    with torch.no_grad():  # and through the model's own head
        torch.testing.assert_close(target.model(input_ids=ids(2)).logits, expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral"])
def test_sdpa_of_transformers_agrees_as_well(kind):
    model = tiny_model(kind)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(input_ids=ids(2), use_cache=False).logits
    torch.testing.assert_close(reference(kind, ids(2)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[13], [1] * 13, [6, 1, 4, 2]], ids=["one", "each", "mixed"])
def test_cached_passes_equal_one_pass(kind, pieces):
    expected = reference(kind, ids(2))
    target = tiny_target(kind)
    cache = target.new_cache(2, S)
    logits = []
    for piece in ids(2).split(pieces, 1):
        logits.append(target.logits(target.forward(piece, cache).hidden_BSH))
        cache.advance(piece.shape[1])
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=2e-5, rtol=1e-5)
    assert cache.lengths_B.tolist() == [13, 13]


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_equal_rows_alone(kind):
    # Prefill of 3, 9 and 6 tokens, then 4 more each, of which 1, 4 and 2 are kept, then 2 more.
    target, ids_BS = tiny_target(kind), ids(3, 20)
    lengths, kept = [3, 9, 6], [1, 4, 2]
    cache = target.new_cache(3, 32)
    target.forward(ids_BS[:, :9], cache)
    cache.advance(torch.tensor(lengths))
    at = torch.tensor(lengths)[:, None] + torch.arange(4)
    target.forward(ids_BS.gather(1, at), cache)
    cache.advance(4)
    cache.rollback(torch.tensor(lengths) + torch.tensor(kept))
    starts = torch.tensor(lengths) + torch.tensor(kept)
    new_B2 = ids_BS.gather(1, starts[:, None] + torch.arange(2))
    got = target.logits(target.forward(new_B2, cache).hidden_BSH)
    for b, start in enumerate(starts.tolist()):
        expected = reference(kind, ids_BS[b : b + 1, : start + 2])[0, -2:]
        torch.testing.assert_close(got[b], expected, atol=2e-5, rtol=1e-5)


def test_padding_on_the_right_changes_nothing():
    target, ids_BS = tiny_target(), ids(1)
    padded = torch.cat([ids_BS, torch.full((1, 7), 258)], 1)
    torch.testing.assert_close(
        target.forward(padded).hidden_BSH[:, :S],
        target.forward(ids_BS).hidden_BSH,
        atol=1e-4,  # a product of 20 rows and one of 13 round differently
        rtol=1e-4,
    )


def test_row_of_length_zero_shares_a_batch():
    target, ids_BS = tiny_target(), ids(2)
    cache = target.new_cache(2, 32)
    target.forward(ids_BS[:, :5], cache)
    cache.advance(torch.tensor([5, 0]))
    got = target.forward(ids_BS[:, 5:6], cache).hidden_BSH
    expected = target.forward(ids_BS[:1, :6]).hidden_BSH[0, -1]
    torch.testing.assert_close(got[0, 0], expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(
        got[1], target.forward(ids_BS[1:, 5:6]).hidden_BSH[0], atol=2e-5, rtol=1e-5
    )


def cache_of(lengths: list[int], places: int = 8) -> KVCache:
    cache = KVCache(1, len(lengths), places, 1, 2, torch.float32)
    cache.lengths_B += torch.tensor(lengths)
    return cache


def test_mask_of_a_cache():
    cache = cache_of([2, 0])
    cache.begin(2)
    assert cache.positions_BS.tolist() == [[2, 3], [0, 1]]
    assert cache.mask_BST().int().tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0]],
    ]
    assert cache.mask_BST(2).int().tolist() == [
        [[0, 1, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0]],
    ]


def test_append_past_the_end_is_refused():
    cache = cache_of([7, 1])
    cache.begin(1)
    with pytest.raises(IndexError, match="8 places and this pass needs 9"):
        cache.begin(2)


def test_rollback_only_shortens():
    cache = cache_of([4, 2])
    cache.rollback(torch.tensor([3, 2]))
    assert cache.lengths_B.tolist() == [3, 2]
    with pytest.raises(ValueError, match="only become shorter"):
        cache.rollback(torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="down to 0"):
        cache.rollback(-1)
    cache.rollback(0)
    assert cache.lengths_B.tolist() == [0, 0]


def test_rollback_keeps_no_hold_of_its_argument():
    cache, lengths_B = cache_of([4, 2]), torch.tensor([1, 1])
    cache.rollback(lengths_B)
    cache.advance(1)
    assert lengths_B.tolist() == [1, 1]


@pytest.mark.parametrize("bias", [False, True])
def test_thin_linear_equals_linear(bias):
    torch.manual_seed(0)
    weight = torch.randn(24, 16)
    bias_O = torch.randn(24) if bias else None
    for num_rows in [*range(1, 41), 96, 255, 256, 257, 260]:
        x = torch.randn(num_rows, 16)
        got = thin_linear(x, weight, bias_O)
        torch.testing.assert_close(got, F.linear(x, weight, bias_O), atol=1e-5, rtol=1e-5)
    assert THIN_ROWS < 260


@pytest.mark.parametrize("bias", [False, True])
def test_thin_linear_takes_any_strides(bias):
    torch.manual_seed(0)
    weight = torch.randn(24, 16)
    bias_O = torch.randn(24) if bias else None
    inputs = [
        torch.randn(16, 5).t(),
        torch.randn(3, 7, 16)[:, 2:4],
        torch.randn(16, 2, 3).permute(1, 2, 0),
        torch.randn(2, 32)[:, ::2],
        torch.randn(1, 1, 16).expand(4, 3, 16),
        torch.randn(16),
        torch.randn(2, 1, 16)[:1],
    ]
    for x in inputs:
        got = thin_linear(x, weight, bias_O)
        assert got.shape == (*x.shape[:-1], 24)
        torch.testing.assert_close(got, F.linear(x, weight, bias_O), atol=1e-5, rtol=1e-5)


def test_thin_linear_of_no_rows():
    assert thin_linear(torch.zeros(0, 16), torch.ones(24, 16)).shape == (0, 24)
    assert thin_linear(torch.zeros(2, 0, 16), torch.ones(24, 16)).shape == (2, 0, 24)


def test_thin_linear_in_bf16_is_linear():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    assert torch.equal(thin_linear(x, weight), F.linear(x, weight))


def test_use_thin_linears_leaves_subclasses_alone():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4))
    use_thin_linears(model)
    assert [type(m) for m in model] == [ThinLinear, Special]
