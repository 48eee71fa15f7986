"""What differs between launchers: backward, the optimizer's step, whole tensors out of shards.

One process and DDP hold everything whole. ZeRO-1 and -2 (DeepSpeed) divide the optimizer's moments,
ZeRO-3 and FSDP2 the weights as well. A checkpoint holds whole tensors by parameter name, so that
what one launcher wrote, another goes on with. Every function here is called by all ranks.
"""

import math
import os
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from data.target import Target
from drafters.base import TrainedDrafter
from drafters.methods import METHODS
from recipes.errors import UserError
from train.optim import clip

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam, where DeepSpeed keeps them flat


def zero_stage(accelerator: Accelerator) -> int:
    """1, 2 or 3 under DeepSpeed, else 0."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else int(plugin.zero_stage)


def divides_weights(accelerator: Accelerator) -> bool:
    """Whether a rank holds only a part of the drafter's weights between steps."""
    return uses_fsdp(accelerator) or zero_stage(accelerator) == 3


def uses_fsdp(accelerator: Accelerator) -> bool:
    """Whether the launcher asked for FSDP; accelerate's own state forgets it on CPUs."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.num_processes > 1


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Hand module and optimizer to the launcher's engine.

    Raises:
        UserError: weights that should have been divided are not; moments that cannot be divided.
    """
    divides = uses_fsdp(accelerator) or zero_stage(accelerator) > 0
    if divides and type(optimizer) is not torch.optim.AdamW:
        raise UserError(
            "train.optimizer=adamw8bit keeps whole moments on every process: use "
            "recipes/accelerate/ddp.yaml, or set adamw"
        )
    if uses_fsdp(accelerator):
        accelerator.state.distributed_type = DistributedType.FSDP
    model, optimizer = accelerator.prepare(module, optimizer)
    divided = any(isinstance(p, DTensor) for p in module.parameters())
    if uses_fsdp(accelerator) and not divided:
        raise UserError("FSDP was asked for and not applied; use recipes/accelerate/fsdp2.yaml")
    return model, optimizer


