"""Final distributions and draws from them: the one place where logits become probabilities.

Dimensions: N rows or positions, B rows, V vocabulary, C candidates kept by a nucleus (C <= V),
K proposed tokens, S = K + 1 positions, M marked tokens.
"""

import math
import sys

import torch
from torch import Tensor

from recipes.errors import UserError

# fp32 softmax is no finer than this, so nucleus masses are compared with this much slack.
_MASS_SLACK = 1e-6
# A nucleus is looked for among this many most likely tokens before all V are sorted.
_NUCLEUS_CANDIDATES = 1024
# Smaller temperatures would turn 0 / T into NaN in fp32; the result is the argmax long before.
_MIN_TEMPERATURE = 1e-30


def final_probs(
    logits_NV: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    where: str = "logits",
    min_p: float = 0.0,
) -> Tensor:
    """The distribution that tokens are drawn from: temperature, min-p, top-k, top-p (vLLM's order).

    Args:
        logits_NV: any float dtype; -inf entries get probability 0.
        temperature: 0 puts all mass on the argmax, on the lowest id where several tie.
        top_k: 0 keeps all tokens; tokens that tie with the k-th are kept.
        top_p: the smallest set of most likely tokens with at least this mass is kept, never
            none; the mass is that after top-k. 1 keeps all tokens.
        where: what the rows are, for the error message (such as "target logits, round 7").
        min_p: tokens less likely than this share of the likeliest one are left out, before the
            masses of top-p are taken (transformers filters in the other order); 0 keeps all.

    Returns:
        probs_NV, fp32, rows sum to 1.

    Raises:
        UserError: a row holds NaN or +inf or nothing but -inf, or a setting is out of range.
    """
    if temperature < 0:
        raise UserError(f"temperature={temperature}: give 0 (greedy) or a positive number")
    if top_k < 0:
        raise UserError(f"top_k={top_k}: give 0 (keep all tokens) or a positive number")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: give a number in (0, 1]; 1 keeps all tokens")
    if not 0 <= min_p <= 1:
        raise UserError(f"min_p={min_p}: give a number in [0, 1]; 0 keeps all tokens")

    # The maximum of a row is NaN or +inf or -inf exactly when the row cannot be used.
    max_N1 = logits_NV.amax(dim=-1, keepdim=True)
    finite_N = max_N1[:, 0].isfinite()
    if not bool(finite_N.all()):
        row = int((~finite_N).nonzero()[0, 0])
        raise UserError(
            f"{where}: row {row} has maximum {float(max_N1[row, 0])}, so no token can be drawn "
            "from it; check the model's weights and dtype (float16 overflows: try bfloat16)"
        )

    if temperature == 0:
        ids_N1 = logits_NV.argmax(dim=-1, keepdim=True)  # the first of several maxima
        return torch.zeros_like(logits_NV, dtype=torch.float32).scatter_(-1, ids_N1, 1.0)

    # The maximum is subtracted before the division, which therefore cannot overflow to +inf.
    scaled_NV = (logits_NV.float() - max_N1.float()) / max(temperature, _MIN_TEMPERATURE)
    if min_p > 0:  # the likeliest token stands at 0; where several tie, all are kept
        scaled_NV = scaled_NV.masked_fill(scaled_NV < math.log(min_p), -torch.inf)
    vocab_size = logits_NV.shape[-1]
    if 0 < top_k < vocab_size:
        kth_N1 = scaled_NV.topk(top_k, dim=-1).values[:, -1:]
        scaled_NV = scaled_NV.masked_fill(scaled_NV < kth_N1, -torch.inf)
    probs_NV = scaled_NV.softmax(dim=-1)
    return _nucleus(probs_NV, top_p) if top_p < 1 else probs_NV


