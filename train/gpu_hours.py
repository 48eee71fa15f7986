"""Hours and memory of a recipe on GPUs that are not there yet (`--estimate 8xH100`).

From FLOPs and bytes by the sizes of target and drafter, the data sheet (eval.roofline) and two
shares of it that real runs reach, stated in the answer. A multiply-add is two FLOPs; training costs
three forward passes where weights are trained.
"""

import math
import re

from data.pipeline import data_dir
from eval.roofline import DEVICES, Device, find_device
from recipes.errors import UserError
from recipes.schema import Recipe
from train.plan import Sizes, memory_line, sizes_of

MEMORY_GB = {"A100": 80, "H100": 80, "H200": 141, "B200": 180, "L40S": 48, "L4": 24}
COMPUTE_SHARE = 0.35  # of the peak, in training and in the target's passes over whole rows
BANDWIDTH_SHARE = 0.5  # of the bandwidth, in writing answers token by token
MACHINE_GPUS = 8  # of one machine, at most
SPREAD = 2.0  # the answer may be off by this factor either way


def estimate(recipe: Recipe, text: str) -> str:
    """Lines for a person.

    Args:
        text: NAME or NUMBERxNAME, such as 8xH100.
    """
    found = re.fullmatch(r"(?:([1-9][0-9]*)x)?(.+)", text)
    device = None if found is None else find_device(found[2].upper())
    if found is None or device is None:
        names = ", ".join(d.name for d in DEVICES)
        raise UserError(f"--estimate {text}: no such GPU; known are {names}, or 8x before a name")
    num_gpus = int(found[1] or 1)
    sizes = sizes_of(recipe, on_gpu=True, num_local=min(num_gpus, MACHINE_GPUS))
    parts = {
        "writing answers": _generation_seconds(recipe, sizes, device),
        "the target's states": _target_seconds(recipe, sizes, device),
        "training": _training_seconds(recipe, sizes, device),
    }
    hours = {name: seconds / 3600 / num_gpus for name, seconds in parts.items()}
    total = sum(hours.values())
    have = MEMORY_GB[device.name]
    fits = "fits" if sizes.memory.peak < 0.9 * have * 1e9 else "DOES NOT FIT"
    lines = [
        f"{num_gpus} x {device.name} ({device.source}): about {total:.2g} hours, between "
        f"{total / SPREAD:.2g} and {total * SPREAD:.2g}; {total * num_gpus:.2g} GPU hours",
        "  " + ", ".join(f"{name} {value:.2g} h" for name, value in hours.items()),
        f"  taken: {COMPUTE_SHARE:.0%} of {device.peak / 1e12:.0f} TFLOPs a second, "
        f"{BANDWIDTH_SHARE:.0%} of {device.bandwidth / 1e12:.2g} TB a second; rows at full length "
        "until they are prepared",
        f"{memory_line(sizes.memory)}: {fits} in {have} GB",
    ]
    if fits != "fits":
        lines.append(
            "  smaller: train.activation_checkpointing=true, train.micro_batch_size=1, "
            "train.mixed_precision=bf16, data.states=cached, data.max_length, "
            "target.placement=sharded (several GPUs), target.weights=ends (cached states)"
        )
    return "\n".join(lines)


def _row_tokens(recipe: Recipe) -> int:
    data = recipe.data
    return min(data.max_length, data.max_prompt_tokens + data.max_new_tokens)


def _generation_seconds(recipe: Recipe, sizes: Sizes, device: Device) -> float:
    """Decoding steps of full batches: the weights are read once a step."""
    data, shape = recipe.data, sizes.shape
    if not data.regenerate or (data_dir(recipe) / "report.json").exists():
        return 0.0
    steps = math.ceil(data.num_prompts / data.batch_size) * data.max_new_tokens
    read = shape.target_parameters * shape.target_bytes / (device.bandwidth * BANDWIDTH_SHARE)
    flops = 2 * shape.target_parameters * data.batch_size / (device.peak * COMPUTE_SHARE)
    seconds = steps * max(read, flops)
    return seconds if data.max_minutes is None else min(seconds, data.max_minutes * 60)


def _target_seconds(recipe: Recipe, sizes: Sizes, device: Device) -> float:
    """One pass over every row, or, online, one in every epoch."""
    passes = 1.0 if recipe.data.states == "cached" else _epochs(recipe, sizes)
    tokens = sizes.num_rows * _row_tokens(recipe) * passes
    return 2 * sizes.shape.target_parameters * tokens / (device.peak * COMPUTE_SHARE)


def _epochs(recipe: Recipe, sizes: Sizes) -> float:
    if recipe.train.max_steps is None:
        return recipe.train.epochs
    return recipe.train.max_steps * sizes.step_rows / sizes.num_rows


def _training_seconds(recipe: Recipe, sizes: Sizes, device: Device) -> float:
    """Layers at every position and depth, the head at every slot, the target's head once."""
    shape = sizes.shape
    head = shape.draft_vocab_size * int(shape.fields["hidden_size"])
    body = max(shape.num_parameters - sizes.num_head, 0)
    again = 8 if recipe.train.activation_checkpointing else 6
    head_flops = 6 if recipe.drafter.trains_head else 4
    a_token = recipe.loss.num_steps * (again * body + head_flops * head) + 2 * head
    tokens = sizes.num_rows * _row_tokens(recipe) * _epochs(recipe, sizes)
    seconds = a_token * tokens / (device.peak * COMPUTE_SHARE)
    limit = recipe.train.max_minutes
    return seconds if limit is None else min(seconds, limit * 60)
