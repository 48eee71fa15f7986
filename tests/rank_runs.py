"""What each process of a launcher does in test_launchers.py: several runs, one after the other.

    accelerate launch --config_file recipes/accelerate/zero3.yaml --num_processes 2 \\
        tests/rank_runs.py FOLDER OVERRIDE ...

Every run NAME finds its data (and a checkpoint to go on from) in FOLDER/NAME.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.schema import load_recipe
from train.run import make_accelerator, run_with
from train.shards import divides_weights, zero_stage

SMOKE = Path(__file__).resolve().parents[1] / "recipes/smoke.yaml"


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
