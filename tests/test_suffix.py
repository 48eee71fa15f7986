"""Suffix decoding: counts, matches, lengths, and answers kept from earlier decodes."""

from typing import Any

import pytest
import torch

from drafters.base import Sampling
from drafters.lookup import LookupThen
from drafters.suffix import Suffix, SuffixTree
from eval.arms import run_arms
from eval.decode import DecodeSettings, decode
from eval.forced import teacher_forced
from eval.lossless import pit_p_value
from eval.results import Plan, make_drafters
from eval.sweep import need_export
from eval.turns import TurnBatch
from recipes.schema import load_recipe
from tests.scripted import ScriptedTarget
from tests.tiny_exports import ROOT
from tests.tiny_targets import tiny_target

NO_STATES = torch.zeros(1, 1, 0)


def proposed(ids: list[int], num_draft: int = 4, drafter: Suffix | None = None) -> list[int]:
    """What is proposed behind these tokens."""
    drafter = drafter or Suffix()
    state = drafter.start([ids[:1]], 64)
    drafter.observe(state, torch.tensor([ids[1:]]), NO_STATES, torch.tensor([len(ids) - 1]))
    proposal = drafter.propose(state, num_draft, Sampling(), None)
    assert proposal.tokens_BK.shape == (1, num_draft) and proposal.probs_BKV is None
    return proposal.tokens_BK[0, : int(proposal.num_proposed_B[0])].tolist()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4]),  # two tokens matched, so two are drafted
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),
        ([1, 2, 7, 1, 2, 8, 1, 2, 8, 9, 1, 2], [8, 9]),  # 8 twice, 7 once
        ([1, 2, 3, 4], []),  # seen for the first time
        ([1, 2, 1, 3, 1], [3]),  # as often as 2, but newer
        ([1], []),
    ],
)
def test_the_most_frequent_continuation_of_the_best_match(ids, expected):
    assert proposed(ids) == expected


def test_length_follows_the_factor_and_what_was_asked_for():
    ids = [1, 2, 3, 4, 5, 6, 1, 2]
    assert proposed(ids, drafter=Suffix(max_factor=0.5)) == [3]
    assert proposed(ids, drafter=Suffix(max_factor=2.0)) == [3, 4, 5, 6]
    assert proposed(ids, drafter=Suffix(max_factor=1e308)) == [3, 4, 5, 6]
    assert proposed(ids, num_draft=1) == [3]


def test_a_draft_ends_where_it_becomes_unlikely():
    # 5 stood four times: the piece at the end counts, so 6 has 2/4 and 7 behind it 1/2 of that.
    ids = [5, 6, 7, 5, 6, 8, 5, 9, 5]
    free = {"max_factor": 9.0}
    assert proposed(ids, drafter=Suffix(**free, min_prob=0.25)) == [6, 8, 5, 9]
    assert proposed(ids, drafter=Suffix(**free, min_prob=0.3)) == [6]
    assert proposed(ids, drafter=Suffix(**free, min_prob=0.6)) == []


def test_short_matches_can_be_passed_over():
    ids = [1, 2, 1]
    assert proposed(ids) == [2]
    assert proposed(ids, drafter=Suffix(min_match=2)) == []


def pieces(texts: list[list[int]], depth: int) -> dict[tuple[int, ...], int]:
    """Every piece of the texts and how often it occurs, counted one by one."""
    counts: dict[tuple[int, ...], int] = {}
    for ids in texts:
        for i in range(len(ids)):
            for n in range(1, min(depth, len(ids) - i) + 1):
                piece = tuple(ids[i : i + n])
                counts[piece] = counts.get(piece, 0) + 1
    return counts


def in_tree(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    stack: list[Any] = [((), tree.root)]
    while stack:
        path, node = stack.pop()
        for token, child in node.children.items():
            found[(*path, token)] = child.count
            stack.append(((*path, token), child))
    return found


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_tree_counts_every_piece_and_forgets_what_is_taken_back(depth):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 4, (n,), generator=generator).tolist() for n in (30, 17, 1, 0)]
    tree = SuffixTree(depth)
    for ids in texts:
        tree.add(ids)
    assert in_tree(tree) == pieces(texts, depth)
    tree.remove(texts.pop(0))
    assert in_tree(tree) == pieces(texts, depth)


def test_earlier_answers_are_searched_only_where_they_are_kept():
    def second(num_cached: int) -> list[int]:
        drafter = Suffix(num_cached=num_cached)
        first = drafter.start([[1, 2]], 64)  # the prompt is 1 2, the answer 7 8 9
        drafter.observe(first, torch.tensor([[2, 7, 8, 9]]), NO_STATES, torch.tensor([4]))
        return proposed([5, 7], drafter=drafter)

    assert second(0) == []
    assert second(4) == [8]


