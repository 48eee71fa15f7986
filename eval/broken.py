"""Verifiers that are broken on purpose, to show that the losslessness test would notice.

Each is a fault that engines have had; all take what the right rule takes (eval.rounds) and can
stand in its place in the loop. What they emit does not follow p.

(No fault, although it looks like one: judging a token that was drawn from q as if it had been
chosen outright. Given that token, the emitted one follows p; only fewer are accepted.)

Dimensions: B rows, K proposed tokens, S = K + 1, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from data.sampling import sample
from eval.rounds import Verifier, VerifyInputs
from eval.verify import Verdict, verify_block, verify_token

X = TypeVar("X")


@dataclass(frozen=True)
class Fault(Generic[X]):
    """A broken verifier. applies: whether it does something wrong in a round with such inputs."""

    what: str
    applies: Callable[[X], bool]
    verify: Callable[[X], Any]


RULES: dict[str, Verifier] = {
    "token": lambda x: x.judged_by(verify_token),
    "block": lambda x: x.judged_by(verify_block),
}


def replacement_from_p(x: VerifyInputs, rule: Verifier) -> Verdict:
    """After a rejection the token comes from p, not from the residual."""
    verdict = rule(x)
    return Verdict(verdict.num_accepted_B, _draw_at(x, verdict.num_accepted_B))


def reused_uniform(x: VerifyInputs, rule: Verifier) -> Verdict:
    """The number that drew a token decides whether it is accepted, too."""
    return rule(replace(x, accept_uniforms_BK=x.draft_uniforms_BK))


def previous_q(x: VerifyInputs, rule: Verifier) -> Verdict:
    """Every token but the first is judged by the q of the token before it."""
    assert x.q_BKV is not None
    return rule(replace(x, q_BKV=torch.cat([x.q_BKV[:, :1], x.q_BKV[:, :-1]], 1)))


def unfiltered_q(x: VerifyInputs, rule: Verifier) -> Verdict:
    """q is taken before top-k and top-p, but the token was drawn after them."""
    assert x.laws is not None
    return rule(replace(x, q_BKV=x.laws.unfiltered_BKV))


def argmax_as_drawn(x: VerifyInputs, rule: Verifier) -> Verdict:
    """The drafter's most likely token is judged as if it had been drawn from q."""
    assert x.laws is not None
    return rule(replace(x, q_BKV=x.laws.final_BKV))


def early_bonus(x: VerifyInputs, rule: Verifier) -> Verdict:
    """The bonus token is drawn from the distribution one position before its own."""
    verdict = rule(x)
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


def faults_of(rule: Verifier) -> dict[str, Fault[VerifyInputs]]:
    """All the ways in which this rule for chains is broken."""
    broken = [
        (replacement_from_p, _any, "after a rejection draws from p, not from the residual"),
        (reused_uniform, _drawn, "accepts with the random number that drew the draft"),
        (previous_q, _drawn_twice, "judges by q of the previous position"),
        (unfiltered_q, _drawn_filtered, "takes q before top-p"),
        (early_bonus, _any, "draws the bonus one position early"),
        (argmax_as_drawn, _chosen, "judges an argmax draft as if it had been drawn"),
    ]
    return {
        verify.__name__: Fault(what, applies, partial(verify, rule=rule))
        for verify, applies, what in broken
    }
