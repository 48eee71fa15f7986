"""Draft trees: shapes, attention and compaction in the cache, growth by EAGLE-3."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from data.cache import KVCache, TreeNodes
from drafters.base import Sampling
from eval.grow_tree import grow
from eval.tree import (
    DynamicTree,
    FixedTree,
    Tree,
    ancestors_BPP,
    attention_nodes,
    chain,
    cut_depth,
    first_choices,
    parse_tree,
    seen_at_nodes,
)
from recipes.errors import UserError
from tests.decoding import PROMPTS, random_eagle, small_target
from tests.tiny_targets import KINDS, tiny_target

# Root 9 with children 1, 2; 1 with children 3, 4; 2 with child 5; 4 with child 6.
TREE = Tree(
    torch.tensor([[9, 1, 2, 3, 4, 5, 6]]),
    torch.tensor([[0, 0, 0, 1, 1, 2, 4]]),
    torch.tensor([[0, 1, 1, 2, 2, 2, 3]]),
    torch.tensor([7]),
)


def paths_of(tree: Tree) -> list[list[tuple[int, ...]]]:
    """The tokens from the root to every node, row by row."""
    rows = []
    for tokens, parents, num in zip(*(part.tolist() for part in (*tree[:2], tree[3])), strict=True):
        paths = [()]
        for n in range(1, num):
            paths.append((*paths[parents[n]], tokens[n]))
        rows.append(paths)
    return rows


def test_sizes_of_specs():
    assert [FixedTree(c).num_guesses for c in ((1, 1, 1), (3, 2), (2, 2, 2))] == [3, 9, 14]
    assert FixedTree((2, 2, 2)).num_drafter_places == 6
    assert FixedTree((3,)).num_drafter_places == 0
    assert (DynamicTree().num_guesses, DynamicTree().num_drafter_places) == (59, 60)
    assert DynamicTree(59, 2, 3).num_guesses == 12  # 3 + 9


def test_specs_in_words():
    assert parse_tree("3,2,1") == FixedTree((3, 2, 1))
    assert parse_tree("4") == FixedTree((4,))
    assert parse_tree("59/7/10") == DynamicTree(59, 7, 10)


@pytest.mark.parametrize("text", ["", "3,,2", "a", "1/2", "1/2/3/4", "3.5"])
def test_specs_that_cannot_be_read(text):
    with pytest.raises(UserError, match=r"children of each level \('3,2,1'\)"):
        parse_tree(text)


@pytest.mark.parametrize("text", ["0", "3,0", "59/0/10", "11,11,11", "2000/3/3", "-1"])
def test_specs_out_of_range(text):
    with pytest.raises(UserError, match="tree "):
        parse_tree(text)


def test_ancestors():
    found = ancestors_BPP(TREE)[0].int().tolist()
    assert found == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]


def test_cut_depth_keeps_the_upper_levels():
    two = Tree(*(part.expand(2, *part.shape[1:]) for part in TREE))
    cut = cut_depth(two, torch.tensor([1, 2]))
    assert cut.num_nodes_B.tolist() == [3, 6]
    assert cut.tokens_BP.shape == (2, 6)
    assert cut.live_BP.int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert cut_depth(two, torch.tensor([0, 0])).tokens_BP.tolist() == [[9], [9]]


def test_first_choices_go_on_behind_the_path():
    path_1A = torch.tensor([[0, 1, 0, 0]])
    assert first_choices(TREE, path_1A, torch.tensor([0])) == [[1, 3]]
    assert first_choices(TREE, torch.tensor([[0, 2, 0, 0]]), torch.tensor([1])) == [[2, 5]]
    assert first_choices(TREE, torch.tensor([[0, 1, 4, 6]]), torch.tensor([3])) == [[1, 4, 6]]


def test_seen_tokens_are_those_of_the_path():
    seen_BPV = seen_at_nodes(TREE, F.one_hot(torch.tensor([7]), 10).bool())
    found = [row.nonzero()[:, 0].tolist() for row in seen_BPV[0]]
    assert found == [[7, 9], [1, 7, 9], [2, 7, 9], [1, 3, 7, 9], [1, 4, 7, 9], [2, 5, 7, 9],
                     [1, 4, 6, 7, 9]]  # fmt: skip


# ---------------------------------------------------------------- the cache


def test_mask_of_a_tree():
    cache = KVCache(1, 2, 12, 1, 2, torch.float32)
    cache.advance(torch.tensor([3, 1]))
    nodes = TreeNodes(*(part.expand(2, *part.shape[1:])[:, :4] for part in attention_nodes(TREE)))
    nodes = TreeNodes(nodes.depths_BP, nodes.sees_BSP[..., :4])
    cache.begin(4, nodes)
    assert cache.places_BS.tolist() == [[3, 4, 5, 6], [1, 2, 3, 4]]
    assert cache.positions_BS.tolist() == [[3, 4, 4, 5], [1, 2, 2, 3]]
    assert cache.mask_BST().int().tolist() == [
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0],
         [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1]],
        [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0],
         [1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0]],
    ]  # fmt: skip
    # Two positions back: node 3 (position 5) sees its parent (4) and itself, not the root (3).
    assert cache.mask_BST(2).int()[0].tolist() == [
        [0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0, 1],
    ]  # fmt: skip


def test_a_window_counts_positions_and_not_places():
    # Node 4 lies two places behind its depth; a window of one position hides it from its child.
    cache = KVCache(1, 1, 12, 1, 2, torch.float32)
    cache.advance(3)
    cache.begin(7, attention_nodes(TREE))
    assert torch.equal(cache.mask_BST(1)[0, :, 3:], torch.eye(7, dtype=torch.bool))
    assert cache.mask_BST(2)[0, 6].int().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 1]


def test_only_the_path_is_kept():
    cache = KVCache(2, 2, 10, 1, 1, torch.float32)
    cache.advance(torch.tensor([2, 1]))
    depths_BP = torch.tensor([[0, 1, 1, 2, 2]] * 2)
    cache.begin(5, TreeNodes(depths_BP, torch.ones(2, 5, 5, dtype=torch.bool)))
    new_BNSD = torch.arange(1.0, 6).view(1, 1, 5, 1).expand(2, -1, -1, -1)
    for layer in range(2):
        cache.append(layer, new_BNSD + 10 * layer, -new_BNSD)
    cache.keep_path(torch.tensor([[0, 2, 4], [0, 1, 0]]), torch.tensor([3, 1]))
    assert cache.lengths_B.tolist() == [5, 2]
    assert cache.keys[0][0, 0, 2:5, 0].tolist() == [1, 3, 5]
    assert cache.keys[1][0, 0, 2:5, 0].tolist() == [11, 13, 15]
    assert cache.values[1][0, 0, 2:5, 0].tolist() == [-1, -3, -5]
    assert cache.keys[0][1, 0, 1:2, 0].tolist() == [1]


def test_a_pass_that_does_not_fit_is_refused():
    cache = KVCache(1, 1, 6, 1, 1, torch.float32)
    with pytest.raises(IndexError, match="6 places and this pass needs 7"):
        cache.begin(7, attention_nodes(TREE))


def random_tree(num_rows: int, num_guesses: int, generator: torch.Generator) -> Tree:
    """Level by level, another in every row; the last rows have padding."""
    rows = []
    for _ in range(num_rows):
        depths = [0]
        parents = [0]
        level, following = [0], []
        while len(parents) <= num_guesses:
            if not level or (following and torch.rand((), generator=generator) < 0.4):
                level, following = following, []
            node = level[int(torch.randint(len(level), (), generator=generator))]
            following.append(len(parents))
            parents.append(node)
            depths.append(depths[node] + 1)
        rows.append((parents, depths))
    tokens_BP = torch.randint(0, 264, (num_rows, num_guesses + 1), generator=generator)
    sizes_B = torch.tensor([num_guesses + 1, num_guesses - 2] * num_rows)[:num_rows]
    return Tree(
        tokens_BP,
        torch.tensor([parents for parents, _ in rows]),
        torch.tensor([depths for _, depths in rows]),
        sizes_B,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_node_are_those_of_a_fresh_pass_over_its_path(kind):
    """Over any history: each round a random tree, of which a random path of each row is kept."""
    target = tiny_target(kind)
    generator = torch.Generator().manual_seed(0)
    cache = target.new_cache(2, 80)
    target.forward(torch.tensor([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 0, 0, 0, 0]]), cache)
    cache.advance(torch.tensor([7, 3]))
    committed = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
    for _ in range(5):
        tree = random_tree(2, 8, generator)
        states = target.forward(tree.tokens_BP, cache, (2,), attention_nodes(tree))
        logits_BPV = target.logits(states.hidden_BSH)
        ancestors = ancestors_BPP(tree)
        kept = []
        for b, paths in enumerate(paths_of(tree)):
            root = int(tree.tokens_BP[b, 0])
            ids = [[*committed[b], root, *path] for path in paths]
            longest = max(map(len, ids))
            fresh = target.forward(
                torch.tensor([i + [0] * (longest - len(i)) for i in ids]), None, (2,)
            )
            last = torch.tensor([len(i) - 1 for i in ids])
            n = torch.arange(len(ids))
            expected = target.logits(fresh.hidden_BSH[n, last])
            scale = float(expected.abs().max())
            torch.testing.assert_close(
                logits_BPV[b, : len(ids)], expected, atol=1e-5 * scale, rtol=0
            )
            torch.testing.assert_close(
                states.aux_BSF[b, : len(ids)], fresh.aux_BSF[n, last], atol=2e-5, rtol=1e-4
            )
            node = int(torch.randint(len(ids), (), generator=generator))
            path = ancestors[b, node].nonzero()[:, 0].tolist()
            num = int(torch.randint(len(path) + 1, (), generator=generator))
            kept.append(path[:num])
            committed[b] += tree.tokens_BP[b, path[:num]].tolist()
        width = max(map(len, kept)) or 1
        cache.keep_path(
            torch.tensor([path + [0] * (width - len(path)) for path in kept]),
            torch.tensor([len(path) for path in kept]),
        )
    assert cache.lengths_B.tolist() == [len(c) for c in committed]


# ---------------------------------------------------------------- growth


def started(target, drafter, prompts):
    """A drafter that has read the prompts, and the token behind them (1 for every row)."""
    state = drafter.start(prompts, 64)
    lengths_B = torch.tensor([len(p) for p in prompts])
    width = max(map(len, prompts))
    ids_BN = torch.tensor([p + [0] * (width - len(p)) for p in prompts])
    states = target.forward(ids_BN, None, drafter.aux_layers)
    next_BN = ids_BN.roll(-1, 1)
    next_BN[torch.arange(len(prompts)), lengths_B - 1] = 1
    drafter.observe(state, next_BN, states.aux_BSF, lengths_B)
    return state, torch.ones(len(prompts), dtype=torch.long)


def log_probs_behind(target, drafter, prompt, path):
    """The drafter's law after a path, by a chain of its own over a fresh state."""
    with torch.no_grad():
        state, _ = started(target, drafter, [prompt])
        hidden_1H = state.last_hidden_BH
        for token in path:
            step = drafter._cached_step(state, torch.tensor([[token]]), hidden_1H[:, None])
            hidden_1H = step[:, 0]
            state.cache.advance(1)
        return drafter.lm_head(drafter.head_input(hidden_1H)).float().log_softmax(-1)[0]


