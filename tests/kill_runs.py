"""Runs that are killed at many moments and taken up again; used by test_kills.py.

    python tests/kill_runs.py FOLDER

Each life of a run is a forked process that holds all imports already, so it costs a second. Kills
are SIGKILL: nothing is flushed, no handler runs. Prints JSON: what was killed when.
"""

import json
import os
import random
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.schema import load_recipe
from train.run import run

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = [
    "data.num_prompts=12",
    "data.max_new_tokens=10",
    "train.micro_batch_size=1",
    "train.max_steps=20",
    "train.validate_prompts=1",
    "train.validate_every=3",
    "log.every=4",  # not a divisor of where checkpoints lie: sums of a half window travel too
]
NUM_KILLS = 20


def whole_way(folder: Path, save_every: int) -> None:
    """Prepare, train, export: whatever is missing of a run."""
    more = [f"output_dir={folder.parent}", f"name={folder.name}", f"train.save_every={save_every}"]
    run(load_recipe(ROOT / "recipes/smoke.yaml", [*OVERRIDES, *more]), resume=True)
    sys.argv = ["train/export.py", str(folder), "--format", "speculators"]
    runpy.run_path(str(ROOT / "train/export.py"), run_name="__main__")


def life(act: Callable[[], None]) -> int:
    """Start `act` in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> str:
    """Wait: `killed` or `done`; anything else is a failure of the run."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed"
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
    return "done"


def place(folder: Path) -> str:
    """How far a run has come, as its files say."""
    steps = [int(p.name.removeprefix("step-")) for p in folder.glob("checkpoints/step-*")]
    if (folder / "drafter").exists():
        return "export"
    if steps:
        return f"step {max(steps)}"
    return "first step" if (folder / "data/report.json").exists() else "data"


def kill_at_random(folder: Path, seconds: float) -> list[str]:
    """NUM_KILLS lives of random length; a run that ends before is followed by another one."""
    rng, killed, number = random.Random(0), [], 0
    while len(killed) < NUM_KILLS:
        run_dir = folder / f"random-{number}"
        pid = life(lambda run_dir=run_dir: whole_way(run_dir, save_every=1))
        time.sleep(rng.uniform(0, 0.5 * seconds))
        os.kill(pid, signal.SIGKILL)
        if ended(pid) == "killed":
            killed.append(place(run_dir))
        else:
            number += 1
    run_dir = folder / f"random-{number}"
    assert ended(life(lambda: whole_way(run_dir, save_every=1))) == "done"
    return killed


def kill_in_export(folder: Path) -> list[str]:
    """The finished run once more, without its export: life n dies at its n-th rename."""
    run_dir = folder / "exports"
    shutil.copytree(folder / "straight", run_dir)
    shutil.rmtree(run_dir / "export")
    return kill_at_renames(run_dir)


def kill_at_renames(run_dir: Path) -> list[str]:
    """Life n dies at its n-th rename of a file or folder, before it or just behind it."""
    killed: list[str] = []
    number, rename = 0, os.replace

    def dying() -> None:
        count = 0

        def replace(source: str, target: str) -> None:
            nonlocal count
            count += 1
            if count < number:
                return rename(source, target)
            if number % 2:
                rename(source, target)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        os.replace = replace
        whole_way(run_dir, save_every=5)

    while True:
        number += 1
        if ended(life(dying)) == "done":
            return killed
        killed.append(place(run_dir))


def main() -> None:
    folder = Path(sys.argv[1])
    began = time.monotonic()
    assert ended(life(lambda: whole_way(folder / "straight", save_every=0))) == "done"
    seconds = time.monotonic() - began
    killed = {
        "seconds": seconds,
        "random": kill_at_random(folder, seconds),
        "renames": kill_at_renames(folder / "renames"),
        "exports": kill_in_export(folder),
    }
    for junk in folder.glob("*/data/states"):
        shutil.rmtree(junk)
    sys.stdout.write(json.dumps(killed) + "\n")


if __name__ == "__main__":
    main()
