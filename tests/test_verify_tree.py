"""Draft trees and several candidates a position: exact by enumeration of the functions."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from eval.tree import Tree, chain
from eval.verify import verify_token
from eval.verify_tree import judge_siblings, verify_sampled_tree, verify_tree
from recipes.errors import UserError
from tests.exact_laws import (
    ONE,
    Case,
    Emitted,
    Law,
    Prefix,
    Row,
    cumulated,
    emitted_law,
    normalised,
    one_hot,
    random_law,
    residual,
    target_law,
)


@dataclass
class Nodes:
    """A tree of one row: parents and paths (the tokens behind the root), level by level."""

    parents: list[int] = field(default_factory=lambda: [0])
    paths: list[Prefix] = field(default_factory=lambda: [()])

    def children(self, node: int) -> list[int]:
        return [n for n in range(1, len(self.paths)) if self.parents[n] == node]


def stack(trees: list[Nodes]) -> Tree:
    """Rows of one tree, padded with nonsense."""
    most = max(len(t.paths) for t in trees)
    tokens, parents, depths = [], [], []
    for t in trees:
        pad = most - len(t.paths)
        tokens.append([0, *(p[-1] for p in t.paths[1:])] + [99] * pad)
        parents.append(t.parents + [0] * pad)
        depths.append([len(p) for p in t.paths] + [1] * pad)
    sizes = torch.tensor([len(t.paths) for t in trees])
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), sizes)


def rows_of(tree: Tree, index_N: Tensor) -> Tree:
    return Tree(*(part[index_N] for part in tree))


def table(law: Law, trees: list[Nodes]) -> Tensor:
    """Distributions at every node, fp64; padding nodes get those of the root."""
    most = max(len(t.paths) for t in trees)
    paths = [t.paths + [()] * (most - len(t.paths)) for t in trees]
    rows = [[[float(v) for v in law[path]] for path in row] for row in paths]
    return torch.tensor(rows, dtype=torch.float64)


def emitted_tokens(tree: Tree, verdict: tuple[Tensor, Tensor, Tensor], length: int) -> Tensor:
    num_accepted_N, next_N, path_NA = verdict
    tokens_NA = tree.tokens_BP.gather(1, path_NA)[:, 1:]
    tokens_NA = torch.nn.functional.pad(tokens_NA, (0, length - tokens_NA.shape[1]))
    tokens_NA = tokens_NA.scatter(1, num_accepted_N[:, None], next_N[:, None])
    return tokens_NA.masked_fill(torch.arange(length) > num_accepted_N[:, None], -1)


def cuts_of(tree: Nodes, p: Law, q_of: Callable[[int, list[Row], Row], Row]) -> list[set[Fraction]]:
    """Cuts of each node's acceptance uniform, then of the final draw.

    q_of: (child, q of the siblings before it, q at the parent) -> what the child was drawn from.
    """
    accept: list[set[Fraction]] = [set() for _ in tree.paths]
    final: set[Fraction] = set()
    for node, path in enumerate(tree.paths):
        rest: Row | None = p[path]
        before: list[Row] = []
        for child in tree.children(node):
            if rest is None:
                break
            token = tree.paths[child][-1]
            before.append(q_of(child, before, path))  # type: ignore[arg-type]
            q_x = before[-1][token]
            accept[child] = {rest[token] / q_x} if q_x else set()
            rest = residual(rest, before[-1])
        final |= cumulated(rest) | cumulated(p[path])
    return [*accept, final]


def random_tree(generator: random.Random, vocab_size: int, depth: int, most: int) -> Nodes:
    """Distinct guesses, at least one path of full depth, at most `most` guesses."""
    tree, level = Nodes(), [0]
    for d in range(depth):
        found = []
        for i, node in enumerate(level):
            room = most - (len(tree.paths) - 1) - (depth - d - 1)
            low = 1 if i == 0 else 0
            count = min(room, generator.randint(low, min(vocab_size, 3)))
            for token in generator.sample(range(vocab_size), max(count, low)):
                found.append(len(tree.paths))
                tree.parents.append(node)
                tree.paths.append((*tree.paths[node], token))
        level = found
    return tree


def point_law(p: Law, trees: list[Nodes], chances: list[Fraction]) -> tuple[Emitted, Fraction]:
    """Law of verify_tree where tree i is proposed with probability chances[i]."""
    vocab_size = len(p[()])
    most, depth = max(len(t.paths) for t in trees), max(len(q) for t in trees for q in t.paths)
    cases = []
    for tree, chance in zip(trees, chances, strict=True):
        *accept, final = cuts_of(
            tree, p, lambda n, _b, _q, t=tree: one_hot(t.paths[n][-1], vocab_size)
        )
        cases.append(Case(chance, [*accept, *[set()] * (most - len(accept)), final]))
    stacked, p_MPV = stack(trees), table(p, trees)

    def run(case_N: Tensor, accept_NP: Tensor, final_N: Tensor) -> Tensor:
        tree = rows_of(stacked, case_N)
        return emitted_tokens(tree, verify_tree(p_MPV[case_N], tree, accept_NP, final_N), depth + 1)

    return emitted_law(p, depth + 1, cases, run)


@pytest.mark.parametrize(("vocab_size", "depth"), [(v, d) for v in (2, 3, 4) for d in (1, 2, 3)])
def test_trees_of_point_masses_are_exact(vocab_size: int, depth: int) -> None:
    generator = random.Random(vocab_size * 10 + depth)
    for _ in range(2):
        p = random_law(generator, vocab_size, depth + 1)
        trees = [random_tree(generator, vocab_size, depth, 6) for _ in range(3)]
        law, mean = point_law(p, trees, [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])
        assert law == target_law(p, depth + 1)
        reached = [sum(mass_of(p, path) for path in t.paths) for t in trees]
        assert mean == reached[0] / 2 + reached[1] / 3 + reached[2] / 6  # every node: P(path)


def mass_of(p: Law, path: Prefix) -> Fraction:
    mass = ONE
    for i, token in enumerate(path):
        mass *= p[path[:i]][token]
    return mass


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_top_k_siblings_are_exact(vocab_size: int) -> None:
    """One position, the k likeliest tokens of q in order: a tree of depth 1."""
    generator = random.Random(vocab_size)
    for k in range(1, vocab_size + 1):
        p, q = random_law(generator, vocab_size, 2), random_law(generator, vocab_size, 1)[()]
        best = sorted(range(vocab_size), key=lambda v: -q[v])[:k]
        tree = Nodes([0] * (k + 1), [(), *((v,) for v in best)])
        law, mean = point_law(p, [tree], [ONE])
        assert law == target_law(p, 2)
        assert mean == 1 + sum(p[()][v] for v in best)


# ---------------------------------------------------------------- drawn siblings


def without(q: Row, tokens: list[int]) -> Row | None:
    return normalised([Fraction(0) if v in tokens else w for v, w in enumerate(q)])


def draws(q: Law, children: tuple[int, ...], replacement: bool) -> Iterator[tuple[Nodes, Fraction]]:
    """Every tree of this shape with its probability; fewer siblings where q is used up."""
    todo: list[tuple[Nodes, Fraction, list[int], list[int], int]] = [(Nodes(), ONE, [0], [], 0)]
    while todo:
        tree, chance, level, following, depth = todo.pop()
        if depth == len(children):
            yield tree, chance
            continue
        if not level:
            todo.append((tree, chance, following, [], depth + 1))
            continue
        node = level[0]
        mine = tree.children(node)
        used = [] if replacement else [tree.paths[n][-1] for n in mine]
        left = without(q[tree.paths[node]], used)
        if len(mine) == children[depth] or left is None:
            todo.append((tree, chance, level[1:], following, depth))
            continue
        for token, mass in enumerate(left):
            if mass:
                path = (*tree.paths[node], token)
                grown = Nodes([*tree.parents, node], [*tree.paths, path])
                todo.append((grown, chance * mass, level, [*following, len(tree.paths)], depth))


def sampled_law(
    p: Law, q: Law, children: tuple[int, ...], replacement: bool, truth: bool | None = None
) -> tuple[Emitted, Fraction]:
    """Law of verify_sampled_tree; truth: how the siblings were really drawn."""
    drawn = list(draws(q, children, replacement if truth is None else truth))
    trees, length = [tree for tree, _ in drawn], len(children) + 1
    most = max(len(t.paths) for t in trees)
    cases = []
    for tree, chance in drawn:

        def q_of(child: int, before: list[Row], path: Row, tree: Nodes = tree) -> Row:
            siblings = tree.children(tree.parents[child])[: len(before)]
            used = [] if replacement else [tree.paths[n][-1] for n in siblings]
            return without(q[path], used) or [Fraction(0)] * len(q[()])  # type: ignore[index]

        *accept, final = cuts_of(tree, p, q_of)
        cases.append(Case(chance, [*accept, *[set()] * (most - len(accept)), final]))
    stacked, p_MPV = stack(trees), table(p, trees)
    leaves = {path: q.get(path, q[()]) for t in trees for path in t.paths}
    q_MPV = table(leaves, trees)

    def run(case_N: Tensor, accept_NP: Tensor, final_N: Tensor) -> Tensor:
        tree = rows_of(stacked, case_N)
        verdict = verify_sampled_tree(
            p_MPV[case_N], tree, q_MPV[case_N], accept_NP, final_N, replacement
        )
        return emitted_tokens(tree, verdict, length)

    return emitted_law(p, length, cases, run)


SHAPES = [(4, (1,)), (4, (2,)), (4, (3,)), (3, (2, 1)), (3, (1, 2)), (2, (2, 1, 1)), (2, (1, 1, 2))]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("vocab_size", "children"), SHAPES)
def test_trees_of_draws_are_exact(
    vocab_size: int, children: tuple[int, ...], replacement: bool
) -> None:
    generator = random.Random(vocab_size)
    for _ in range(2):
        p = random_law(generator, vocab_size, len(children) + 1)
        q = random_law(generator, vocab_size, len(children))
        law, _ = sampled_law(p, q, children, replacement)
        assert law == target_law(p, len(children) + 1)


def test_one_draw_accepts_what_token_verification_accepts() -> None:
    p: Law = {(): [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]}
    p |= dict.fromkeys([(0,), (1,), (2,)], p[()])
    q: Law = {(): [Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)]}
    assert sampled_law(p, q, (1,), True)[1] == 1 + Fraction(7, 10)  # .2 + .3 + .2
    # The second is judged by norm(max(p - q, 0)) = (1, 0, 0): drawn again from q it is accepted
    # with .2; from q without the first, which was 1 (2/3 of the rejections) or 2 (1/3), with
    # .2/.5 and .2/.7.
    assert sampled_law(p, q, (2,), True)[1] == 1 + Fraction(7, 10) + Fraction(3, 10) * Fraction(
        2, 10
    )
    second = Fraction(2, 3) * Fraction(2, 5) + Fraction(1, 3) * Fraction(2, 7)
    assert sampled_law(p, q, (2,), False)[1] == 1 + Fraction(7, 10) + Fraction(3, 10) * second


# ---------------------------------------------------------------- rules that are not exact


def test_min_p_over_q_with_top_k_siblings_is_biased() -> None:
    """The two likeliest tokens of q, judged as if they had been drawn from it."""
    p: Law = {(): [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]}
    p |= {(v,): [ONE, ONE * 0, ONE * 0] for v in range(3)}
    q = [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]
    tree = Nodes([0, 0, 0], [(), (0,), (1,)])
    *accept, final = cuts_of(tree, p, lambda *_: q)
    stacked, p_MPV = stack([tree]), table(p, [tree])
    q_MPV = table(dict.fromkeys(tree.paths, q), [tree])

    def run(case_N: Tensor, accept_NP: Tensor, final_N: Tensor) -> Tensor:
        rows = rows_of(stacked, case_N)
        verdict = verify_sampled_tree(
            p_MPV[case_N], rows, q_MPV[case_N], accept_NP, final_N, replacement=True
        )
        return emitted_tokens(rows, verdict, 2)

    law, _ = emitted_law(p, 2, [Case(ONE, [*accept, final])], run)
    # 0 with 5/6; else the residual (0, 0, 1) rejects 1 and draws 2.
    assert law == {(0, 0): Fraction(5, 6), (2, 0): Fraction(1, 6)}
    assert point_law(p, [tree], [ONE])[0] == target_law(p, 2)


def test_siblings_drawn_without_replacement_must_be_judged_so() -> None:
    p: Law = {(): [Fraction(5, 10), Fraction(4, 10), Fraction(1, 10)]}
    p |= {(v,): [ONE, ONE * 0, ONE * 0] for v in range(3)}
    q: Law = {(): [Fraction(2, 10), Fraction(2, 10), Fraction(6, 10)]}
    assert sampled_law(p, q, (2,), replacement=True, truth=False)[0] != target_law(p, 2)
    assert sampled_law(p, q, (2,), replacement=False, truth=True)[0] != target_law(p, 2)


def test_guess_may_be_dropped_by_any_coin_of_the_drafter() -> None:
    p: Law = {(): [Fraction(7, 10), Fraction(3, 10)]} | {(v,): [ONE, ONE * 0] for v in range(2)}
    guess = Nodes([0, 0], [(), (0,)])
    assert point_law(p, [guess, Nodes()], [Fraction(1, 2)] * 2)[0] == target_law(p, 2)


# ---------------------------------------------------------------- shapes, padding, edges


def random_inputs(num_rows: int, vocab_size: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p_BPV = torch.randn(num_rows, 4, vocab_size, generator=generator).softmax(-1)
    tokens_BK = torch.randint(vocab_size, (num_rows, 3), generator=generator)
    u_BP = torch.rand(num_rows, 4, generator=generator)
    return p_BPV, tokens_BK, u_BP, torch.rand(num_rows, generator=generator)


def test_chain_as_a_tree_is_token_verification() -> None:
    p_BPV, tokens_BK, u_BP, final_B = random_inputs(4000)
    num_B = torch.arange(4000) % 4
    tree = chain(torch.zeros(4000, dtype=torch.long), tokens_BK, num_B)
    ours = verify_tree(p_BPV, tree, u_BP, final_B)
    theirs = verify_token(p_BPV, tokens_BK, num_B, None, u_BP[:, 1:], final_B)
    assert torch.equal(ours.num_accepted_B, theirs.num_accepted_B)
    assert torch.equal(ours.next_token_B, theirs.next_token_B)
    assert set(ours.num_accepted_B.tolist()) == {0, 1, 2, 3}
    q_BPV = torch.nn.functional.one_hot(torch.nn.functional.pad(tokens_BK, (0, 1)), 5).float()
    for replacement in (True, False):
        drawn = verify_sampled_tree(p_BPV, tree, q_BPV, u_BP, final_B, replacement)
        assert torch.equal(drawn.num_accepted_B, theirs.num_accepted_B)
        assert torch.equal(drawn.path_BA, ours.path_BA)


def test_path_names_the_accepted_nodes() -> None:
    """Greedy over 0 -> 2 -> 1: guesses (1, 2), then 2's children (0, 1), then the next token 3."""
    tree = Tree(
        torch.tensor([[0, 1, 2, 4, 0, 1]]),
        torch.tensor([[0, 0, 0, 1, 2, 2]]),
        torch.tensor([[0, 1, 1, 2, 2, 2]]),
        torch.tensor([6]),
    )
    best = torch.tensor([[2, 4, 1, 0, 0, 3]])
    p_BPV = torch.nn.functional.one_hot(best, 5).float()
    verdict = verify_tree(p_BPV, tree, torch.full((1, 6), 0.99), torch.zeros(1))
    assert [part.tolist() for part in verdict] == [[2], [3], [[0, 2, 5]]]


