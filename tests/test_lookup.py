"""Prompt lookup, and lookup in front of a trained drafter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.base import DecodingDrafter, Proposal, Sampling
from drafters.lookup import Lookup, LookupThen

NO_STATES = torch.zeros(1, 1, 0)
GREEDY = Sampling()


def proposed(ids: list[int], num_draft: int = 4, sizes: tuple[int, int] = (2, 3)) -> list[int]:
    """What lookup proposes behind these tokens."""
    lookup = Lookup(*sizes)
    state = lookup.start([ids[:1]], 64)
    lookup.observe(state, torch.tensor([ids[1:]]), NO_STATES, torch.tensor([len(ids) - 1]))
    proposal = lookup.propose(state, num_draft, GREEDY, None)
    assert proposal.tokens_BK.shape == (1, num_draft) and proposal.probs_BKV is None
    return proposal.tokens_BK[0, : int(proposal.num_proposed_B[0])].tolist()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),  # what followed 1 2
        ([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], [8, 8, 1, 2]),  # the latest occurrence
        ([9, 1, 2, 7, 7, 5, 1, 2, 8, 8, 9, 1, 2], [7, 7, 5, 1]),  # 9 1 2 is longer than 1 2
        ([1, 2, 3, 1, 2], [3, 1, 2]),  # only three tokens follow
        ([1, 2, 3, 4], []),  # seen for the first time
        ([1, 2, 1, 3, 1], []),  # a single token is shorter than ngram_min
        ([4, 4, 4], [4]),  # overlaps itself: 4 4 stood at 0..1, and 4 follows
        ([4, 4], []),  # the only 4 4 is the one at the end
        ([1], []),
    ],
)
def test_lookup_continues_the_longest_latest_ngram(ids, expected):
    assert proposed(ids) == expected


def test_single_tokens_are_found_when_allowed():
    assert proposed([1, 2, 1, 3, 1], sizes=(1, 3)) == [3, 1]


def test_proposal_has_at_most_the_tokens_asked_for():
    assert proposed([1, 2, 3, 4, 5, 1, 2], num_draft=2) == [3, 4]


def test_lookup_equals_a_search_from_scratch():
    torch.manual_seed(0)
    ids = torch.randint(0, 4, (120,)).tolist()

    def search(text: list[int]) -> list[int]:
        for n in (4, 3, 2):
            for end in range(len(text) - 1, n - 1, -1):
                if len(text) >= n and text[end - n : end] == text[-n:]:
                    return text[end : end + 5]
        return []

    lookup = Lookup(2, 4)
    state = lookup.start([ids[:1]], 200)
    hits = 0
    for i in range(1, len(ids)):
        lookup.observe(state, torch.tensor([ids[i : i + 1]]), NO_STATES, torch.tensor([1]))
        proposal = lookup.propose(state, 5, GREEDY, None)
        got = proposal.tokens_BK[0, : int(proposal.num_proposed_B[0])].tolist()
        assert got == search(ids[: i + 1])
        hits += bool(got)
    assert hits > 80


def test_rows_and_their_padding_are_apart():
    lookup = Lookup(2, 3)
    state = lookup.start([[1], [1]], 64)
    ids_BN = torch.tensor([[2, 3, 1, 2, 0, 0], [2, 5, 6, 1, 2, 9]])
    lookup.observe(state, ids_BN, NO_STATES, torch.tensor([4, 5]))
    proposal = lookup.propose(state, 2, GREEDY, None)
    assert proposal.tokens_BK.tolist() == [[3, 1], [5, 6]]
    assert [row.ids for row in state] == [[1, 2, 3, 1, 2], [1, 2, 5, 6, 1, 2]]
    lookup.observe(state, torch.tensor([[3], [9]]), NO_STATES, torch.tensor([1, 0]))
    assert [len(row.ids) for row in state] == [6, 6]


class Head(DecodingDrafter):
    """Always proposes 7 7 7, drawn from a law that is 0.5 on 7 and 0.5 on 8."""

    aux_layers = (1, 2)

    def __init__(self) -> None:
        self.observed: list[tuple[Any, Any]] = []
        self.proposals = 0

    def start(self, prompts: list[list[int]], max_length: int) -> str:
        return f"{len(prompts)} rows of {max_length}"

    def keep(self, state: str, rows: list[int]) -> str:
        return f"{len(rows)} rows left"

    def observe(self, state: Any, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor) -> None:
        self.observed.append((state, num_B.tolist()))

    def propose(
        self,
        state: Any,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        self.proposals += 1
        tokens_BK = torch.full((2, num_draft), 7)
        probs_BKV = torch.zeros(2, num_draft, 10)
        probs_BKV[..., 7:9] = 0.5
        sampled = sampling.draft_sampled
        return Proposal(tokens_BK, torch.tensor([num_draft] * 2), probs_BKV if sampled else None)


def both(second_row: list[int], sampled: bool) -> tuple[Proposal, Head]:
    head = Head()
    drafter = LookupThen(Lookup(2, 3), head)
    assert drafter.aux_layers == (1, 2)
    state = drafter.start([[1], [1]], 64)
    ids_BN = torch.tensor([[2, 3, 1, 2], second_row])
    drafter.observe(state, ids_BN, torch.zeros(2, 4, 8), torch.tensor([4, 4]))
    assert head.observed == [("2 rows of 64", [4, 4])]
    proposal = drafter.propose(state, 4, Sampling(1.0, draft_sampled=sampled), torch.rand(2, 4))
    return proposal, head


@pytest.mark.parametrize("second_row", [[2, 3, 4, 5], [9, 2, 3, 1]])
def test_shorter_drafts_of_the_head_are_padded_with_their_laws(second_row):
    class Short(Head):
        """Stops after two tokens, whatever is asked for."""

        def propose(self, state, num_draft, *rest):
            return super().propose(state, 2, *rest)

    drafter = LookupThen(Lookup(2, 3), Short())
    state = drafter.start([[1], [1]], 64)
    first = [2, 3, 1, 2] if second_row[0] == 2 else [6, 5, 4, 3]  # a hit, or none in the batch
    ids_BN = torch.tensor([first, second_row])
    drafter.observe(state, ids_BN, torch.zeros(2, 4, 8), torch.tensor([4, 4]))
    proposal = drafter.propose(state, 4, Sampling(1.0, draft_sampled=True), torch.rand(2, 4))
    assert proposal.tokens_BK[1].tolist() == [7, 7, 0, 0]
    assert int(proposal.num_proposed_B[1]) == 2
    assert proposal.probs_BKV.shape == (2, 4, 10)
    assert proposal.probs_BKV[1, :, 7].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_combined_drafter_chooses_row_by_row():
    proposal, head = both([2, 3, 4, 5], sampled=False)
    assert proposal.tokens_BK[0, :3].tolist() == [3, 1, 2]  # lookup hits: three tokens follow
    assert proposal.tokens_BK[1].tolist() == [7, 7, 7, 7]
    assert proposal.num_proposed_B.tolist() == [3, 4]
    assert proposal.probs_BKV is None
    assert head.proposals == 1


def test_found_tokens_are_certain_beside_drawn_ones():
    proposal, _ = both([2, 3, 4, 5], sampled=True)
    expected = torch.nn.functional.one_hot(torch.tensor([3, 1, 2]), 10).float()
    assert torch.equal(proposal.probs_BKV[0, :3], expected)
    assert proposal.probs_BKV[1, :, 7:9].eq(0.5).all()
    assert torch.equal(proposal.probs_BKV.sum(-1), torch.ones(2, 4))


def test_head_is_not_asked_when_every_row_hits():
    proposal, head = both([2, 6, 1, 2], sampled=True)
    assert proposal.tokens_BK[:, :3].tolist() == [[3, 1, 2], [6, 1, 2]]
    assert proposal.probs_BKV is None
    assert head.proposals == 0
