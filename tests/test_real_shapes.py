"""Every trained drafter on targets of the shapes that people use, shrunk: one step, one decode, one
export each.

Qwen3 and Gemma-3 have heads whose width is not hidden_size / heads; Llama-3 scales its rotary
positions; Gemma-3 and Mistral look through windows, shorter here than the text.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from data.batch import Batch, Row, collate
from data.target import Target
from data.vocab import DraftVocab
from drafters.anchors import anchors_of
from drafters.base import TrainedDrafter
from drafters.export_info import TargetInfo
from drafters.methods import METHODS, build_drafter, build_on_meta
from drafters.vllm_format import load, save
from eval.decode import DecodeSettings, decode
from recipes.schema import LossSection, load_recipe
from tests.test_drafter_family import SECTIONS
from tests.tiny_exports import ORIGIN, ROOT
from tests.tiny_targets import tiny_target
from train.distiller import Distiller
from train.loop import with_states

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 16, "hidden_size": 40, "tie_word_embeddings": True}),
    "llama3": (
        "llama",
        {"attention_bias": False, "mlp_bias": False, "rope_parameters": LLAMA3_ROPE},
    ),
    "gemma3": ("gemma3", {**WINDOWS, "head_dim": 16, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 5}),
}
DEPTHS = 3
EVERY = pytest.mark.parametrize("method", METHODS)
SHAPE = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    # Small weights: the drafts of a random target are then about as likely as any.
    common = {"num_hidden_layers": 6, "initializer_range": 0.1}
    return {
        name: tiny_target(kind, **common, **changes) for name, (kind, changes) in SHAPES.items()
    }


def make(method: str, target: Target) -> TrainedDrafter:
    section = SECTIONS[method]
    ids_D = torch.arange(target.vocab_size)[:: 2 if section.draft_vocab_size else 1]
    aux = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    vocab = DraftVocab(ids_D, target.vocab_size)
    return build_drafter(section, target, aux, vocab, seed=0)


def make_batch(drafter: TrainedDrafter, target: Target) -> Batch:
    generator = torch.Generator().manual_seed(2)
    known = drafter.draft_ids_D
    ids_S = known[torch.randint(0, len(known), (14,), generator=generator)]
    row = Row(id="r", ids_S=ids_S, mask_S=torch.arange(14) >= 4)
    return with_states(target, collate([row]), drafter.aux_layers)


def head_inputs(drafter: TrainedDrafter, batch: Batch) -> Tensor:
    with torch.no_grad():
        return drafter.eval().slots(batch, DEPTHS).head_NW


@SHAPE
@EVERY
def test_trains_decodes_and_exports(
    method: str, shape: str, targets: dict[str, Target], tmp_path: Any
) -> None:
    target = targets[shape]
    drafter = make(method, target).train()
    batch = make_batch(drafter, target)
    vocab = DraftVocab(drafter.draft_ids_D.clone(), target.vocab_size)
    distiller = Distiller(drafter, LossSection(num_steps=DEPTHS, renormalize=False), vocab)
    distiller.use_target(target)
    optimizer = torch.optim.SGD(distiller.parameters(), 1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = distiller(batch)
        (loss / len(anchors_of(batch))).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]

    drafter.eval()
    prompts = [[5, 9, 14, 3, 11, 8, 20], [7]]  # the longer one fills the windows
    plain, _ = decode(target, None, prompts, DecodeSettings(max_new_tokens=10, num_draft=0))
    drafted, _ = decode(target, drafter, prompts, DecodeSettings(max_new_tokens=10, num_draft=3))
    assert [a.ids for a in drafted] == [a.ids for a in plain]
    assert any(r.proposed for a in drafted for r in a.rounds)

    info = TargetInfo.of(target)
    save(drafter, tmp_path / "export", "vllm", torch.float32, info, ORIGIN)
    loaded = load(tmp_path / "export", info)
    loaded.use_target(target)
    torch.testing.assert_close(head_inputs(loaded, batch), head_inputs(drafter, batch))


# As the config.json of these targets on the hub says.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ).to_dict(),
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    ).to_dict(),
    "embedded:smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ).to_dict(),
}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama3", 424.69),  # fc 50.33, attention 67.11, MLP 176.16, head 131.07, norms 0.02
        ("qwen3", 399.52),
        ("qwen3_peagle", 978.37),
        ("qwen3_medusa", 672.67),
        ("smollm2", 9.81),
        ("smollm2_peagle", 9.81),
        ("smollm2_medusa", 29.31),
        ("smollm2_eagle1", 4.20),
        ("smollm2_mtp", 4.21),
    ],
)
def test_shipped_recipes_fit_their_targets(name: str, millions: float) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    section, target = recipe.drafter, PUBLISHED[recipe.target.model]
    n, vocab_size = target["num_hidden_layers"], target["vocab_size"]
    aux = tuple(section.aux_layers or section.default_aux_layers(n))
    assert max(aux) <= n
    drafter = build_on_meta(section, target, aux, section.draft_vocab_size or vocab_size)
    if section.method == "eagle3":
        assert aux == (2, n // 2, n - 3) or recipe.target.model.startswith("embedded")
    num = sum(p.numel() for p in drafter.parameters())
    assert num / 1e6 == pytest.approx(millions, abs=0.01)
    assert METHODS[section.method].form.faults(drafter.config) == []
