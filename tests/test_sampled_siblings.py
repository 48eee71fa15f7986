"""Trees whose siblings are drawn from the drafter, in the decoding loop: exact, and worth it."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from pydantic import ValidationError

from drafters.base import Sampling
from eval.decode import Decoded, DecodeSettings, Run, decode
from eval.decode_tree import decode_tree
from eval.grow_tree import draw_siblings, grow
from eval.lossless import pit_p_value
from eval.measure import tree_of
from eval.tree import DynamicTree, FixedTree, parse_tree
from recipes.errors import UserError
from recipes.schema import EvalSection
from tests.decoding import PROMPTS, greedy_answers, random_eagle, small_target
from tests.scripted import FixedLaw, ScriptedTarget
from tests.table_trees import TableEagle, table_pair

F = Fraction
BOTH = ["with_replacement", "without_replacement"]
DRAWN = Sampling(temperature=1.0, draft_sampled=True)
# After token 3 the target's law is P and the drafter's Q; after 0, 1, 2 the target's is HALVES.
P, Q = [F(1, 12), F(5, 12), F(3, 12), F(3, 12)], [F(6, 12), F(4, 12), F(1, 12), F(1, 12)]
HALVES = [F(1, 2), F(0), F(1, 2), F(0)]


def logits(*rows: list[F]) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in rows]).log().clamp(min=-1e9)


@pytest.mark.parametrize(
    ("siblings", "sizes", "accepted"),
    [
        # sum min(P, Q) = 7/12; 0 alone is rejected, where u > 1/6; norm(P - Q) = (0, 2, 4, 4)/10 is
        # left. Its overlap with Q is 1/5 + 1/12 + 1/12: 1 is rejected where u > 3/5.
        ("with_replacement", (12, 12, 6, 5, 2), F(7, 12) + F(5, 12) * F(11, 30)),
        # With Q without 0, (0, 4, 1, 1)/6, it is 1/5 + 1/6 + 1/6: 1 is rejected where u > 3/10.
        ("without_replacement", (12, 6, 6, 10, 2), F(7, 12) + F(5, 12) * F(8, 15)),
    ],
)
def test_law_of_a_round_of_the_loop_to_the_last_fraction(siblings, sizes, accepted, monkeypatch):
    """Random numbers of two draws, two acceptances and the next token on a grid of these sizes.

    Its cells lie between the cuts of the rule, so shares of them are probabilities.
    """
    grid_N5 = torch.tensor([[(k + 0.5) / n for k, n in zip(cell, sizes, strict=True)]
                            for cell in product(*map(range, sizes))])  # fmt: skip

    def uniforms(run: Run, num: int) -> torch.Tensor:
        return torch.nn.functional.pad(grid_N5, (0, 9))[: len(run.rows), :num]

    monkeypatch.setattr(Run, "uniforms", uniforms)
    one_3 = [F(0), F(0), F(0), F(1)]
    target = ScriptedTarget(logits(one_3, HALVES, HALVES, P), [])  # the prompt 0 brings 3
    drafter = TableEagle(logits(Q, Q, Q, Q))
    settings = DecodeSettings(max_new_tokens=3, sampling=DRAWN)
    prompts = [[0]] * len(grid_N5)
    rows, _ = decode_tree(target, drafter, prompts, settings, FixedTree((2,), siblings))
    N = len(rows)
    counts = [sum(row.ids[1] == token for row in rows) for token in range(4)]
    assert [F(count, N) for count in counts] == P
    assert F(sum(row.rounds[0].accepted for row in rows), N) == accepted
    for token in (1, 2):  # what follows an accepted guess
        after = [row.ids[2] for row in rows if row.ids[1] == token and row.rounds[0].accepted]
        assert [F(after.count(v), len(after)) for v in range(4)] == HALVES
    chances = sum(row.alpha_sum for row in rows) / N  # of acceptance, given what was drawn
    assert chances == pytest.approx(float(accepted), abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("siblings", BOTH)
def test_greedy_tokens_are_the_targets_own(kind, siblings):
    target = small_target(kind=kind)
    settings = DecodeSettings(max_new_tokens=10, sampling=Sampling(draft_sampled=True))
    spec = FixedTree((3, 2), siblings)
    rows, _ = decode_tree(target, random_eagle(target), PROMPTS, settings, spec)
    assert [row.ids for row in rows] == list(greedy_answers(target, PROMPTS, 10).values())
    top, _ = decode_tree(target, random_eagle(target), PROMPTS, settings, FixedTree((3, 2)))
    assert [row.rounds for row in rows] == [row.rounds for row in top]  # nothing is drawn at T=0


@pytest.mark.parametrize("siblings", BOTH)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_chain_of_draws_is_token_verification(siblings, penalty):
    target = small_target()
    sampling = Sampling(1.0, top_p=0.95, repetition_penalty=penalty, draft_sampled=True)
    settings = DecodeSettings(max_new_tokens=14, num_draft=4, sampling=sampling, seed=3)
    drafter, spec = random_eagle(target), FixedTree((1, 1, 1, 1), siblings)
    ours, _ = decode_tree(target, drafter, PROMPTS, settings, spec)
    theirs, _ = decode(target, drafter, PROMPTS, settings)
    assert [row.ids for row in ours] == [row.ids for row in theirs]
    assert [row.rounds for row in ours] == [row.rounds for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert [r.q for r in a.rounds] == [pytest.approx(r.q, abs=1e-4) for r in b.rounds]


def test_chain_of_another_drafter_is_judged_by_its_own_law():
    target = small_target()
    settings = DecodeSettings(max_new_tokens=14, num_draft=3, sampling=DRAWN)
    drafter = FixedLaw(torch.full((12,), 1 / 12))
    spec = FixedTree((1, 1, 1), "without_replacement")
    ours, _ = decode_tree(target, drafter, PROMPTS, settings, spec)
    theirs, _ = decode(target, drafter, PROMPTS, settings)
    assert [row.ids for row in ours] == [row.ids for row in theirs]


def answers(spec: FixedTree, num: int = 64) -> list[Decoded]:
    target, drafter = table_pair()
    settings = DecodeSettings(max_new_tokens=48, sampling=DRAWN, seed=1)
    return decode_tree(target, drafter, [[i % 24] for i in range(num)], settings, spec)[0]


def tau(rows: list[Decoded]) -> float:
    rounds = [r.emitted for row in rows for r in row.rounds]
    return sum(rounds) / len(rounds)


def test_more_candidates_a_position_accept_more():
    chain = tau(answers(FixedTree((1, 1), "with_replacement")))
    repeated = tau(answers(FixedTree((3, 2), "with_replacement")))
    different = tau(answers(FixedTree((3, 2), "without_replacement")))
    assert chain + 0.2 < repeated < different
    assert different < 3  # two levels and the bonus


@pytest.mark.parametrize("siblings", BOTH)
def test_drawn_tokens_pass_the_test_of_their_law(siblings):
    rows = answers(FixedTree((3, 2), siblings), 200)
    p_value = pit_p_value([values for row in rows for values in row.pit])
    assert p_value is not None and p_value > 0.001


def test_a_node_gets_as_many_different_guesses_as_its_law_has():
    """The drafter's law has 4, 1, 2 and 3 tokens after 0, 1, 2 and 3."""
    sizes = {0: 4, 1: 1, 2: 2, 3: 3}
    rows = [[F(v < sizes[a]) for v in range(4)] for a in range(4)]
    drafter, prompts = TableEagle(logits(*rows)), [[0], [1], [2], [3]]
    state = drafter.start(prompts, 16)
    root_B = torch.arange(4)
    drafter.observe(state, root_B[:, None], torch.zeros(4, 1, 1), torch.ones(4, dtype=torch.long))
    spec, uniforms_BM = FixedTree((3, 3), "without_replacement"), torch.rand(4, 12)
    tree, q_BPV, _, _ = grow(drafter, state, root_B, spec, 2, DRAWN, uniforms_BM)
    assert q_BPV is not None
    expected = []
    for b in range(4):
        num = int(tree.num_nodes_B[b])
        children: dict[int, list[int]] = {n: [] for n in range(num)}
        for n in range(1, num):
            children[int(tree.parents_BP[b, n])].append(int(tree.tokens_BP[b, n]))
        for n in range(num):
            wanted = min(3, sizes[int(tree.tokens_BP[b, n])]) if tree.depths_BP[b, n] < 2 else 0
            assert len(children[n]) == len(set(children[n])) == wanted
            if wanted:
                expected_V = torch.tensor(rows[int(tree.tokens_BP[b, n])], dtype=torch.float32)
                torch.testing.assert_close(q_BPV[b, n], expected_V / expected_V.sum())
        expected.append(1 + min(3, sizes[b]) + sum(min(3, sizes[t]) for t in children[0]))
    assert tree.num_nodes_B.tolist() == expected
    assert tree.num_nodes_B[1] == 5  # 0 alone, then three


