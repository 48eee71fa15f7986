"""Weights of the positions of a draft, by what they do to its accepted length.

Dimension letters: N slots, A drafts (anchors), G depths.

A slot counts only where all before it are accepted, so its weight depends on its whole draft. The
weights are constants of a step: no gradient flows through them.
"""

import torch
from torch import Tensor


def by_draft(values_N: Tensor, anchor_N: Tensor, depth_N: Tensor, num_depths: int) -> Tensor:
    """Values [N] of slots as [A, G], one row a draft; 0 where a slot is not supervised."""
    drafts_A, place_N = anchor_N.unique(return_inverse=True)
    table_AG = values_N.new_zeros(len(drafts_A), num_depths)
    table_AG[place_N, depth_N] = values_N
    return table_AG


def end_to_end_weights(alpha_AG: Tensor) -> Tensor:
    """d(expected accepted share) / d(alpha_j), [A, G].

    With these weights the gradient of a sum of tv is that of 1 - (1 / G) sum_m prod_(i<=m) alpha_i:
    w_j = (1 / G) sum_(m>=j) prod_(i<=m, i!=j) alpha_i.

    Source: the end-to-end TV loss of AngelSpec.
    """
    G = alpha_AG.shape[1]
    before_AG = torch.cat([torch.ones_like(alpha_AG[:, :1]), alpha_AG[:, :-1]], 1).cumprod(1)
    after_AG = torch.ones_like(alpha_AG)
    for j in range(G - 2, -1, -1):
        after_AG[:, j] += alpha_AG[:, j + 1] * after_AG[:, j + 1]
    return before_AG * after_AG / G


def d_pace_weights(q_AG: Tensor, known_AG: Tensor, smoothing: float = 0.5) -> Tensor:
    """D-PACE: w_j = sum_(m>=j) prod_(i<=m) s_i, s_i = (1 - a) q_i(x_i) + a, [A, G].

    Args:
        q_AG: the drafter's probability of the tokens that followed.
        known_AG: which slots are supervised; the sum ends at the first that is not.
        smoothing: a.

    Source: D-PACE, as AngelSpec and speculators train with it.
    """
    smoothed_AG = torch.where(known_AG, (1 - smoothing) * q_AG + smoothing, 0.0)
    return smoothed_AG.cumprod(1).flip(1).cumsum(1).flip(1)