def test_the_same_guess_made_twice_is_tried_once() -> None:
    tree = stack([Nodes([0, 0, 0], [(), (0,), (0,)])])
    p_BPV = torch.tensor([[[0.5, 0.5]] * 3])
    for u, accepted in ((0.4, 1), (0.6, 0)):
        verdict = verify_tree(p_BPV, tree, torch.tensor([[0.0, u, 0.0]]), torch.zeros(1))
        assert verdict.num_accepted_B.tolist() == [accepted]


def test_siblings_that_hold_all_mass_leave_p() -> None:
    """Rounding can reject all of them; then the draw is from p and never fails."""
    tree = stack([Nodes([0, 0, 0], [(), (0,), (1,)])])
    third = torch.tensor([[[1 / 3, 2 / 3 - 1e-7, 0.0]] * 3])
    verdict = verify_tree(third, tree, torch.full((1, 3), 1.0), torch.tensor([0.9]))
    assert verdict.next_token_B.item() < 2


def test_nan_is_an_error_that_names_row_and_position() -> None:
    p_BPV, tokens_BK, u_BP, final_B = random_inputs(2)
    p_BPV[1] = torch.nan
    tree = chain(torch.zeros(2, dtype=torch.long), tokens_BK, torch.tensor([3, 3]))
    with pytest.raises(UserError, match="row 1 at position 0"):
        verify_tree(p_BPV, tree, u_BP, final_B)


def test_judge_siblings_of_rows_with_fewer_candidates() -> None:
    p_BV = torch.tensor([[0.5, 0.3, 0.2]]).expand(3, 3)
    q_BV = torch.tensor([[0.2, 0.5, 0.3]]).expand(3, 3)
    tokens_BC = torch.tensor([[1, 0], [1, 0], [1, 0]])
    u_BC = torch.tensor([[0.7, 0.5], [0.7, 0.5], [0.5, 0.5]])
    verdict = judge_siblings(p_BV, tokens_BC, torch.tensor([1, 2, 2]), q_BV, u_BC, True)
    assert verdict.rank_B.tolist() == [-1, 1, 0]  # .7 > 3/5; then (1, 0, 0) takes 0; .5 < 3/5
    torch.testing.assert_close(verdict.rest_BV[0], torch.tensor([1.0, 0.0, 0.0]))
