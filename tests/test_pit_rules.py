"""The right rules pass the test as often as they should: p-values over 200 seeds are uniform.

Dimension letters: N rounds of all seeds, K proposed tokens, S = K + 1, V vocabulary, C candidates.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from data.sampling import sample
from drafters.base import Sampling
from eval.decode import decode
from eval.lossless import ORDERS, ks_p_value, pit_columns, pit_p_value
from eval.rounds import DecodeSettings, drafted_from
from eval.tree import Tree
from eval.verify import verify_token
from eval.verify_tree import judge_siblings, verify_tree
from tests.noisy_pair import noisy_pair

SEEDS, ROUNDS, K, V = 200, 120, 3, 8
N = SEEDS * ROUNDS


class Emitted(NamedTuple):
    """What all rounds emitted: num_N tokens each, from p; q as pit_columns takes it."""

    p_NSV: Tensor
    tokens_NS: Tensor
    num_N: Tensor
    q_NSV: Tensor


def laws(*shape: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = 1.5 * torch.randn(*shape, V)
    return logits.softmax(-1), (logits + noise * torch.randn(*shape, V)).softmax(-1)


def chain(drawn: bool) -> Emitted:
    p_NSV, q_NSV = laws(N, K + 1)
    q_NKV = q_NSV[:, :K]
    tokens_NK = sample(q_NKV.flatten(0, 1), torch.rand(N * K)).view(N, K)
    if not drawn:
        tokens_NK, q_NKV = q_NKV.argmax(-1), None
    num_N = torch.arange(N) % (K + 1)
    verdict = verify_token(p_NSV, tokens_NK, num_N, q_NKV, torch.rand(N, K), torch.rand(N))
    emitted_NS = torch.nn.functional.pad(tokens_NK, (0, 1))
    emitted_NS[torch.arange(N), verdict.num_accepted_B] = verdict.next_token_B
    q_NSV = drafted_from(p_NSV, tokens_NK, num_N, q_NKV)
    return Emitted(p_NSV, emitted_NS, verdict.num_accepted_B + 1, q_NSV)


def drawn_siblings(replacement: bool) -> Emitted:
    """Two candidates for one position."""
    p_NV, q_NV = laws(N)
    first_N = sample(q_NV, torch.rand(N))
    rest_NV = q_NV if replacement else q_NV.scatter(1, first_N[:, None], 0.0)
    tokens_NC = torch.stack([first_N, sample(rest_NV, torch.rand(N))], 1)
    both_N = torch.full((N,), 2)
    rank_N, left_NV, _ = judge_siblings(
        p_NV, tokens_NC, both_N, q_NV, torch.rand(N, 2), replacement
    )
    taken_N = tokens_NC.gather(1, rank_N.clamp(min=0)[:, None])[:, 0]
    emitted_N = torch.where(rank_N < 0, sample(left_NV, torch.rand(N)), taken_N)
    return Emitted(p_NV[:, None], emitted_N[:, None], torch.ones_like(both_N), q_NV[:, None])


def top_siblings() -> Emitted:
    """The drafter's two likeliest tokens under the root; the accepted one has a bonus behind it."""
    p_NPV, q_NPV = laws(N, 3)
    top_NC = q_NPV[:, 0].topk(2).indices
    nodes_NP = torch.cat([torch.zeros(N, 1, dtype=torch.long), top_NC], 1)
    parents_NP = torch.zeros_like(nodes_NP)
    depths_NP = torch.tensor([0, 1, 1]).expand(N, 3)
    tree = Tree(nodes_NP, parents_NP, depths_NP, torch.full((N,), 3))
    verdict = verify_tree(p_NPV, tree, torch.rand(N, 3), torch.rand(N))
    rows_N, node_N = torch.arange(N), verdict.path_BA[:, 1]
    accepted_N = verdict.num_accepted_B == 1
    first_N = torch.where(accepted_N, nodes_NP[rows_N, node_N], verdict.next_token_B)
    p_NSV = torch.stack([p_NPV[:, 0], p_NPV[rows_N, node_N]], 1)
    q_NSV = torch.zeros_like(p_NSV)
    q_NSV[:, 0].scatter_(1, top_NC, 1.0)  # the bonus has no candidates
    tokens_NS = torch.stack([first_N, verdict.next_token_B], 1)
    return Emitted(p_NSV, tokens_NS, verdict.num_accepted_B + 1, q_NSV)


RULES: dict[str, Callable[[], Emitted]] = {
    "token": lambda: chain(drawn=True),
    "token, chosen outright": lambda: chain(drawn=False),
    "siblings with replacement": lambda: drawn_siblings(True),
    "siblings without replacement": lambda: drawn_siblings(False),
    "top siblings": top_siblings,
}


def by_seed(emitted: Emitted) -> list[Tensor]:
    """The transforms of each seed's tokens."""
    kept_NS = torch.arange(emitted.tokens_NS.shape[1]) < emitted.num_N[:, None]
    tokens = emitted.tokens_NS[kept_NS]
    uniforms = torch.rand(len(tokens))
    columns = pit_columns(emitted.p_NSV[kept_NS], tokens, uniforms, emitted.q_NSV[kept_NS])
    return list(columns.split(emitted.num_N.view(SEEDS, ROUNDS).sum(1).tolist()))


@pytest.mark.parametrize("name", RULES)
def test_p_values_of_the_right_rule_are_uniform(name: str) -> None:
    torch.manual_seed(0)
    check_uniform(by_seed(RULES[name]()))


def check_uniform(found: list[Tensor]) -> None:
    """found: the transforms [tokens, 3] of each seed."""
    for order in range(len(ORDERS)):
        p_values = [ks_p_value(columns[:, order].tolist()) for columns in found]
        assert kstest(p_values, "uniform").pvalue > 0.001, ORDERS[order]
    combined = [pit_p_value(columns.tolist()) for columns in found]
    # Three orders in one p-value: below a level at most as often as the level says (5% of 200,
    # and three standard deviations of 3.1).
    assert sum(p is not None and p < 0.05 for p in combined) <= 10 + 3 * 3.1


def test_p_values_of_block_verification_are_uniform() -> None:
    """In the loop, one seed a row: which round a token falls into depends on the token itself."""
    target, drafter = noisy_pair(vocab_size=V)
    sampling = Sampling(temperature=1.0, draft_sampled=True)
    settings = DecodeSettings(
        max_new_tokens=ROUNDS, num_draft=K, sampling=sampling, verification="block"
    )
    rows, _ = decode(target, drafter, [[i % V] for i in range(SEEDS)], settings)
    check_uniform([torch.tensor(row.pit) for row in rows])