def by_hand(target, drafter, prompt, spec):
    """All nodes that the description of a dynamic tree makes, with their scores."""
    level, found = [((), 0.0)], []
    for _ in range(spec.depth):
        children = []
        for path, score in level:
            law_D = log_probs_behind(target, drafter, prompt, path)
            best = law_D.topk(spec.top_k)
            children += [
                ((*path, int(drafter.draft_ids_D[i])), score + float(v))
                for v, i in zip(best.values, best.indices, strict=True)
            ]
        found += children
        level = sorted(children, key=lambda c: -c[1])[: spec.top_k]
    return sorted(found, key=lambda c: -c[1])[: spec.num_nodes]


def test_a_dynamic_tree_holds_the_likeliest_nodes():
    target = small_target()
    drafter, spec = random_eagle(target), DynamicTree(11, 4, 3)
    state, root_B = started(target, drafter, PROMPTS)
    lengths = state.cache.lengths_B.clone()
    tree = grow(drafter, state, root_B, spec, 4, Sampling(), torch.rand(4, 60)).tree
    assert torch.equal(state.cache.lengths_B, lengths)
    assert tree.num_nodes_B.tolist() == [12] * 4
    assert bool((tree.depths_BP.diff(dim=1) >= 0).all())
    shapes = set()
    for prompt, paths in zip(PROMPTS, paths_of(tree), strict=True):
        expected = by_hand(target, drafter, prompt, spec)
        assert set(paths[1:]) == {path for path, _ in expected}
        shapes.add(tuple(map(len, paths)))
        score = dict(expected)
        for a, b in pairwise(paths[1:]):
            if a[:-1] == b[:-1]:  # siblings: the likelier is tried first
                assert score[a] >= score[b] - 1e-4
    assert len(shapes) > 1  # rows have trees of their own


