"""What a run will need, before it runs: memory against a real step, hours against hand counts."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.batch import Row, collate
from data.target import Target
from data.vocab import DraftVocab
from drafters.anchors import choose_anchors
from drafters.methods import build_drafter
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe
from tests.bare_shapes import bare_shape
from tests.tiny_exports import ROOT
from tests.tiny_targets import tiny_target
from train.distiller import Distiller
from train.gpu_hours import COMPUTE_SHARE, estimate
from train.plan import estimates, sizes_of
from train.shape_pass import LiveBytes, Shapes
from train.step_clock import CountFlops
from train.step_memory import step_memory
from train.validate import with_states

AUX = (1, 2, 3)


def make_recipe(**train: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "toy",
            "target": {"model": "random:qwen3-tiny", "dtype": "float32"},
            "data": {
                "sources": ["book"],
                "num_prompts": 100,
                "max_length": 384,
                "max_prompt_tokens": 64,
                "max_new_tokens": 320,
            },
            "drafter": {"method": "eagle3", "draft_vocab_size": 132, "aux_layers": [1, 2, 3]},
            "loss": {"num_steps": 4, "chunk_size": 100},
            "train": train,
        }
    )


def measured(recipe: Recipe, target: Target, length: int) -> int:
    """Bytes that a real step of these sizes keeps at most, beside weights and batch."""
    section, half = recipe.drafter, recipe.drafter.draft_vocab_size is not None
    layers = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    vocab = DraftVocab(torch.arange(0, 264, 2 if half else 1), 264)
    drafter = build_drafter(section, target, layers, vocab, seed=0)
    distiller = Distiller(drafter, recipe.loss, vocab)
    distiller.use_target(target)
    if recipe.train.activation_checkpointing:
        distiller.recompute_activations()
    ids_S = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))
    row = Row(id="a", ids_S=ids_S, mask_S=torch.ones(length, dtype=torch.bool))
    batch = with_states(target, collate([row]), layers)
    anchors_A = choose_anchors(batch.mask_BS, drafter.num_anchors, 0)
    batch = replace(batch, anchors_A=anchors_A)
    with LiveBytes() as live:
        distiller(batch)[0].backward()
    return live.peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_of_a_step_is_within_15_percent_of_a_real_one(checkpointing: bool) -> None:
    recipe = make_recipe(activation_checkpointing=checkpointing)
    assert 0.85 < share_of_real(recipe) < 1.15


# Every other method: what its section needs, and the depths that it learns.
OTHERS: dict[str, tuple[dict[str, object], int]] = {
    "p_eagle": ({"num_layers": 2, "draft_vocab_size": 132, "aux_layers": [1, 2, 3]}, 3),
    "eagle1": ({}, 2),
    "mtp": ({}, 2),
    "medusa": ({"num_heads": 3}, 3),
    "dflash": ({"num_layers": 2, "block_size": 4, "num_anchors": 48, "aux_layers": [1, 2]}, 3),
    "dspark": ({"num_layers": 2, "block_size": 3, "num_anchors": 48, "aux_layers": [1, 2]}, 3),
    "small_lm": ({"num_layers": 2}, 1),
    "pard": ({"num_layers": 2, "num_anchors": 48}, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_peak_of_every_method_is_within_15_percent_of_a_real_one(method: str) -> None:
    section, num_steps = OTHERS[method]
    if method in ("p_eagle", "dflash", "dspark", "pard"):
        section = section | {"mask_token_id": 3}
    recipe = make_recipe().model_dump(mode="json")
    recipe["drafter"] = {"method": method} | section
    recipe["loss"]["num_steps"] = num_steps
    assert 0.85 < share_of_real(Recipe.model_validate(recipe)) < 1.15


def share_of_real(recipe: Recipe) -> float:
    """The counted peak over that of a real step of one row."""
    target = tiny_target("qwen3", max_position_embeddings=512)
    recipe = recipe.model_copy(
        update={"loss": recipe.loss.model_copy(update={"renormalize": False})}
    )
    return counted(recipe, target) / measured(recipe, target, 384)


def counted(recipe: Recipe, target: Target) -> int:
    """Bytes of a step of one row, counted on shapes."""
    section = recipe.drafter
    layers = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    D = section.draft_vocab_size or 264
    shape = bare_shape(target.config.to_dict(), layers, D, 384)
    return step_memory(recipe, shape).work


@pytest.mark.parametrize(
    ("drafter", "num_steps", "train"),
    [
        ({"method": "eagle3", "draft_vocab_size": 132, "aux_layers": [1, 2, 3]}, 4, {}),
        (
            {"method": "eagle3", "draft_vocab_size": 132, "aux_layers": [1, 2, 3]},
            3,
            {"activation_checkpointing": True, "mixed_precision": "bf16"},
        ),
        ({"method": "small_lm", "num_layers": 2}, 1, {}),
        (
            {
                "method": "dflash",
                "num_layers": 2,
                "block_size": 4,
                "num_anchors": 48,
                "aux_layers": [1, 2],
                "mask_token_id": 3,
            },
            3,
            {},
        ),
    ],
    ids=["eagle3", "eagle3-lean-bf16", "small_lm", "dflash"],
)
def test_remembered_shapes_count_the_same_bytes_as_every_operation_worked_out(
    drafter: dict[str, object],
    num_steps: int,
    train: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target("qwen3", max_position_embeddings=512)
    keys = make_recipe(**train).model_dump(mode="json")
    keys["drafter"], keys["loss"]["num_steps"] = drafter, num_steps
    recipe = Recipe.model_validate(keys)
    fast = counted(recipe, target)
    monkeypatch.setattr("train.step_memory.Shapes", lambda: Shapes(remember=False))
    assert fast == counted(recipe, target) > 1_000_000


def test_activation_checkpointing_keeps_less_and_gives_the_same_gradients() -> None:
    target = tiny_target("qwen3", max_position_embeddings=512)
    plain, lean = make_recipe(), make_recipe(activation_checkpointing=True)
    assert measured(lean, target, 384) < 0.75 * measured(plain, target, 384)
    found: list[dict[str, Tensor]] = []
    vocab = DraftVocab(torch.arange(0, 264, 2), 264)
    for recipe in (plain, lean):
        drafter = build_drafter(recipe.drafter, target, AUX, vocab, seed=0)
        distiller = Distiller(drafter, recipe.loss, vocab)
        distiller.use_target(target)
        if recipe.train.activation_checkpointing:
            distiller.recompute_activations()
        row = Row(id="a", ids_S=torch.arange(40), mask_S=torch.ones(40, dtype=torch.bool))
        distiller(with_states(target, collate([row]), AUX))[0].backward()
        found.append({n: p.grad for n, p in distiller.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    for name, grad in found[0].items():
        assert torch.equal(found[1][name], grad), name


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e4m3"])
def test_states_that_are_stored_in_eight_bits_are_computed_in_sixteen(stored: str) -> None:
    keys = make_recipe().model_dump(mode="json")
    keys["data"] |= {"states": "cached", "states_dtype": stored}
    assert sizes_of(Recipe.model_validate(keys)).shape.states_bytes == 2


def test_bytes_live_only_as_long_as_their_tensors() -> None:
    given = torch.ones(1000)
    with LiveBytes() as live:
        view = given[:10]  # was there before
        a = given + 1
        b = a.view(10, 100)  # the same storage
        del a
        assert live.now == 4000
        del b
        assert live.now == 0
        c = torch.zeros(10)
    assert (live.now, live.peak) == (40, 4000)
    assert view.shape == (10,) and c.shape == (10,)


def test_dry_run_states_sizes_and_memory() -> None:
    text = estimates(make_recipe(max_steps=7))
    sizes = sizes_of(make_recipe(max_steps=7))
    assert "steps: 7 of 1 rows (1 processes)" in text
    assert f"counted on shapes: {sizes.memory.peak / 1e9:.2f} GB" in text
    shape = sizes.shape
    # fp32 weights and two fp32 moments of what is trained.
    assert sizes.memory.weights == 4 * shape.num_parameters + 8 * shape.num_trained
    small = sizes_of(make_recipe(optimizer="adamw8bit")).memory.weights
    assert small == 4 * shape.num_parameters + 2 * shape.num_trained


def test_hours_on_a_gpu_that_is_not_there() -> None:
    one = estimate(make_recipe(epochs=2), "h100")
    assert "1 x H100 (NVIDIA H100 SXM datasheet): about" in one
    assert "fits in 80 GB" in one
    shape = sizes_of(make_recipe(), on_gpu=True).shape
    head = 132 * int(shape.fields["hidden_size"])
    a_token = 4 * (6 * (shape.num_parameters - head) + 6 * head) + 2 * head
    rows = 95  # 5 of 100 are held out
    hours = a_token * rows * 384 * 2 / (989e12 * COMPUTE_SHARE) / 3600
    assert f"training {hours:.2g} h" in one
    assert f"training {hours / 8:.2g} h" in estimate(make_recipe(epochs=2), "8xH100")
    with pytest.raises(UserError, match="no such GPU; known are A100, H100"):
        estimate(make_recipe(), "TPU")


def test_counting_flops_changes_no_bit_of_a_step() -> None:
    target, recipe = tiny_target("qwen3", max_position_embeddings=512), make_recipe()
    vocab = DraftVocab(torch.arange(0, 264, 2), 264)
    drafter = build_drafter(recipe.drafter, target, AUX, vocab, seed=0)
    distiller = Distiller(drafter, recipe.loss, vocab)
    distiller.use_target(target)
    rows = [
        Row(id=str(n), ids_S=torch.arange(n), mask_S=torch.ones(n, dtype=torch.bool))
        for n in (60, 40)
    ]
    batch = with_states(target, collate(rows), AUX)
    found: list[dict[str, Tensor]] = []
    for counting in (nullcontext(), CountFlops()):
        distiller.zero_grad()
        with counting:
            distiller(batch)[0].backward()
        grads = {n: p.grad for n, p in distiller.named_parameters() if p.grad is not None}
        found.append({name: grad.clone() for name, grad in grads.items()})
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


GPU_RECIPES = sorted(
    path
    for path in (ROOT / "recipes").glob("*.yaml")
    if not path.stem.startswith(("smollm2", "smoke"))
)
# The published shapes, as far as sizes follow from them.
SHAPES = {
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


def folder_of(model: str, root: Path) -> str:
    """A folder that holds the model's config and nothing else."""
    folder = root / model.replace("/", "--")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return str(folder)


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_recipes_for_gpus_dry_run_from_the_config_alone(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    # Rows of 48 tokens, and 4 of a small LM's 28 layers: the step is run on shapes, op by op.
    short = ["data.max_length=48", "data.max_prompt_tokens=16", "data.max_new_tokens=32"]
    changes = [f"target.model={folder_of(recipe.target.model, tmp_path)}", *short]
    if recipe.drafter.method == "small_lm" and recipe.drafter.model is not None:
        changes.append(f"drafter.model={folder_of(recipe.drafter.model, tmp_path)}")
    text = estimates(load_recipe(path, changes))
    assert "target: 8,190.7M parameters" in text or "target: 8,030.3M parameters" in text
    assert "memory a process at most" in text and "steps: " in text


def test_every_recipe_for_gpus_has_a_twin_for_two_cores() -> None:
    twins = {load_recipe(path).drafter.method for path in (ROOT / "recipes").glob("smollm2*.yaml")}
    assert {load_recipe(path).drafter.method for path in GPU_RECIPES} <= twins
    for path in GPU_RECIPES:  # each says where its numbers come from
        lines = path.read_text().splitlines()
        named = [line for line in lines if line.startswith("# [")]
        assert named, path.name


def test_target_in_parts_or_by_its_ends_takes_less_memory() -> None:
    recipe = make_recipe()

    def held(num_local: int, **keys: str) -> int:
        target = recipe.target.model_copy(update=keys)
        sizes = sizes_of(recipe.model_copy(update={"target": target}), num_local=num_local)
        assert sizes.shape.target_parameters == 8 * layer + ends
        assert sizes.memory.target == (sizes.shape.held_parameters + 132 * 64) * 4
        return sizes.shape.held_parameters

    layer = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128 + 2 * 64  # of random:qwen3-tiny, norms of q, k
    ends = 2 * 264 * 64 + 64  # left out
    assert held(4) == 8 * layer + ends
    assert held(4, placement="sharded") == (8 // 4 + 2) * layer + ends  # with two gathered ones
    assert held(1, placement="sharded") == 8 * layer + ends
    assert held(4, weights="ends") == layer + ends
