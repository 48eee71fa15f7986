"""What acceptance and costs predict: tokens a round, speedup, the best number of draft tokens.

Formulas: Leviathan et al. 2211.17192, with the costs of a real loop added. Times are in any
one unit (milliseconds in the result record).
"""

from collections.abc import Sequence


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Tokens a round, bonus included, if each position accepts with probability alpha.

    1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha).
    """
    return expected_tokens_from_conditional([alpha] * num_draft_tokens)


def expected_tokens_from_conditional(conditional: Sequence[float | None]) -> float:
    """Tokens a round, bonus included, from c_i = P(accept i | i - 1 accepted).

    1 + sum_k prod_(i<=k) c_i. A None (position never reached) ends the sum, since the product
    is 0 from there on.
    """
    tokens, survival = 1.0, 1.0
    for c in conditional:
        if c is None:
            break
        survival *= c
        tokens += survival
    return tokens


def predicted_speedup(
    tau: float, t_draft: float, t_verify: float, t_other: float, t_ar: float
) -> float:
    """Time of plain decoding over time of speculative decoding, for the same tokens.

    Args:
        tau: tokens a round, bonus included.
        t_draft, t_verify, t_other: time of each part of a round.
        t_ar: time of one token without a drafter.
    """
    return tau * t_ar / (t_draft + t_verify + t_other)


def best_num_draft_tokens(
    alpha: float,
    t_draft: float,
    t_verify: float,
    t_other: float,
    t_ar: float,
    max_draft_tokens: int = 64,
    parallel: bool = False,
) -> tuple[int, float]:
    """The number of draft tokens with the largest predicted speedup, and that speedup.

    Verification is taken to cost the same for any number, as it does while the target is
    bound by memory bandwidth.

    Args:
        alpha: acceptance of each position.
        t_draft: time of one draft token, or of the whole draft where parallel.
        parallel: the drafter proposes all tokens in one pass.
        t_verify, t_other, t_ar: as in predicted_speedup.

    Returns:
        (0, 1.0) where no number beats plain decoding.
    """
    best = (0, 1.0)
    for num_draft_tokens in range(1, max_draft_tokens + 1):
        tau = expected_tokens(alpha, num_draft_tokens)
        draft = t_draft if parallel else t_draft * num_draft_tokens
        speedup = predicted_speedup(tau, draft, t_verify, t_other, t_ar)
        if speedup > best[1]:
            best = (num_draft_tokens, speedup)
    return best
