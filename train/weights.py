"""The trained drafter as a folder, in the very form that vLLM loads, in fp32."""

from pathlib import Path

import torch

from data.provenance import ROOT, git_state, versions
from data.target import Target
from drafters.base import TrainedDrafter
from drafters.export_info import Origin, TargetInfo
from drafters.vllm_format import save
from recipes.schema import Recipe


def save_drafter(
    folder: Path, drafter: TrainedDrafter, target: Target, recipe: Recipe, num_trained_tokens: int
) -> None:
    """Write RUN/drafter (the last weights) or RUN/drafter-best."""
    origin = Origin(
        recipe=recipe.model_dump(mode="json"),
        commit=git_state(ROOT)["commit"],
        versions=versions(),
        num_trained_tokens=num_trained_tokens,
        num_draft_tokens=recipe.eval.num_draft_tokens,
    )
    save(drafter, folder, "vllm", torch.float32, TargetInfo.of(target), origin)
