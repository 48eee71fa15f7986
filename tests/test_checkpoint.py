"""A resumed run is the run that never stopped; a damaged checkpoint is never picked up."""

import logging
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

import train.checkpoint
from data.files import write_json, write_text
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe
from train.checkpoint import (
    Progress,
    check_recipe,
    differences,
    folder,
    latest,
    load,
    load_weights,
    save,
)
from train.optim import lr_factor, set_lr
from train.run import check_learned, check_shape, finished, result_key


def make_recipe(tmp_path, **train):
    return Recipe(
        name="toy",
        output_dir=tmp_path,
        target={"model": "random:qwen3-tiny"},
        data={"sources": ["book"], "num_prompts": 4},
        train={"keep_checkpoints": 2, **train},
    )


class Run:
    """A toy training run whose steps depend on weights, moments and every random state."""

    def __init__(self, recipe, dtype=torch.float32):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        self.recipe = recipe
        self.accelerator = Accelerator(cpu=True)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.dtype = dtype
        self.progress = Progress()
        self.rates = []

    def steps(self, num_steps):
        for _ in range(num_steps):
            self.rates.append(0.1 * lr_factor(self.progress.step, 10, 3, 0.1))
            set_lr(self.optimizer, self.rates[-1])
            x = torch.randn(3, 4).to(self.dtype) + random.random() + float(np.random.rand())
            self.accelerator.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.progress.step += 1
            self.progress.index += 1

    def save(self):
        parts = (self.recipe, self.model, self.optimizer)
        return save(self.accelerator, self.recipe.run_dir, self.progress, *parts)

    def load(self, path, recipe=None):
        load_weights(path, self.model)
        parts = (recipe or self.recipe, self.model, self.optimizer)
        self.progress = load(self.accelerator, path, *parts)

    def state(self):
        """Weights, moments and step counters."""
        moments = self.optimizer.state_dict()["state"].values()
        return [*self.model.state_dict().values(), *(m[key] for m in moments for key in sorted(m))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p63_resume_is_bit_exact(tmp_path, dtype):
    recipe = make_recipe(tmp_path)
    straight = Run(recipe, dtype)
    straight.steps(10)

    first = Run(recipe, dtype)
    first.steps(5)
    first.progress.improve(1.7)
    first.save()
    resumed = Run(recipe, dtype)
    torch.randn(7)  # whatever a fresh process draws before it loads
    resumed.load(latest(recipe.run_dir))
    assert resumed.progress == Progress(step=5, index=5, best=1.7, best_step=5)
    resumed.steps(5)

    assert all(torch.equal(a, b) for a, b in zip(straight.state(), resumed.state(), strict=True))
    assert len(straight.state()) == 4 + 4 * 3  # weights; exp_avg, exp_avg_sq, step of each
    assert straight.rates == first.rates + resumed.rates
    # A worse later result does not replace the best.
    assert not resumed.progress.improve(1.6)
    assert not resumed.progress.improve(float("nan"))
    assert (resumed.progress.best, resumed.progress.best_step) == (1.7, 5)
    assert resumed.progress.improve(1.8)


def test_weights_that_cannot_be_written_are_named(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("File too large (os error 27)")

    monkeypatch.setattr(train.checkpoint, "save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*w\.safetensors: File too large"):
        train.checkpoint._save({"a": torch.zeros(1)}, tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (Progress(step=3, num_empty=3), "no token was learned in 3 steps"),
        (Progress(step=3, num_tokens=9, num_skipped=3), "all 3 steps were skipped"),
    ],
)
def test_a_run_that_learned_nothing_is_no_success(progress, message, tmp_path):
    with pytest.raises(UserError, match=message):
        check_learned(progress, tmp_path)
    check_learned(Progress(step=3, num_tokens=9, num_skipped=2), tmp_path)
    check_learned(Progress(), tmp_path)


def test_a_run_without_its_drafter_is_not_finished(tmp_path):
    recipe = make_recipe(tmp_path)
    assert not finished(recipe)
    write_json(recipe.run_dir / "trained.json", {"recipe": result_key(recipe)})
    assert not finished(recipe)
    write_text(recipe.run_dir / "drafter/model.safetensors", "")
    assert finished(recipe)


def test_a_metric_that_is_not_known_is_no_best():
    progress = Progress(step=3)
    assert not progress.improve(float("nan"))
    assert (progress.best, progress.best_step) == (None, None)
    assert progress.improve(0.0)


def test_saving_does_not_change_the_run(tmp_path):
    recipe = make_recipe(tmp_path)
    straight, saving = Run(recipe), Run(recipe)
    for run in (straight, saving):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        for _ in range(4):
            run.steps(1)
            if run is saving:
                run.save()
    assert all(torch.equal(a, b) for a, b in zip(straight.state(), saving.state(), strict=True))


def test_newest_are_kept_and_the_best(tmp_path):
    run = Run(make_recipe(tmp_path))
    for step in range(1, 13):
        run.steps(1)
        if step == 3:
            run.progress.improve(2.0)
        run.save()
    names = sorted(path.name for path in (run.recipe.run_dir / "checkpoints").iterdir())
    assert names == ["step-11", "step-12", "step-3"]
    assert latest(run.recipe.run_dir).name == "step-12"  # by number, not by name


def test_saving_the_same_step_again_replaces_it(tmp_path):
    run = Run(make_recipe(tmp_path))
    run.steps(1)
    run.save()
    run.progress.num_tokens = 7
    path = run.save()
    run.load(path)
    assert run.progress.num_tokens == 7


def test_half_written_checkpoint_is_never_picked_up(tmp_path, caplog, monkeypatch):
    run = Run(make_recipe(tmp_path))
    assert latest(run.recipe.run_dir) is None
    run.steps(1)
    good = run.save()
    run.steps(1)

    def killed(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.checkpoint, "_write_state", killed)
        with pytest.raises(KeyboardInterrupt):
            run.save()
    assert [path.name for path in good.parent.iterdir()] == ["step-1"]

    bad = run.save()
    weights = bad / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (good.parent / ".step-9.abc.tmp").mkdir()
    folder(run.recipe.run_dir, 3).mkdir()  # without state.json
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        assert latest(run.recipe.run_dir) == good
    assert "step-2 is damaged (weights.safetensors has" in caplog.text
    assert "step-3 is damaged" in caplog.text
    (bad / "state.json").write_text("[]")
    assert latest(run.recipe.run_dir) == good
    weights.unlink()
    assert latest(run.recipe.run_dir) == good
    run.progress.step = 4
    run.save()  # clears away what a killed run left
    assert sorted(path.name for path in good.parent.iterdir()) == ["step-3", "step-4"]


@pytest.mark.parametrize("name", ["weights.safetensors", "moments.safetensors", "random-0.json"])
def test_checkpoint_of_zeros_is_found_by_its_sum(tmp_path, caplog, name):
    # As after a power cut: every file has its size, and one has nothing in it.
    run = Run(make_recipe(tmp_path))
    run.steps(1)
    good = run.save()
    run.steps(1)
    bad = run.save()
    size = (bad / name).stat().st_size
    (bad / name).write_bytes(bytes(size))
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        assert latest(run.recipe.run_dir) == good
    assert f"step-2 is damaged ({name} has other content than was written" in caplog.text
    assert "trying an older one" in caplog.text
    (good / name).write_bytes(b"")
    with pytest.raises(UserError) as caught:  # never silently from the first step again
        latest(run.recipe.run_dir)
    said = str(caught.value)
    assert f"step-1: {name} has 0 bytes" in said and "delete that folder" in said


def test_recipe_that_changes_the_result_is_refused(tmp_path):
    run = Run(make_recipe(tmp_path))
    run.steps(1)
    path = run.save()
    changed = make_recipe(tmp_path, lr=0.5, seed=3, save_every=7)
    with pytest.raises(UserError) as caught:
        run.load(path, changed)
    message = str(caught.value)
    assert "train.lr: 0.0001 -> 0.5; train.seed: 0 -> 3" in message
    assert "save_every" not in message
    run.load(path, make_recipe(tmp_path, save_every=7, keep_checkpoints=9, validate_prompts=1))


def test_differences_name_added_and_removed_keys():
    assert differences({"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [1]}) == [
        "a.b: 1 -> absent",
        "a.d: absent -> 2",
    ]
    assert differences({"log": {"every": 1}}, {"log": {"every": 2}, "name": "x"}) == []


@pytest.mark.parametrize(
    ("processes", "accumulation", "said"),
    [
        (4, 1, None),
        (2, 2, None),
        (1, 4, None),
        (2, 1, "set train.gradient_accumulation=2"),
        (3, 1, "launch 1 or 2 or 4 processes"),
        (8, 1, "launch 1 or 2 or 4 processes"),
    ],
)
def test_other_number_of_processes_needs_the_same_step(tmp_path, processes, accumulation, said):
    run = Run(make_recipe(tmp_path, gradient_accumulation=4))
    path = run.save()
    recipe = make_recipe(tmp_path, gradient_accumulation=accumulation)
    if said is None:
        assert check_recipe(path, recipe, processes)["num_processes"] == 1
        return
    with pytest.raises(UserError, match=said):
        check_recipe(path, recipe, processes)


def test_random_states_come_back(tmp_path):
    run = Run(make_recipe(tmp_path))
    path = run.save()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    run.load(path)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"method": "eagle3"}, "draft_vocab_size 32000 is not within 1 and .* of 264"),
        ({"method": "dflash", "block_size": 8, "aux_layers": [0, 2]}, "read states after layers 1"),
        (
            {"method": "dflash", "block_size": 8, "draft_vocab_size": 264, "train_head": True},
            "train_head: true, but drafter.draft_vocab_size 264 is the whole vocabulary",
        ),
        ({"method": "pard", "mask_token_id": 264}, "mask_token_id: 264 is no token of the target"),
        ({"method": "pard", "keep_layers": [0, 99]}, "layers are 0..7"),
        ({"method": "pard", "init": "checkpoint", "model": "./none"}, "drafter.model './none'"),
    ],
)
def test_drafter_that_the_target_cannot_have_is_refused_before_answers(drafter, message, tmp_path):
    if "aux_layers" not in drafter and drafter["method"] == "dflash":
        drafter = drafter | {"aux_layers": [1, 2]}
    recipe = Recipe.model_validate(
        make_recipe(tmp_path).model_dump(mode="json") | {"drafter": drafter}
    )
    with pytest.raises(UserError, match=message):
        check_shape(recipe, Target.load(recipe.target))
