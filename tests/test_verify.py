"""eval/verify.py: the emitted tokens follow the target, by enumeration and by draws."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from data.sampling import sample
from eval.verify import Verdict, verify_block, verify_token
from recipes.errors import UserError

Prefix = tuple[int, ...]
Law = dict[Prefix, list[Fraction]]  # next-token distribution after each prefix
P85_P, P85_Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def verify_one(p: list[float], q: list[float] | None, token: int, u: float) -> tuple[int, int]:
    """One proposed token of one row; the bonus distribution is p again."""
    p_12V = torch.tensor([[p, p]])
    q_11V = None if q is None else torch.tensor([[q]])
    one = torch.ones(1, dtype=torch.long)
    verdict = verify_token(
        p_12V, torch.tensor([[token]]), one, q_11V, torch.tensor([[u]]), torch.tensor([0.5])
    )
    return int(verdict.num_accepted_B), int(verdict.next_token_B)


def first_tokens(
    p: list[float], q: list[float], num_draws: int, seed: int = 0
) -> tuple[Tensor, float]:
    """Frequencies of the first emitted token, and the acceptance rate, of verify_token."""
    generator = torch.Generator().manual_seed(seed)
    p_V, q_V = torch.tensor(p), torch.tensor(q)
    x_B = sample(q_V.expand(num_draws, -1), torch.rand(num_draws, generator=generator))
    verdict = verify_token(
        p_V.expand(num_draws, 2, -1),
        x_B[:, None],
        torch.ones(num_draws, dtype=torch.long),
        q_V.expand(num_draws, 1, -1),
        torch.rand(num_draws, 1, generator=generator),
        torch.rand(num_draws, generator=generator),
    )
    emitted_B = torch.where(verdict.num_accepted_B > 0, x_B, verdict.next_token_B)
    frequencies = emitted_B.bincount(minlength=len(p)) / num_draws
    return frequencies, verdict.num_accepted_B.float().mean().item()


# ---------------------------------------------------------------- exact enumeration


def random_law(generator: random.Random, vocab_size: int, depth: int) -> Law:
    """Small integers over their sum, some of them zero, for each prefix below depth."""
    law = {}
    for length in range(depth):
        for prefix in itertools.product(range(vocab_size), repeat=length):
            weights = [generator.randint(0, 4) for _ in range(vocab_size)]
            weights[generator.randrange(vocab_size)] += 1
            law[prefix] = [Fraction(w, sum(weights)) for w in weights]
    return law


def token_rule(p: list[list[Fraction]], x: Prefix, q: list[list[Fraction]]) -> dict[int, Fraction]:
    """P(num_accepted = n) of token verification."""
    result, reached = {}, Fraction(1)
    for i, token in enumerate(x):
        accept = min(Fraction(1), p[i][token] / q[i][token])
        result[i] = reached * (1 - accept)
        reached *= accept
    return {**result, len(x): reached}


def residual(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    weights = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [w / sum(weights) for w in weights] if sum(weights) else p


def emitted_law(p: Law, q: Law, num_draft: int, vocab_size: int, naive: bool = False) -> Law:
    """Law of the first num_draft + 1 tokens: one round, then the target itself goes on."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for x in itertools.product(range(vocab_size), repeat=num_draft):
        q_rows = [q[x[:i]] for i in range(num_draft)]
        p_rows = [p[x[:i]] for i in range(num_draft + 1)]
        drawn = Fraction(1)
        for i, token in enumerate(x):
            drawn *= q_rows[i][token]
        if not drawn:
            continue
        for n, chance in token_rule(p_rows, x, q_rows).items():
            bonus = n == num_draft or naive
            nexts = p_rows[n] if bonus else residual(p_rows[n], q_rows[n])
            for token, mass in enumerate(nexts):
                extend(law, p, (*x[:n], token), drawn * chance * mass, num_draft + 1, vocab_size)
    return {k: [v] for k, v in law.items() if v}


def extend(
    law: dict[Prefix, Fraction], p: Law, prefix: Prefix, mass: Fraction, length: int, vocab: int
) -> None:
    if len(prefix) == length or not mass:
        law[prefix] += mass
        return
    for token in range(vocab):
        extend(law, p, (*prefix, token), mass * p[prefix][token], length, vocab)


def target_law(p: Law, length: int, vocab_size: int) -> Law:
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    extend(law, p, (), Fraction(1), length, vocab_size)
    return {k: [v] for k, v in law.items() if v}