@pytest.mark.parametrize("siblings", BOTH)
def test_law_where_some_nodes_run_out_of_guesses(siblings):
    """Top-p leaves some nodes fewer than three tokens."""
    target, drafter = table_pair(6)
    sampling = Sampling(1.0, top_p=0.8, draft_sampled=True)
    settings = DecodeSettings(max_new_tokens=32, sampling=sampling, seed=2)
    prompts = [[i % 6] for i in range(300)]
    rows, _ = decode_tree(target, drafter, prompts, settings, FixedTree((3, 3), siblings))
    p_value = pit_p_value([values for row in rows for values in row.pit])
    assert p_value is not None and p_value > 0.001


def test_draws_without_replacement_have_their_law():
    """First 1 with 1/2, then 0 or 2 with what is left of them."""
    q_ND = torch.tensor([[0.25, 0.5, 0.25, 0.0]])
    tokens, real = draw_siblings(q_ND, torch.tensor([[0.3, 0.6, 0.0, 0.5]]), replacement=False)
    assert tokens[0, :3].tolist() == [1, 2, 0]
    assert real.tolist() == [[True, True, True, False]]
    tokens, real = draw_siblings(q_ND, torch.tensor([[0.3, 0.6, 0.0, 0.5]]), replacement=True)
    assert (tokens.tolist(), bool(real.all())) == ([[1, 1, 0, 1]], True)


