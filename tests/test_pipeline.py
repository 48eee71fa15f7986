"""From recipe to rows: resumable, stale parts rebuilt, states right however they were made."""

import json
from pathlib import Path

import pytest
import torch

from data import answers
from data.hidden_states import StateStore, manifest_of
from data.pipeline import prepare
from data.target import Target
from recipes.errors import UserError
from recipes.schema import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(smoke(Path("unused")).target)


def smoke(folder: Path, *overrides: str) -> Recipe:
    small = ["data.num_prompts=8", "data.max_new_tokens=6", "data.heldout_fraction=0.25"]
    return load_recipe(ROOT / "recipes/smoke.yaml", [f"output_dir={folder}", *small, *overrides])


def responses(recipe: Recipe) -> list[str]:
    return (recipe.run_dir / "data/responses.jsonl").read_text().splitlines()


def test_rows_are_what_the_target_saw_and_wrote(tmp_path: Path, target: Target) -> None:
    recipe = smoke(tmp_path)
    prepared = prepare(recipe, target)
    assert len(prepared.train) + len(prepared.heldout) == 8 and len(prepared.heldout) == 2
    by_id = {r["id"]: r for r in map(json.loads, responses(recipe))}
    for row in prepared.train:
        (r,) = by_id[row.id]["answers"]
        assert row.ids_S.tolist() == r["prompt_ids"] + r["answer_ids"]
        assert row.mask_S.tolist() == [False] * len(r["prompt_ids"]) + [True] * len(r["answer_ids"])
    assert 0 < prepared.report["supervised_share"] < 1
    assert prepared.report["draft_vocab_coverage_train"] == 1.0


def test_captured_states_equal_a_pass_and_online(tmp_path: Path, target: Target) -> None:
    generated = prepare(smoke(tmp_path / "a"), target)
    passed = prepare(smoke(tmp_path / "b", "data.capture=pass"), target)
    assert generated.store is not None and passed.store is not None
    for row in passed.train:
        a, b = generated.store.get(row.id), passed.store.get(row.id)
        n = len(row.ids_S) - 1  # the target never ran over the last token while it wrote
        online = target.forward(row.ids_S[None], None, (2, 4, 5))
        torch.testing.assert_close(a.aux_SF[:n], b.aux_SF[:n], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.aux_SF, online.aux_BSF[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.hidden_SH[:n], b.hidden_SH[:n], rtol=1e-4, atol=1e-4)
        assert a.lse_S is not None and b.lse_S is not None
        torch.testing.assert_close(a.lse_S[:n], b.lse_S[:n], rtol=1e-4, atol=1e-4)


def test_a_second_call_finds_everything(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = smoke(tmp_path)
    first = prepare(recipe, target)
    monkeypatch.setattr(answers, "generate", None)  # any use of it would fail
    second = prepare(recipe, target)
    assert [r.id for r in second.train] == [r.id for r in first.train]


def test_a_killed_generation_goes_on_without_loss_or_repeat(tmp_path: Path, target: Target) -> None:
    whole = smoke(tmp_path / "whole")
    prepare(whole, target)
    killed = smoke(tmp_path / "killed")
    prepare(killed, target)
    path = killed.run_dir / "data/responses.jsonl"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])  # ends inside a line
    manifest = killed.run_dir / "data/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "done": False}))
    prepare(killed, target)
    assert sorted(responses(killed)) == sorted(responses(whole))


def test_p26_changed_settings_rebuild_and_the_rest_is_kept(tmp_path: Path, target: Target) -> None:
    prepare(smoke(tmp_path, "drafter.draft_vocab_size=64"), target)
    before = responses(smoke(tmp_path))
    sizes = []
    for size in ("128", "null"):
        prepared = prepare(smoke(tmp_path, f"drafter.draft_vocab_size={size}"), target)
        sizes.append(prepared.vocab.size)
    assert sizes == [128, 264]
    assert responses(smoke(tmp_path)) == before
    prepare(smoke(tmp_path, "data.max_new_tokens=4"), target)
    assert all(
        len(a["answer_ids"]) <= 4
        for r in responses(smoke(tmp_path))
        for a in json.loads(r)["answers"]
    )


