"""Token, point-mass and block verification: exact by enumeration of the functions themselves."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from eval.verify import Verdict, verify_block, verify_token
from tests.exact_laws import (
    ONE,
    Case,
    Emitted,
    Law,
    Prefix,
    Row,
    cumulated,
    emitted_law,
    one_hot,
    random_law,
    residual,
    round_law,
    target_law,
)

HALF, TENTH = Fraction(1, 2), Fraction(1, 10)
Rule = Callable[[list[Row], list[Row], Prefix], list[set[Fraction]]]


def token_cuts(p: list[Row], q: list[Row], x: Prefix) -> list[set[Fraction]]:
    """Cuts of each acceptance uniform, then those of the final draw."""
    accept = [{p[i][t] / q[i][t]} for i, t in enumerate(x)]
    final = cumulated(p[len(x)])
    for i in range(len(x)):
        final |= cumulated(residual(p[i], q[i]) or p[i]) | cumulated(p[i])
    return [*accept, final]


def block_cuts(p: list[Row], q: list[Row], x: Prefix) -> list[set[Fraction]]:
    """The same for block verification (2403.10444, algorithm 2)."""
    rho, accept, final = ONE, [], cumulated(p[len(x)])
    for i, token in enumerate(x):
        final |= cumulated(residual([rho * a for a in p[i]], q[i])) | cumulated(p[i])
        rho = min(rho * p[i][token] / q[i][token], ONE)
        if i + 1 == len(x):
            accept.append({rho})
            continue
        left = sum(max(rho * a - b, Fraction(0)) for a, b in zip(p[i + 1], q[i + 1], strict=True))
        accept.append({left / (left + 1 - rho)} if left + 1 - rho else set())
    return [*accept, final]


def law_of(
    verify: Callable[..., Verdict],
    cuts: Rule,
    p: Law,
    q: Law,
    num_draft: int,
    num_proposed: Callable[[Prefix], int] | None = None,
    point_mass: bool = False,
) -> tuple[Emitted, Fraction]:
    """Law of num_draft + 1 tokens and E[tau]; num_proposed says how many of x are verified."""
    cases, run = round_of(verify, cuts, p, q, num_draft, num_proposed, point_mass)
    return emitted_law(p, num_draft + 1, cases, run)


def round_of(
    verify: Callable[..., Verdict],
    cuts: Rule,
    p: Law,
    q: Law,
    num_draft: int,
    num_proposed: Callable[[Prefix], int] | None = None,
    point_mass: bool = False,
) -> tuple[list[Case], Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Every proposal, and a round of the rule over them, as emitted_law takes them."""
    vocab_size = len(p[()])
    cases, tokens, counts, p_rows, q_rows = [], [], [], [], []
    for x in itertools.product(range(vocab_size), repeat=num_draft):
        q_x: list[Row] = [q[x[:i]] for i in range(num_draft)]
        chance = ONE
        for row, token in zip(q_x, x, strict=True):
            chance *= row[token]
        if not chance:
            continue
        k = num_proposed(x) if num_proposed else num_draft
        p_x: list[Row] = [p[x[:i]] for i in range(num_draft + 1)]
        *accept, final = cuts(p_x[: k + 1], q_x[:k], x[:k])
        cases.append(Case(chance, [*accept, *[set()] * (num_draft - k), final]))
        tokens.append(x)
        counts.append(k)
        p_rows.append([[float(v) for v in row] for row in p_x])
        q_rows.append([[float(v) for v in row] for row in q_x])
    tokens_MK, count_M = torch.tensor(tokens), torch.tensor(counts)
    p_MK1V = torch.tensor(p_rows, dtype=torch.float64)
    q_MKV = torch.tensor(q_rows, dtype=torch.float64)

    def run(case_N: Tensor, accept_NK: Tensor, final_N: Tensor) -> Tensor:
        tokens_NK, q_NKV = tokens_MK[case_N], None if point_mass else q_MKV[case_N]
        accepted_N, next_N = verify(
            p_MK1V[case_N], tokens_NK, count_M[case_N], q_NKV, accept_NK, final_N
        )
        emitted_NK1 = torch.cat([tokens_NK, next_N[:, None]], 1)
        emitted_NK1.scatter_(1, accepted_N[:, None], next_N[:, None])
        behind_NK1 = torch.arange(num_draft + 1) > accepted_N[:, None]
        return emitted_NK1.masked_fill(behind_NK1, -1)

    return cases, run


def pair(seed: int, vocab_size: int, num_draft: int) -> tuple[Law, Law]:
    generator = random.Random(seed)
    p = random_law(generator, vocab_size, num_draft + 1)
    return p, random_law(generator, vocab_size, num_draft)


@pytest.mark.parametrize(
    ("verify", "cuts"), [(verify_token, token_cuts), (verify_block, block_cuts)]
)
def test_each_token_follows_the_target_among_the_rounds_that_have_one(
    verify: Callable[..., Verdict], cuts: Rule
) -> None:
    """What allows eval.lossless to order the tokens of a place by the q of this place."""
    p, q = pair(7, 3, 3)
    emitted = round_law(*round_of(verify, cuts, p, q, 3))
    begins: Emitted = defaultdict(Fraction)  # rounds that emit these tokens and maybe more
    long_enough: Emitted = defaultdict(Fraction)  # of them, those that emit more
    for tokens, mass in emitted.items():
        for i in range(len(tokens)):
            begins[tokens[: i + 1]] += mass
            long_enough[tokens[:i]] += mass
    assert max(map(len, begins)) == 4
    for tokens, mass in begins.items():
        assert mass == p[tokens[:-1]][tokens[-1]] * long_enough[tokens[:-1]]


