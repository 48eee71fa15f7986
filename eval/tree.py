"""Draft trees: their shapes, and the tokens of one round in them.

Node 0 is the root, the last committed token; every other node is a guess at the token behind its
parent. Nodes stand level by level, so a parent stands before its children and siblings in the order
in which they are tried; a row's nodes of at most some depth are the first of its nodes.

Dimension letters: B rows, P nodes (the most of any row), A nodes of a path.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from data.cache import TreeNodes
from recipes.errors import UserError

MAX_NODES = 1024  # guesses of one round: more is a slip in the settings

Siblings = Literal["top", "with_replacement", "without_replacement"]
"""How the guesses below one node are chosen: the likeliest tokens, or draws from the drafter."""


class Tree(NamedTuple):
    """Guesses of one round.

    tokens_BP: int64 target ids; column 0 is the last committed token.
    parents_BP: int64 index of each node's parent; the root's is 0.
    depths_BP: int64; the root's is 0.
    num_nodes_B: int64, root included; nodes from there on are padding (any token, parent 0).
    """

    tokens_BP: Tensor
    parents_BP: Tensor
    depths_BP: Tensor
    num_nodes_B: Tensor

    @property
    def live_BP(self) -> Tensor:
        """bool: guesses, as against the root and padding."""
        nodes_P = torch.arange(self.tokens_BP.shape[1], device=self.tokens_BP.device)
        return (nodes_P > 0) & (nodes_P < self.num_nodes_B[:, None])


@dataclass(frozen=True)
class FixedTree:
    """Every node of level i has children[i] children: (1, 1, 1) is a chain, (3, 2) has 9 guesses.

    siblings: drawn ones are the likeliest tokens at temperature 0, where nothing is drawn. Without
        replacement a node whose law has fewer tokens than children[i] gets as many as it has.

    Raises:
        UserError: no level, a level without children, or more guesses than MAX_NODES.
    """

    children: tuple[int, ...]
    siblings: Siblings = "top"

    def __post_init__(self) -> None:
        if not self.children or min(self.children) < 1:
            raise UserError(
                f"tree children {list(self.children)}: give at least one level, each of 1 or more"
            )
        if self.num_guesses > MAX_NODES:
            raise UserError(
                f"tree children {list(self.children)}: {self.num_guesses} guesses a round; "
                f"give fewer, at most {MAX_NODES}"
            )

    @property
    def depth(self) -> int:
        return len(self.children)

    @property
    def num_guesses(self) -> int:
        total, level = 0, 1
        for width in self.children:
            level *= width
            total += level
        return total

    @property
    def num_drafter_places(self) -> int:
        """Nodes that the drafter runs over: all but the last level."""
        return FixedTree(self.children[:-1]).num_guesses if self.depth > 1 else 0


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2406.16858, sections 4.1 and 4.2).

    On each level the top_k likeliest nodes (by the product of the drafter's probabilities from the
    root) get top_k children each; of all nodes the num_nodes likeliest are proposed.

    Raises:
        UserError: a number below 1, or above MAX_NODES.
    """

    num_nodes: int = 59
    depth: int = 7
    top_k: int = 10
    siblings: ClassVar[Siblings] = "top"  # kept for what they are, so they may not be drawn

    def __post_init__(self) -> None:
        for name in ("num_nodes", "depth", "top_k"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_NODES:
                raise UserError(f"tree {name}={value}: give a number in 1..{MAX_NODES}")

    @property
    def num_guesses(self) -> int:
        return min(self.num_nodes, self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def num_drafter_places(self) -> int:
        """Nodes that the drafter runs over."""
        return self.top_k * (self.depth - 1)


TreeSpec = FixedTree | DynamicTree


def parse_tree(text: str, siblings: Siblings = "top") -> TreeSpec:
    """Read "3,2,1" (FixedTree: children a level) or "59/7/10" (num_nodes/depth/top_k, DynamicTree).

    Raises:
        UserError: neither, a number is out of range, or drawn siblings in a dynamic tree.
    """
    if "/" in text and siblings != "top":
        raise UserError(
            f"tree {text!r} keeps guesses for what they are, which would bias drawn ones: with "
            f"siblings {siblings} give the children of each level, as in '3,2,1'"
        )
    try:
        if "/" in text:
            num_nodes, depth, top_k = (int(part) for part in text.split("/"))
            return DynamicTree(num_nodes, depth, top_k)
        return FixedTree(tuple(int(part) for part in text.split(",")), siblings)
    except ValueError as error:
        raise UserError(
            f"tree {text!r}: give the children of each level ('3,2,1') or "
            "num_nodes/depth/top_k ('59/7/10')"
        ) from error


def chain(root_B: Tensor, tokens_BK: Tensor, num_proposed_B: Tensor) -> Tree:
    """A chain of K guesses as a tree."""
    nodes_P = torch.arange(tokens_BK.shape[1] + 1, device=tokens_BK.device)
    shape = (tokens_BK.shape[0], len(nodes_P))
    return Tree(
        torch.cat([root_B[:, None], tokens_BK], 1),
        (nodes_P - 1).clamp(min=0).expand(shape),
        nodes_P.expand(shape),
        num_proposed_B + 1,
    )


def cut_depth(tree: Tree, most_B: Tensor) -> Tree:
    """The tree without the guesses deeper than `most` of their row (0 leaves the root)."""
    fits_BP = tree.live_BP & (tree.depths_BP <= most_B[:, None])
    num_nodes_B = fits_BP.sum(-1) + 1  # levels stand in order, so what fits stands first
    width = int(num_nodes_B.max())
    return Tree(
        tree.tokens_BP[:, :width],
        tree.parents_BP[:, :width],
        tree.depths_BP[:, :width],
        num_nodes_B,
    )


def select_nodes(tree: Tree, kept_BP: Tensor, num_nodes_B: Tensor) -> Tree:
    """The tree of some of its nodes.

    Args:
        kept_BP: int64, ascending over the first num_nodes of a row; the root and, with every
            node, its parent are among them. Entries behind are padding (any valid index).
    """
    place_BP = torch.zeros_like(tree.parents_BP)
    nodes_P = torch.arange(kept_BP.shape[1], device=kept_BP.device)
    place_BP.scatter_(1, kept_BP, nodes_P.expand_as(kept_BP))
    live_BP = nodes_P < num_nodes_B[:, None]
    parents_BP = place_BP.gather(1, tree.parents_BP.gather(1, kept_BP)).masked_fill(~live_BP, 0)
    return Tree(
        tree.tokens_BP.gather(1, kept_BP),
        parents_BP,
        tree.depths_BP.gather(1, kept_BP).masked_fill(~live_BP, 0),
        num_nodes_B,
    )


def ancestors_BPP(tree: Tree) -> Tensor:
    """bool: entry [b, n, m] says that node m is node n or one of its ancestors."""
    num_nodes = tree.parents_BP.shape[1]
    node_BP = torch.arange(num_nodes, device=tree.parents_BP.device).expand_as(tree.parents_BP)
    found_BPP = torch.zeros(*node_BP.shape, num_nodes, dtype=torch.bool, device=node_BP.device)
    for _ in range(int(tree.depths_BP.max()) + 1):
        found_BPP.scatter_(2, node_BP[..., None], True)
        node_BP = tree.parents_BP.gather(1, node_BP)
    return found_BPP


def attention_nodes(tree: Tree) -> TreeNodes:
    """What the cache has to know for one pass over the whole tree, root included."""
    return TreeNodes(tree.depths_BP, ancestors_BPP(tree))


def first_choices(tree: Tree, path_BA: Tensor, num_accepted_B: Tensor) -> list[list[int]]:
    """Nodes of one branch a row: those accepted, and behind them the first child each time.

    The branch that a table of rounds shows; of a chain it is the whole proposal.
    """
    rows = []
    parents = tree.parents_BP.tolist()
    lists = zip(path_BA.tolist(), num_accepted_B.tolist(), tree.num_nodes_B.tolist(), strict=True)
    for b, (path, accepted, num_nodes) in enumerate(lists):
        first_child = {parents[b][n]: n for n in range(num_nodes - 1, 0, -1)}
        branch, node = path[1 : accepted + 1], path[accepted]
        while node in first_child:
            node = first_child[node]
            branch.append(node)
        rows.append(branch)
    return rows


def seen_at_nodes(tree: Tree, seen_BV: Tensor) -> Tensor:
    """Which tokens are seen at each node, its own included: bool [B, P, V]."""
    seen_BPV = seen_BV[:, None].repeat(1, tree.tokens_BP.shape[1], 1)
    node_BP = torch.arange(tree.tokens_BP.shape[1], device=seen_BV.device).expand_as(tree.tokens_BP)
    for _ in range(int(tree.depths_BP.max()) + 1):
        seen_BPV.scatter_(2, tree.tokens_BP.gather(1, node_BP)[..., None], True)
        node_BP = tree.parents_BP.gather(1, node_BP)
    return seen_BPV
