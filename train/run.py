"""A whole run: target, data, drafter, training, and the finished drafter in RUN/drafter."""

import gc
import logging
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from data.files import read_json, write_json
from data.pipeline import aux_layers_of, prepare_together
from data.progress import log_to_stderr
from data.target import Target
from data.vocab import build_draft_vocab
from drafters.methods import build_drafter, build_on_meta
from drafters.vllm_format import WEIGHTS
from recipes.errors import UserError
from recipes.schema import Recipe
from train import checkpoint
from train.log import result_line, write_run_record
from train.loop import train
from train.weights import save_drafter

log = logging.getLogger("draftsmith")


SMALL_TENSOR = 4096  # under ZeRO-3 what is smaller (norms) is not divided


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator that the launcher asked for, with the CPU's silent traps closed.

    Without CUDA, DeepSpeed needs gloo named, FSDP2 has to be forced and plain launches need
    cpu=True; otherwise accelerate quietly runs each process on its own, or without sharding. The
    world size is therefore checked. Precision, clipping and accumulation come from the recipe
    alone, whatever the launcher's file says.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    use_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    use_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if use_fsdp:  # otherwise transformers loads the target on one rank only
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if torch.cuda.is_available() and recipe.target.device != "cpu":
        accelerator = Accelerator(mixed_precision="no")
    elif use_deepspeed and "LOCAL_RANK" in os.environ:
        from deepspeed import ops

        # Otherwise the first run compiles a shared-memory helper for a minute; gloo does as well.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        accelerator = Accelerator(
            mixed_precision="no", kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
        )
    else:
        accelerator = Accelerator(mixed_precision="no", cpu=True)
        if use_fsdp and world > 1:
            accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if accelerator.num_processes != world:
        raise UserError(
            f"the launcher started {world} processes, but accelerate joined "
            f"{accelerator.num_processes}; use one of recipes/accelerate/*.yaml"
        )
    plugin = accelerator.state.deepspeed_plugin
    if use_fsdp and world > 1 and not accelerator.is_fsdp2:
        raise UserError("only FSDP version 2 is supported: use recipes/accelerate/fsdp2.yaml")
    if plugin is not None:
        config, section = plugin.deepspeed_config, recipe.train
        config["train_micro_batch_size_per_gpu"] = section.micro_batch_size
        config["gradient_accumulation_steps"] = section.gradient_accumulation
        config["gradient_clipping"] = section.clip
        config["zero_optimization"]["stage3_param_persistence_threshold"] = SMALL_TENSOR
    return accelerator


def result_key(recipe: Recipe) -> dict[str, Any]:
    """The parts of a recipe that the trained weights depend on."""
    fields = recipe.model_dump(mode="json")
    del fields["train"]["compile"]  # the same weights within rounding
    return {name: fields[name] for name in ("target", "data", "drafter", "loss", "train")}


def finished(recipe: Recipe) -> bool:
    """Whether RUN/drafter is there and was trained with this very recipe."""
    path, weights = recipe.run_dir / "trained.json", recipe.run_dir / "drafter" / WEIGHTS
    if not (path.exists() and weights.exists()):
        return False
    record = read_json(path)
    return isinstance(record, dict) and record.get("recipe") == result_key(recipe)


def run(recipe: Recipe, resume: bool) -> Path:
    """Prepare, train and save; returns RUN/drafter. A finished run is left alone."""
    accelerator = make_accelerator(recipe)
    folder = run_with(accelerator, recipe, resume)
    gc.collect()
    accelerator.end_training()
    return folder


def run_with(accelerator: Accelerator, recipe: Recipe, resume: bool) -> Path:
    """A run in processes that have joined already; afterwards they may go on with another one."""
    main = accelerator.is_main_process
    log_to_stderr(main)
    folder = recipe.run_dir / "drafter"
    if finished(recipe):
        log.info("%s is trained already (change the recipe or its name to train anew)", folder)
        return folder
    start = find_start(accelerator, recipe, resume)  # before prepare() replaces any data
    set_seed(recipe.train.seed)
    # Under ZeRO-3 transformers would divide every model that it loads, hence the target as well.
    unset_hf_deepspeed_config()
    target = Target.load(recipe.target)
    log.info("target %s in %s on %s", target.name, target.dtype, target.device)
    check_shape(recipe, target)
    rank, world = accelerator.process_index, accelerator.num_processes
    prepared = prepare_together(recipe, target, rank, world, accelerator.wait_for_everyone)
    drafter = build_drafter(
        recipe.drafter, target, aux_layers_of(recipe, target), prepared.vocab, recipe.train.seed
    )
    num_trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    log.info("drafter: %.2fM trained parameters", num_trained / 1e6)
    if main:
        write_run_record(recipe)
    progress, drafter = train(recipe, accelerator, target, prepared, drafter, start)
    check_learned(progress, recipe.run_dir)
    if main:
        save_drafter(folder, drafter, target, recipe, progress.num_tokens)
        write_json(
            recipe.run_dir / "trained.json",
            {"recipe": result_key(recipe), "steps": progress.step, "seconds": progress.seconds},
        )
        done = (progress.step, progress.num_tokens, progress.seconds, progress.best)
        log.info(result_line(folder, *done, decoded=recipe.train.validate_prompts > 0))
    accelerator.wait_for_everyone()
    return folder


def check_shape(recipe: Recipe, target: Target) -> None:
    """Refuse a drafter that this target cannot have, before hours of answers are written.

    Raises:
        UserError: sizes, layers, mask token or first model do not fit.
    """
    size = recipe.drafter.draft_vocab_size
    build_draft_vocab(torch.zeros(target.vocab_size, dtype=torch.int64), size, target.eos_ids)
    aux_layers = aux_layers_of(recipe, target)
    build_on_meta(recipe.drafter, target.config.to_dict(), aux_layers, size or target.vocab_size)


def check_learned(progress: checkpoint.Progress, run_dir: Path) -> None:
    """Raises UserError where steps were made and nothing was learned in any of them."""
    if progress.step and progress.num_tokens == 0:
        raise UserError(
            f"{run_dir}: no token was learned in {progress.step} steps: the answers are too short "
            "to draft in; look at data.sources and data.max_length"
        )
    if progress.step and progress.num_skipped == progress.step:
        raise UserError(
            f"{run_dir}: all {progress.step} steps were skipped, their numbers not finite; look at "
            "train.lr, train.mixed_precision and the weights that it started from"
        )


def find_start(accelerator: Accelerator, recipe: Recipe, resume: bool) -> Path | None:
    """The checkpoint to go on from, as the main process sees it; None = from the first step."""
    found: list[Path | None] = [None]
    if accelerator.is_main_process:
        found = [checkpoint.latest(recipe.run_dir)]
    broadcast_object_list(found, from_process=0)
    if found[0] is not None and not resume:
        raise UserError(
            f"{recipe.run_dir}/checkpoints holds a run: go on with it by --resume, or choose "
            "another name (name=...) or delete that folder"
        )
    if found[0] is not None:
        checkpoint.check_recipe(found[0], recipe, accelerator.num_processes)
    return found[0]