def penalise(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (CTRL, Keskar et al. 1909.05858, section 4.1, as transformers and vLLM).

    Args:
        seen_NV: bool, tokens of the prompt and of the answer so far. Their logits are divided by
            `penalty` where positive and multiplied by it where negative.
        penalty: above 1 makes repeats less likely, 1 changes nothing.

    Raises:
        UserError: the penalty is not positive.
    """
    if not penalty > 0:
        raise UserError(f"repetition_penalty={penalty}: give a positive number; 1 changes nothing")
    changed_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, changed_NV, logits_NV)


def seen_in(prompts: list[list[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Which tokens stand in each prompt: bool [B, V]."""
    seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
    for seen_V, prompt in zip(seen_BV, prompts, strict=True):
        seen_V[torch.tensor(prompt, device=device)] = True
    return seen_BV


def mark_seen(seen_BV: Tensor, ids_BN: Tensor, num_B: Tensor) -> None:
    """Add the first `num` tokens of each row, in place."""
    places_N = torch.arange(ids_BN.shape[1], device=ids_BN.device)
    rows_M, places_M = (places_N < num_B[:, None]).nonzero(as_tuple=True)
    seen_BV[rows_M, ids_BN[rows_M, places_M]] = True


def seen_along(seen_BV: Tensor, tokens_BK: Tensor) -> Tensor:
    """What is seen at each position of a proposal: bool [B, K + 1, V], the token itself not yet."""
    K = tokens_BK.shape[1]
    seen_BSV = seen_BV[:, None].repeat(1, K + 1, 1)
    for i in range(K):
        seen_BSV[:, i + 1 :].scatter_(2, tokens_BK[:, i, None, None].expand(-1, K - i, -1), True)
    return seen_BSV


def _nucleus(probs_NV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass is >= top_p, renormalised."""
    num_candidates = min(_NUCLEUS_CANDIDATES, probs_NV.shape[-1])
    probs_NC, ids_NC = probs_NV.topk(num_candidates, dim=-1)
    kept_NV = _keep_mass(probs_NV, probs_NC, ids_NC, top_p)
    flat_N = probs_NC.sum(dim=-1) < top_p
    if bool(flat_N.any()):  # the nucleus of these rows may be anything
        flat_MV = probs_NV[flat_N]
        sorted_MV = flat_MV.sort(dim=-1, descending=True, stable=True)
        kept_NV[flat_N] = _keep_mass(flat_MV, *sorted_MV, top_p)
    return kept_NV


def _keep_mass(probs_NV: Tensor, probs_NC: Tensor, ids_NC: Tensor, top_p: float) -> Tensor:
    """The first of the candidates (most likely first) whose mass is >= top_p, renormalised."""
    mass_before_NC = probs_NC.cumsum(dim=-1, dtype=torch.float64) - probs_NC
    keep_NC = mass_before_NC < top_p - _MASS_SLACK
    keep_NC[:, 0] = True
    kept_NC = probs_NC * keep_NC
    kept_NC = kept_NC / kept_NC.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs_NV).scatter_(-1, ids_NC, kept_NC)


def sample(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Draw one token a row by inverse CDF in token id order: the first id with F(id) > u.

    Args:
        probs_NV: weights >= 0; rows need not sum to 1.
        uniforms_N: in [0, 1); a 1.0 that rounding made draws the last id with mass.

    Returns:
        ids_N int64; never an id whose weight is 0.

    Raises:
        UserError: the weights of a row are all zero, or one is NaN or infinite.
    """
    # Summed in fp64: in fp32 the tail of a large vocabulary would be lost to rounding.
    cdf_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:].contiguous()
    usable_N = (total_N1[:, 0] > 0) & total_N1[:, 0].isfinite()
    if not bool(usable_N.all()):
        row = int((~usable_N).nonzero()[0, 0])
        raise UserError(
            f"sample: row {row} has total weight {float(total_N1[row, 0])}, expected a positive "
            "finite number; pass probabilities made by final_probs"
        )
    # Kept strictly below the total, so that the search always ends on an id with mass.
    below_total_N1 = total_N1 * (1.0 - sys.float_info.epsilon)
    threshold_N1 = torch.minimum(uniforms_N[:, None].double() * total_N1, below_total_N1)
    ids_N1 = torch.searchsorted(cdf_NV, threshold_N1, right=True)
    # A parallel cumsum need not be monotone in its last bit: never let that choose a zero.
    drawn_N1 = probs_NV.gather(-1, ids_N1.clamp(max=probs_NV.shape[-1] - 1))
    return torch.where(drawn_N1 > 0, ids_N1, probs_NV.argmax(dim=-1, keepdim=True))[:, 0]
