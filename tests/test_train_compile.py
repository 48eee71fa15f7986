"""`train.compile`: losses, gradients, names and validation are those of a drafter as it is."""

import shutil
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from data import compiled as compiling
from data.batch import Batch, collate
from data.target import Target
from data.vocab import DraftVocab
from drafters.base import TrainedDrafter
from drafters.methods import METHODS
from recipes.errors import UserError
from recipes.schema import LossSection, TargetSection, load_recipe
from tests.test_drafter_family import DEPTHS, make
from tests.test_packing import loss_and_gradients, make_rows, ready
from tests.tiny_exports import ROOT
from train.checkpoint import differences
from train.distiller import Distiller
from train.step_clock import StepClock

EAGLE3 = {"RMSNorm.forward", "Eagle3Layer.before", "Eagle3Layer.after"}
BLOCKS = {"RMSNorm.forward", "BlockLayer.before", "BlockLayer.after", "Attention.keys_values"}
LM = {"Qwen3RMSNorm.forward", "Qwen3MLP.forward"}
PARTS = {
    "eagle3": EAGLE3,
    "p_eagle": EAGLE3,
    "eagle1": EAGLE3 - {"RMSNorm.forward"},
    "mtp": EAGLE3,
    "medusa": {"MedusaBlock.forward"},
    "dflash": BLOCKS,
    "dspark": BLOCKS,
    "small_lm": LM,
    "pard": LM,
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of what is handed to torch.compile."""
    names, inner = set[str](), compiling.compiled

    def noting(run: Any, *rest: Any, **how: Any) -> Any:
        names.add(run.__qualname__)
        return inner(run, *rest, **how)

    monkeypatch.setattr(compiling, "compiled", noting)
    compiling._compiled_part.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    return names


def make_distiller(method: str, target: Target) -> Distiller:
    drafter = make(method, target)  # in eval mode: EAGLE-1's noise is another matter
    if method == "eagle1":  # without a norm its random features grow, and so does rounding
        with torch.no_grad():
            for weight in drafter.parameters():
                weight.mul_(0.4)
    vocab = DraftVocab(drafter.draft_ids_D.clone(), target.vocab_size)
    distiller = Distiller(drafter, LossSection(num_steps=DEPTHS, renormalize=False), vocab)
    distiller.use_target(target)
    return distiller


def make_batch(drafter: TrainedDrafter, target: Target, rows: list[int], **how: Any) -> Batch:
    """Of test_packing's rows, which are 12, 3, 9, 6 and 15 long."""
    every = make_rows(drafter)
    return ready(drafter, target, collate([every[i] for i in rows], **how))


def check_same(plain: Distiller, other: nn.Module, batch: Batch) -> None:
    loss, _, gradients = loss_and_gradients(plain, batch)
    found_loss, _, found = loss_and_gradients(other, batch)  # type: ignore[arg-type]
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=0)
    found = {name.removeprefix("module."): gradient for name, gradient in found.items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        most = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=most)


@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradients_are_those_of_the_drafter_as_it_is(
    method: str, target: Target, parts: set[str]
) -> None:
    plain, other = make_distiller(method, target), make_distiller(method, target)
    weights = plain.state_dict()
    other.drafter.compile_training("aot_eager", "train.compile")
    if method in ("mtp", "dflash"):  # rollout steps around the parts; an MLP within one
        plain.recompute_activations()
        other.recompute_activations()
    check_same(plain, other, make_batch(plain.drafter, target, [0, 2]))
    assert parts == PARTS[method]
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    for rows in ([3, 2], [0, 4]):  # 9 and 15 long, after 12
        check_same(plain, other, make_batch(plain.drafter, target, rows))
    assert counters["stats"]["unique_graphs"] == num_graphs
    with torch.no_grad():  # validation runs nothing that is compiled
        batch = make_batch(plain.drafter, target, [0, 4])
        assert torch.equal(plain(batch)[0], other(batch)[0])
    assert list(other.state_dict()) == list(weights)
    other.load_state_dict(weights, strict=True)


def test_packed_rows_recomputed_under_ddp(target: Target, parts: set[str]) -> None:
    plain, other = make_distiller("eagle3", target), make_distiller("eagle3", target)
    plain.recompute_activations()
    other.recompute_activations()
    other.drafter.compile_training("aot_eager", "train.compile")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(other)
        for rows in ([0, 1, 2], [2, 3, 4]):
            check_same(plain, model, make_batch(plain.drafter, target, rows, packing=True))
    finally:
        distributed.destroy_process_group()
    assert parts == PARTS["eagle3"] and counters["stats"]["unique_graphs"] > 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same(target: Target, parts: set[str]) -> None:
    plain, other = make_distiller("medusa", target), make_distiller("medusa", target)
    other.drafter.compile_training("default", "train.compile")
    for rows in ([0, 2], [0, 4]):
        check_same(plain, other, make_batch(plain.drafter, target, rows))
    assert parts == PARTS["medusa"] and counters["stats"]["unique_graphs"] > 0


@pytest.mark.usefixtures("parts")
def test_counting_flops_in_the_first_micro_batch_leaves_the_others_compiled(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.step_clock.peak_flops", lambda _: 1e9)
    distiller, clock = make_distiller("medusa", target), StepClock(torch.device("cpu"))
    distiller.drafter.compile_training("aot_eager", "train.compile")
    batch = make_batch(distiller.drafter, target, [0, 2])
    num_graphs = []
    for _ in range(3):
        with clock.micro_batch(distiller, batch.ids_BS.numel()):
            distiller(batch)[0].backward()
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert clock.flops_per_position > 0
    assert num_graphs == [0, 1, 1]


@pytest.mark.usefixtures("parts")
def test_no_compiler_is_an_error_that_names_the_key(target: Target) -> None:
    distiller = make_distiller("medusa", target)
    distiller.drafter.compile_training("default", "train.compile")
    batch = make_batch(distiller.drafter, target, [4, 3, 2])
    patch = {"cpp.cxx": ("/no/compiler/here",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(patch),
        pytest.raises(UserError, match=r"train.compile is 'default'.*train.compile: null"),
    ):
        distiller(batch)


def test_nothing_to_compile_is_an_error(target: Target) -> None:
    drafter = make("medusa", target)
    drafter.blocks = nn.ModuleList()
    with pytest.raises(UserError, match="the drafter medusa has no part to compile"):
        drafter.compile_training("aot_eager", "train.compile")


def test_key_takes_no_cuda_graphs_and_may_change_on_resume() -> None:
    smoke = ROOT / "recipes/smoke.yaml"
    with pytest.raises(UserError, match=r"train\.compile"):
        load_recipe(smoke, ["train.compile=reduce-overhead"])
    plain, other = (
        load_recipe(smoke, more).model_dump(mode="json") for more in ([], ["train.compile=default"])
    )
    assert plain["train"]["compile"] is None and not differences(plain, other)
