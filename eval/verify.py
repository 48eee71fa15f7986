"""Verification: which proposed tokens are accepted and which token comes next.

Pure functions of (p, q, proposal, uniforms): no model, no cache, no random state. Both rules
leave the law of the emitted tokens equal to the target's for any drafter (the tests enumerate
these very functions in rational arithmetic). They ask four things of the caller:
    p is the target's *final* distribution (after temperature, top-k and top-p);
    q is the distribution that each proposed token was really drawn from;
    the uniforms are independent of each other and of those that drew the proposal;
    whether a row proposes an i-th token does not depend on what this or a later token is.
A proposal that was not drawn at all (argmax, n-gram lookup) has q = None: a point mass.

Dimensions: B rows, K proposed tokens (the most of any row), K1 = K + 1, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from data.sampling import sample
from recipes.errors import UserError


class Verdict(NamedTuple):
    """What one round decided for each row; the row emits num_accepted + 1 tokens.

    num_accepted_B: int64, proposed tokens accepted, 0 <= num_accepted <= num_proposed.
    next_token_B: int64, the token after them: a correction where a token was rejected, a
        bonus from p at the next position where none was.
    """

    num_accepted_B: Tensor
    next_token_B: Tensor


def verify_token(
    p_BK1V: Tensor,
    tokens_BK: Tensor,
    num_proposed_B: Tensor,
    q_BKV: Tensor | None,
    accept_uniforms_BK: Tensor,
    final_uniforms_B: Tensor,
) -> Verdict:
    """Token by token speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    Going left to right, x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)). At the
    first rejection the next token is drawn from norm(max(p_i - q_i, 0)) and the round ends;
    if all are accepted it is drawn from p after the last one.

    Args:
        p_BK1V: target probabilities; position i judges tokens_BK[:, i], and position
            num_proposed of a row gives its bonus.
        tokens_BK: int64; entries from num_proposed on are padding and may hold anything.
        num_proposed_B: int64 in 0..K; a row that proposes nothing gets a token from p.
        q_BKV: drafter probabilities, or None when each token was proposed with certainty.
        accept_uniforms_BK, final_uniforms_B: in [0, 1).

    Raises:
        UserError: p or q is NaN at the position that the next token is drawn from.
    """
    num_rows, max_proposed = tokens_BK.shape
    proposed_BK, tokens_BK = _mask_padding(tokens_BK, num_proposed_B)
    p_x_BK = p_BK1V[:, :max_proposed].gather(-1, tokens_BK[..., None])[..., 0]
    if q_BKV is None:
        q_x_BK = torch.ones_like(p_x_BK)
    else:
        q_x_BK = q_BKV.gather(-1, tokens_BK[..., None])[..., 0]

    # u < p / q without the division: q = 0 accepts iff p > 0, and p = 0 always rejects.
    # p >= q accepts whatever u is, also a u that was rounded up to 1.
    accept_BK = (accept_uniforms_BK * q_x_BK < p_x_BK) | ((p_x_BK >= q_x_BK) & (p_x_BK > 0))
    num_accepted_B = (accept_BK & proposed_BK).long().cumprod(dim=-1).sum(dim=-1)

    # Only one position a row is drawn from: the first rejected one, or the one after the last.
    rows_B = torch.arange(num_rows, device=p_BK1V.device)
    p_BV = p_BK1V[rows_B, num_accepted_B]
    if max_proposed == 0:
        return Verdict(num_accepted_B, draw(p_BV, num_accepted_B, final_uniforms_B))
    rejected_B1 = (num_accepted_B < num_proposed_B)[:, None]
    position_B = num_accepted_B.clamp(max=max_proposed - 1)  # of the rejected token, where any
    if q_BKV is None:
        residual_BV = p_BV.scatter(-1, tokens_BK[rows_B, position_B][:, None], 0.0)
    else:
        residual_BV = (p_BV - q_BKV[rows_B, position_B]).clamp(min=0)
    # An all-zero residual means p = q up to rounding, and then p itself is the right law.
    use_residual_B1 = rejected_B1 & (residual_BV.sum(dim=-1, keepdim=True) != 0)
    weights_BV = torch.where(use_residual_B1, residual_BV, p_BV)
    return Verdict(num_accepted_B, draw(weights_BV, num_accepted_B, final_uniforms_B))


def verify_block(
    p_BK1V: Tensor,
    tokens_BK: Tensor,
    num_proposed_B: Tensor,
    q_BKV: Tensor | None,
    accept_uniforms_BK: Tensor,
    final_uniforms_B: Tensor,
) -> Verdict:
    """Block verification (Sun et al. 2403.10444): as exact, and accepts no fewer on average.

    With rho_0 = 1, rho_i = min(rho_(i-1) p_i(x_i) / q_i(x_i), 1) and
    S_i = sum_v max(rho_i p_(i+1)(v) - q_(i+1)(v), 0), the prefix of length i is kept with
    h_i = S_i / (S_i + 1 - rho_i), the whole proposal with h = rho. The longest kept prefix is
    accepted; the next token comes from norm(max(rho p - q, 0)), or from p after the whole.

    Args: as verify_token. Reads all of p and q, so it costs more than verify_token.

    Raises:
        UserError: p or q is NaN at the position that the next token is drawn from.
    """
    num_rows, max_proposed = tokens_BK.shape
    proposed_BK, tokens_BK = _mask_padding(tokens_BK, num_proposed_B)
    rows_B = torch.arange(num_rows, device=p_BK1V.device)
    if max_proposed == 0:
        zeros_B = torch.zeros_like(num_proposed_B)
        return Verdict(zeros_B, draw(p_BK1V[:, 0], zeros_B, final_uniforms_B))
    if q_BKV is None:
        q_BKV = torch.zeros_like(p_BK1V[:, :-1]).scatter_(-1, tokens_BK[..., None], 1.0)
    p_x_BK = p_BK1V[:, :-1].gather(-1, tokens_BK[..., None])[..., 0]
    q_x_BK = q_BKV.gather(-1, tokens_BK[..., None])[..., 0]
    ratio_BK = torch.where(p_x_BK > 0, p_x_BK / q_x_BK, 0.0)  # q = 0: infinite iff p > 0

    rho_B = torch.ones_like(p_x_BK[:, 0])
    rhos = [rho_B]
    for i in range(max_proposed):
        rho_B = (rho_B * ratio_BK[:, i]).nan_to_num(nan=0.0).clamp(max=1)  # 0 * inf is 0
        rhos.append(rho_B)
    rho_BK1 = torch.stack(rhos, dim=-1)

    # h of prefixes of length 1..K: a proper prefix of the row's proposal, or the whole of it.
    num_kept_K = torch.arange(1, max_proposed + 1, device=p_BK1V.device)
    excess_BKV = (rho_BK1[:, :-1, None] * p_BK1V[:, :-1] - q_BKV).clamp(min=0)
    mass_BK1 = torch.nn.functional.pad(excess_BKV.sum(dim=-1), (0, 1))  # S_0 .. S_(K-1), then 0
    denominator_BK = mass_BK1[:, 1:] + 1 - rho_BK1[:, 1:]
    h_BK = torch.where(denominator_BK > 0, mass_BK1[:, 1:] / denominator_BK, 0.0)
    h_BK = torch.where(num_kept_K == num_proposed_B[:, None], rho_BK1[:, 1:], h_BK)
    keep_BK = ((accept_uniforms_BK < h_BK) | (h_BK >= 1)) & proposed_BK
    num_accepted_B = (keep_BK * num_kept_K).amax(dim=-1)

    p_BV = p_BK1V[rows_B, num_accepted_B]
    rejected_B1 = (num_accepted_B < num_proposed_B)[:, None]
    residual_BV = excess_BKV[rows_B, num_accepted_B.clamp(max=max_proposed - 1)]
    use_residual_B1 = rejected_B1 & (residual_BV.sum(dim=-1, keepdim=True) != 0)
    weights_BV = torch.where(use_residual_B1, residual_BV, p_BV)
    unknown_BK = (0.0 * (p_x_BK + q_x_BK)).masked_fill(~proposed_BK, 0.0)  # NaN where p or q is
    weights_BV = weights_BV + unknown_BK.sum(dim=-1, keepdim=True)
    return Verdict(num_accepted_B, draw(weights_BV, num_accepted_B, final_uniforms_B))


def _mask_padding(tokens_BK: Tensor, num_proposed_B: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries were proposed (bool), and the tokens with padding set to a valid id."""
    positions_K = torch.arange(tokens_BK.shape[1], device=tokens_BK.device)
    proposed_BK = positions_K < num_proposed_B[:, None]
    return proposed_BK, tokens_BK.masked_fill(~proposed_BK, 0)


def draw(weights_BV: Tensor, num_accepted_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw the next token of each row; a NaN in p or q is named by row and position."""
    # A NaN at a proposed token rejects there, or was added to the weights: it is seen here.
    bad_B = weights_BV.sum(dim=-1).isnan()
    if bool(bad_B.any()):
        row = int(bad_B.nonzero()[0, 0])
        raise UserError(
            f"verify: NaN probability in row {row} at position {int(num_accepted_B[row])} of "
            "this round; check the target's and the drafter's weights and dtype"
        )
    return sample(weights_BV, uniforms_B)
