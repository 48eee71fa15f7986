"""What holds for every trained drafter: one set of weights, the same logits wherever it is used.

Each architecture is made for a tiny random target and driven through training pass, decoding loop
and export. `Draft.draw` sees every distribution that a drafter proposes from, so forcing its tokens
to those of a row makes decoding repeat the training pass.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from data.batch import Batch, Row, collate
from data.target import Target
from data.vocab import DraftVocab, full_vocab
from drafters.anchors import anchors_of
from drafters.base import Sampling, TrainedDrafter
from drafters.drafting import Draft
from drafters.export_info import Origin, TargetInfo
from drafters.lookup import Lookup, LookupThen
from drafters.methods import METHODS, build_drafter
from drafters.vllm_format import load, save
from eval.decode import DecodeSettings, decode
from eval.decode_tree import decode_tree
from eval.grow_tree import grow
from eval.lossless import pit_p_value
from eval.tree import FixedTree
from recipes.drafter_sections import (
    DFlashSection,
    DrafterSection,
    DSparkSection,
    Eagle1Section,
    Eagle3Section,
    MedusaSection,
    MTPSection,
    PardSection,
    PEagleSection,
    SmallLMSection,
)
from recipes.errors import UserError
from recipes.schema import LossSection, TargetSection, load_recipe
from tests.tiny_exports import ROOT
from train import shards
from train.distiller import Distiller
from train.loop import with_states

DEPTHS = 4
SIZES: dict[str, Any] = {"draft_vocab_size": 132, "aux_layers": [2, 4, 5]}
SECTIONS: dict[str, DrafterSection] = {
    "eagle3": Eagle3Section(**SIZES),
    "p_eagle": PEagleSection(**SIZES, num_layers=2, mask_token_id=3, keep_ratio=1.0),
    "eagle1": Eagle1Section(num_layers=2, feature_weight=0.5),
    "medusa": MedusaSection(num_heads=DEPTHS, num_layers=2, shared_head=False),
    "mtp": MTPSection(),
    "dflash": DFlashSection(**SIZES, num_layers=2, mask_token_id=3, block_size=DEPTHS + 1),
    "dspark": DSparkSection(
        **SIZES, num_layers=2, mask_token_id=3, block_size=DEPTHS, markov_rank=8
    ),
    "small_lm": SmallLMSection(num_layers=2),
    "pard": PardSection(num_layers=2, mask_token_id=3, keep_ratio=1.0),
}
EVERY = pytest.mark.parametrize("method", METHODS)


def test_every_method_is_tried_here() -> None:
    assert SECTIONS.keys() == METHODS.keys()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))


def build(method: str, target: Target) -> tuple[TrainedDrafter, DraftVocab]:
    section = SECTIONS[method]
    size = section.draft_vocab_size or target.vocab_size
    ids_D = torch.arange(target.vocab_size)[:: target.vocab_size // size]
    vocab = DraftVocab(ids_D, target.vocab_size)
    aux = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    return build_drafter(section, target, aux, vocab, seed=0), vocab


def make(method: str, target: Target) -> TrainedDrafter:
    drafter, _ = build(method, target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # no norm is the identity, no projection is zero
        for name, weight in drafter.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return drafter.eval()


def make_batch(drafter: TrainedDrafter, target: Target, lengths: list[int], start: int) -> Batch:
    """Rows of tokens that the drafter knows, with the target's states."""
    generator = torch.Generator().manual_seed(2)
    known = drafter.draft_ids_D
    rows = []
    for i, n in enumerate(lengths):
        ids_S = known[torch.randint(0, len(known), (n,), generator=generator)]
        rows.append(Row(id=f"r{i}", ids_S=ids_S, mask_S=torch.arange(n) >= start))
    return with_states(target, collate(rows), drafter.aux_layers)


def training_logits(drafter: TrainedDrafter, batch: Batch) -> dict[tuple[int, int], Tensor]:
    """Logits [D] of every slot, by (anchor, depth)."""
    with torch.no_grad():
        slots = drafter.slots(batch, DEPTHS)
        heads = [
            torch.cat(head, 1) if isinstance(head, tuple) else head
            for head in drafter.head_weights()
        ]
    keys = list(zip(slots.anchor_N.tolist(), slots.depth_N.tolist(), strict=True))
    return {
        (anchor, depth): slots.head_NW[i] @ heads[depth if len(heads) > 1 else 0].T
        for i, (anchor, depth) in enumerate(keys)
    }