def run_micro_batch(
    accelerator: Accelerator, model: Any, batch: Any, scale: float, last: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of one micro-batch; ranks add their gradients up with the last one.

    Wrappers average gradients over ranks, so the loss is multiplied by their number. A loss or
    target state that is not finite makes the gradient not finite too (times NaN), so every rank
    sees it in the norm, without further communication.

    Args:
        scale: factor of the loss sum, 1 / supervised slots of the whole step.
        last: of this optimizer step.

    Returns:
        Whether loss and states are finite (bool scalar), and the sums that the loss reports.
    """
    scale *= accelerator.num_processes
    deepspeed = zero_stage(accelerator) > 0
    if deepspeed:
        model.set_gradient_accumulation_boundary(last)
    several = accelerator.num_processes > 1 and not deepspeed and not uses_fsdp(accelerator)
    with accelerator.no_sync(model) if several and not last else nullcontext():
        loss, stats = model(batch)
        healthy = loss.detach().isfinite()
        for states in (batch.aux_BSF, batch.hidden_BSH):
            if states is not None:
                healthy = healthy & states.isfinite().all()
        scaled = loss * torch.where(healthy, scale, math.nan)
        if deepspeed:
            model.backward(scaled, scale_wrt_gas=False)
        else:  # not accelerator.backward: it divides by a count in the launcher's file
            scaled.backward()
    return healthy, stats


def take_step(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, max_norm: float
) -> float:
    """Clip, step, and clear the gradients; nothing but clearing where a gradient is not finite.

    Returns:
        The L2 norm of all gradients before clipping, the same on every rank; not finite = skipped.
    """
    if zero_stage(accelerator):
        model.step()  # clips by its own configuration, and leaves such a step out by itself
        norm = model.get_global_grad_norm() if model.was_step_applied() else None
        return math.nan if norm is None else float(norm)
    value = clip(accelerator, model, max_norm)
    if math.isfinite(value):
        optimizer.step()
    optimizer.zero_grad()
    return value


def whole_weights(accelerator: Accelerator, module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers of a part of the model (not wrapped), whole on every rank."""
    if zero_stage(accelerator) == 3:
        from deepspeed import zero

        with zero.GatheredParameters(list(module.parameters())):
            return {name: t.detach().clone() for name, t in module.state_dict().items()}
    return {
        name: t.full_tensor() if isinstance(t, DTensor) else t.detach()
        for name, t in module.state_dict().items()
    }


def whole_drafter(
    accelerator: Accelerator, drafter: TrainedDrafter, target: Target
) -> TrainedDrafter:
    """The drafter to decode with and to save: itself, or a copy where its weights are divided."""
    if not divides_weights(accelerator):
        return drafter
    weights = whole_weights(accelerator, drafter)
    with torch.device("meta"):
        whole = METHODS[drafter.method].drafter(drafter.config)
    whole.load_state_dict(weights, strict=True, assign=True)
    whole.num_anchors = drafter.num_anchors  # of what validation looks at, too
    whole.use_target(target)
    return whole


def whole_moments(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The optimizer's state as `PARAMETER.KEY` -> tensor; empty before the first step."""
    found: dict[str, Tensor] = {}
    if zero_stage(accelerator):
        from deepspeed.utils import safe_get_full_optimizer_state

        inner, flats = _zero_parts(accelerator, model)
        if "step" not in inner.state[flats[0]]:
            return found
        _link_moments(accelerator, model)
        step = torch.as_tensor(inner.state[flats[0]]["step"])
        for name, parameter in _trained(accelerator, model):
            found[f"{name}.step"] = step.clone()
            for key in MOMENTS:
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
        return found
    state = _plain(optimizer).state
    for name, parameter in _trained(accelerator, model):
        for key, value in state.get(parameter, {}).items():
            found[f"{name}.{key}"] = (
                value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
            )
    return found


def set_moments(
    accelerator: Accelerator,
    model: Any,
    optimizer: torch.optim.Optimizer,
    moments: dict[str, Tensor],
) -> None:
    """Give the optimizer what `whole_moments` took, from whatever launcher."""
    if not moments:
        return
    if zero_stage(accelerator):
        _set_zero_moments(accelerator, model, moments)
        return
    state = _plain(optimizer).state
    for name, parameter in _trained(accelerator, model):
        keys = [key for key in moments if key.rpartition(".")[0] == name]
        values: dict[str, Any] = {  # copied: memory as aligned as that of a run that never stopped
            key.rpartition(".")[2]: moments[key].to(parameter.device, copy=True) for key in keys
        }
        if values and not values["step"].is_floating_point():
            values["step"] = int(values["step"])  # bitsandbytes counts in a Python number
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            for key, value in values.items():
                if value.shape == parameter.shape:
                    values[key] = distribute_tensor(value, mesh, placements)
        state[parameter] = values


def close(accelerator: Accelerator, model: Any) -> None:
    """Let go of a model, so that another may be prepared (or the process end, without a crash)."""
    if zero_stage(accelerator):
        model.destroy()
    accelerator.free_memory()


def _set_zero_moments(accelerator: Accelerator, model: Any, moments: dict[str, Tensor]) -> None:
    inner, flats = _zero_parts(accelerator, model)
    step = next(value for key, value in moments.items() if key.endswith(".step"))
    for flat in flats:
        inner.state[flat] = {key: torch.zeros_like(flat) for key in MOMENTS}
        inner.state[flat]["step"] = step.to(flat.device).clone()
    whole = zero_stage(accelerator) < 3
    _link_moments(accelerator, model)
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    for name, parameter in _trained(accelerator, model):
        for key in MOMENTS:
            value = moments[f"{name}.{key}"].to(accelerator.device)
            if whole:
                safe_set_full_optimizer_state(parameter, value, key)
                continue
            divided: Any = parameter
            size = divided.ds_tensor.numel()  # the last rank's part is padded
            padded = value.new_zeros(size * accelerator.num_processes)
            padded[: value.numel()] = value.flatten()
            part = padded[size * accelerator.process_index :][:size]
            safe_set_local_optimizer_state(parameter, part, key)


def _link_moments(accelerator: Accelerator, model: Any) -> None:
    """ZeRO-1 and -2: let parameters find their moments, in all groups.

    DeepSpeed does so once, after the step of the first group, when the others have none yet.
    """
    if zero_stage(accelerator) < 3:
        model.optimizer._hp_optimizer_states_linked = False
        model.optimizer._lazy_init_hp_params_optimizer_state()


def _zero_parts(accelerator: Accelerator, model: Any) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """DeepSpeed's inner optimizer, and this rank's flat fp32 weights that it steps."""
    outer = model.optimizer
    if zero_stage(accelerator) == 3:
        return outer.optimizer, list(outer.fp32_partitioned_groups_flat)
    return outer.optimizer, list(outer.single_partition_of_fp32_groups)


def _trained(accelerator: Accelerator, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    module = accelerator.unwrap_model(model)
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner: torch.optim.Optimizer = optimizer.optimizer
    return inner
