"""What each process of a launcher does in test_launchers.py: several runs, one after the other.

    accelerate launch --config_file recipes/accelerate/zero3.yaml --num_processes 2 \\
        tests/rank_runs.py FOLDER OVERRIDE ...

Every run NAME finds its data (and a checkpoint to go on from) in FOLDER/NAME. What a rank saw
beside the files of a run goes to FOLDER/facts.json.
"""

import hashlib
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from data import batch as batches
from data.batch import Row, States
from data.hidden_states import StateStore
from data.row_file import RowFile
from data.target import Target
from recipes.schema import Recipe, load_recipe
from train import loop
from train.run import make_accelerator, run_with
from train.shards import divides_weights, zero_stage

SMOKE = Path(__file__).resolve().parents[1] / "recipes/smoke.yaml"
VOCAB, CHUNK = 200, 16  # of the hard run: no other width there is 200
HARD = (
    f"drafter.draft_vocab_size={VOCAB}",
    f"loss.chunk_size={CHUNK}",
    "data.states_dtype=bfloat16",
    "train.micro_batch_size=2",
    "train.max_steps=8",
)
"""7 batches an epoch: with 4 a step, every other step has one too few."""
EXTRA_PADDING = 37


def poison(row_id: str) -> Any:
    """A patch: the stored states of a row hold a NaN."""
    get = StateStore.get

    def poisoned(store: StateStore, name: str) -> States:
        states = get(store, name)
        if name != row_id:
            return states
        aux_SF = states.aux_SF.clone()
        aux_SF[-2, 0] = torch.nan
        return replace(states, aux_SF=aux_SF)

    return mock.patch.object(StateStore, "get", poisoned)


def blank(row_ids: Collection[str]) -> Any:
    """A patch: nothing of these rows is supervised."""
    get = RowFile.__getitem__

    def blanked(rows: RowFile, index: Any) -> Any:
        row = get(rows, index)
        if isinstance(row, Row) and row.id in row_ids:
            return replace(row, mask_S=torch.zeros_like(row.mask_S))
        return row

    return mock.patch.object(RowFile, "__getitem__", blanked)


def pad_more() -> Any:
    """A patch: batches are padded further than they need be."""
    pad = batches._pad

    def padded(tensors: Any, value: float) -> Tensor:
        joined = pad(tensors, value)
        rest = (0, 0) * (joined.ndim - 2) + (0, EXTRA_PADDING)
        return F.pad(joined, rest, value=value)

    return mock.patch.object(batches, "_pad", padded)


class MostLogits(TorchDispatchMode):
    """The most rows that any tensor over the draft vocabulary has had (weights left out)."""

    def __init__(self, vocab: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab, self.hidden_size, self.rows = vocab, hidden_size, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.vocab:
                rows = tensor.numel() // self.vocab
                if rows != self.hidden_size:  # a head, the other way round
                    self.rows = max(self.rows, rows)
        return out


class Watch:
    """What a rank saw, run by run.

    rows: ids of every micro-batch that was trained on. training: whether the module was in training
    mode then. changed: whether the target's weights were others afterwards. held: bytes of the
    target's weights on this rank.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[list[str]]] = defaultdict(list)
        self.training: dict[str, bool] = {}
        self.changed: dict[str, bool] = {}
        self.held: dict[str, int] = {}

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Watch a run."""
        step, load, targets = loop.run_micro_batch, Target.load, []
        self.training[name] = True

        def watched(accelerator: Any, model: Any, batch: Any, *rest: Any) -> Any:
            self.rows[name].append(batch.row_ids)
            self.training[name] &= accelerator.unwrap_model(model).training
            return step(accelerator, model, batch, *rest)

        def loading(section: Any) -> Target:
            target = load(section)
            targets.append((target, digest(target)))
            return target

        with (
            mock.patch.object(loop, "run_micro_batch", watched),
            mock.patch.object(Target, "load", loading),
        ):
            yield
        [(target, before)] = targets
        self.changed[name] = digest(target) != before
        self.held[name] = sum(t.numel() * t.itemsize for t in weights_held(target))


def weights_held(target: Target) -> list[Tensor]:
    """What of the target's weights lies on this rank."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in target.model.parameters()]


def digest(target: Target) -> str:
    """A hash over these weights."""
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in weights_held(target))
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]

    def recipe(name: str, *more: str) -> Recipe:
        return load_recipe(SMOKE, [f"output_dir={folder}", f"name={name}", *overrides, *more])

    accelerator = make_accelerator(recipe("straight"))
    watch = Watch()

    def run(name: str, *more: str, resume: bool = False) -> None:
        with watch.over(name):
            run_with(accelerator, recipe(name, *more), resume)

    run("straight")
    if accelerator.is_main_process:
        halfway = folder / "straight/checkpoints/step-10"
        shutil.copytree(halfway, folder / "resumed/checkpoints/step-10")
    accelerator.wait_for_everyone()
    run("resumed", "train.validate_every=3", resume=True)
    run("crossed", "target.placement=sharded", resume=True)
    run("sharded", "data.states=online", "target.placement=sharded")
    with poison((folder / "row.txt").read_text()):
        run("poisoned", "train.max_steps=8")
    padding = pad_more() if accelerator.process_index == 1 else nullcontext()
    most = MostLogits(VOCAB, 64)
    with blank((folder / "blank.txt").read_text().split()), padding, most:
        run("hard", *HARD, "train.gradient_accumulation=2")
    seen = {
        "rows": watch.rows,
        "training": watch.training,
        "changed": watch.changed,
        "held": watch.held,
        "most_logits": most.rows,
    }
    ranks = gather_object([seen])
    if accelerator.is_main_process:
        facts = {
            "world": accelerator.num_processes,
            "zero": zero_stage(accelerator),
            "divided": divides_weights(accelerator),
            "ranks": ranks,
        }
        (folder / "facts.json").write_text(json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    main()