@pytest.mark.parametrize(
    ("vocab_size", "num_draft"), [(v, k) for v in (2, 3, 4) for k in (1, 2, 3)]
)
def test_token_and_block_verification_are_exact(vocab_size: int, num_draft: int) -> None:
    for seed in range(2):
        p, q = pair(seed * 100 + vocab_size * 10 + num_draft, vocab_size, num_draft)
        expected = target_law(p, num_draft + 1)
        token, tau_token = law_of(verify_token, token_cuts, p, q, num_draft)
        block, tau_block = law_of(verify_block, block_cuts, p, q, num_draft)
        assert token == expected
        assert block == expected
        assert tau_block >= tau_token  # (theorem 2 there)


@pytest.mark.parametrize("num_draft", [1, 2, 3])
def test_point_mass_drafts_are_exact(num_draft: int) -> None:
    p, q = pair(num_draft, 4, num_draft)
    q = {prefix: one_hot(row.index(max(row)), 4) for prefix, row in q.items()}
    for verify, cuts in ((verify_token, token_cuts), (verify_block, block_cuts)):
        law, _ = law_of(verify, cuts, p, q, num_draft, point_mass=True)
        assert law == target_law(p, num_draft + 1)


def test_block_verification_accepts_more_by_a_known_amount() -> None:
    # By hand: q is uniform over two tokens, p = (1, 0) then (1/2, 1/2) whatever came first.
    # Token: P(first) = 1/2; then always: tau = 1 + 1/2 + 1/2. Block: rho_1 = 1 or 0, the same.
    p: Law = {(): [ONE, ONE * 0], (0,): [HALF, HALF], (1,): [HALF, HALF]}
    p |= {x: [HALF, HALF] for x in itertools.product(range(2), repeat=2)}
    q: Law = {x: [HALF, HALF] for x in ((), (0,), (1,))}
    assert law_of(verify_token, token_cuts, p, q, 2)[1] == 2
    assert law_of(verify_block, block_cuts, p, q, 2)[1] == 2
    # With p = (3/4, 1/4) twice, token: alpha = 3/4, tau = 1 + 3/4 + 9/16 = 37/16. Block: prefix
    # (0, x): rho_1 = 1, S_1 = 1/4, h_1 = 1, whole: min(1, 2 p(x)); prefix (1, x): rho_1 = 1/2,
    # S_1 = 0, h_1 = 0, whole: min(1, p(x)) = 3/4 and 1/4.
    # tau = 1 + 1/4 (2 + (1 + 1/2) + 2 * 3/4 + 2 * 1/4) = 1 + 1/4 * 11/2 = 38/16.
    skewed = [3 * HALF * HALF, HALF * HALF]
    p = dict.fromkeys(p, skewed)
    assert law_of(verify_token, token_cuts, p, q, 2)[1] == Fraction(37, 16)
    assert law_of(verify_block, block_cuts, p, q, 2)[1] == Fraction(38, 16)


# ---------------------------------------------------------------- rules that are not exact


def test_replacement_from_p_is_biased() -> None:
    """On rejection draw from p: (0.52, 0.48) instead of (0.4, 0.6)."""
    p: Law = {(): [4 * TENTH, 6 * TENTH], (0,): [ONE, ONE * 0], (1,): [ONE, ONE * 0]}
    q: Law = {(): [7 * TENTH, 3 * TENTH]}

    def naive(p_BK1V, tokens_BK, num_B, q_BKV, accept_BK, final_B):  # type: ignore[no-untyped-def]
        accepted_B, next_B = verify_token(p_BK1V, tokens_BK, num_B, q_BKV, accept_BK, final_B)
        from_p_B = (final_B >= p_BK1V[:, 0, 0]).long()
        return Verdict(accepted_B, torch.where(accepted_B == 0, from_p_B, next_B))

    right, _ = law_of(verify_token, token_cuts, p, q, 1)
    wrong, _ = law_of(naive, token_cuts, p, q, 1)
    assert right == {(0, 0): Fraction(40, 100), (1, 0): Fraction(60, 100)}
    assert wrong == {(0, 0): Fraction(52, 100), (1, 0): Fraction(48, 100)}


@pytest.mark.parametrize(
    ("verify", "cuts"), [(verify_token, token_cuts), (verify_block, block_cuts)]
)
def test_length_may_look_at_earlier_tokens(verify: Callable[..., Verdict], cuts: Rule) -> None:
    lengths = [lambda x: 1 + x[0], lambda x: 1 if x[0] == 0 else 3 - (x[1] == 1)]
    for seed, length in enumerate(lengths):
        p, q = pair(5 + seed, 3, 3)
        assert law_of(verify, cuts, p, q, 3, length)[0] == target_law(p, 4)


def test_length_that_looks_at_the_last_token_is_biased() -> None:
    """(0.7, 0.3) becomes (0.85, 0.15): the example of DSpark's scheduler."""
    p: Law = {(): [7 * TENTH, 3 * TENTH], (0,): [ONE, ONE * 0], (1,): [ONE, ONE * 0]}
    q: Law = {(): [HALF, HALF]}
    for verify, cuts in ((verify_token, token_cuts), (verify_block, block_cuts)):
        law, _ = law_of(verify, cuts, p, q, 1, lambda x: 1 - x[0])
        assert law == {(0, 0): Fraction(85, 100), (1, 0): Fraction(15, 100)}