@pytest.mark.parametrize(
    ("vocab_size", "num_draft", "point_mass"),
    [(v, k, m) for v in (2, 3, 4) for k in (1, 2, 3) for m in (False, True)],
)
def test_emitted_law_is_the_targets_exactly(
    vocab_size: int, num_draft: int, point_mass: bool
) -> None:
    generator = random.Random(vocab_size * 10 + num_draft)
    for _ in range(3):
        p = random_law(generator, vocab_size, num_draft + 1)
        q = random_law(generator, vocab_size, num_draft)
        if point_mass:
            q = {k: [Fraction(i == row.index(max(row))) for i in range(vocab_size)]
                 for k, row in q.items()}  # fmt: skip
        expected = target_law(p, num_draft + 1, vocab_size)
        assert emitted_law(p, q, num_draft, vocab_size) == expected
        for verify in (verify_token, verify_block):  # the functions follow the same law
            assert_function_follows(verify, p, q, num_draft, vocab_size, point_mass)


def assert_function_follows(
    verify: Callable[..., Verdict], p: Law, q: Law, num_draft: int, vocab: int, point_mass: bool
) -> None:
    """Counts of 40k seeded rounds, drafted token by token, against the target's law."""
    num_rows = 40_000
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def table(law: Law, length: int) -> Tensor:
        """The distributions after all prefixes of this length, in the order of their codes."""
        prefixes = itertools.product(range(vocab), repeat=length)
        return torch.tensor([[float(v) for v in law[prefix]] for prefix in prefixes])

    code_B = torch.zeros(num_rows, dtype=torch.long)  # of a prefix: its digits in base V
    p_rows, q_rows, drawn = [table(p, 0)[code_B]], [], []
    for i in range(num_draft):
        q_rows.append(table(q, i)[code_B])
        drawn.append(sample(q_rows[-1], rand(num_rows)))
        code_B = code_B * vocab + drawn[-1]
        p_rows.append(table(p, i + 1)[code_B])
    tokens_BK = torch.stack(drawn, dim=1)
    num_accepted_B, next_token_B = verify(
        torch.stack(p_rows, dim=1),
        tokens_BK,
        torch.full((num_rows,), num_draft),
        None if point_mass else torch.stack(q_rows, dim=1),
        rand(num_rows, num_draft),
        rand(num_rows),
    )
    # The emitted tokens, completed to num_draft + 1 by the target itself.
    code_B = torch.zeros(num_rows, dtype=torch.long)
    padded_BK1 = torch.nn.functional.pad(tokens_BK, (0, 1))
    for i in range(num_draft + 1):
        own_B = sample(table(p, i)[code_B], rand(num_rows))
        token_B = torch.where(num_accepted_B > i, padded_BK1[:, i], own_B)
        code_B = code_B * vocab + torch.where(num_accepted_B == i, next_token_B, token_B)
    count_C = code_B.bincount(minlength=vocab ** (num_draft + 1)).tolist()
    law = target_law(p, num_draft + 1, vocab)
    for count, sequence in zip(
        count_C, itertools.product(range(vocab), repeat=num_draft + 1), strict=True
    ):
        mass = float(law[sequence][0]) if sequence in law else 0.0
        assert abs(count - num_rows * mass) <= 5 * (num_rows * mass * (1 - mass)) ** 0.5 + 1e-9


def test_naive_rule_is_told_apart() -> None:
    """Replacing a rejected token by a draw from p: (0.52, 0.48) instead of (0.4, 0.6)."""
    p = {(): [Fraction(4, 10), Fraction(6, 10)]}
    p |= {(i,): [Fraction(1), Fraction(0)] for i in range(2)}
    q = {(): [Fraction(7, 10), Fraction(3, 10)]}
    right = emitted_law(p, q, 1, 2)
    wrong = emitted_law(p, q, 1, 2, naive=True)
    assert right == {(0, 0): [Fraction(40, 100)], (1, 0): [Fraction(60, 100)]}
    assert wrong == {(0, 0): [Fraction(52, 100)], (1, 0): [Fraction(48, 100)]}
    frequencies, rate = first_tokens([0.4, 0.6], [0.7, 0.3], 200_000)
    torch.testing.assert_close(frequencies, torch.tensor([0.4, 0.6]), atol=0.005, rtol=0)
    assert rate == pytest.approx(0.7, abs=0.005)  # sum_v min(p, q)


def test_law_by_integration_over_a_grid_of_uniforms() -> None:
    """No random draws: midpoints of a 400 x 400 grid for each proposed token."""
    grid = (torch.arange(400) + 0.5) / 400
    u, final = (g.flatten() for g in torch.meshgrid(grid, grid, indexing="ij"))
    p_V, num_rows = torch.tensor(P85_P), 160_000
    law_V = torch.zeros(3)
    for x, q_x in enumerate(P85_Q):
        verdict = verify_token(
            p_V.expand(num_rows, 2, 3),
            torch.full((num_rows, 1), x),
            torch.ones(num_rows, dtype=torch.long),
            torch.tensor(P85_Q).expand(num_rows, 1, 3),
            u[:, None],
            final,
        )
        emitted = torch.where(verdict.num_accepted_B > 0, x, verdict.next_token_B)
        law_V += q_x * emitted.bincount(minlength=3) / num_rows
    torch.testing.assert_close(law_V, p_V, atol=0.003, rtol=0)


