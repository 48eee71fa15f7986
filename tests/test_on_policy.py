"""Answers that the drafter writes itself: whose law, which rows, and that a seed repeats them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from data.batch import Batch, Row, collate, stand_in
from data.target import Target
from data.vocab import full_vocab
from drafters.methods import build_drafter
from recipes.errors import UserError
from recipes.lm_sections import PardSection, SmallLMSection
from recipes.schema import load_recipe
from tests.tiny_exports import ROOT
from tests.tiny_targets import tiny_target
from train.on_policy import with_own_answers

PAD = 258


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3")


def make(target: Target, section: Any = None) -> Any:
    section = section or SmallLMSection(num_layers=2)
    return build_drafter(section, target, (), full_vocab(264), seed=0).eval()


def rows_of(spans: list[tuple[int, int]]) -> list[Row]:
    """Rows by (first supervised token, length)."""
    generator = torch.Generator().manual_seed(1)
    return [
        Row(
            id=str(i),
            ids_S=torch.randint(0, 256, (n,), generator=generator),
            mask_S=torch.arange(n) >= start,
        )
        for i, (start, n) in enumerate(spans)
    ]


def own(batch: Batch, drafter: Any, share: float = 1.0, eos: int = 257, seed: int = 5) -> Batch:
    return with_own_answers(replace(batch, seed=seed), drafter, share, [eos], PAD)


@pytest.mark.parametrize("section", [SmallLMSection(num_layers=2), PardSection(num_layers=2)])
def test_a_sure_drafter_writes_its_likeliest_continuation(section: Any, target: Target) -> None:
    drafter = make(target, section)
    with torch.no_grad():
        drafter.lm.lm_head.weight.mul_(1e4)  # every draw is now the likeliest token
    batch = collate(rows_of([(3, 9), (1, 12), (6, 8)]), PAD)
    written = own(batch, drafter)
    assert written.lengths_B.tolist() == [9, 12, 8]  # no end token came
    for b, (start, end) in enumerate([(3, 9), (1, 12), (6, 8)]):
        ids = batch.ids_BS[b, :start].tolist()
        for _ in range(end - start):
            logits_SV = drafter.head_logits(drafter.states(torch.tensor([ids])))[0]
            ids.append(int(logits_SV[-1].argmax()))
        assert written.ids_BS[b, :end].tolist() == ids
        assert written.mask_BS[b].nonzero()[:, 0].tolist() == list(range(start, end))


def test_tokens_follow_the_drafters_law(target: Target) -> None:
    drafter = make(target)
    batch = collate(rows_of([(4, 5)]) * 4000, PAD)
    first = own(batch, drafter).ids_BS[:, 4]
    law_V = drafter.head_logits(drafter.states(batch.ids_BS[:1, :4]))[0, -1].softmax(-1)
    counts_V = torch.bincount(first, minlength=264)
    likely = law_V * 4000 > 20
    assert likely.sum() >= 5
    error = (counts_V - 4000 * law_V)[likely] / (4000 * law_V * (1 - law_V))[likely].sqrt()
    assert error.abs().max() < 4.5  # standard deviations


def test_the_seed_decides_everything(target: Target) -> None:
    drafter = make(target)
    batch = collate(rows_of([(3, 20)] * 6), PAD)
    one, again, other = own(batch, drafter), own(batch, drafter), own(batch, drafter, seed=6)
    assert torch.equal(one.ids_BS, again.ids_BS)
    assert not torch.equal(one.ids_BS, other.ids_BS)


def test_the_share_is_of_the_rows(target: Target) -> None:
    drafter = make(target)
    batch = collate(rows_of([(2, 6)] * 400), PAD)
    changed = (own(batch, drafter, 0.25).ids_BS != batch.ids_BS).any(1)
    assert 70 <= changed.sum() <= 130  # 100 expected, standard deviation 9
    assert torch.equal(own(batch, drafter, 0.0).ids_BS, batch.ids_BS)


def test_an_end_token_ends_the_answer(target: Target) -> None:
    drafter = make(target)
    batch = collate(rows_of([(3, 12)] * 3), PAD)
    whole = own(batch, drafter)
    eos = int(whole.ids_BS[0, 5])
    written = own(batch, drafter, eos=eos)
    place = whole.ids_BS[0, 3:].tolist().index(eos) + 3
    assert written.lengths_B[0] == place + 1
    assert written.ids_BS[0, : place + 1].tolist() == whole.ids_BS[0, : place + 1].tolist()
    assert written.ids_BS[0, place + 1 :].tolist() == [PAD] * (11 - place)
    assert written.mask_BS[0].sum() == place - 2


def test_only_the_first_answer_of_a_conversation_is_kept(target: Target) -> None:
    row = rows_of([(4, 16)])[0]
    row.mask_S[8:12] = False  # the user's second turn
    batch = collate([row], PAD)
    written = own(batch, make(target))
    assert torch.equal(written.ids_BS[0, :4], batch.ids_BS[0, :4])
    assert written.mask_BS[0].nonzero()[:, 0].tolist() == list(range(4, 16))


def test_rows_without_an_answer_stay_and_the_first_token_is_always_prompt(target: Target) -> None:
    drafter = make(target)
    rows = [stand_in(rows_of([(3, 9)])[0]), rows_of([(0, 9)])[0]]
    batch = collate(rows, PAD)
    written = own(batch, drafter)
    assert torch.equal(written.ids_BS[0], batch.ids_BS[0])
    assert not torch.equal(written.ids_BS[1], batch.ids_BS[1])
    assert written.ids_BS[1, 0] == batch.ids_BS[1, 0] and not written.mask_BS[1, 0]


def test_recipe_refuses_what_cannot_be() -> None:
    smoke, share = ROOT / "recipes" / "smoke.yaml", "train.on_policy_share=0.5"
    with pytest.raises(UserError, match="a drafter of method eagle3 cannot write text"):
        load_recipe(smoke, [share])
    small = [share, "drafter={method: small_lm}", "loss.num_steps=1"]
    with pytest.raises(UserError, match=r"set data\.states: online"):
        load_recipe(smoke, small)
    recipe = load_recipe(smoke, [*small, "data.states=online"])
    assert recipe.train.on_policy_share == 0.5
