"""A target without most of its layers: what it still is, and what it is refused for."""

import json
from pathlib import Path

import pytest
import torch

from data.embedded import byte_tokenizer
from data.pipeline import prepare
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe, TargetSection, load_recipe
from tests.tiny_targets import KINDS, tiny_model
from train.run import run

ROOT = Path(__file__).resolve().parents[1]


def saved(folder: Path, kind: str, shard_size: str = "5GB", **changes: object) -> Path:
    tiny_model(kind, **changes).save_pretrained(folder, max_shard_size=shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, weights: str) -> Target:
    return Target.load(
        TargetSection.model_validate(
            {"model": str(folder), "dtype": "float32", "device": "cpu", "weights": weights}
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_are_those_of_the_whole(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path, kind, tie_word_embeddings=kind in ("gemma2", "qwen3"))
    whole, ends = load(folder, "whole"), load(folder, "ends")
    assert (whole.whole, ends.whole) == (True, False)
    assert (ends.num_layers, len(ends.decoder.layers)) == (3, 1)
    assert ends.revision == whole.revision and ends.eos_ids == whole.eos_ids
    assert ends.config.to_dict() == whole.config.to_dict()
    states_SH = torch.randn(5, whole.hidden_size)
    assert torch.equal(ends.logits(states_SH), whole.logits(states_SH))
    assert torch.equal(ends.embed_weight_VH, whole.embed_weight_VH)
    last = whole.decoder.layers[-1].state_dict()
    assert all(torch.equal(x, last[n]) for n, x in ends.decoder.layers[-1].state_dict().items())
    with pytest.raises(UserError, match=r"without most of its layers .*target.weights: whole"):
        ends.forward(torch.tensor([[1, 2]]))


def test_of_many_files_only_those_with_ends_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3", shard_size="20KB")
    whole = load(folder, "whole")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    needed = {file for name, file in index["weight_map"].items() if "layers." not in name}
    needed |= {file for name, file in index["weight_map"].items() if "layers.2." in name}
    assert len(needed) < len(files)
    for file in set(files) - needed:
        (folder / file).write_bytes(b"")
    states_SH = torch.randn(5, whole.hidden_size)
    assert torch.equal(load(folder, "ends").logits(states_SH), whole.logits(states_SH))
    (folder / sorted(needed)[0]).unlink()
    with pytest.raises(UserError, match=r"cannot be loaded|is missing"):
        load(folder, "ends")


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    told = r"neither model.safetensors nor .*weights: ends.* set target.weights: whole"
    with pytest.raises(UserError, match=told):
        load(folder, "ends")


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    source = folder / "talks.jsonl"
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"It is {i} and not {i + 1}."},
            ]
        }
        for i in range(24)
    ]
    source.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    common = [f"output_dir={folder}", f"data.sources=[{source}]", "data.regenerate=false"]
    common += ["data.capture=pass", "train.max_steps=6", "train.validate_prompts=0"]
    return load_recipe(ROOT / "recipes/smoke.yaml", [*common, *overrides])


def test_training_on_stored_states_is_the_same_without_the_layers(tmp_path: Path) -> None:
    losses = {}
    for weights in ("whole", "ends"):
        recipe = recipe_of(tmp_path, f"name={weights}", f"target.weights={weights}")
        if weights == "ends":  # as on another machine, where the target fits
            fits = recipe_of(tmp_path, "name=ends")
            prepare(fits, Target.load(fits.target))
        folder = run(recipe, resume=False)
        assert (folder / "model.safetensors").exists()
        lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
        numbers = [json.loads(line) for line in lines]
        losses[weights] = [line["loss"] for line in numbers if "loss" in line]
        valid = [line for line in numbers if "valid/alpha_by_step" in line]
        assert valid and not any("valid/tau" in line for line in valid)
        losses[weights] += valid[-1]["valid/alpha_by_step"]
    assert losses["ends"][:-3] == losses["whole"][:-3] and len(losses["ends"]) > 3
    assert losses["ends"][-3:] == pytest.approx(losses["whole"][-3:], abs=1e-4)


def test_states_that_nothing_can_give_are_told_before_training(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "target.weights=ends")
    with pytest.raises(UserError, match=r"states of \d+ rows are not there, and target.weights"):
        run(recipe, resume=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.states=online", "data.states: cached, filled by"),
        ("train.validate_prompts=2", "train.validate_prompts: 0"),
        ("target.placement=sharded", "target.placement: replicated"),
    ],
)
def test_recipes_that_need_the_layers_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(UserError, match=f"weights: ends neither writes .*{message}"):
        recipe_of(tmp_path, "target.weights=ends", override)