# ---------------------------------------------------------------- public cases


def test_p85_replacement_comes_from_the_residual() -> None:
    frequencies, rate = first_tokens(P85_P, P85_Q, 200_000)
    torch.testing.assert_close(frequencies, torch.tensor(P85_P), atol=0.005, rtol=0)
    assert rate == pytest.approx(0.2 + 0.3 + 0.2, abs=0.005)


@pytest.mark.parametrize(
    ("p", "q", "rate"),
    [
        (P85_P, P85_P, 1.0),  # q = p
        (P85_P, [1.0, 0.0, 0.0], 0.5),  # one-hot q
        ([0.0, 0.0, 1.0], P85_Q, 0.3),  # one-hot p
    ],
)
def test_p85_limits(p: list[float], q: list[float], rate: float) -> None:
    frequencies, measured = first_tokens(p, q, 200_000)
    torch.testing.assert_close(frequencies, torch.tensor(p), atol=0.005, rtol=0)
    assert measured == pytest.approx(rate, abs=0.005 if rate < 1 else 0)


def test_p85_one_hot_q_and_point_mass_agree() -> None:
    torch.manual_seed(0)
    p_BK1V = torch.rand(500, 4, 6).softmax(-1)
    tokens_BK, num_proposed_B = torch.randint(6, (500, 3)), torch.randint(4, (500,))
    uniforms = torch.rand(500, 3), torch.rand(500)
    one_hot = torch.nn.functional.one_hot(tokens_BK, 6).float()
    for verify in (verify_token, verify_block):
        a = verify(p_BK1V, tokens_BK, num_proposed_B, one_hot, *uniforms)
        b = verify(p_BK1V, tokens_BK, num_proposed_B, None, *uniforms)
        assert torch.equal(a.num_accepted_B, b.num_accepted_B)
        assert torch.equal(a.next_token_B, b.next_token_B)


def test_p88_1_equal_laws_accept_up_to_the_last_uniform() -> None:
    third = [1 / 3, 1 / 3, 1 / 3]
    assert verify_one(third, third, token=1, u=1 - 1e-9)[0] == 1


def test_p88_2_certain_token_is_accepted() -> None:
    assert verify_one([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], token=0, u=1 - 1e-9) == (1, 0)
    assert verify_one([1.0, 0.0, 0.0], None, token=0, u=1 - 1e-9) == (1, 0)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 1e-9])
def test_p88_3_zero_q_of_the_proposed_token(u: float) -> None:
    assert verify_one([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], token=1, u=u)[0] == 1
    assert verify_one([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], token=2, u=u) == (0, 1)


def test_p88_4_nan_is_an_error_that_names_row_and_position() -> None:
    p_BK1V = torch.full((2, 3, 3), 1 / 3)
    p_BK1V[1, 1] = torch.nan
    arguments = torch.zeros(2, 2, dtype=torch.long), torch.full((2,), 2)
    q_BKV = torch.full((2, 2, 3), 1 / 3)
    with pytest.raises(UserError, match="row 1 at position 1"):
        verify_token(p_BK1V, *arguments, q_BKV, torch.rand(2, 2), torch.rand(2))
    # Block verification: of p or of q, at any proposed token, but not behind them.
    for which in (0, 1):
        for position in (0, 1):
            p, q = laws = torch.full((2, 3, 3), 1 / 3), torch.full((2, 2, 3), 1 / 3)
            laws[which][1, position] = torch.nan
            with pytest.raises(UserError, match="row 1 "):
                verify_block(p, *arguments, q, torch.rand(2, 2), torch.rand(2))
    p, q = torch.full((1, 3, 3), 1 / 3), torch.full((1, 2, 3), 1 / 3)
    q[0, 1] = torch.nan
    one = torch.zeros(1, 2, dtype=torch.long), torch.tensor([1])
    assert verify_block(p, *one, q, torch.rand(1, 2), torch.rand(1)).num_accepted_B.tolist() == [1]


def test_p88_5_only_one_token_possible() -> None:
    assert verify_one([0.0, 0.0, 1.0], [0.5, 0.5, 0.0], token=0, u=0.0) == (0, 2)
    assert verify_one([0.0, 0.0, 1.0], None, token=1, u=0.0) == (0, 2)


