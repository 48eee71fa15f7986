"""The training pass: which positions learn what, and sums that do not depend on the cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.batch import Batch, Row, collate
from data.target import Target
from data.vocab import DraftVocab
from drafters.anchors import supervised_anchors
from drafters.methods import build_drafter
from recipes.drafter_sections import Eagle3Section
from recipes.schema import LossSection, TargetSection
from train.distiller import Distiller, count_slots
from train.validate import tau_of, with_states


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))


VOCAB = DraftVocab(torch.arange(0, 264, 2), 264)  # every other token


def make_distiller(target: Target, **loss: object) -> Distiller:
    torch.manual_seed(0)
    drafter = build_drafter(Eagle3Section(draft_vocab_size=132), target, (2, 4, 5), VOCAB, seed=0)
    section = LossSection(**{"num_steps": 3, "renormalize": False, **loss})
    distiller = Distiller(drafter, section, VOCAB)
    distiller.use_target(target)
    return distiller


def make_rows(lengths: list[int], start: int) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i, n in enumerate(lengths):
        mask_S = torch.arange(n) >= start
        rows.append(
            Row(id=f"r{i}", ids_S=torch.randint(0, 256, (n,), generator=generator), mask_S=mask_S)
        )
    return rows


def test_p06_shift_moves_the_mask_with_the_labels() -> None:
    # Prompt 0..3, assistant 4..7: anchor s is a committed token, its first guess is token s+1.
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    steps = [pairs.tolist() for pairs in supervised_anchors(mask, 4)]
    assert steps == [[4, 5, 6], [4, 5], [4], []]


def test_p06_gradient_reaches_exactly_the_rows_that_count(target: Target) -> None:
    distiller = make_distiller(target, num_steps=1)
    batch = with_states(target, collate(make_rows([8], 4)), (2, 4, 5))
    assert batch.aux_BSF is not None
    # At step 0 a row's feature reaches the loss of its own and later rows; the last counted row's
    # feature reaches only itself, and rows after it none.
    aux = batch.aux_BSF.clone().requires_grad_()
    distiller(replace(batch, aux_BSF=aux))[0].backward()
    assert aux.grad is not None
    reached = (aux.grad[0].abs().sum(-1) > 0).tolist()
    assert reached == [True] * 6 + [False, False]


def test_rollout_must_not_cross_an_unsupervised_gap() -> None:
    # Two answers with one token between them: no pair may span the gap.
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
    assert [p.tolist() for p in supervised_anchors(mask, 3)] == [[1, 2, 5, 6], [1, 5], []]


def test_padding_and_row_order_change_nothing(target: Target) -> None:
    distiller = make_distiller(target)
    rows = make_rows([12, 20, 9], 4)

    def loss(batch: Batch) -> float:
        return distiller(with_states(target, batch, (2, 4, 5)))[0].item()

    together = loss(collate(rows))
    assert together == pytest.approx(sum(loss(collate([r])) for r in rows), rel=1e-5)
    assert loss(collate(rows, pad_id=7)) == pytest.approx(together, rel=1e-6)


def test_loss_by_step_equals_the_naive_formula(target: Target) -> None:
    distiller = make_distiller(target, chunk_size=5)
    (row,) = make_rows([14], 4)
    batch = with_states(target, collate([row]), (2, 4, 5))
    loss, stats = distiller(batch)
    assert batch.hidden_BSH is not None and batch.aux_BSF is not None
    p_SV = target.logits(batch.hidden_BSH[0]).softmax(-1)
    heads = distiller.drafter.rollout(batch.ids_BS, batch.aux_BSF, 3)
    expected, alphas = 0.0, []
    for k, head in enumerate(heads):
        log_q_SD = distiller.drafter.lm_head(head[0]).log_softmax(-1).detach()
        alpha = 0.0
        for t in range(3, 14 - 2 - k):  # label t+2+k must exist; token t+1 starts at the answer
            p_D = p_SV[t + 1 + k, VOCAB.ids_D]
            expected += 0.8**k * float((p_D * (p_D.log() - log_q_SD[t])).sum())
            alpha += float(torch.minimum(p_D, log_q_SD[t].exp()).sum())
        alphas.append(alpha)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert stats["alpha_sum"].tolist() == pytest.approx(alphas, rel=1e-4)
    assert stats["num_positions"].tolist() == [9, 8, 7]


def test_renormalized_loss_leaves_out_what_the_drafter_cannot_propose(target: Target) -> None:
    distiller = make_distiller(target, renormalize=True)
    batch = with_states(target, collate(make_rows([40], 4)), (2, 4, 5))
    assert batch.argmax_BS is not None
    _, stats = distiller(batch)
    inside = (batch.argmax_BS[0] % 2 == 0).tolist()  # the draft vocabulary holds even ids
    assert stats["num_positions"][0] == sum(inside[t + 1] for t in range(3, 38))


def test_p51_batch_without_supervised_token_adds_exactly_nothing(target: Target) -> None:
    for name in ("kl", "ce", "tv", "lk_hybrid"):
        distiller = make_distiller(target, name=name)
        (row,) = make_rows([10], 10)
        batch = with_states(target, collate([row]), (2, 4, 5))
        loss, stats = distiller(batch)
        loss.backward()
        assert loss.item() == 0 and int(stats["num_positions"].sum()) == 0
        grads = [p.grad for p in distiller.parameters() if p.grad is not None]
        assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("name", ["kl", "ce", "tv", "lk_hybrid"])
def test_p53_one_batch_equals_its_micro_batches(target: Target, name: str) -> None:
    rows = make_rows([9, 30, 14, 22], 4)

    def gradients(parts: list[list[Row]]) -> dict[str, torch.Tensor]:
        distiller = make_distiller(target, name=name)
        batches: list[Batch] = [with_states(target, collate(p), (2, 4, 5)) for p in parts]
        total = sum(count_slots(b) for b in batches)
        for batch in batches:
            (distiller(batch)[0] / total).backward()
        return {n: p.grad for n, p in distiller.named_parameters() if p.grad is not None}

    whole = gradients([rows])
    for parts in ([[r] for r in rows], [rows[:1], rows[1:]]):
        cut = gradients(parts)
        assert whole.keys() == cut.keys()
        for key, grad in whole.items():
            torch.testing.assert_close(cut[key], grad, rtol=1e-4, atol=1e-6)


def test_p60_the_target_is_never_trained(target: Target) -> None:
    distiller = make_distiller(target)
    before = {n: p.clone() for n, p in target.model.named_parameters()}
    names = [n for n, p in distiller.named_parameters() if p.requires_grad]
    assert not any("embed" in n for n in names)
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=0.1)
    for _ in range(3):
        distiller(with_states(target, collate(make_rows([20], 4)), (2, 4, 5)))[0].backward()
        optimizer.step()
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, before[name]) and not parameter.requires_grad


def test_warm_start_is_the_targets_last_layer(target: Target) -> None:
    section = Eagle3Section(draft_vocab_size=132, init="target")
    drafter = build_drafter(section, target, (2, 4, 5), VOCAB, seed=0)
    last, first = target.decoder.layers[-1], drafter.layers[0]
    assert torch.equal(first.self_attn.q_proj.weight[:, 64:], last.self_attn.q_proj.weight)
    assert torch.equal(first.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(drafter.lm_head.weight, target.head_weight_VH[::2])
    aux = torch.randn(1, 1, 192)
    assert torch.equal(drafter.fuse(aux), aux[..., 128:])


def test_tau_of_product_of_alphas() -> None:
    assert tau_of([0.5, 0.5, 0.0]) == pytest.approx(1 + 0.5 + 0.25)


def test_p36_no_row_sees_a_target_state_that_it_will_not_have_when_drafting(target: Target) -> None:
    # Row t drafts before the target has run over t+1: no later state may change any of its steps.
    drafter = make_distiller(target).drafter
    ids_BS, aux_BSF = torch.randint(0, 256, (1, 12)), torch.randn(1, 12, 192)
    changed = aux_BSF.clone()
    changed[:, 7:] += 1.0
    before, after = drafter.rollout(ids_BS, aux_BSF, 3), drafter.rollout(ids_BS, changed, 3)
    for k in range(3):
        assert torch.equal(before[k][:, :7], after[k][:, :7])
        assert not torch.equal(before[k][:, 7], after[k][:, 7])


class Waits(TorchDispatchMode):
    """What a GPU's host would wait for: sizes and numbers that depend on a tensor's contents."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or name in WAITING or name.startswith("unique"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal")


def test_waits_for_the_device_are_counted_and_do_not_grow_with_chunks(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(1) or tolist(x))
    batch = with_states(target, collate(make_rows([40, 24], 4)), (2, 4, 5))

    def count(num_steps: int, chunk_size: int) -> tuple[list[str], int]:
        distiller = make_distiller(target, num_steps=num_steps, chunk_size=chunk_size)
        lists.clear()
        with Waits() as waits:
            distiller(batch)[0].backward()
        return sorted(waits.names), len(lists)

    names, num_lists = count(2, 512)
    assert count(2, 5) == (names, num_lists)
    # Three a depth (its anchors, those chosen, those gathered), all anchors, distinct places; and
    # two lists, of where chunks begin and end.
    assert names == ["index"] * 4 + ["nonzero"] * 3 + ["unique_consecutive"]
    assert num_lists == 2
