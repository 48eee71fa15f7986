"""Packed rows: documents one behind the other are what they are alone, for every drafter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.attention import attend
from data.batch import Batch, Row, collate, num_places, plan_batches
from data.documents import Documents, flex, sees
from data.target import Target
from data.vocab import DraftVocab
from drafters.anchors import choose_anchors, supervised_slots
from drafters.base import TrainedDrafter
from drafters.methods import METHODS
from drafters.rollout_attention import merged, rollout_attention
from recipes.errors import UserError
from recipes.schema import LossSection, TargetSection, load_recipe
from tests.test_drafter_family import DEPTHS, make, training_logits
from tests.tiny_exports import ROOT
from tests.tiny_targets import KINDS, tiny_target
from train.distiller import Distiller, count_slots
from train.validate import with_states

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
EVERY = pytest.mark.parametrize("method", METHODS)
LENGTHS = [12, 3, 9, 6, 15]
STARTS = [3, 3, 2, 0, 5]  # the second has no supervised token, the fourth is supervised from 0 on


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))


def make_rows(drafter: TrainedDrafter) -> list[Row]:
    generator = torch.Generator().manual_seed(4)
    known, rows = drafter.draft_ids_D, []
    for i, (n, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        ids_S = known[torch.randint(0, len(known), (n,), generator=generator)]
        rows.append(Row(id=f"r{i}", ids_S=ids_S, mask_S=torch.arange(n) >= start))
    return rows


def ready(drafter: TrainedDrafter, target: Target, batch: Batch) -> Batch:
    """The batch as the loop completes it."""
    anchors_A = choose_anchors(batch.mask_BS, drafter.num_anchors, batch.seed, batch.stretches)
    return with_states(target, replace(batch, anchors_A=anchors_A), drafter.aux_layers)


def loss_and_gradients(
    distiller: Distiller, batch: Batch
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    distiller.zero_grad()
    loss, stats = distiller(batch)
    loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in distiller.named_parameters()
        if weight.grad is not None
    }
    return loss.detach(), stats, gradients


@pytest.mark.parametrize(
    ("method", "recompute"),
    [(m, r) for m in sorted(METHODS) for r in (False, True) if not (r and m == "medusa")],
)  # a Medusa has nothing to recompute
def test_p45_packed_loss_and_gradients_are_those_of_the_rows_alone(
    method: str, recompute: bool, target: Target
) -> None:
    drafter = make(method, target).train()
    if method == "eagle1":  # without a norm its random features grow, and so does rounding
        with torch.no_grad():
            for weight in drafter.parameters():
                weight.mul_(0.4)
    if drafter.num_anchors is not None:
        drafter.num_anchors = 4
    if "keep_ratio" in vars(drafter.config):
        drafter.config = replace(drafter.config, keep_ratio=0.7)
    if "noise" in vars(drafter.config):  # drawn for a batch as a whole
        drafter.config = replace(drafter.config, noise=0.0)
    vocab = DraftVocab(drafter.draft_ids_D.clone(), target.vocab_size)
    distiller = Distiller(drafter, LossSection(num_steps=DEPTHS, renormalize=False), vocab)
    distiller.use_target(target)
    if recompute:
        distiller.recompute_activations()
    rows = make_rows(drafter)
    padded = ready(drafter, target, collate(rows))
    packed = ready(drafter, target, collate(rows, packing=True))
    assert packed.ids_BS.shape == (1, sum(LENGTHS)) and packed.row_ids == padded.row_ids
    assert count_slots(packed) == count_slots(padded) > 0
    loss, stats, gradients = loss_and_gradients(distiller, padded)
    packed_loss, packed_stats, packed_gradients = loss_and_gradients(distiller, packed)
    torch.testing.assert_close(packed_loss, loss, rtol=1e-5, atol=0)
    assert stats["num_positions"].tolist() == packed_stats["num_positions"].tolist()
    torch.testing.assert_close(packed_stats, stats, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == packed_gradients.keys()
    for name, gradient in gradients.items():
        most = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-5, atol=most)


@EVERY
def test_p45_no_document_changes_another(method: str, target: Target) -> None:
    """A(12) and B(9) with others and padding behind them: B is B alone, whatever A holds."""
    drafter = make(method, target)
    a, _, b, *_ = make_rows(drafter)
    padding = Row(id="pad", ids_S=torch.full((3,), 7), mask_S=torch.zeros(3, dtype=torch.bool))
    other = replace(a, ids_S=drafter.draft_ids_D[: len(a.ids_S)])
    longer = replace(padding, ids_S=torch.full((8,), 9), mask_S=torch.zeros(8, dtype=torch.bool))

    def of_b(rows: list[Row], start: int) -> dict[tuple[int, int], Tensor]:
        batch = ready(drafter, target, collate(rows, packing=True))
        logits = training_logits(drafter, batch)
        return {(at - start, k): x for (at, k), x in logits.items() if 0 <= at - start < 9}

    first, alone = of_b([a, b, padding], 12), of_b([b], 0)
    assert first.keys() == alone.keys() and len(first) > 3
    placed = [([other, b, padding], 12), ([a, b, longer], 12), ([a, padding, b], 15)]
    for found in [alone, *(of_b(rows, start) for rows, start in placed)]:
        for key, logits_D in found.items():
            most = 1e-5 * max(1.0, logits_D.abs().max().item())
            torch.testing.assert_close(first[key], logits_D, rtol=0, atol=most)
    # Nor does the target's state of one reach another, where states are cached.
    batch = ready(drafter, target, collate([a, b], packing=True))
    assert batch.aux_BSF is not None
    aux_BSF = batch.aux_BSF.clone()
    aux_BSF[:, :12] = 5.0
    changed = training_logits(drafter, replace(batch, aux_BSF=aux_BSF))
    for (anchor, k), logits_D in training_logits(drafter, batch).items():
        if anchor >= 12:
            torch.testing.assert_close(changed[anchor, k], logits_D, rtol=0, atol=0)


def test_p46_no_shift_crosses_a_document() -> None:
    """Anchor s and depth k need tokens s .. s+1+k of one document; its first token is no label."""
    everything = torch.ones(4, dtype=torch.bool)
    rows = [
        Row(id="a", ids_S=torch.tensor([1, 2, 3, 4]), mask_S=everything),
        Row(id="b", ids_S=torch.tensor([5, 6, 7]), mask_S=everything[:3]),
    ]
    batch = collate(rows, packing=True)
    assert batch.position_1S.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    anchor_N, depth_N = supervised_slots(batch, 3)
    found = list(zip(anchor_N.tolist(), depth_N.tolist(), strict=True))
    # a: tokens 1, 2, 3 are supervised; b stands at 4, 5, 6, of which 5 and 6 are.
    assert found == [(1, 0), (2, 0), (5, 0), (1, 1)]


def dense(query: Tensor, key: Tensor, value: Tensor, documents: Documents, **how: Any) -> Tensor:
    """Attention under the whole mask, and its logsumexp."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    places_S = torch.arange(query.shape[2])
    mask_SS = sees(
        places_S[:, None], places_S, documents.start_S[:, None], how.get("sliding_window")
    )
    scores = query @ key.transpose(2, 3) * (how.get("scaling") or query.shape[-1] ** -0.5)
    if how.get("softcap"):
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    scores = scores.masked_fill(~mask_SS, float("-inf"))
    return torch.cat([scores.softmax(-1) @ value, scores.logsumexp(-1)[..., None]], -1)


