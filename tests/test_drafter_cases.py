"""Public cases that every trained drafter must get right, each in every architecture."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.batch import Row, collate
from data.target import Target
from data.vocab import DraftVocab
from drafters.base import TrainedDrafter
from drafters.export_info import TargetInfo
from drafters.methods import METHODS, build_drafter
from drafters.shape import norm_weight
from drafters.vllm_format import load, save
from recipes.drafter_sections import Eagle1Section, Eagle3Section
from recipes.errors import UserError
from recipes.schema import LossSection
from tests.test_drafter_family import DEPTHS, SECTIONS
from tests.tiny_exports import ORIGIN
from tests.tiny_targets import tiny_target
from train.distiller import Distiller
from train.loop import with_states

EVERY = pytest.mark.parametrize("method", METHODS)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#      prompt  answer   user    answer   user  answer
MASK = [0] * 4 + [1] * 5 + [0] * 3 + [1] * 4 + [0] * 2 + [1]


@pytest.fixture(scope="module")
def target() -> Target:
    """A Qwen3 whose heads are wider than hidden_size / heads, with Llama-3's rotary scaling."""
    changes = {"num_hidden_layers": 6, "head_dim": 16, "tie_word_embeddings": True}
    return tiny_target("qwen3", rope_parameters=LLAMA3_ROPE, initializer_range=0.1, **changes)


def make(method: str, target: Target) -> TrainedDrafter:
    section = SECTIONS[method]
    ids_D = torch.arange(target.vocab_size)[:: 2 if section.draft_vocab_size else 1]
    aux = tuple(section.aux_layers or section.default_aux_layers(target.num_layers))
    return build_drafter(section, target, aux, DraftVocab(ids_D, target.vocab_size), seed=0).eval()


def make_row(drafter: TrainedDrafter) -> Row:
    generator = torch.Generator().manual_seed(2)
    known = drafter.draft_ids_D
    ids_S = known[torch.randint(0, len(known), (len(MASK),), generator=generator)]
    return Row(id="r", ids_S=ids_S, mask_S=torch.tensor(MASK).bool())


@EVERY
def test_p44_p46_a_slot_counts_only_if_all_up_to_its_token_belongs_to_one_answer(
    method: str, target: Target
) -> None:
    """The mask of depth k is met with the mask k further on, and no draft runs into a new turn."""
    drafter = make(method, target)
    batch = with_states(target, collate([make_row(drafter)]), drafter.aux_layers)
    with torch.no_grad():
        slots = drafter.slots(batch, DEPTHS)
    found = set(zip(slots.anchor_N.tolist(), slots.depth_N.tolist(), strict=True))
    allowed = {
        (s, k)
        for s in range(len(MASK))
        for k in range(DEPTHS)
        if all(MASK[s : s + k + 2]) and s + 1 + k < len(MASK)
    }
    assert found == allowed
    assert len(found) == (4 + 3 + 2 + 1) + (3 + 2 + 1)  # answers of five and four tokens


@EVERY
def test_p44_labels_in_the_masked_part_change_nothing(method: str, target: Target) -> None:
    """Tokens behind the answer stand in the row, but only as labels that nobody may learn."""
    drafter = make(method, target)
    row = make_row(drafter)
    mask_S = row.mask_S.clone()
    mask_S[9:] = False  # the first answer alone
    vocab = DraftVocab(drafter.draft_ids_D.clone(), target.vocab_size)
    distiller = Distiller(drafter, LossSection(num_steps=DEPTHS, ce_share=0.5), vocab)
    distiller.use_target(target)
    losses = []
    for token in (0, 6):
        ids_S = row.ids_S.clone()
        ids_S[9:] = token
        one = replace(row, ids_S=ids_S, mask_S=mask_S)
        loss, stats = distiller(with_states(target, collate([one]), drafter.aux_layers))
        losses.append(loss.item())
        assert float(stats["num_positions"].sum()) > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def export(method: str, target: Target, folder: Path, dtype: torch.dtype) -> TrainedDrafter:
    drafter = make(method, target)
    save(drafter, folder, "vllm", dtype, TargetInfo.of(target), ORIGIN)
    return drafter


@EVERY
def test_p75_p77_p80_config_carries_rope_head_width_vocabulary_and_dtype(
    method: str, target: Target, tmp_path: Path
) -> None:
    drafter = export(method, target, tmp_path / "export", torch.bfloat16)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["vocab_size"] == target.vocab_size
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    kinds = {t.dtype for t in load_file(tmp_path / "export" / "model.safetensors").values()}
    assert kinds - {torch.int64, torch.bool} == {torch.bfloat16}
    if drafter.config.draft_vocab_size < target.vocab_size:
        assert config["draft_vocab_size"] == 132
    if method == "medusa":  # no attention, so no positions
        return
    assert config["head_dim"] == 16
    for key, value in LLAMA3_ROPE.items():
        assert config["rope_parameters"][key] == value, key


@EVERY
def test_p78_no_tensor_may_be_absent(method: str, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    export(method, target, folder, torch.float32)
    where = folder / "model.safetensors"
    tensors = load_file(where)
    assert len(tensors) > 3
    for name in tensors:
        rest = {other: t for other, t in tensors.items() if other != name}
        save_file(rest, where)
        with pytest.raises(UserError, match=name if name not in ("d2t", "t2d") else "d2t"):
            load(folder, TargetInfo.of(target))


@EVERY
def test_p78_a_tied_target_leaves_the_drafter_untied(
    method: str, target: Target, tmp_path: Path
) -> None:
    """A head of its own stays one: an engine that ties it would overwrite it."""
    export(method, target, tmp_path / "export", torch.float32)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    has_head = "lm_head.weight" in load_file(tmp_path / "export" / "model.safetensors")
    assert not (has_head and config.get("tie_word_embeddings", False))


def rotary_tables(drafter: Any, positions_N: Tensor) -> Tensor:
    return torch.cat(drafter.rope(torch.zeros(1, 1, 1), positions_N[None]), -1)


@pytest.mark.parametrize("method", ["eagle3", "p_eagle", "eagle1", "mtp"])
def test_p75_rotary_tables_are_the_same_after_export(
    method: str, target: Target, tmp_path: Path
) -> None:
    drafter = export(method, target, tmp_path / "export", torch.bfloat16)
    loaded = load(tmp_path / "export", TargetInfo.of(target))
    places = torch.tensor([10, 20_000])
    assert torch.equal(rotary_tables(drafter, places), rotary_tables(loaded, places))
    plain = make(method, tiny_target("qwen3", num_hidden_layers=6, head_dim=16))
    assert not torch.equal(rotary_tables(drafter, places), rotary_tables(plain, places))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2", "mistral"])
def test_factors_of_a_norm_however_they_are_stored(kind: str) -> None:
    target = tiny_target(kind)
    norm = target.decoder.norm
    with torch.no_grad():
        norm.weight.add_(0.2 * torch.randn(norm.weight.shape))
    x = torch.randn(3, target.hidden_size)
    expected = norm(x)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(normed * norm_weight(norm), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("section", [Eagle3Section(init="target"), Eagle1Section(init="target")])
def test_no_warm_start_from_layers_with_norms_that_the_drafter_has_no_place_for(
    section: Any,
) -> None:
    target = tiny_target("gemma3", num_hidden_layers=6, layer_types=["full_attention"] * 6)
    aux = (6,) if section.method == "eagle1" else (2, 4, 5)
    vocab = DraftVocab(torch.arange(target.vocab_size), target.vocab_size)
    with pytest.raises(UserError, match="norms behind attention and MLP"):
        build_drafter(section, target, aux, vocab, seed=0)
