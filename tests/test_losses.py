"""Losses against hand-computed values, and the chunked head against all logits at once."""

import math
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.linear_loss import head_pass, linear_loss
from train.losses import LOSSES, LossOptions, ce, kl, lk_hybrid, renormalize, tv

OPTIONS = LossOptions()
CHUNK = 7


def make_case(num_positions=23, hidden=6, vocab=11, dtype=torch.float32, seed=0):
    """Random inputs, head, p (30% of its mass outside the draft vocabulary) and labels."""
    rng = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(num_positions, hidden, generator=rng, dtype=dtype)
    weight_DH = torch.randn(vocab, hidden, generator=rng, dtype=dtype)
    p_ND = 0.7 * torch.randn(num_positions, vocab, generator=rng, dtype=dtype).softmax(dim=1)
    labels_N = torch.randint(-1, vocab, (num_positions,), generator=rng)
    return hidden_NH, weight_DH, p_ND, labels_N


def chunked(name, case, options=OPTIONS, weights_N=None, chunk_size=CHUNK):
    """(loss, d_hidden, d_weight, stats) of linear_loss."""
    hidden_NH, weight_DH, p_ND, labels_N = case
    hidden_NH = hidden_NH.clone().requires_grad_()
    weight_DH = weight_DH.clone().requires_grad_()
    loss, stats, _ = linear_loss(
        hidden_NH,
        weight_DH,
        lambda rows: (p_ND[rows], labels_N[rows]),
        LOSSES[name],
        options,
        chunk_size,
        weights_N,
    )
    loss.backward()
    return loss.detach(), hidden_NH.grad, weight_DH.grad, stats


def naive(name, case, options=OPTIONS, weights_N=None):
    """The same from all logits at once."""
    hidden_NH, weight_DH, p_ND, labels_N = case
    hidden_NH = hidden_NH.clone().requires_grad_()
    weight_DH = weight_DH.clone().requires_grad_()
    logits_ND = hidden_NH @ weight_DH.T
    loss_p_ND = p_ND / p_ND.sum(1, keepdim=True) if options.renormalize else p_ND
    losses_N = LOSSES[name](logits_ND, loss_p_ND, labels_N, options)
    loss = (losses_N if weights_N is None else losses_N * weights_N).sum()
    loss.backward()
    return loss.detach(), hidden_NH.grad, weight_DH.grad, logits_ND.detach()


def test_values_by_hand():
    q = torch.tensor([[0.5, 0.25, 0.25]])
    p = torch.tensor([[0.25, 0.5, 0.25]])
    label = torch.tensor([1])
    assert ce(q.log(), p, label, OPTIONS).item() == pytest.approx(math.log(4))
    # .25 log(.25/.5) + .5 log(.5/.25) + 0 = .25 log 2
    assert kl(q.log(), p, label, OPTIONS).item() == pytest.approx(0.25 * math.log(2))
    assert tv(q.log(), p, label, OPTIONS).item() == pytest.approx(0.25)
    lam = math.exp(-3 * 0.75)
    expected = lam * 0.25 * math.log(2) + (1 - lam) * 0.25
    assert lk_hybrid(q.log(), p, label, OPTIONS).item() == pytest.approx(expected)


def test_label_outside_the_draft_vocabulary_costs_nothing():
    logits_ND = torch.randn(2, 5, requires_grad=True)
    losses_N = ce(logits_ND, torch.zeros(2, 5), torch.tensor([-1, 3]), OPTIONS)
    losses_N.sum().backward()
    assert losses_N[0] == 0
    assert losses_N[1] > 0
    assert logits_ND.grad[0].abs().max() == 0


def test_missing_mass_counts_as_rejected_unless_renormalized():
    q = torch.tensor([[0.5, 0.5]])
    p = torch.tensor([[0.3, 0.3]])  # 40% of the target's mass lies outside the draft vocabulary
    label = torch.tensor([0])
    assert tv(q.log(), p, label, OPTIONS).item() == pytest.approx(0.4)
    assert tv(q.log(), renormalize(p), label, OPTIONS).item() == pytest.approx(0, abs=1e-6)
    assert renormalize(torch.zeros(1, 2)).tolist() == [[0, 0]]