def test_what_cannot_be_drawn_is_refused():
    target, settings = small_target(), DecodeSettings(max_new_tokens=4, sampling=DRAWN)
    drafter = random_eagle(target)
    for spec in (FixedTree((2, 1)), DynamicTree(5, 2, 2)):
        with pytest.raises(UserError, match="siblings top are the drafter's likeliest tokens"):
            decode_tree(target, drafter, PROMPTS, settings, spec)
    chosen = DecodeSettings(max_new_tokens=4, sampling=Sampling(1.0))
    with pytest.raises(UserError, match="with_replacement are drawn"):
        decode_tree(target, drafter, PROMPTS, chosen, FixedTree((2, 1), "with_replacement"))
    with pytest.raises(UserError, match="would bias drawn ones: with siblings with_replacement"):
        parse_tree("24/4/4", "with_replacement")
    assert parse_tree("3,2", "without_replacement") == FixedTree((3, 2), "without_replacement")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verification": "token"}, "siblings: with_replacement needs verification: tree"),
        ({"tree": "9/3/3"}, "needs tree as children a level, such as 3,2,1, not 9/3/3"),
        ({"draft_sampling": "greedy"}, "siblings: with_replacement needs draft_sampling: sampled"),
        ({"siblings": "top"}, "draft_sampling: sampled needs siblings: with_replacement"),
    ],
)
def test_keys_that_do_not_fit_are_refused(changes, words):
    keys = {"verification": "tree", "tree": "3,2", "draft_sampling": "sampled",
            "siblings": "with_replacement"}  # fmt: skip
    assert tree_of(EvalSection.model_validate(keys)) == FixedTree((3, 2), "with_replacement")
    with pytest.raises(ValidationError, match=words):
        EvalSection.model_validate(keys | changes)