def decoding_logits(
    drafter: TrainedDrafter, ids: list[int], aux_SF: Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Logits of the draft behind each anchor of a row, whose drafted tokens are the row's own.

    The committed positions arrive in pieces of uneven length, as accepted drafts do.
    """
    seen: list[Tensor] = []
    forced: list[int] = []

    def draw(self: Draft, logits_BD: Tensor) -> Tensor:
        seen.append(logits_BD[0])
        self.tokens.append(torch.tensor([forced[len(self.tokens)]]))
        return self.tokens[-1]

    monkeypatch.setattr(Draft, "draw", draw)
    out: list[Tensor] = []
    first = 3  # a prompt of three tokens; the token behind it is the first anchor
    state = drafter.start([ids[:first]], len(ids) + DEPTHS + 1)
    done = 0
    for anchor in [first, first + 1, first + 4, first + 6]:
        next_ids = torch.tensor([ids[done + 1 : anchor + 1]])
        drafter.observe(state, next_ids, aux_SF[None, done:anchor], torch.tensor([anchor - done]))
        done = anchor
        seen.clear()
        forced[:] = ids[anchor + 1 : anchor + 1 + DEPTHS]
        drafter.propose(state, DEPTHS, Sampling(), None)
        out.append(torch.stack(seen))
    return out


@EVERY
def test_training_logits_are_decoding_logits_at_every_depth(
    method: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(method, target)
    batch = make_batch(drafter, target, [16, 11], start=3)  # the second row is padded
    assert batch.aux_BSF is not None
    trained = training_logits(drafter, batch)
    decoded = decoding_logits(drafter, batch.ids_BS[0].tolist(), batch.aux_BSF[0], monkeypatch)
    for anchor, logits_KD in zip([3, 4, 7, 9], decoded, strict=True):
        for depth in range(DEPTHS):
            wanted_D = trained[anchor, depth]
            atol = 1e-4 * max(1.0, wanted_D.abs().max().item())  # without a norm they are large
            torch.testing.assert_close(logits_KD[depth], wanted_D, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "medusa"])
def test_recomputed_activations_are_not_kept_and_give_the_same_gradients(
    method: str, target: Target
) -> None:
    kept, gradients = [], []
    for lean in (False, True):
        drafter, vocab = build(method, target)
        distiller = Distiller(drafter, LossSection(num_steps=DEPTHS, renormalize=False), vocab)
        distiller.use_target(target)
        if lean:
            distiller.recompute_activations()
        batch = make_batch(drafter, target, [80], start=3)
        numbers = [0]

        def count(tensor: Tensor, numbers: list[int] = numbers) -> Tensor:
            numbers[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = distiller(batch)[0]
        kept.append(numbers[0])
        loss.backward()
        gradients.append(
            {n: w.grad.clone() for n, w in drafter.named_parameters() if w.grad is not None}
        )
    assert kept[1] < 0.9 * kept[0], kept
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


@EVERY
def test_a_row_trains_the_same_alone_and_beside_others(method: str, target: Target) -> None:
    drafter = make(method, target)
    together = training_logits(drafter, make_batch(drafter, target, [16, 11], start=3))
    alone = training_logits(drafter, make_batch(drafter, target, [16], start=3))
    for (anchor, depth), logits_D in alone.items():
        torch.testing.assert_close(together[anchor, depth], logits_D, rtol=1e-4, atol=1e-4)


@EVERY
def test_nothing_behind_the_drafted_tokens_reaches_a_draft(method: str, target: Target) -> None:
    drafter = make(method, target)
    batch = make_batch(drafter, target, [16], start=3)
    assert batch.aux_BSF is not None
    before = training_logits(drafter, batch)
    cut = 9  # the draft behind anchor 6 ends with token 10: it knows tokens up to 9, states to 5
    ids_BS, aux_BSF = batch.ids_BS.clone(), batch.aux_BSF.clone()
    ids_BS[:, cut + 1 :] = drafter.draft_ids_D[0]
    aux_BSF[:, 6:] = 7.0
    after = training_logits(drafter, replace(batch, ids_BS=ids_BS, aux_BSF=aux_BSF))
    for depth in range(DEPTHS):
        assert torch.equal(before[6, depth], after[6, depth])
    reached = 7 if drafter.aux_layers else 10  # and what it may know does reach it
    assert not torch.equal(before[reached, 0], after[reached, 0])


@pytest.mark.parametrize("section", [Eagle3Section(**SIZES, init="target"), MTPSection()])
def test_what_a_warm_start_leaves_out_is_said(
    section: DrafterSection, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    section = section.model_copy(update={"init": "target"})
    aux = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    build_drafter(section, target, aux, full_vocab(target.vocab_size), seed=0)
    said = "has no place for the target's self_attn.k_norm.weight, self_attn.q_norm.weight"
    assert (said in caplog.text) == (section.method == "eagle3")  # MTP has norms of its own


def test_whole_copy_of_divided_weights_looks_at_as_many_anchors(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make("dflash", target)
    drafter.num_anchors = 4
    monkeypatch.setattr(shards, "divides_weights", lambda _: True)
    whole = shards.whole_drafter(Accelerator(cpu=True), drafter, target)
    assert whole is not drafter and whole.num_anchors == 4
    ours, theirs = drafter.state_dict(), whole.state_dict()
    assert all(torch.equal(theirs[name], values) for name, values in ours.items())


@EVERY
def test_greedy_speculative_decoding_is_the_targets_greedy_decoding(
    method: str, target: Target
) -> None:
    drafter = make(method, target)
    prompts = [[5, 9, 14, 3], [7], [2, 4, 6, 8, 10, 12, 14]]
    settings = DecodeSettings(max_new_tokens=12, num_draft=3)
    plain, _ = decode(target, None, prompts, replace(settings, num_draft=0))
    drafted, _ = decode(target, drafter, prompts, settings)
    assert [a.ids for a in drafted] == [a.ids for a in plain]
    assert any(r.proposed for a in drafted for r in a.rounds)


@pytest.mark.parametrize("method", ["eagle1", "eagle3", "mtp"])
def test_trees_of_a_drafter_hold_its_own_drafts(method: str, target: Target) -> None:
    drafter = make(method, target)
    state = drafter.start([[5, 9, 14, 3]], 64)
    states = target.forward(torch.tensor([[5, 9, 14, 3]]), None, drafter.aux_layers)
    drafter.observe(state, torch.tensor([[9, 14, 3, 7]]), states.aux_BSF, torch.tensor([4]))
    drafted_BK = drafter.propose(state, 3, Sampling(), None).tokens_BK
    spec, none_BM = FixedTree((2, 1, 1)), torch.rand(1, 6)  # nothing is drawn
    tree = grow(drafter, state, torch.tensor([7]), spec, 3, Sampling(), none_BM).tree
    first = [int(tree.tokens_BP[0, i]) for i in (1, 3, 5)]  # two a level, the likelier one first
    assert first == drafted_BK[0].tolist()
    prompts, settings = [[5, 9, 14, 3], [7]], DecodeSettings(max_new_tokens=12)
    plain, _ = decode(target, None, prompts, replace(settings, num_draft=0))
    rows, _ = decode_tree(target, drafter, prompts, settings, spec)
    assert [row.ids for row in rows] == [row.ids for row in plain]


@pytest.mark.parametrize("method", ["p_eagle", "medusa", "dflash", "dspark", "small_lm", "pard"])
def test_drafter_of_chains_grows_no_tree(method: str, target: Target) -> None:
    settings = DecodeSettings(max_new_tokens=4)
    with pytest.raises(UserError, match="proposes chains, no trees"):
        decode_tree(target, make(method, target), [[7]], settings, FixedTree((2, 1)))


@EVERY
@pytest.mark.parametrize("draft_sampled", [False, True])
def test_lookup_may_draft_more_than_the_head_behind_it(
    method: str, draft_sampled: bool, target: Target
) -> None:
    # Medusa and the block drafters end after DEPTHS tokens, lookup after the number asked for.
    drafter = LookupThen(Lookup(1, 3), make(method, target))
    sampling = Sampling(temperature=float(draft_sampled), draft_sampled=draft_sampled)
    settings = DecodeSettings(max_new_tokens=24, num_draft=DEPTHS + 2, sampling=sampling)
    prompts = [[5, 9, 14, 5, 9, 14, 5, 9], [7], [2, 4, 6, 2, 4]]
    rows, _ = decode(target, drafter, prompts, settings)
    assert any(r.proposed > DEPTHS for row in rows for r in row.rounds)
    if not draft_sampled:
        plain, _ = decode(target, None, prompts, replace(settings, num_draft=0))
        assert [row.ids for row in rows] == [row.ids for row in plain]


@EVERY
@pytest.mark.parametrize("draft_sampled", [False, True])
def test_drawn_tokens_follow_the_target(method: str, draft_sampled: bool, target: Target) -> None:
    drafter = make(method, target)
    sampling = Sampling(temperature=1.0, draft_sampled=draft_sampled)
    settings = DecodeSettings(max_new_tokens=40, num_draft=3, sampling=sampling, seed=3)
    answers, _ = decode(target, drafter, [[5, 9, 14, 3]] * 24, settings)
    pit = [value for a in answers for value in a.pit]
    p_value = pit_p_value(pit)
    assert len(pit) > 500
    assert p_value is not None and p_value > 1e-3


@EVERY
def test_training_lowers_the_loss_and_reaches_every_weight(method: str, target: Target) -> None:
    section = SECTIONS[method]
    drafter = make(method, target).train()
    vocab = DraftVocab(drafter.draft_ids_D.clone(), target.vocab_size)
    loss = LossSection(num_steps=DEPTHS, renormalize=False)
    distiller = Distiller(drafter, loss, vocab)
    distiller.use_target(target)
    batch = make_batch(drafter, target, [16, 11], start=3)
    optimizer = torch.optim.Adam(distiller.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        total, _ = distiller(batch)
        (total / len(anchors_of(batch))).backward()
        untouched = [
            name
            for name, weight in distiller.named_parameters()
            if weight.requires_grad and (weight.grad is None or not weight.grad.any())
        ]
        assert not untouched, (section.method, untouched)
        optimizer.step()
        losses.append(total.item())
    assert losses[-1] < 0.8 * losses[0]


@EVERY
def test_every_depth_learns_a_language_whose_next_token_is_certain(
    method: str, target: Target
) -> None:
    """Eight tokens in a circle, three on each time: by chance 1 of 8 is right."""
    drafter, vocab = build(method, target)
    drafter.train()
    distiller = Distiller(drafter, LossSection(name="ce", num_steps=DEPTHS), vocab)
    distiller.use_target(target)
    weights = [weight for weight in distiller.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, 3e-3)
    circle = vocab.ids_D[5:13]
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        begins = torch.randint(0, 8, (2,), generator=generator).tolist()
        rows = [
            Row(
                id=str(begin),
                ids_S=circle[(begin + 3 * torch.arange(20)) % 8],
                mask_S=torch.ones(20, dtype=torch.bool),
            )
            for begin in begins
        ]
        batch = with_states(target, collate(rows), drafter.aux_layers)
        optimizer.zero_grad()
        total, sums = distiller(batch)
        (total / len(anchors_of(batch))).backward()
        optimizer.step()
    top1 = sums["num_top1"] / sums["num_positions"]
    assert len(top1) == DEPTHS and top1.min() > 0.8, top1


@EVERY
def test_random_choices_of_training_follow_from_the_seed(method: str, target: Target) -> None:
    drafter = make(method, target)
    batch = make_batch(drafter, target, [16, 11], start=3)
    one, two = training_logits(drafter, batch), training_logits(drafter, batch)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@EVERY
def test_batch_without_a_supervised_token_adds_nothing(method: str, target: Target) -> None:
    drafter = make(method, target).train()
    vocab = DraftVocab(drafter.draft_ids_D.clone(), target.vocab_size)
    distiller = Distiller(drafter, LossSection(num_steps=DEPTHS), vocab)
    distiller.use_target(target)
    batch = make_batch(drafter, target, [9], start=9)
    loss, stats = distiller(batch)
    loss.backward()  # ranks without rows must take part
    assert loss.item() == 0
    assert stats["num_positions"].tolist() == [0.0] * DEPTHS


def forms() -> list[tuple[str, Any]]:
    return [(name, form) for name, method in METHODS.items() for form in method.form.forms]


@pytest.mark.parametrize(("method", "form"), forms())
def test_exported_and_loaded_again_it_is_the_same_drafter(
    method: str, form: Any, target: Target, tmp_path: Any
) -> None:
    drafter = make(method, target)
    origin = Origin(
        recipe=load_recipe(ROOT / "recipes" / "smoke.yaml").model_dump(mode="json"),
        commit=None,
        versions={},
        num_trained_tokens=0,
        num_draft_tokens=3,
    )
    folder = tmp_path / "export"
    save(drafter, folder, form, torch.float32, TargetInfo.of(target), origin)
    loaded = load(folder, TargetInfo.of(target))
    loaded.use_target(target)
    assert (loaded.method, loaded.aux_layers) == (drafter.method, drafter.aux_layers)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    batch = make_batch(drafter, target, [16, 11], start=3)
    before, after = training_logits(drafter, batch), training_logits(loaded.eval(), batch)
    assert before.keys() == after.keys()
    for key, logits_D in before.items():
        torch.testing.assert_close(after[key], logits_D, rtol=1e-5, atol=1e-5)