def test_p88_ids_stay_below_the_vocabulary_size() -> None:
    torch.manual_seed(0)
    p_BK1V = torch.rand(2000, 3, 5).pow(20)
    p_BK1V = p_BK1V / p_BK1V.sum(-1, keepdim=True)
    q_BKV = p_BK1V[:, :2] + 1e-7 * torch.rand(2000, 2, 5)  # equal but for rounding
    tokens_BK = torch.randint(5, (2000, 2))
    for verify in (verify_token, verify_block):
        ones = torch.ones(2000, 2), torch.ones(2000)
        verdict = verify(p_BK1V, tokens_BK, torch.full((2000,), 2), q_BKV, *ones)
        assert bool((verdict.next_token_B < 5).all())
        chosen = p_BK1V[torch.arange(2000), verdict.num_accepted_B, verdict.next_token_B]
        assert bool((chosen > 0).all())


def test_p89_greedy_emits_the_argmax_for_any_draft_and_seed() -> None:
    torch.manual_seed(0)
    greedy_BK1 = torch.randint(7, (300, 4))
    p_BK1V = torch.nn.functional.one_hot(greedy_BK1, 7).float()
    tokens_BK, num_proposed_B = torch.randint(2, (300, 3)) + greedy_BK1[:, :3], torch.tensor(3)
    tokens_BK, num_proposed_B = tokens_BK % 7, num_proposed_B.expand(300)
    q_BKV = torch.rand(300, 3, 7).softmax(-1)
    runs = [
        verify_token(p_BK1V, tokens_BK, num_proposed_B, q, torch.rand(300, 3), torch.rand(300))
        for q in (q_BKV, None, q_BKV)
    ]
    for num_accepted_B, next_token_B in runs:
        matches = (tokens_BK == greedy_BK1[:, :3]).long().cumprod(-1).sum(-1)
        assert torch.equal(num_accepted_B, matches)
        assert torch.equal(next_token_B, greedy_BK1[torch.arange(300), matches])


# ---------------------------------------------------------------- shapes and padding


@pytest.mark.parametrize("verify", [verify_token, verify_block])
def test_ragged_rows_equal_each_row_alone(verify: Callable[..., Verdict]) -> None:
    """Rows with 0..3 proposed tokens; padding holds ids that do not exist."""
    torch.manual_seed(0)
    num_proposed_B = torch.tensor([0, 1, 2, 3] * 50)
    p_BK1V, q_BKV = torch.randn(200, 4, 5).softmax(-1), torch.randn(200, 3, 5).softmax(-1)
    tokens_BK = torch.randint(5, (200, 3))
    tokens_BK[torch.arange(3) >= num_proposed_B[:, None]] = -100
    u_BK, final_B = torch.rand(200, 3), torch.rand(200)
    together = verify(p_BK1V, tokens_BK, num_proposed_B, q_BKV, u_BK, final_B)
    assert bool((together.num_accepted_B <= num_proposed_B).all())
    for row in range(200):
        k = int(num_proposed_B[row])
        one = slice(row, row + 1)
        alone = verify(
            p_BK1V[one, : k + 1], tokens_BK[one, :k], num_proposed_B[one], q_BKV[one, :k],
            u_BK[one, :k], final_B[one],
        )  # fmt: skip
        assert alone.num_accepted_B.item() == together.num_accepted_B[row].item()
        assert alone.next_token_B.item() == together.next_token_B[row].item()


def test_row_without_a_proposal_draws_from_p() -> None:
    p_BK1V = torch.tensor([[[0.5, 0.3, 0.2]]])
    empty = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    for u, token in ((0.49, 0), (0.79, 1), (0.99, 2)):
        verdict = verify_token(p_BK1V, *empty, None, torch.zeros(1, 0), torch.tensor([u]))
        assert (verdict.num_accepted_B.item(), verdict.next_token_B.item()) == (0, token)


def test_block_accepts_no_fewer_than_token() -> None:
    torch.manual_seed(0)
    p_K1V, q_KV = torch.randn(4, 3).softmax(-1), torch.randn(3, 3).softmax(-1)
    tokens_BK = torch.stack([sample(q.expand(50_000, 3), torch.rand(50_000)) for q in q_KV], 1)
    arguments = (
        p_K1V.expand(50_000, 4, 3), tokens_BK, torch.full((50_000,), 3),
        q_KV.expand(50_000, 3, 3), torch.rand(50_000, 3), torch.rand(50_000),
    )  # fmt: skip
    token, block = (
        f(*arguments).num_accepted_B.float().mean() for f in (verify_token, verify_block)
    )
    assert block > token