def heads(S: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, n, S, 16, generator=generator) for n in (4, 2, 2))
    return query, key, value


@pytest.mark.parametrize(
    "how", [{}, {"sliding_window": 5}, {"softcap": 2.0, "scaling": 0.5}], ids=str
)
def test_p47_every_way_of_packed_attention_gives_the_same(how: dict[str, Any]) -> None:
    documents = Documents([7, 1, 20, 12])
    query, key, value = heads(40)
    by_document = attend(None, query, key, value, None, documents=documents, **how)[0]
    by_document = by_document.transpose(1, 2)
    window = how.get("sliding_window")
    flexed, lse = flex(query, key, value, documents, how.get("scaling"), window, how.get("softcap"))
    wanted = dense(query, key, value, documents, **how)
    torch.testing.assert_close(by_document, wanted[..., :-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(flexed, wanted[..., :-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted[..., -1], rtol=1e-5, atol=1e-5)
    # A key that is masked has exactly no influence: those of the third document, on the others.
    key[:, :, 8:28], value[:, :, 8:28] = 300.0, -300.0
    again = attend(None, query, key, value, None, documents=documents, **how)[0].transpose(1, 2)
    flexed_again = flex(
        query, key, value, documents, how.get("scaling"), window, how.get("softcap")
    )[0]
    for before, after in ((by_document, again), (flexed, flexed_again)):
        assert torch.equal(before[:, :, :8], after[:, :, :8])
        assert torch.equal(before[:, :, 28:], after[:, :, 28:])
        assert not torch.equal(before[:, :, 8:28], after[:, :, 8:28])


@pytest.mark.parametrize("num_documents", [1, 3])
@pytest.mark.parametrize("S", [1, 127, 128, 129, 200])
def test_p48_lengths_that_are_no_multiple_of_128(S: int, num_documents: int) -> None:
    lengths = [n for n in (S // 3, S // 5, S - S // 3 - S // 5) if n]
    documents = Documents([S] if num_documents == 1 else lengths)
    query, key, value = heads(S)
    out = flex(query, key, value, documents)[0]
    wanted = dense(query, key, value, documents)[..., :-1]
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_rollout_merged_into_flex_attention_has_the_outputs_and_gradients() -> None:
    """The formula of CUDA, over a product that has a gradient on a CPU."""
    documents = Documents([9, 1, 14])
    query, *_ = heads(24)
    keys, values = zip(*(heads(24, seed)[1:] for seed in (1, 2, 3)), strict=True)
    leaves = [query, *keys, *values]
    weight = heads(24, 9)[0]

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * weight).sum(), leaves)

    for leaf in leaves:
        leaf.requires_grad_()
    ours = rollout_attention(query, list(keys), list(values), documents)
    causal = dense(query, keys[0], values[0], documents)
    merged_out = merged(query, list(keys), list(values), causal[..., :-1], causal[..., -1])
    torch.testing.assert_close(ours, merged_out, rtol=1e-5, atol=1e-5)
    for one, two in zip(gradients(ours), gradients(merged_out), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    flexed = [
        x.detach() for x in flex(query.detach(), keys[0].detach(), values[0].detach(), documents)
    ]
    torch.testing.assert_close(
        merged(query, list(keys), list(values), flexed[0], flexed[1]), ours, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("batch_tokens", [300, 1024])
def test_packed_plan_holds_every_row_once_within_the_budget(batch_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [*torch.randint(5, 300, (2000,), generator=generator).tolist(), 1500]
    plan = plan_batches(lengths, batch_tokens, 1, seed=3, epoch=1, packing=True)
    assert sorted(i for batch in plan for i in batch) == list(range(2001))
    tokens = [sum(lengths[i] for i in batch) for batch in plan]
    assert [2000] in plan and max(n for n in tokens if n != 1500) <= batch_tokens
    filled = (sum(lengths) - 1500) / (batch_tokens * (len(plan) - 1))
    assert filled > (0.97 if batch_tokens == 1024 else 0.92)
    assert num_places(plan, lengths, packing=True) == sum(lengths)
    assert plan == plan_batches(lengths, batch_tokens, 1, seed=3, epoch=1, packing=True)
    assert plan != plan_batches(lengths, batch_tokens, 1, seed=3, epoch=2, packing=True)
    assert plan_batches([], batch_tokens, 1, seed=0, epoch=0, packing=True) == []


def test_places_of_padded_batches_count_the_padding() -> None:
    assert num_places([[0, 1], [2], []], [3, 5, 2], packing=False) == 2 * 5 + 2


@pytest.mark.parametrize("kind", KINDS)
def test_p45_packed_target_gives_every_document_the_states_that_it_has_alone(kind: str) -> None:
    """Windows (5) and softcaps too: positions and windows begin anew with each document."""
    model = tiny_target(kind)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 250, (1, n), generator=generator) for n in (9, 1, 14, 7)]
    documents = Documents([9, 1, 14, 7])
    packed = model.forward(torch.cat(ids, 1), aux_layers=(1, 2), documents=documents)
    wanted = [model.forward(x, aux_layers=(1, 2)) for x in ids]
    for found, whole in (
        (packed.hidden_BSH, torch.cat([states.hidden_BSH for states in wanted], 1)),
        (packed.aux_BSF, torch.cat([states.aux_BSF for states in wanted], 1)),
    ):
        most = 1e-5 * whole.abs().max().item()
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=most)


def test_packing_needs_a_budget_and_answers_of_known_length() -> None:
    smoke, packing = ROOT / "recipes/smoke.yaml", ["train.packing=true"]
    with pytest.raises(UserError, match="packing needs batch_tokens"):
        load_recipe(smoke, packing)
    budget = [*packing, "train.batch_tokens=512"]
    assert load_recipe(smoke, budget).train.packing
    with pytest.raises(UserError, match="packing and on_policy_share do not go together"):
        load_recipe(smoke, [*budget, "train.on_policy_share=0.5"])
