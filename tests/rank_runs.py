"""What each process of a launcher does in test_launchers.py: several runs, one after the other.

    accelerate launch --config_file recipes/accelerate/zero3.yaml --num_processes 2 \\
        tests/rank_runs.py FOLDER OVERRIDE ...

Every run NAME finds its data (and a checkpoint to go on from) in FOLDER/NAME.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from data.batch import States
from data.hidden_states import StateStore
from recipes.schema import load_recipe
from train.run import make_accelerator, run_with
from train.shards import divides_weights, zero_stage

SMOKE = Path(__file__).resolve().parents[1] / "recipes/smoke.yaml"


def poison(row_id: str) -> None:
    """From now on the stored states of a row hold a NaN."""
    get = StateStore.get

    def poisoned(store: StateStore, name: str) -> States:
        states = get(store, name)
        if name != row_id:
            return states
        aux_SF = states.aux_SF.clone()
        aux_SF[-2, 0] = torch.nan
        return replace(states, aux_SF=aux_SF)

    StateStore.get = poisoned


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]

    def recipe(name: str, *more: str):
        return load_recipe(SMOKE, [f"output_dir={folder}", f"name={name}", *overrides, *more])

    accelerator = make_accelerator(recipe("straight"))
    run_with(accelerator, recipe("straight"), resume=False)
    if accelerator.is_main_process:
        halfway = folder / "straight/checkpoints/step-10"
        shutil.copytree(halfway, folder / "resumed/checkpoints/step-10")
    accelerator.wait_for_everyone()
    for name in ("resumed", "crossed"):
        run_with(accelerator, recipe(name), resume=True)
    poison((folder / "row.txt").read_text())
    run_with(accelerator, recipe("poisoned", "train.max_steps=8"), resume=False)
    if accelerator.is_main_process:
        facts = {
            "world": accelerator.num_processes,
            "zero": zero_stage(accelerator),
            "divided": divides_weights(accelerator),
        }
        (folder / "facts.json").write_text(json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    main()
