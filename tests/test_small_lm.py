"""The small LM and its parallel form: where weights come from, and what others load."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from data.attention import masked_attention
from data.batch import Batch, Row, collate
from data.json_lines import read_lines
from data.pipeline import prepare
from data.target import Target
from data.vocab import DraftVocab, full_vocab
from drafters.anchors import choose_anchors
from drafters.base import Sampling
from drafters.drafting import Draft
from drafters.methods import build_drafter, build_on_meta
from drafters.small_lm import ChainKeys, Pard, SmallLM
from drafters.small_lm_form import layers_kept
from drafters.vllm_format import TargetInfo, load, save
from recipes.drafter_sections import DFlashSection, Eagle3Section
from recipes.errors import UserError
from recipes.lm_sections import PardSection, SmallLMSection
from recipes.schema import LossSection, load_recipe
from tests.tiny_exports import ORIGIN, ROOT, edit_config, edit_tensors
from tests.tiny_targets import tiny_model, tiny_target
from train.distiller import Distiller
from train.loop import with_states
from train.optim import param_groups
from train.plan import sizes_of

KINDS = ["llama", "qwen3", "gemma3", "mistral"]
WHOLE = full_vocab(264)


def build(target: Target, **keys: Any) -> Any:
    section = PardSection if "mask_token_id" in keys else SmallLMSection
    return build_drafter(section(**keys), target, (), full_vocab(target.vocab_size), seed=0).eval()


def batch_of(target: Target, lengths: list[int], start: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i, n in enumerate(lengths):
        ids_S = torch.randint(0, 256, (n,), generator=generator)
        rows.append(Row(id=str(i), ids_S=ids_S, mask_S=torch.arange(n) >= start))
    return with_states(target, collate(rows), ())


# Where the weights come from.


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_with_every_layer_of_the_target_it_is_the_target(kind: str, tied: bool) -> None:
    target = tiny_target(kind, tie_word_embeddings=tied)
    drafter = build(target, num_layers=3)
    ids_BS = torch.randint(0, 256, (2, 11), generator=torch.Generator().manual_seed(0))
    expected = target.model(input_ids=ids_BS, use_cache=False).logits
    torch.testing.assert_close(drafter.head_logits(drafter.states(ids_BS)), expected)
    names = [name for name, _ in drafter.named_parameters()]
    assert ("lm.lm_head.weight" in names) != tied


def test_kept_layers_are_evenly_spread_or_those_that_are_named() -> None:
    assert layers_kept(SmallLMSection(num_layers=4), 28) == [0, 9, 18, 27]
    assert layers_kept(SmallLMSection(num_layers=1), 28) == [0]
    assert layers_kept(SmallLMSection(), 12) == [0, 6, 11]  # a quarter of them
    assert layers_kept(SmallLMSection(), 3) == [0]
    assert layers_kept(SmallLMSection(keep_layers=[0, 1, 5]), 6) == [0, 1, 5]
    with pytest.raises(UserError, match=r"drafter.keep_layers \[0, 6\]: the target's layers are"):
        layers_kept(SmallLMSection(keep_layers=[0, 6]), 6)
    with pytest.raises(UserError, match=r"num_layers 7: the target has 6"):
        layers_kept(SmallLMSection(num_layers=7), 6)


def test_a_kept_layer_keeps_its_kind_of_attention() -> None:
    target = tiny_target("gemma3")  # sliding, full, sliding
    drafter = build(target, keep_layers=[1, 2])
    assert drafter.config.model["layer_types"] == ["full_attention", "sliding_attention"]
    kept, source = drafter.lm.state_dict(), target.model.state_dict()
    name = "model.layers.{}.self_attn.q_proj.weight"
    assert torch.equal(kept[name.format(0)], source[name.format(1)])
    assert torch.equal(kept[name.format(1)], source[name.format(2)])


def test_fresh_model_has_the_sizes_of_the_recipe() -> None:
    keys = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    target = tiny_target("qwen3")
    drafter = build(target, init="fresh", num_layers=2, intermediate_size=24, **keys)
    shapes = {name: list(weight.shape) for name, weight in drafter.lm.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == [264, 16]
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == [8, 16]
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [16, 24]
    with pytest.raises(UserError, match="num_attention_heads 3 is no multiple of"):
        build(target, init="fresh", num_attention_heads=3)


@pytest.mark.parametrize("rows", [264, 272, 260])
def test_p29_padding_rows_may_differ(rows: int, tmp_path: Path) -> None:
    target = tiny_target("qwen3")  # 259 tokens in 264 rows
    model = tiny_model("llama", vocab_size=rows, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "lm")
    target.tokenizer.save_pretrained(tmp_path / "lm")
    drafter = build(target, init="checkpoint", model=str(tmp_path / "lm"))
    ids_BS = torch.arange(100, 112)[None]
    logits_SV = drafter.head_logits(drafter.states(ids_BS))[0]
    assert logits_SV.shape[1] == 264  # what an engine compares
    num = min(rows, 264)
    expected_SV = model(input_ids=ids_BS, use_cache=False).logits[0]
    torch.testing.assert_close(logits_SV[:, :num], expected_SV[:, :num])
    assert len(target.tokenizer) == 259


def test_another_vocabulary_is_refused_and_said(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    folder = tmp_path / "lm"
    tiny_model("llama").save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"!"', '"~~"'))
    with pytest.raises(UserError, match=r"another vocabulary .* 2 tokens differ, such as '!'"):
        build(target, init="checkpoint", model=str(folder))
    with pytest.raises(UserError, match=r"drafter\.model .*no such folder"):
        build(target, init="checkpoint", model=str(tmp_path / "nothing"))


def test_parallel_form_goes_on_from_a_trained_small_lm(tmp_path: Path) -> None:
    # As published: PARD is adapted from a small LM. An export holds no tokenizer.
    target = tiny_target("qwen3")
    first = build(target, num_layers=2)
    with torch.no_grad():
        for weight in first.parameters():
            weight.mul_(1.5)
    save(first, tmp_path / "out", "vllm", torch.float32, TargetInfo.of(target), ORIGIN)
    path = str(tmp_path / "out")
    drafter = build(target, init="checkpoint", model=path, mask_token_id=258)
    ids_BS = torch.arange(20, 33)[None]
    expected = first.head_logits(first.states(ids_BS))
    torch.testing.assert_close(drafter.head_logits(drafter.states(ids_BS)), expected)
    with pytest.raises(UserError, match=r"is a small_lm drafter of .*; name a language model, or"):
        build(tiny_target("llama"), init="checkpoint", model=path)


def test_architecture_that_caps_its_logits_is_refused() -> None:
    with pytest.raises(UserError, match="gemma2 caps its logits"):
        build(tiny_target("gemma2"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "org/lm"}, "model belongs to init: checkpoint; init is layers"),
        ({"hidden_size": 8}, "hidden_size belongs to init: fresh"),
        ({"init": "fresh", "keep_layers": [0]}, "keep_layers belongs to init: layers"),
        ({"init": "checkpoint"}, "init: checkpoint needs model"),
        ({"init": "checkpoint", "model": "a/b", "num_layers": 1}, "num_layers is the checkpoint's"),
        ({"init": "fresh", "train_vocabulary": False}, "a head of chance that never learns"),
        ({"init": "fresh", "head_dim": 7}, "head_dim=7 is odd"),
        ({"keep_layers": [1, 0]}, "not ascending"),
        ({"keep_layers": [0, 1], "num_layers": 3}, "num_layers=3, but keep_layers names 2"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallLMSection(**keys)


def test_plain_form_refuses_to_count_a_token_more_than_once() -> None:
    smoke = ROOT / "recipes" / "smoke.yaml"
    plain = ["drafter={method: small_lm}"]
    with pytest.raises(UserError, match=r"loss.num_steps=3, .* set loss.num_steps: 1"):
        load_recipe(smoke, plain)
    assert load_recipe(smoke, [*plain, "loss.num_steps=1"]).drafter.method == "small_lm"
    assert load_recipe(smoke, ["drafter={method: pard}"]).loss.num_steps == 3


# What it computes.


@pytest.mark.parametrize("method", ["small_lm", "pard"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_are_decoding_logits_of_every_architecture(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(kind)
    keys = {"mask_token_id": 258, "keep_ratio": 1.0} if method == "pard" else {}
    drafter = build(target, keep_layers=[0, 1], **keys)
    batch = batch_of(target, [14, 9])
    slots = drafter.slots(batch, 3)
    logits_ND = slots.head_NW @ drafter.head_weights()[0].T
    places = zip(slots.anchor_N.tolist(), slots.depth_N.tolist(), strict=True)
    trained = dict(zip(places, logits_ND, strict=True))
    ids = batch.ids_BS[0].tolist()
    seen: list[torch.Tensor] = []

    def draw(self: Draft, logits_BD: torch.Tensor) -> torch.Tensor:
        seen.append(logits_BD[0])
        self.tokens.append(torch.tensor([ids[anchor + 1 + len(self.tokens)]]))
        return self.tokens[-1]

    monkeypatch.setattr(Draft, "draw", draw)
    state, done = drafter.start([ids[:2]], 20), 0
    for anchor in [3, 4, 8, 10]:  # the window of a sliding layer is 5
        next_ids = torch.tensor([ids[done + 1 : anchor + 1]])
        drafter.observe(state, next_ids, torch.zeros(1, 1, 0), torch.tensor([anchor - done]))
        done = anchor
        seen.clear()
        drafter.propose(state, 3, Sampling(), None)
        for depth, logits_D in enumerate(seen):
            torch.testing.assert_close(logits_D, trained[anchor, depth], rtol=1e-4, atol=1e-4)


def test_no_committed_token_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    drafter = build(target, num_layers=1)
    run: list[int] = []
    states = SmallLM.states

    def counted(self: SmallLM, ids_BS: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        run.append(ids_BS.shape[1])
        return states(self, ids_BS, **kwargs)

    monkeypatch.setattr(SmallLM, "states", counted)
    state = drafter.start([[5, 6, 7]], 20)
    nothing = torch.zeros(1, 1, 0)
    drafter.observe(state, torch.tensor([[6, 7, 8]]), nothing, torch.tensor([3]))
    drafter.propose(state, 3, Sampling(), None)
    drafter.observe(state, torch.tensor([[9, 1]]), nothing, torch.tensor([2]))
    drafter.propose(state, 3, Sampling(), None)
    assert run == [4, 1, 1, 2, 1, 1]  # prompt and anchor; K - 1 drafts; what was committed; ...
    assert state.cache.lengths_B.tolist() == [6]


def test_a_mask_sees_the_text_up_to_its_anchor_and_its_own_draft() -> None:
    # Five tokens; drafts behind anchors 1 (two masks) and 3 (one mask), depth after depth.
    keys = ChainKeys(5, [torch.tensor([1, 3]), torch.tensor([1])])
    assert keys.positions_T.tolist() == [0, 1, 2, 3, 4, 2, 4, 3]
    assert keys.mask_BST()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 0, 1],
    ]
    windowed = keys.mask_BST(2)[0].int()  # two positions
    assert windowed[7].tolist() == [0, 0, 0, 0, 0, 1, 0, 1]
    assert windowed[5].tolist() == [0, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("scaling", [None, 0.2])
def test_chains_without_their_mask_equal_those_with_it(scaling: float | None) -> None:
    anchors = [torch.tensor([6, 2, 4]), torch.tensor([2, 6]), torch.tensor([], dtype=torch.int64)]
    keys, places = ChainKeys(8, anchors), 13
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        values = torch.randn(1, heads, places, 8, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    query, key, value = random(4), random(2), random(2)
    dense = masked_attention(query, key, value, keys.mask_BST(), scaling)
    ours = keys.attention(query, key, value, scaling)
    torch.testing.assert_close(ours, dense)
    weights = torch.randn(dense.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), (query, key, value)),
        torch.autograd.grad((dense * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_the_parallel_form_trains_without_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target("qwen3")
    drafter = build(target, num_layers=1, mask_token_id=258, keep_ratio=1.0)

    def refused(*_: object) -> Tensor:
        raise AssertionError("a mask of (K S) squared")

    monkeypatch.setattr(ChainKeys, "mask_BST", refused)
    slots = drafter.slots(batch_of(target, [24, 17], start=3), 3)
    assert set(slots.depth_N.tolist()) == {0, 1, 2}


def test_conditional_drop_keeps_fewer_masks_at_each_depth() -> None:
    target = tiny_target("qwen3")
    drafter = build(target, num_layers=1, mask_token_id=258, keep_ratio=0.5, min_keep_ratio=0.2)
    slots = drafter.slots(batch_of(target, [44], start=3), 5)
    sets = [set(slots.anchor_N[slots.depth_N == d].tolist()) for d in range(5)]
    assert [len(s) for s in sets] == [40, 20, 10, 8, 8]
    assert all(deeper <= shallower for shallower, deeper in pairwise(sets))


def test_anchors_of_the_parallel_form_can_be_sampled() -> None:
    target = tiny_target("qwen3")
    drafter: Pard = build(target, num_layers=1, mask_token_id=258, num_anchors=6, keep_ratio=1.0)
    assert drafter.num_anchors == 6
    batch = batch_of(target, [44], start=3)
    batch.__dict__["anchors_A"] = choose_anchors(batch.mask_BS, drafter.num_anchors, 1)
    slots = drafter.slots(batch, 3)
    assert (slots.depth_N == 0).sum() == 6


# Export.


@pytest.mark.parametrize("method", ["small_lm", "pard"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_export_with_equal_logits(
    kind: str, tied: bool, method: str, tmp_path: Path
) -> None:
    target = tiny_target(kind, tie_word_embeddings=tied)
    drafter = build(target, num_layers=2, **({"mask_token_id": 258} if method == "pard" else {}))
    folder, info = tmp_path / "out", TargetInfo.of(target)
    save(drafter, folder, "vllm", torch.float32, info, ORIGIN)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != tied
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids_BS = torch.arange(20, 33)[None]
    expected = drafter.head_logits(drafter.states(ids_BS))
    torch.testing.assert_close(model.eval()(input_ids=ids_BS, use_cache=False).logits, expected)
    loaded: Any = load(folder, info)
    torch.testing.assert_close(loaded.head_logits(loaded.states(ids_BS)), expected)
    if method == "pard":
        assert model.config.pard_token == loaded.config.mask_token_id == 258


def test_damaged_exports_are_refused(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    info, name = TargetInfo.of(target), "model.layers.0.mlp.up_proj.weight"

    def fresh(folder: str) -> Path:
        drafter = build(target, num_layers=2, mask_token_id=258)
        save(drafter, tmp_path / folder, "vllm", torch.float32, info, ORIGIN)
        return tmp_path / folder

    folder = fresh("a")
    edit_config(folder, lambda config: config.pop("pard_token"))
    with pytest.raises(UserError, match="missing keys: pard_token"):
        load(folder)
    folder = fresh("b")
    edit_config(folder, lambda config: config.update(pard_token=264))
    with pytest.raises(UserError, match="pard_token 264 is not within the vocabulary"):
        load(folder)
    folder = fresh("c")
    edit_config(folder, lambda config: config.update(vocab_size=260))
    with pytest.raises(UserError, match="vocab_size is 260, that of the target tiny-qwen3 is 264"):
        load(folder, info)
    folder = fresh("d")
    edit_config(folder, lambda config: config.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(UserError, match="model_type 'qwen3' is a Qwen3ForCausalLM"):
        load(folder)
    folder = fresh("e")
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=f"missing tensors: {name}"):
        load(folder)


def test_bf16_export_keeps_rotary_tables_exact(tmp_path: Path) -> None:
    target = tiny_target("llama")
    drafter = build(target, num_layers=1)
    save(drafter, tmp_path / "out", "vllm", torch.bfloat16, TargetInfo.of(target), ORIGIN)
    loaded: Any = load(tmp_path / "out", dtype=torch.bfloat16)
    assert loaded.lm.lm_head.weight.dtype == torch.bfloat16
    table = drafter.lm.model.rotary_emb.inv_freq
    assert torch.equal(loaded.lm.model.rotary_emb.inv_freq, table)


def test_dry_run_takes_no_memory_for_weights() -> None:
    fields = tiny_target("qwen3").config.to_dict()
    drafter = build_on_meta(SmallLMSection(num_layers=2), fields, (), 264)
    assert all(weight.is_meta for weight in drafter.parameters())


# Training and data.


def test_distilled_on_the_targets_law_it_comes_closer() -> None:
    target = tiny_target("qwen3", initializer_range=0.15)
    drafter = build(target, num_layers=1).train()
    distiller = Distiller(drafter, LossSection(num_steps=1), WHOLE)
    distiller.use_target(target)
    batch = batch_of(target, [30, 24])
    optimizer = torch.optim.Adam(distiller.parameters(), 3e-3)
    alphas = []
    for _ in range(20):
        optimizer.zero_grad()
        loss, sums = distiller(batch)
        (loss / sums["num_positions"].sum()).backward()
        optimizer.step()
        alphas.append(float(sums["alpha_sum"].sum() / sums["num_positions"].sum()))
    assert alphas[-1] > alphas[0] + 0.1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_vocabulary_that_is_not_trained_stays_as_it_came(tied: bool, parallel: bool) -> None:
    target = tiny_target("qwen3", tie_word_embeddings=tied)
    form: dict[str, Any] = {"mask_token_id": 5} if parallel else {}
    drafter = build(target, num_layers=1, train_vocabulary=False, **form).train()
    distiller = Distiller(drafter, LossSection(num_steps=2 if parallel else 1), WHOLE)
    distiller.use_target(target)
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    groups = param_groups(distiller, weight_decay=0.5)
    optimizer = torch.optim.AdamW(groups, 1e-2)
    distiller(batch_of(target, [30, 24]))[0].backward()
    optimizer.step()
    same = {name for name, w in drafter.named_parameters() if torch.equal(w, before[name])}
    names = {"lm.model.embed_tokens.weight"} | (set() if tied else {"lm.lm_head.weight"})
    assert same == names
    assert {id(w) for w in drafter.vocabulary_weights()} == {
        id(dict(drafter.named_parameters())[name]) for name in names
    }


@pytest.mark.parametrize("trained", [False, True])
def test_head_of_any_drafter_learns_where_the_recipe_says_so(trained: bool) -> None:
    target = tiny_target("qwen3", num_hidden_layers=4)
    vocab = DraftVocab(torch.arange(3, 103), target.vocab_size)
    for section in (
        Eagle3Section(train_head=trained, draft_vocab_size=100),
        DFlashSection(train_head=trained, draft_vocab_size=100, mask_token_id=5),
    ):
        drafter = build_drafter(section, target, (1, 2, 3), vocab, seed=0)
        assert drafter.get_parameter("lm_head.weight").requires_grad == trained, section.method


def test_plan_counts_a_frozen_vocabulary_as_not_trained() -> None:
    changes = ["drafter={method: small_lm, num_layers: 1}", "loss.num_steps=1"]
    whole = sizes_of(load_recipe(ROOT / "recipes" / "smoke.yaml", changes))
    frozen = sizes_of(
        load_recipe(ROOT / "recipes" / "smoke.yaml", [*changes, "drafter.train_vocabulary=false"])
    )
    assert whole.shape.num_trained == whole.shape.num_parameters == frozen.shape.num_parameters
    assert frozen.shape.num_trained == frozen.shape.num_parameters - frozen.num_head
    assert frozen.num_head > 0


@pytest.mark.parametrize("capture", ["generate", "pass"])
def test_states_without_captured_layers_are_stored_and_read(capture: str, tmp_path: Path) -> None:
    changes = ["drafter={method: small_lm}", "loss.num_steps=1", f"data.capture={capture}"]
    changes += ["data.num_prompts=8", "data.max_new_tokens=8", f"output_dir={tmp_path}"]
    recipe = load_recipe(ROOT / "recipes" / "smoke.yaml", changes)
    target = Target.load(recipe.target)
    prepared = prepare(recipe, target)
    assert prepared.store is not None
    row = prepared.train[0]
    states = prepared.store.get(row.id)
    assert states.aux_SF.shape == (len(row.ids_S), 0)
    online = with_states(target, collate([row]), ())
    assert online.hidden_BSH is not None
    # The last position of an answer that was cut short is never run over while it is written.
    n = len(row.ids_S) - 1
    torch.testing.assert_close(states.hidden_SH[:n], online.hidden_BSH[0, :n], rtol=1e-4, atol=1e-4)
    assert len(list(read_lines(recipe.run_dir / "data" / "responses.jsonl"))) == 8