def test_a_fixed_tree_holds_the_likeliest_children_of_every_node():
    target = small_target()
    drafter = random_eagle(target)
    state, root_B = started(target, drafter, PROMPTS[:2])
    none_BM = torch.rand(2, 15)  # nothing is drawn
    tree = grow(drafter, state, root_B, FixedTree((3, 2, 1)), 3, Sampling(), none_BM).tree
    assert tree.depths_BP[0].tolist() == [0] + [1] * 3 + [2] * 6 + [3] * 6
    for prompt, paths in zip(PROMPTS, paths_of(tree), strict=False):
        for path in paths:
            children = [p[-1] for p in paths if p and p[:-1] == path]
            if children:
                law_D = log_probs_behind(target, drafter, prompt, path)
                best = law_D.topk(len(children)).indices
                assert children == drafter.draft_ids_D[best].tolist()


def test_a_chain_grows_as_it_is_proposed():
    target = small_target()
    drafter = random_eagle(target)
    state, root_B = started(target, drafter, PROMPTS)
    spec, none_BM = FixedTree((1, 1, 1, 1)), torch.rand(4, 4)  # nothing is drawn
    tree = grow(drafter, state, root_B, spec, 4, Sampling(), none_BM).tree
    proposal = drafter.propose(state, 4, Sampling(), None)
    expected = chain(root_B, proposal.tokens_BK, proposal.num_proposed_B)
    assert all(torch.equal(a, b) for a, b in zip(tree, expected, strict=True))
    penalised = Sampling(repetition_penalty=3.0)
    seen_BV = torch.zeros(4, 12, dtype=torch.bool)
    tree = grow(drafter, state, root_B, spec, 4, penalised, none_BM, seen_BV).tree
    proposal = drafter.propose(state, 4, penalised, None, seen_BV)
    assert torch.equal(tree.tokens_BP[:, 1:], proposal.tokens_BK)
    assert not bool(seen_BV.any())  # what was handed in is left alone