def test_truncated_answers_are_kept_or_dropped_by_option(tmp_path: Path, target: Target) -> None:
    kept = prepare(smoke(tmp_path), target)
    assert kept.report["num_truncated"] > 0
    cut = [json.loads(r) for r in responses(smoke(tmp_path))]
    last = [(r["answers"][-1]["answer_ids"][-1], r["finish"]) for r in cut]
    assert all(token not in target.eos_ids for token, finish in last if finish == "length")
    whole = sum(r["finish"] == "stop" for r in cut)
    if whole:
        dropped = prepare(smoke(tmp_path, "data.keep_truncated=false"), target)
        assert len(dropped.train) + len(dropped.heldout) == whole
    else:
        with pytest.raises(UserError, match="no rows"):
            prepare(smoke(tmp_path, "data.keep_truncated=false"), target)


def test_answers_of_the_source_without_regeneration(tmp_path: Path, target: Target) -> None:
    source = tmp_path / "chats.jsonl"
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "a" * 9},
            ]
        }
        for i in range(6)
    ]
    bad = {"messages": [{"role": "user", "content": "nobody answers"}]}
    source.write_text("".join(json.dumps(c) + "\n" for c in [*chats, bad]))
    recipe = smoke(
        tmp_path, "data.regenerate=false", f"data.sources=[{source}]", "data.capture=pass"
    )
    prepared = prepare(recipe, target)
    rows = [*prepared.train, *prepared.heldout]
    assert len(rows) == 6
    texts = {target.tokenizer.decode(r.ids_S[r.mask_S]) for r in rows}
    assert texts == {"aaaaaaaaa<|im_end|>"}


def test_p70_a_folder_that_cannot_be_made_fails_at_once(tmp_path: Path, target: Target) -> None:
    (tmp_path / "file").write_text("in the way")
    manifest = manifest_of(target, (2, 4, 5), "float32")
    with pytest.raises(UserError, match="cannot make"):
        StateStore(tmp_path / "file" / "states", manifest)


def test_damaged_shard_is_named(tmp_path: Path, target: Target) -> None:
    recipe = smoke(tmp_path)
    prepare(recipe, target)
    shard = next((recipe.run_dir / "data/states").glob("shard-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match=r"shard-000-00000.safetensors is damaged"):
        prepare(recipe, target)


def test_p40_aux_layers_out_of_range(tmp_path: Path, target: Target) -> None:
    for layers in ("[2,4,9]", "[4,2,5]"):
        with pytest.raises(UserError, match="aux_layers"):
            prepare(smoke(tmp_path, f"drafter.aux_layers={layers}"), target)


def test_magpie_prompts_are_the_targets_own(tmp_path: Path, target: Target) -> None:
    recipe = smoke(tmp_path, "data.sources=[book,magpie]", "data.magpie_share=0.5")
    try:
        prepare(recipe, target)
    except UserError as error:  # a random target hardly ever ends a message of three words
        pytest.fail(str(error))
    lines = (recipe.run_dir / "data/prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    assert sum(p["source"] == "book" for p in prompts) == 4


def test_a_source_that_cannot_be_read_deletes_no_answers(tmp_path: Path, target: Target) -> None:
    recipe = smoke(tmp_path)
    prepare(recipe, target)
    before = responses(recipe)
    with pytest.raises(UserError, match="no such file"):
        prepare(smoke(tmp_path, "data.sources=[/nope.jsonl]"), target)
    with pytest.raises(UserError, match="chat_template cannot be read"):
        prepare(smoke(tmp_path, "data.chat_template=/nope.jinja"), target)
    assert responses(recipe) == before


@pytest.mark.parametrize("name", ["manifest.json", "responses.jsonl"])
def test_a_damaged_file_is_named(tmp_path: Path, target: Target, name: str) -> None:
    recipe = smoke(tmp_path)
    prepare(recipe, target)
    (recipe.run_dir / "data" / name).write_text("[]\n")
    with pytest.raises(UserError, match=f"{name} is damaged"):
        prepare(recipe, target)


def test_a_file_in_the_way_of_the_run_is_named(tmp_path: Path, target: Target) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="cannot make the folder"):
        prepare(smoke(tmp_path / "taken"), target)


def test_states_are_those_of_the_rows_when_rendering_changes(
    tmp_path: Path, target: Target
) -> None:
    source = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 30}]
    lines = [json.dumps({"id": f"r{i}", "messages": turns + turns[: i % 2]}) for i in range(8)]
    source.write_text("\n".join(lines) + "\n")
    of_source = [f"data.sources=[{source}]", "data.regenerate=false", "data.capture=pass"]
    for length in (60, 40):
        fit = [f"data.max_length={length}", "data.max_prompt_tokens=20"]
        prepared = prepare(smoke(tmp_path, *of_source, *fit), target)
        assert prepared.store is not None
        for row in prepared.train:
            assert len(prepared.store.get(row.id).hidden_SH) == len(row.ids_S)
