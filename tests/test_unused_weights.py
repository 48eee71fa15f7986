"""Every trained weight takes part in every step, whatever the batch holds.

Data parallelism waits for the gradient of each weight on each rank; one that has none (a head whose
depth does not occur, a batch with nothing to learn) would end the run.
"""

from dataclasses import replace

import pytest

from data.batch import Row, collate, stand_in
from data.target import Target
from data.vocab import DraftVocab
from drafters.anchors import choose_anchors
from drafters.methods import METHODS
from recipes.errors import UserError
from recipes.schema import LossSection, TargetSection, load_recipe
from tests.test_drafter_family import DEPTHS, make, make_batch
from tests.tiny_exports import ROOT
from train.distiller import Distiller
from train.validate import with_states


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", ["rows", "one short row", "nothing to learn", "stand-in"])
def test_no_weight_is_left_out(method: str, what: str, target: Target) -> None:
    drafter = make(method, target).train()
    batch = make_batch(drafter, target, [12, 20] if what == "rows" else [6], 3)
    if what == "one short row":  # two supervised tokens: an anchor, and a slot of depth 0
        batch.mask_BS[:, 5:] = False
    elif what == "nothing to learn":
        batch.mask_BS[:] = False
    elif what == "stand-in":
        row = stand_in(Row(id="r", ids_S=batch.ids_BS[0], mask_S=batch.mask_BS[0]))
        batch = with_states(target, collate([row]), drafter.aux_layers)
    anchors = choose_anchors(batch.mask_BS, drafter.num_anchors, batch.seed)
    num_steps = 1 if method == "small_lm" else DEPTHS
    vocab = DraftVocab(drafter.draft_ids_D, target.vocab_size)
    distiller = Distiller(drafter, LossSection(num_steps=num_steps), vocab)
    distiller.use_target(target)
    loss, _ = distiller(replace(batch, anchors_A=anchors))
    loss.backward()
    trained = {name: p.grad for name, p in distiller.named_parameters() if p.requires_grad}
    assert len(trained) > 1
    assert [name for name, gradient in trained.items() if gradient is None] == []
    if what in ("nothing to learn", "stand-in"):
        assert not any(gradient.any() for gradient in trained.values())
    elif what == "rows":
        assert any(gradient.any() for gradient in trained.values())


def test_medusa_heads_without_a_step_are_refused() -> None:
    smoke, heads = ROOT / "recipes" / "smoke.yaml", "drafter={method: medusa, num_heads: 3}"
    with pytest.raises(
        UserError, match=r"num_steps=2, but drafter.num_heads=3: each head learns one"
    ):
        load_recipe(smoke, [heads, "loss.num_steps=2"])
    assert load_recipe(smoke, [heads, "loss.num_steps=3"]).loss.num_steps == 3
