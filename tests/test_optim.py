"""Parameter groups, schedule, clipping."""

import math

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from recipes.errors import UserError
from recipes.train_section import TrainSection
from train.optim import build_optimizer, clip, lr_factor, param_groups, set_lr


def test_norms_and_biases_are_not_decayed_and_frozen_parameters_are_absent():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 3))
    module[2].weight.requires_grad_(False)
    decayed, plain = param_groups(module, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [p.shape for p in plain["params"]] == [(4,), (4,), (4,)]
    assert plain["weight_decay"] == 0
    assert len(param_groups(nn.LayerNorm(4), 0.1)) == 1


def test_optimizer_takes_the_recipe_and_the_rate_of_the_step():
    section = TrainSection(lr=2e-4, betas=(0.8, 0.9), weight_decay=0.3)
    optimizer = build_optimizer(nn.Linear(2, 2), section)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    set_lr(optimizer, 1e-5)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-5}


def test_8_bit_moments_say_what_they_need():
    section = TrainSection(optimizer="adamw8bit")
    with pytest.raises(UserError, match=r"train\.optimizer=adamw8bit needs CUDA.*cpu; set adamw"):
        build_optimizer(nn.Linear(2, 2), section)


def test_warm_up_then_cosine():
    factors = [lr_factor(step, num_steps=8, warmup_steps=4, min_ratio=0.1) for step in range(9)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[6] == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert factors[8] == pytest.approx(0.1)
    assert lr_factor(100, 8, 4, 0.1) == pytest.approx(0.1)
    assert all(factor > 0 for factor in factors)


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("warmup_steps", [0, 1, 0.3, 5])
def test_short_runs_have_rates_within_zero_and_one(num_steps, warmup_steps):
    for step in range(num_steps + 1):
        assert 0 <= lr_factor(step, num_steps, warmup_steps, 0.0) <= 1
    assert lr_factor(0, num_steps, warmup_steps, 0.0) > 0


def test_clip_returns_the_norm_before_clipping():
    accelerator = Accelerator(cpu=True)
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip(accelerator, module, 0.5) == pytest.approx(5.0)
    assert module.weight.grad.norm().item() == pytest.approx(0.5)
    assert clip(accelerator, module, 1.0) == pytest.approx(0.5)  # small ones stay
    assert module.weight.grad.norm().item() == pytest.approx(0.5)
    module.weight.grad = torch.tensor([[math.nan, 0.0]])
    assert math.isnan(clip(accelerator, module, 0.5))
