"""What a number was made by: commit, versions of packages, hardware."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "deepspeed",
    "datasets",
    "safetensors",
    "numpy",
    "pydantic",
)


def git_state(root: Path) -> dict[str, Any]:
    """Commit of a checkout, whether it was changed, and a hash of the change (None: no checkout).

    diff_sha256 covers tracked files; num_untracked counts the others that git does not ignore.
    """
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None, "diff_sha256": None, "num_untracked": None}
    diff = _git(root, "diff", "HEAD") or ""
    num_untracked = len((_git(root, "ls-files", "--others", "--exclude-standard") or "").split())
    return {
        "commit": commit.strip(),
        "dirty": bool(diff) or num_untracked > 0,
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "num_untracked": num_untracked,
    }


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str | None]:
    """Python's and each package's version; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    """CPU, cores, threads that torch uses, GPUs."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cpuinfo = Path("/proc/cpuinfo")
    cpu = platform.processor() or platform.machine()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "num_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }
