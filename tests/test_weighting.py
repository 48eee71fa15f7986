"""Weights of positions by what they do to the accepted length of their draft."""

import pytest
import torch

from train.linear_loss import head_pass
from train.losses import LossOptions, jsd, l1, nla, rkl, tv
from train.weighting import by_draft, d_pace_weights, end_to_end_weights

OPTIONS = LossOptions(renormalize=False)


def test_slots_become_drafts_whatever_their_order():
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    anchors, depths = torch.tensor([9, 4, 9, 4]), torch.tensor([1, 0, 0, 2])
    table = by_draft(values, anchors, depths, 3)
    torch.testing.assert_close(table, torch.tensor([[0.2, 0, 0.4], [0.3, 0.1, 0]]))


def test_end_to_end_weights_by_hand():
    # alpha = (.5, .4): L = 1 - (.5 + .5 * .4) / 2, so dL/d(alpha) = -(1 + .4) / 2 and -.5 / 2.
    weights = end_to_end_weights(torch.tensor([[0.5, 0.4]]))
    assert weights.tolist()[0] == pytest.approx([0.7, 0.25])


def test_end_to_end_weights_give_the_gradient_of_the_expected_accepted_length():
    torch.manual_seed(0)
    logits = torch.randn(6, 4, 5, dtype=torch.double, requires_grad=True)  # drafts, depths, tokens
    p = torch.randn(6, 4, 5, dtype=torch.double).softmax(-1)
    alpha = torch.minimum(p, logits.softmax(-1)).sum(-1)
    (1 - alpha.cumprod(1).mean(1)).sum().backward()
    wanted, logits.grad = logits.grad, None
    weights = end_to_end_weights(alpha.detach())
    labels = torch.zeros(24, dtype=torch.int64)
    losses = tv(logits.flatten(0, 1), p.flatten(0, 1), labels, OPTIONS)
    (losses * weights.flatten()).sum().backward()
    torch.testing.assert_close(logits.grad, wanted)


def test_d_pace_weights_by_hand_and_only_as_far_as_a_draft_is_supervised():
    # s = (1 - .5) q + .5 = (.75, .6, .9); products .75, .45, .405; sums from the end.
    q = torch.tensor([[0.5, 0.2, 0.8], [0.5, 0.2, 0.8]])
    known = torch.tensor([[True, True, True], [True, True, False]])
    weights = d_pace_weights(q, known)
    assert weights[0].tolist() == pytest.approx([1.605, 0.855, 0.405])
    assert weights[1].tolist() == pytest.approx([1.2, 0.45, 0.0])


def test_losses_by_hand():
    # p = (.5, .5), q = (.8, .2): sum min = .7.
    p, logits = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.8, 0.2]]).log()
    labels = torch.tensor([0])
    log = torch.tensor
    assert rkl(logits, p, labels, OPTIONS).item() == pytest.approx(
        float(0.8 * log(1.6).log() + 0.2 * log(0.4).log()), rel=1e-5
    )
    half = 0.5 * (0.5 * log(0.5 / 0.65).log() + 0.5 * log(0.5 / 0.35).log())
    half += 0.5 * (0.8 * log(0.8 / 0.65).log() + 0.2 * log(0.2 / 0.35).log())
    assert jsd(logits, p, labels, OPTIONS).item() == pytest.approx(float(half), rel=1e-5)
    assert l1(logits, p, labels, OPTIONS).item() == pytest.approx(0.6, rel=1e-5)
    assert nla(logits, p, labels, OPTIONS).item() == pytest.approx(0.3566749, rel=1e-5)  # -log .7


def test_a_token_that_the_target_never_says_gives_finite_gradients():
    p = torch.tensor([[1.0, 0.0, 0.0]])
    for loss in (rkl, jsd, nla):
        logits = torch.tensor([[-20.0, 3.0, 1.0]], requires_grad=True)
        loss(logits, p, torch.tensor([0]), OPTIONS).sum().backward()
        assert logits.grad.isfinite().all()


def test_head_pass_gives_acceptance_and_the_probability_of_what_followed():
    hidden, weight = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[0.8], [0.2]]).log()
    p, labels = torch.full((3, 2), 0.5), torch.tensor([0, 1, -1])
    alpha, q = head_pass(hidden, weight, lambda rows: (p[rows], labels[rows]), chunk_size=2)
    assert alpha.tolist() == pytest.approx([0.7] * 3)
    assert q.tolist() == pytest.approx([0.8, 0.2, 0.0])