def test_no_gradient_through_lambda():
    logits_ND = torch.randn(3, 5, dtype=torch.double)
    p_ND = torch.randn(3, 5, dtype=torch.double).softmax(1)
    labels_N = torch.tensor([0, 1, 2])

    def grad(loss_fn):
        x = logits_ND.clone().requires_grad_()
        return torch.autograd.grad(loss_fn(x, p_ND, labels_N, OPTIONS).sum(), x)[0]

    lam_N1 = torch.exp(-3 * torch.minimum(p_ND, logits_ND.softmax(1)).sum(1, keepdim=True))
    expected = lam_N1 * grad(kl) + (1 - lam_N1) * grad(tv)
    torch.testing.assert_close(grad(lk_hybrid), expected)


@pytest.mark.parametrize("name", ["kl", "l1"])
def test_parts_of_a_head_are_the_head(name):
    # A frozen part beside a trained one, as DSpark's: the same numbers, and no gradient for it.
    hidden_NH, weight_DH, p_ND, labels_N = case = make_case()
    loss, d_hidden, d_weight, stats = chunked(name, case)
    inputs = hidden_NH.clone().requires_grad_()
    frozen, trained = weight_DH[:, :2].clone(), weight_DH[:, 2:].clone().requires_grad_()

    def teacher(rows):
        return p_ND[rows], labels_N[rows]

    parted, parted_stats, _ = linear_loss(
        inputs, (frozen, trained), teacher, LOSSES[name], OPTIONS, CHUNK
    )
    parted.backward()
    torch.testing.assert_close(parted.detach(), loss)
    torch.testing.assert_close(inputs.grad, d_hidden)
    torch.testing.assert_close(trained.grad, d_weight[:, 2:])
    assert frozen.grad is None
    assert parted_stats["alpha_sum"].item() == pytest.approx(stats["alpha_sum"].item())
    alpha_N, q_N = head_pass(hidden_NH, (frozen, trained.detach()), teacher, CHUNK)
    whole = head_pass(hidden_NH, weight_DH, teacher, CHUNK)
    torch.testing.assert_close(alpha_N, whole[0])
    torch.testing.assert_close(q_N, whole[1])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("keep_mass", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7, 23, 100])
def test_chunks_equal_all_logits_at_once(name, keep_mass, chunk_size):
    options = LossOptions(renormalize=not keep_mass)
    case = make_case()
    weights_N = torch.linspace(0, 2, 23)
    loss, d_hidden, d_weight, stats = chunked(name, case, options, weights_N, chunk_size)
    want_loss, want_d_hidden, want_d_weight, logits_ND = naive(name, case, options, weights_N)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(d_hidden, want_d_hidden, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(d_weight, want_d_weight, rtol=1e-6, atol=2e-6)
    _, _, p_ND, labels_N = case
    alpha = torch.minimum(p_ND, logits_ND.softmax(1)).sum().item()
    assert stats["num_positions"].item() == 23
    unweighted, *_ = naive(name, case, options, torch.ones(23))
    assert stats["loss_sum"].item() == pytest.approx(unweighted.item(), rel=1e-5)
    assert stats["alpha_sum"].item() == pytest.approx(alpha, rel=1e-6)
    assert stats["num_top1"].item() == (logits_ND.argmax(1) == labels_N).sum().item()


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name):
    # lk_hybrid's gradient leaves lambda out on purpose: with decay 0 lambda is a constant.
    options = LossOptions(lk_scale=0.5, lk_decay=0.0)
    hidden_NH, weight_DH, p_ND, labels_N = make_case(num_positions=5, vocab=4, dtype=torch.double)

    def teacher(rows):
        return p_ND[rows], labels_N[rows]

    def run(hidden_NH, weight_DH):
        return 3 * linear_loss(hidden_NH, weight_DH, teacher, LOSSES[name], options, 2)[0]

    assert torch.autograd.gradcheck(run, (hidden_NH.requires_grad_(), weight_DH.requires_grad_()))


