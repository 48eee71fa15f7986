"""Verifiers that are broken on purpose, to show that the losslessness test would notice.

Each is a fault that engines have had; all take what the right rule takes (eval.rounds) and can
stand in its place in the loop. What they emit does not follow p.

(No fault, although it looks like one: judging a token that was drawn from q as if it had been
chosen outright. Given that token, the emitted one follows p; only fewer are accepted.)

Dimensions: B rows, K proposed tokens, S = K + 1, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from data.sampling import sample
from eval.rounds import VerifyInputs
from eval.verify import Verdict, verify_token


class Fault(NamedTuple):
    """A broken verifier. applies: whether it does something wrong in a round with such inputs."""

    what: str
    applies: Callable[[VerifyInputs], bool]
    verify: Callable[[VerifyInputs], Verdict]

    def judge(self, x: VerifyInputs) -> Verdict:
        """For use in the loop: right in rounds where it does not apply (no proposal, say)."""
        return self.verify(x) if self.applies(x) else token_rule(x)


def token_rule(x: VerifyInputs) -> Verdict:
    """The rule that the others are broken versions of."""
    return verify_token(
        x.p_BSV,
        x.tokens_BK,
        x.num_proposed_B,
        x.q_BKV,
        x.accept_uniforms_BK,
        x.final_uniforms_B,
    )


def replacement_from_p(x: VerifyInputs) -> Verdict:
    """After a rejection the token comes from p, not from the residual."""
    verdict = token_rule(x)
    return Verdict(verdict.num_accepted_B, _draw_at(x, verdict.num_accepted_B))


def reused_uniform(x: VerifyInputs) -> Verdict:
    """The number that drew a token decides whether it is accepted, too."""
    return token_rule(replace(x, accept_uniforms_BK=x.draft_uniforms_BK))


def previous_q(x: VerifyInputs) -> Verdict:
    """Every token but the first is judged by the q of the token before it."""
    assert x.q_BKV is not None
    return token_rule(replace(x, q_BKV=torch.cat([x.q_BKV[:, :1], x.q_BKV[:, :-1]], 1)))


def unfiltered_q(x: VerifyInputs) -> Verdict:
    """q is taken before top-k and top-p, but the token was drawn after them."""
    assert x.laws is not None
    return token_rule(replace(x, q_BKV=x.laws.unfiltered_BKV))


def argmax_as_drawn(x: VerifyInputs) -> Verdict:
    """The drafter's most likely token is judged as if it had been drawn from q."""
    assert x.laws is not None
    return token_rule(replace(x, q_BKV=x.laws.final_BKV))


def early_bonus(x: VerifyInputs) -> Verdict:
    """The bonus token is drawn from the distribution one position before its own."""
    verdict = token_rule(x)
    all_B = (verdict.num_accepted_B == x.num_proposed_B) & (x.num_proposed_B > 0)
    early_B = _draw_at(x, (verdict.num_accepted_B - 1).clamp(min=0))
    return Verdict(verdict.num_accepted_B, torch.where(all_B, early_B, verdict.next_token_B))


def _draw_at(x: VerifyInputs, position_B: Tensor) -> Tensor:
    rows_B = torch.arange(len(position_B), device=position_B.device)
    return sample(x.p_BSV[rows_B, position_B], x.final_uniforms_B)


def _any(_x: VerifyInputs) -> bool:
    return True


def _drawn(x: VerifyInputs) -> bool:
    return x.q_BKV is not None


def _drawn_twice(x: VerifyInputs) -> bool:
    return x.q_BKV is not None and x.tokens_BK.shape[1] > 1


def _drawn_filtered(x: VerifyInputs) -> bool:
    return (
        x.q_BKV is not None and x.laws is not None and not torch.equal(*x.laws)  # final, unfiltered
    )


def _chosen(x: VerifyInputs) -> bool:
    return x.q_BKV is None and x.laws is not None


FAULTS: dict[str, Fault] = {
    "replacement_from_p": Fault(
        "after a rejection draws from p, not from the residual", _any, replacement_from_p
    ),
    "reused_uniform": Fault(
        "accepts with the random number that drew the draft", _drawn, reused_uniform
    ),
    "previous_q": Fault("judges by q of the previous position", _drawn_twice, previous_q),
    "unfiltered_q": Fault("takes q before top-p", _drawn_filtered, unfiltered_q),
    "early_bonus": Fault("draws the bonus one position early", _any, early_bonus),
    "argmax_as_drawn": Fault(
        "judges an argmax draft as if it had been drawn", _chosen, argmax_as_drawn
    ),
}