def test_prompts_are_not_kept_and_the_oldest_answer_goes_first():
    drafter = Suffix(num_cached=1)
    for answer in ([7, 8], [4, 5]):
        state = drafter.start([[1, 2]], 64)
        drafter.observe(state, torch.tensor([[2, *answer]]), NO_STATES, torch.tensor([3]))
    assert proposed([9, 1], drafter=drafter) == []  # 1 2 was a prompt
    drafter = Suffix(num_cached=1)
    for answer in ([7, 8], [4, 5]):
        state = drafter.start([[1, 2]], 64)
        drafter.observe(state, torch.tensor([[2, *answer]]), NO_STATES, torch.tensor([3]))
    drafter.start([[3]], 64)
    assert in_tree(drafter._shared) == pieces([[4, 5]], 24)


@pytest.mark.parametrize("warm_up", [False, True])
def test_each_repeat_begins_without_earlier_answers(warm_up):
    """Two prompts have one answer, 2 3 ... 10: nothing in it repeats, so the first one drafts
    nothing, and the second one is drafted from the first: 3 4 | 5 6 7 8 | 9 10."""
    target = ScriptedTarget.chain({i: i + 1 for i in range(30)}, [])
    prompts, rounds = [[1], [1]], []
    settings = DecodeSettings(max_new_tokens=9, num_draft=4)

    def answer(drafter, indices, settings):
        batch = [prompts[i] for i in indices]
        answers, seconds = decode(target, drafter, batch, settings, indices)
        if drafter is not None and settings.max_new_tokens == 9:
            rounds.extend(len(row.rounds) for row in answers)
        return [TurnBatch(0, list(indices), batch, answers, seconds)]

    drafters = {"suffix": LookupThen(Suffix(num_cached=10), Suffix())}
    few = DecodeSettings(max_new_tokens=8, num_draft=4)  # what a warm-up would leave behind
    answer(drafters["suffix"], [0], few)
    run_arms(answer, drafters, 2, settings, 1, repeats=3, warm_up=warm_up)
    assert rounds[-6:] == [8, 3] * 3


def test_answers_that_are_scored_are_not_searched():
    """Nothing of 2 3 ... 10 repeats, so along it nothing can be guessed from the text alone."""
    target = ScriptedTarget.chain({i: i + 1 for i in range(30)}, [])
    drafter, text = Suffix(num_cached=10), ([1], list(range(2, 11)))
    decode(target, drafter, [[1]], DecodeSettings(max_new_tokens=9, num_draft=4))
    found = teacher_forced(target, drafter, [text] * 9, Sampling())  # in batches of eight
    assert (found.num_silent, found.num_positions, found.alpha) == (72, 0, 0.0)


@pytest.mark.parametrize("num_cached", [0, 3])
def test_greedy_text_is_the_targets_and_drawn_tokens_follow_its_law(num_cached):
    target = tiny_target("llama")
    drafter = Suffix(num_cached=num_cached)
    prompts = [[5, 9, 14, 3, 5, 9], [7, 7, 7]]
    settings = DecodeSettings(max_new_tokens=24, num_draft=4)
    plain, _ = decode(target, None, prompts, DecodeSettings(max_new_tokens=24, num_draft=0))
    for _ in range(2):
        drafted, _ = decode(target, drafter, prompts, settings)
        assert [a.ids for a in drafted] == [a.ids for a in plain]
    assert any(r.proposed for a in drafted for r in a.rounds)
    sampling = Sampling(temperature=1.0)
    settings = DecodeSettings(max_new_tokens=40, num_draft=4, sampling=sampling, seed=1)
    answers, _ = decode(target, drafter, [[5, 9, 14, 3, 5, 9]] * 24, settings)
    pit = [value for a in answers for value in a.pit]
    p_value = pit_p_value(pit)
    assert len(pit) > 300 and p_value is not None and p_value > 1e-3


def test_recipes_name_it_as_vllm_does(tmp_path):
    recipe = load_recipe(
        ROOT / "recipes" / "smoke.yaml",
        ["eval.drafters=[ngram, suffix]", "eval.suffix_min_token_prob=0.2"],
    )
    assert recipe.eval.drafters == ["lookup", "suffix"]
    nowhere = tmp_path / "none"
    plan = Plan(recipe, "x", nowhere, nowhere / "export", nowhere / "results")
    drafters = make_drafters(plan, tiny_target("llama"), recipe.eval.drafters)
    suffix = drafters["suffix"]
    assert isinstance(suffix, Suffix)
    assert (suffix.max_depth, suffix.max_factor, suffix.min_prob) == (24, 1.0, 0.2)
    assert (suffix.num_cached, suffix.min_match) == (0, 1)
    need_export(plan)  # nothing is trained, so nothing need be exported