def test_frozen_head_gets_no_gradient():
    hidden_NH, weight_DH, p_ND, labels_N = make_case()
    hidden_NH.requires_grad_()
    loss, _, _ = linear_loss(
        hidden_NH, weight_DH, lambda rows: (p_ND[rows], labels_N[rows]), kl, OPTIONS, CHUNK
    )
    loss.backward()
    assert weight_DH.grad is None
    want = naive("kl", (hidden_NH.detach(), weight_DH, p_ND, labels_N))[1]
    torch.testing.assert_close(hidden_NH.grad, want, rtol=1e-6, atol=1e-6)


def test_without_gradients_the_sums_are_the_same():
    hidden_NH, weight_DH, p_ND, labels_N = make_case()
    with torch.no_grad():
        loss, stats, _ = linear_loss(
            hidden_NH, weight_DH, lambda rows: (p_ND[rows], labels_N[rows]), kl, OPTIONS, CHUNK
        )
    assert not loss.requires_grad
    want = chunked("kl", (hidden_NH, weight_DH, p_ND, labels_N))[3]
    assert {k: v.item() for k, v in stats.items()} == {k: v.item() for k, v in want.items()}


def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients():
    case = make_case(num_positions=64, hidden=32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, d_hidden, d_weight, _ = chunked("kl", case)
    want_loss, want_d_hidden, want_d_weight, _ = naive("kl", case)
    assert (loss.dtype, d_hidden.dtype, d_weight.dtype) == (torch.float32,) * 3
    torch.testing.assert_close(loss, want_loss, rtol=0.01, atol=0)
    assert torch.cosine_similarity(d_hidden.flatten(), want_d_hidden.flatten(), 0) > 0.999
    assert torch.cosine_similarity(d_weight.flatten(), want_d_weight.flatten(), 0) > 0.999


@pytest.mark.parametrize("name", LOSSES)
def test_p51_batch_without_one_supervised_token(name):
    hidden_NH, weight_DH, p_ND, labels_N = make_case()
    empty = (hidden_NH[:0], weight_DH, p_ND[:0], labels_N[:0])
    loss, d_hidden, d_weight, stats = chunked(name, empty)
    assert loss.item() == 0
    assert d_hidden.shape == (0, 6)
    assert d_weight.shape == weight_DH.shape
    assert d_weight.abs().max() == 0
    assert [stat.item() for stat in stats.values()] == [0, 0, 0, 0]
    # Accumulated with a normal micro-batch it changes nothing.
    normal = chunked(name, (hidden_NH, weight_DH, p_ND, labels_N))
    assert torch.equal(normal[2] + d_weight, normal[2])


def test_p52_padding_changes_neither_loss_nor_gradient():
    hidden_NH, weight_DH, p_ND, labels_N = make_case()
    mask_N = torch.arange(23) < 10  # positions 10..22 are padding or a masked prompt
    short = chunked("kl", (hidden_NH[:10], weight_DH, p_ND[:10], labels_N[:10]))
    padded = chunked("kl", (hidden_NH[mask_N], weight_DH, p_ND[mask_N], labels_N[mask_N]))
    assert short[0] == padded[0]
    assert torch.equal(short[2], padded[2])
    # The same through weights of zero rather than a selection.
    weighted = chunked("kl", (hidden_NH, weight_DH, p_ND, labels_N), weights_N=mask_N.float())
    torch.testing.assert_close(weighted[0], short[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weighted[2], short[2], rtol=1e-6, atol=2e-6)


def test_p53_micro_batches_add_up():
    # A: 1 position with loss 4; B: 9 positions with loss 1 each.
    def part(num_positions, loss):
        hidden_NH = torch.ones(num_positions, 1)
        # q(0) = exp(-loss): logits 0 and log(exp(loss) - 1)
        weight_DH = torch.tensor([[0.0], [math.log(math.exp(loss) - 1)]])
        p_ND = torch.full((num_positions, 2), 0.5)
        return chunked("ce", (hidden_NH, weight_DH, p_ND, torch.zeros(num_positions).long()))[3]

    parts = [part(1, 4.0), part(9, 1.0)]
    loss_sum = sum(stats["loss_sum"] for stats in parts)
    num_positions = sum(stats["num_positions"] for stats in parts)
    assert (loss_sum / num_positions).item() == pytest.approx(1.3)  # a mean of means gives 2.5

    case = make_case()
    hidden_NH, weight_DH, p_ND, labels_N = case
    whole = chunked("kl", case)
    cut = [
        chunked("kl", (hidden_NH[a:b], weight_DH, p_ND[a:b], labels_N[a:b]))
        for a, b in pairwise([0, 1, 9, 23])
    ]
    torch.testing.assert_close(sum(part[0] for part in cut), whole[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum(part[2] for part in cut), whole[2], rtol=1e-6, atol=2e-6)


class LargestTensor(TorchDispatchMode):
    """Element count of the largest tensor that any operation returns while the mode is on."""

    numel = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("name", LOSSES)
def test_p58_logits_of_more_than_one_chunk_never_exist(name):
    num_positions, vocab, hidden, chunk_size = 512, 2000, 16, 32
    rng = torch.Generator().manual_seed(0)
    target_NH = torch.randn(num_positions, hidden, generator=rng)
    target_head_DH = torch.randn(vocab, hidden, generator=rng)
    hidden_NH = torch.randn(num_positions, hidden, generator=rng, requires_grad=True)
    weight_DH = torch.randn(vocab, hidden, generator=rng, requires_grad=True)
    labels_N = torch.randint(vocab, (num_positions,), generator=rng)

    def teacher(rows):  # makes its own logits, of the chunk only
        return (target_NH[rows] @ target_head_DH.T).softmax(1), labels_N[rows]

    with LargestTensor() as chunks:
        loss, _, _ = linear_loss(hidden_NH, weight_DH, teacher, LOSSES[name], OPTIONS, chunk_size)
        loss.backward()
    assert chunks.numel == chunk_size * vocab  # 64,000 and not 1,024,000
    with LargestTensor() as whole:
        p_ND, _ = teacher(slice(None))
        want = LOSSES[name](hidden_NH @ weight_DH.T, p_ND, labels_N, OPTIONS).sum()
    assert whole.numel == num_positions * vocab  # so the probe sees what it should
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=0)


def test_metrics_by_group_are_those_of_each_group_alone():
    case = make_case()
    hidden_NH, weight_DH, p_ND, labels_N = case
    groups_N = torch.arange(23) % 3

    def stats_of(rows):
        def teacher(chunk):
            return p_ND[rows][chunk], labels_N[rows][chunk]

        return linear_loss(
            hidden_NH[rows], weight_DH, teacher, LOSSES["kl"], LossOptions(), 5,
            groups_N=groups_N[rows], num_groups=3,
        )[1]  # fmt: skip

    together = stats_of(torch.arange(23))
    for group in range(3):
        alone = stats_of((groups_N == group).nonzero()[:, 0])
        for name, values in together.items():
            assert values[group].item() == pytest.approx(alone[name][group].item(), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_blocks_of_a_chunk_change_nothing(name):
    """A chunk of 8 in blocks of 3 and whole: the same sums, gradients and statistics."""
    torch.manual_seed(0)
    hidden_NH, weight_DH = torch.randn(13, 4), torch.randn(6, 4)
    p_ND, labels_N = torch.randn(13, 7).softmax(-1)[:, :6], torch.arange(13) % 7 - 1

    def run(block_size):
        inputs = [hidden_NH.clone().requires_grad_(), weight_DH.clone().requires_grad_()]
        loss, stats, alpha_N = linear_loss(
            *inputs, lambda rows: (p_ND[rows], labels_N[rows]), LOSSES[name], OPTIONS, 8,
            torch.arange(13.0), torch.arange(13) % 3, 3, block_size,
        )  # fmt: skip
        loss.backward()
        return [loss.detach(), alpha_N, *stats.values(), *(x.grad for x in inputs)]

    for got, want in zip(run(3), run(8), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
