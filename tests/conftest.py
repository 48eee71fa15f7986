"""Shared by all tests: no network, one thread, and what to skip on this machine."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads it once
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a device or an engine that is not here; files with slow ones go first.

    (So that none of these is left to run alone at the end, where files are run side by side.)
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    missing = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device",
        "vllm": None if "VLLM_ENV" in os.environ else "VLLM_ENV names no environment with vLLM",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
