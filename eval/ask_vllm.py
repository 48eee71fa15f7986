"""A vLLM of another environment is given jobs and its answer is read."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from data.files import read_json
from recipes.errors import UserError

ENGINE_SECONDS = 1500


def ask_vllm(python: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """Run the jobs of eval/vllm_drafts.py in an environment with vLLM, in a process of their own.

    Raises:
        UserError: there is no vLLM, or its process ends early; its last lines are told.
    """
    script = Path(__file__).with_name("vllm_drafts.py")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        command = [str(python), str(script), str(place / "jobs.json"), str(place / "results.json")]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=ENGINE_SECONDS,
                cwd=place, env={**os.environ, "PYTHONPATH": ""},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"vLLM of {python}: {error}") from error
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise UserError(f"vLLM of {python} does not run:\n{last}")
        return dict(read_json(place / "results.json"))
