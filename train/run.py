"""A whole run: target, data, drafter, training, and the finished drafter in RUN/drafter."""

import gc
import logging
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed

from data.files import read_json, write_json
from data.pipeline import aux_layers_of, prepare
from data.progress import log_to_stderr
from data.target import Target
from drafters.methods import build_drafter
from recipes.errors import UserError
from recipes.schema import Recipe
from train import checkpoint
from train.log import write_run_record
from train.loop import train
from train.weights import save_drafter

log = logging.getLogger("draftsmith")


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator that the launcher asked for, with the CPU's silent traps closed.

    Without CUDA, DeepSpeed needs gloo named and plain launches need cpu=True; otherwise accelerate
    quietly runs each process on its own. The world size is therefore checked.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    use_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    precision = recipe.train.mixed_precision
    if use_deepspeed and recipe.train.gradient_accumulation > 1:
        raise UserError(
            "train.gradient_accumulation is not supported with DeepSpeed yet: set it to 1 and "
            "raise train.micro_batch_size or the number of processes"
        )
    if torch.cuda.is_available() and recipe.target.device != "cpu":
        accelerator = Accelerator(mixed_precision=precision)
    elif use_deepspeed and "LOCAL_RANK" in os.environ:
        from deepspeed import ops

        # Otherwise the first run compiles a shared-memory helper for a minute; gloo does as well.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        accelerator = Accelerator(
            mixed_precision=precision, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
        )
    else:
        accelerator = Accelerator(mixed_precision=precision, cpu=True)
    if accelerator.num_processes != world:
        raise UserError(
            f"the launcher started {world} processes, but accelerate joined "
            f"{accelerator.num_processes}; use one of recipes/accelerate/*.yaml"
        )
    plugin = accelerator.state.deepspeed_plugin
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded or (plugin is not None and plugin.zero_stage == 3):
        raise UserError(
            "FSDP and ZeRO-3 are not supported yet: the drafter is saved without gathering its "
            "shards; use recipes/accelerate/ddp.yaml or zero2.yaml (its weights fit on one device)"
        )
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = recipe.train.micro_batch_size
        plugin.deepspeed_config["gradient_clipping"] = recipe.train.clip
    return accelerator


def result_key(recipe: Recipe) -> dict[str, Any]:
    """The parts of a recipe that the trained weights depend on."""
    fields = recipe.model_dump(mode="json")
    return {name: fields[name] for name in ("target", "data", "drafter", "loss", "train")}


def finished(recipe: Recipe) -> bool:
    """Whether RUN/drafter was trained with this very recipe."""
    path = recipe.run_dir / "trained.json"
    if not path.exists():
        return False
    record = read_json(path)
    return isinstance(record, dict) and record.get("recipe") == result_key(recipe)


def run(recipe: Recipe, resume: bool) -> Path:
    """Prepare, train and save; returns RUN/drafter. A finished run is left alone."""
    accelerator = make_accelerator(recipe)
    main = accelerator.is_main_process
    log_to_stderr(main)
    folder = recipe.run_dir / "drafter"
    if finished(recipe):
        log.info("%s is trained already (change the recipe or its name to train anew)", folder)
        return folder
    newest = checkpoint.latest(recipe.run_dir)
    if newest is not None and resume:
        checkpoint.check_recipe(newest, recipe)  # before prepare() replaces any data
    elif newest is not None:
        raise UserError(
            f"{recipe.run_dir}/checkpoints holds a run: go on with it by --resume, or choose "
            "another name (name=...) or delete that folder"
        )
    set_seed(recipe.train.seed)
    target = Target.load(recipe.target)
    log.info("target %s in %s on %s", target.name, target.dtype, target.device)
    with accelerator.main_process_first():
        prepared = prepare(recipe, target)
    drafter = build_drafter(
        recipe.drafter, target, aux_layers_of(recipe, target), prepared.vocab, recipe.train.seed
    )
    num_trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    log.info("drafter: %.2fM trained parameters", num_trained / 1e6)
    if main:
        write_run_record(recipe)
    progress = train(recipe, accelerator, target, prepared, drafter, resume)
    if main:
        save_drafter(folder, drafter, target, recipe, progress.num_tokens)
        write_json(
            recipe.run_dir / "trained.json",
            {"recipe": result_key(recipe), "steps": progress.step, "seconds": progress.seconds},
        )
        log.info("trained in %.1f minutes; the drafter lies in %s", progress.seconds / 60, folder)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()
    return folder
