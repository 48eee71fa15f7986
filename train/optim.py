"""Parameter groups, AdamW, learning-rate schedule and clipping."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.errors import UserError
from recipes.train_section import TrainSection

SMALLEST_8_BIT = 4096  # bitsandbytes keeps the moments of smaller tensors in fp32


def param_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in two groups: matrices with decay; norms, biases and scales without.

    A frozen parameter is in neither, so it gets no optimizer state.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, section: TrainSection) -> torch.optim.Optimizer:
    """AdamW as the recipe says. The loop sets the rate before every step (lr_factor, set_lr).

    Raises:
        UserError: the 8-bit one where its library is missing or does not run on this device.
    """
    groups = param_groups(module, section.weight_decay)
    if section.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, fused=True)
    return _adamw_8_bit(groups, section, next(module.parameters()).device)


def _adamw_8_bit(
    groups: list[dict[str, object]], section: TrainSection, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW of bitsandbytes, tried on a small tensor first: which devices it knows has changed."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"train.optimizer=adamw8bit needs bitsandbytes ({error}): pip install bitsandbytes, or "
            "set adamw"
        ) from error
    probe = torch.zeros(SMALLEST_8_BIT, device=device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    try:
        AdamW8bit([probe]).step()
    except Exception as error:  # what it raises differs by version and device
        raise UserError(
            f"train.optimizer=adamw8bit does not run on {device.type} with this bitsandbytes "
            f"({type(error).__name__}: {error}): pip install -U bitsandbytes, or set adamw"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=section.lr, betas=section.betas)
    return optimizer


def lr_factor(step: float, num_steps: float, warmup_steps: float, min_ratio: float) -> float:
    """Learning rate as a share of its peak: linear warm-up, then half a cosine to min_ratio.

    Pure, so a resumed run has the rates of an uninterrupted one. Units are free: a run limited by
    time may pass minutes instead of steps.

    Args:
        step: 0-based number of the optimizer step about to be made; past num_steps gives min_ratio.
        num_steps: length of the run.
        warmup_steps: length of the warm-up; step 0 already has a rate above 0, and the peak comes
            at step warmup_steps - 1.
        min_ratio: last / peak rate.
    """
    if step < warmup_steps:
        return min(1.0, (step + 1) / warmup_steps)
    share = (step - warmup_steps) / max(num_steps - warmup_steps, 1e-9)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(accelerator: Accelerator, module: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their total L2 norm is at most max_norm.

    Call it once an optimizer step, when all micro-batches are in; not under DeepSpeed, whose engine
    clips by its own configuration.

    Returns:
        The norm before clipping; not finite when a gradient is not.
    """
    norm: Tensor = accelerator.clip_grad_norm_(module.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
