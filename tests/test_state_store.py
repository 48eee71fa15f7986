"""States on disk: codecs, shards of many ranks, what damage is told, and what training loses by 8
bits."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batch import Row, collate
from data.hidden_states import StateStore, bytes_per_token, capture_pass, manifest_of, stored_states
from data.pipeline import aux_layers_of, capture_states, prepare
from data.state_codec import decode, encode
from data.target import Target
from drafters.methods import build_drafter
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe
from tests.tiny_targets import tiny_target
from train.loop import make_distiller
from train.validate import with_states

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (1, 2)
KINDS = ("float32", "bfloat16", "float8_e4m3", "int8")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3")


def some_rows(count: int = 6, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [5 + 3 * i for i in range(count)]
    return [
        Row(
            id=f"r{i}",
            ids_S=torch.randint(0, 250, (n,), generator=generator),
            mask_S=torch.arange(n) > 2,
        )
        for i, n in enumerate(lengths)
    ]


def capture(target: Target, store: StateStore, rows: list[Row]) -> None:
    capture_pass(target, rows, [len(row.ids_S) for row in rows], LAYERS, store)


def open_store(folder: Path, target: Target, kind: str = "bfloat16", rank: int = 0) -> StateStore:
    return StateStore(folder, manifest_of(target, LAYERS, kind), rank)


@pytest.mark.parametrize(
    ("kind", "error"), [("float32", 0.0), ("bfloat16", 2**-8), ("float8_e4m3", 2**-4), ("int8", 0)]
)
def test_what_a_codec_loses(kind: str, error: float) -> None:
    states = torch.randn(50, 3 * 32, generator=torch.Generator().manual_seed(1))
    states[0] *= 1000  # a first token, and a layer, of another order of magnitude
    states[:, 64:] *= 30
    parts = encode("x", states, 32, kind)
    back = decode(parts["x"], parts.get("x_scale")).float()
    largest = states.unflatten(1, (3, 32)).abs().amax(-1, keepdim=True)
    off = (back - states).unflatten(1, (3, 32)).abs()
    if kind == "int8":
        # Half a step of the largest value over 127, and bf16's own rounding of what is read.
        bound = largest * (0.5 / 127 + 2**-8)
    else:
        bound = (
            error * states.unflatten(1, (3, 32)).abs()
            + 2**-9 * largest / 448
            + 2**-8 * (states.unflatten(1, (3, 32)).abs() if kind == "float8_e4m3" else 0)
        )
    if kind == "float32":
        assert torch.equal(back, states)
    assert bool((off <= bound + 1e-12).all())


def test_zeros_and_no_layers_at_all() -> None:
    for kind in KINDS:
        for width in (0, 64):
            parts = encode("x", torch.zeros(4, width), 32, kind)
            back = decode(parts["x"], parts.get("x_scale"))
            assert back.shape == (4, width) and not back.any()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_token_are_those_of_the_file(tmp_path: Path, target: Target, kind: str) -> None:
    store = open_store(tmp_path, target, kind)
    rows = some_rows()
    capture(target, store, rows)
    (shard,) = tmp_path.glob("shard-*.safetensors")
    with shard.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    tokens = sum(len(row.ids_S) for row in rows)
    assert shard.stat().st_size - header == tokens * bytes_per_token(2, 32, kind)


def test_bytes_of_a_token_by_kind() -> None:
    # SmolLM2-135M, three captured layers and the last: 4 * 576 numbers.
    found = {kind: bytes_per_token(3, 576, kind) for kind in KINDS}
    assert found == {"float32": 9224, "bfloat16": 4616, "float8_e4m3": 2328, "int8": 2328}


def test_cached_states_have_the_places_and_norm_of_online_ones(
    tmp_path: Path, target: Target
) -> None:
    rows = some_rows()
    store = open_store(tmp_path, target, "float32")
    capture(target, store, rows)
    for row in rows:
        online, cached = target.forward(row.ids_S[None], None, LAYERS), store.get(row.id)
        torch.testing.assert_close(cached.aux_SF, online.aux_BSF[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cached.hidden_SH, online.hidden_BSH[0], rtol=1e-4, atol=1e-5)
        logits_SV = target.logits(cached.hidden_SH)  # before the final norm: logits apply it
        own = target.model(input_ids=row.ids_S[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits_SV, own, rtol=1e-3, atol=1e-4)
        assert cached.lse_S is not None and cached.argmax_S is not None
        needed = row.mask_S.roll(-1)
        needed[-1] = False
        torch.testing.assert_close(cached.lse_S[needed], own.logsumexp(-1)[needed])
        assert torch.equal(cached.argmax_S[needed].long(), own.argmax(-1)[needed])


def test_ranks_write_shards_of_their_own_and_read_those_of_all(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.hidden_states.SHARD_TOKENS", 20)
    rows = some_rows(9)
    stores = [open_store(tmp_path, target, rank=rank) for rank in range(3)]
    for rank, store in enumerate(stores):
        capture(target, store, rows[rank::3])
        assert sorted(store.missing([row.id for row in rows])) == sorted(
            row.id for row in rows if row not in rows[rank::3]
        )
    names = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert {name[:9] for name in names} == {"shard-000", "shard-001", "shard-002"}
    assert len(names) > 3
    alone = open_store(tmp_path / "alone", target)
    capture(target, alone, rows)
    for store in stores:
        store.refresh()
        assert store.missing([row.id for row in rows]) == []
        for row in rows:
            torch.testing.assert_close(store.get(row.id).aux_SF, alone.get(row.id).aux_SF)
    assert stores[0].verify() == len(names)


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200:-100] = bytes(100)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(damage_end, "bytes instead of"), (damage_zero, "its header cannot be read")],
)
def test_a_damaged_shard_is_told_when_it_is_opened(
    tmp_path: Path, target: Target, damage: Any, message: str
) -> None:
    capture(target, open_store(tmp_path, target), some_rows())
    damage(tmp_path / "shard-000-00000.safetensors")
    with pytest.raises(UserError, match=rf"shard-000-00000.* is damaged: .*{message}.*delete it"):
        open_store(tmp_path, target)


def test_numbers_changed_within_a_shard_are_told_on_demand(tmp_path: Path, target: Target) -> None:
    capture(target, open_store(tmp_path, target), some_rows())
    damage_middle(tmp_path / "shard-000-00000.safetensors")
    store = open_store(tmp_path, target)
    with pytest.raises(UserError, match="checksum"):
        store.verify()


def test_a_deleted_shard_is_made_again_once(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    rows = some_rows()
    capture(target, open_store(tmp_path, target), rows)
    (tmp_path / "shard-000-00000.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path, target)
    assert "its 6 rows are made again" in caplog.text
    assert len(store.missing([row.id for row in rows])) == 6
    capture(target, store, rows)
    caplog.clear()
    again = open_store(tmp_path, target)
    assert not caplog.text and again.missing([row.id for row in rows]) == []
    assert again.verify() == 1


def test_what_a_kill_leaves_is_no_shard(tmp_path: Path, target: Target) -> None:
    rows = some_rows()
    capture(target, open_store(tmp_path, target), rows)
    (tmp_path / "shard-000-00001.tmp").write_bytes(b"half")
    listing = tmp_path / "shards-000.jsonl"
    listing.write_text(listing.read_text() + '{"id": "shard-000-0')
    store = open_store(tmp_path, target)
    assert store.missing([row.id for row in rows]) == []
    extra = Row(id="late", ids_S=torch.arange(9), mask_S=torch.ones(9, dtype=torch.bool))
    capture(target, store, [extra])
    assert "late" in open_store(tmp_path, target)


def test_few_files_are_held_open(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.hidden_states.SHARD_TOKENS", 1)
    monkeypatch.setattr("data.hidden_states.MAX_OPEN", 3)
    rows = some_rows(8)
    store = open_store(tmp_path, target)
    capture(target, store, rows)
    for row in rows + rows:
        assert len(store.get(row.id).hidden_SH) == len(row.ids_S)
        assert len(store._open) <= 3


def smoke(folder: Path, *overrides: str) -> Recipe:
    small = ["data.num_prompts=12", "data.max_new_tokens=6", "data.capture=pass"]
    return load_recipe(ROOT / "recipes/smoke.yaml", [f"output_dir={folder}", *small, *overrides])


def test_two_ranks_capture_a_share_each(tmp_path: Path) -> None:
    recipe = smoke(tmp_path)
    target = Target.load(recipe.target)
    ranks = [prepare(recipe, target, rank, 2) for rank in range(2)]
    for rank, prepared in enumerate(ranks):
        assert prepared.store is not None and prepared.store.missing(prepared.train.ids)
        capture_states(recipe, target, prepared, rank, 2)
    for prepared in ranks:
        assert prepared.store is not None
        prepared.store.refresh()
        assert prepared.store.missing(prepared.train.ids) == []
    folder = recipe.run_dir / "data/states"
    lists = [
        [row for line in path.read_text().splitlines() for row in json.loads(line)["rows"]]
        for path in sorted(folder.glob("shards-*.jsonl"))
    ]
    assert len(lists) == 2 and abs(len(lists[0]) - len(lists[1])) <= 1
    kept = [*ranks[0].train.ids, *ranks[0].heldout.ids]
    assert sorted(lists[0] + lists[1]) == sorted(kept)


def test_training_on_8_bits_learns_as_much(tmp_path: Path) -> None:
    changes = ["data.num_prompts=32", "data.max_new_tokens=8", "data.states=online"]
    recipe = smoke(tmp_path, *changes, "drafter.draft_vocab_size=null", "loss.num_steps=1")
    target = Target.load(recipe.target)
    prepared = prepare(recipe, target)
    layers = aux_layers_of(recipe, target)
    heldout = with_states(target, collate(list(prepared.heldout)), layers)
    alphas = {}
    for kind in KINDS[1:]:
        store = StateStore(tmp_path / kind, manifest_of(target, layers, kind))
        capture_pass(target, prepared.train, prepared.train.lengths, layers, store)
        rows = [replace(row, states=store.get(row.id)) for row in prepared.train]
        drafter = build_drafter(recipe.drafter, target, layers, prepared.vocab, 0)
        distiller = make_distiller(recipe, target, prepared, drafter)
        optimizer = torch.optim.AdamW((p for p in drafter.parameters() if p.requires_grad), lr=3e-3)
        for step in range(30):
            batch = collate([rows[(step * 4 + i) % len(rows)] for i in range(4)])
            optimizer.zero_grad()
            loss, sums = distiller(batch)
            (loss / sums["num_positions"].sum()).backward()
            optimizer.step()
        with torch.no_grad():
            sums = distiller(heldout)[1]
        alphas[kind] = float(sums["alpha_sum"].sum() / sums["num_positions"].sum())
    for kind in ("float8_e4m3", "int8"):
        assert alphas[kind] == pytest.approx(alphas["bfloat16"], rel=0.02), alphas


def test_stored_states_are_verified_on_demand(tmp_path: Path, target: Target) -> None:
    with pytest.raises(UserError, match="no states are stored here"):
        stored_states(tmp_path)
    capture(target, open_store(tmp_path / "states", target), some_rows())
    assert stored_states(tmp_path).verify() == 1
