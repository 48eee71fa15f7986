"""The exported folder: what is written, and that it comes back whole."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.vocab import build_draft_vocab
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.vllm_config import TENSORS
from drafters.vllm_format import (
    TargetInfo,
    load,
    load_info,
    load_origin,
    save,
    serve_command,
)
from recipes.errors import UserError
from recipes.schema import load_recipe
from tests.tiny_exports import ORIGIN, ROOT, SHAPE, TARGET, H, V, config_of, make, write
from tests.tiny_targets import tiny_target

GOLDEN = Path(__file__).parent / "golden" / "vllm_config_eagle3.json"
SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2},
    "four_aux": {"aux_layers": (0, 3, 6, 8)},
    "one_aux": {"aux_layers": (8,)},
    "full_vocabulary": {"draft_vocab_size": V},
    "wide_heads": {"head_dim": 16},
    "eps": {"rms_norm_eps": 1e-5},
}


def logits(drafter: Eagle3) -> list[torch.Tensor]:
    """Of three rollout steps on fixed random inputs."""
    rng = torch.Generator().manual_seed(1)
    drafter.use_embeddings(torch.randn(V, H, generator=rng))
    ids = torch.randint(V, (2, 9), generator=rng)
    aux = torch.randn(2, 9, len(drafter.aux_layers) * H, generator=rng)
    with torch.no_grad():
        return [drafter.lm_head(x) for x in drafter.rollout(ids, aux, 3)]


# Round trips.


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_load_of_save_is_the_same_drafter(tmp_path, form, switches):
    drafter = make(**switches)
    loaded = load(write(drafter, tmp_path / "out", form), TARGET)
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    for ours, theirs in zip(logits(loaded), logits(drafter), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_for_bit(tmp_path, form, dtype):
    drafter = make()
    loaded = load(write(drafter, tmp_path / "out", form, dtype))
    for name, tensor in drafter.named_parameters():
        assert torch.equal(loaded.get_parameter(name), tensor.to(dtype)), name
    assert loaded.get_buffer("d2t").dtype == torch.int64
    assert loaded.rope.inv_freq.dtype == torch.float32


def test_second_export_is_the_first_byte_for_byte(tmp_path):
    first = write(make(), tmp_path / "first")
    second = write(load(first), tmp_path / "second")
    for name in ("config.json", "model.safetensors", "draftsmith.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_loaded_drafter_can_be_converted_and_trained(tmp_path):
    loaded = load(write(make(), tmp_path / "out", dtype=torch.bfloat16), dtype=torch.float32)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert all(p.requires_grad and not p.is_meta for p in loaded.parameters())


def test_every_tensor_of_the_table_is_exported_by_some_drafter(tmp_path):
    drafter = make(norm_before_fc=True, fc_norm=True)
    names = load_file(write(drafter, tmp_path / "out") / "model.safetensors").keys()
    generic = {name.replace(".0.", ".{i}.").replace(".1.", ".{i}.") for name in names}
    assert set(TENSORS.values()) <= generic


# What is written.


def test_config_is_the_recorded_one(tmp_path):
    config = config_of(write(make(), tmp_path / "out", dtype=torch.bfloat16))
    config["transformers_version"] = "*"
    assert config == json.loads(GOLDEN.read_text())


def test_speculators_config_holds_the_plain_one(tmp_path):
    plain = config_of(write(make(), tmp_path / "plain"))
    config = config_of(write(make(), tmp_path / "spec", "speculators"))
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]},
    }
    together = {**config, **config["transformer_layer_config"]}
    for key in plain.keys() - {"architectures", "eagle_config"}:
        assert together[key] == plain[key], key


def test_number_of_captured_layers_stands_where_each_form_reads_it(tmp_path):
    drafter = make(aux_layers=(1, 3, 5, 8))
    plain = config_of(write(drafter, tmp_path / "plain"))
    speculators = config_of(write(drafter, tmp_path / "spec", "speculators"))
    assert plain["num_aux_hidden_states"] == 4
    assert plain["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5, 8]
    assert speculators["transformer_layer_config"]["num_aux_hidden_states"] == 4


def test_tensor_names_are_those_of_the_engine(tmp_path):
    drafter = make(num_layers=2, fc_norm=True)
    names = sorted(load_file(write(drafter, tmp_path / "out") / "model.safetensors"))
    layer = [
        "input_layernorm.weight",
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "post_attention_layernorm.weight",
        "self_attn.k_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
    ]
    expected = ["d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"]
    expected += [f"fc_norm.{i}.weight" for i in range(3)]
    expected += [f"layers.{i}.{name}" for i in range(2) for name in layer]
    assert names == sorted([*expected, "layers.0.hidden_norm.weight"])


def test_origin_is_kept(tmp_path):
    folder = write(make(), tmp_path / "out")
    info = load_info(folder)
    assert (info["method"], info["num_trained_tokens"], info["commit"]) == (
        "eagle3",
        12345,
        "0123abc",
    )
    assert info["recipe"]["name"] == "smoke"
    assert load_origin(folder) == (TARGET, ORIGIN)
    card = (folder / "README.md").read_text()
    assert "org/tiny, revision abc123" in card
    assert "12,345 places of answers drafted from (repeats counted), at most 20 steps" in card
    assert serve_command(folder, TARGET, {"method": "eagle3"}, 3) in card


def test_card_names_epochs_where_they_are_the_limit(tmp_path):
    recipe = load_recipe(ROOT / "recipes/smoke.yaml", ["train.max_steps=null", "train.epochs=1.5"])
    origin = replace(ORIGIN, recipe=recipe.model_dump(mode="json"))
    save(make(), tmp_path / "out", "vllm", torch.float32, TARGET, origin)
    assert "at most 1.5 epochs\n" in (tmp_path / "out" / "README.md").read_text()


def test_origin_without_a_key_names_it(tmp_path):
    folder = write(make(), tmp_path / "out")
    info = load_info(folder)
    del info["commit"], info["target"]["path"]
    (folder / "draftsmith.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"draftsmith\.json: missing keys: target\.path, commit"):
        load_info(folder)


def test_serve_line_survives_a_shell():
    line = serve_command("my exports/run 1", TARGET, {"method": "eagle3"}, 4)
    words = shlex.split(line)
    assert words[:4] == ["vllm", "serve", "org/tiny", "--speculative-config"]
    assert json.loads(words[4]) == {
        "model": "my exports/run 1",
        "method": "eagle3",
        "num_speculative_tokens": 4,
    }


# Public cases.


def test_p24_d2t_holds_offsets_and_travels_with_the_weights(tmp_path):
    counts = torch.zeros(10, dtype=torch.int64)
    counts[[2, 3, 5, 9]] = 1
    vocab = build_draft_vocab(counts, 4, [])
    drafter = make(vocab_size=10, draft_vocab_size=4)
    drafter.get_buffer("d2t").copy_(vocab.d2t)
    folder = write(drafter, tmp_path / "out", vocab_size=10)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].tolist() == [2, 2, 3, 6] and tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 3, 5, 9]
    assert tensors["t2d"].dtype == torch.bool and len(tensors["t2d"]) == 10
    assert int(tensors["t2d"].sum()) == tensors["lm_head.weight"].shape[0] == 4
    assert load(folder).draft_ids_D.tolist() == [2, 3, 5, 9]


def test_p31_full_vocabulary_has_no_map(tmp_path):
    folder = write(make(draft_vocab_size=V), tmp_path / "out")
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()
    assert load(folder).draft_ids_D.tolist() == list(range(V))


def test_p34_layer_ids_are_written_with_their_convention(tmp_path):
    folder = write(make(aux_layers=(0, 2, 8)), tmp_path / "out")  # 8 = after the last of 8 layers
    assert config_of(folder)["eagle_aux_hidden_state_layer_ids"] == [0, 2, 8]
    info = load_info(folder)
    assert info["aux_layers"] == [0, 2, 8]
    assert (
        "after k decoder layers" in info["layer_ids"]
        and "before its final norm" in info["layer_ids"]
    )


@pytest.mark.parametrize("num", [1, 7])
def test_p37_number_of_draft_tokens_is_the_same_everywhere(tmp_path, num):
    origin = replace(ORIGIN, num_draft_tokens=num)
    save(make(), tmp_path / "out", "speculators", torch.float32, TARGET, origin)
    method = config_of(tmp_path / "out")["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == load_info(tmp_path / "out")["num_draft_tokens"] == num
    assert f'"num_speculative_tokens": {num}' in (tmp_path / "out" / "README.md").read_text()


def test_p40_explicit_ids_of_a_shallow_target_fit_fc(tmp_path):
    folder = write(make(aux_layers=(1, 2)), tmp_path / "out", num_layers=2)
    assert load_file(folder / "model.safetensors")["fc.weight"].shape == (H, 2 * H)
    assert load(folder).aux_layers == (1, 2)


def test_p43_embedding_is_the_first_half_of_the_first_layer(tmp_path):
    # [I, 0] as value projection: attention passes on the first half of the layer's input.
    drafter = make(num_key_value_heads=4)
    attention = drafter.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.copy_(torch.cat([torch.eye(H), torch.zeros(H, H)], 1))
        attention.o_proj.weight.copy_(torch.eye(H))
        drafter.layers[0].mlp.down_proj.weight.zero_()
    loaded = load(write(drafter, tmp_path / "out"))
    loaded.use_embeddings(torch.randn(V, H))
    ids, state = torch.tensor([[5]]), torch.randn(1, 1, H)
    layer = loaded.layers[0]
    with torch.no_grad():
        out = loaded.step(ids, state, torch.zeros(1, 1), [lambda *qkv: qkv[2]])
        expected = state + layer.input_layernorm(loaded.embed(ids))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16384,
    },
    "none": {"rope_type": "default", "rope_theta": 1000000.0},
}


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_p75_rope_is_carried_whole(tmp_path, form, rope):
    drafter = make(rope_parameters=rope, max_position_embeddings=65536)
    folder = write(drafter, tmp_path / "out", form, max_position_embeddings=65536)
    config = config_of(folder)
    layer = config if form == "vllm" else config["transformer_layer_config"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert layer["rope_parameters"] == rope
    assert layer["rope_theta"] == rope["rope_theta"]
    assert layer["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)

    x, positions = torch.zeros(1, 2, H), torch.tensor([[10, 20000]])
    trained = drafter.rope(x, positions)
    plain = LlamaConfig.from_dict({k: v for k, v in layer.items() if not k.startswith("eagle")})
    old = {key: value for key, value in layer.items() if key != "rope_parameters"}
    for other in (
        load(folder).rope,
        LlamaRotaryEmbedding(plain),
        LlamaRotaryEmbedding(LlamaConfig.from_dict(old)),  # the spelling of transformers 4
    ):
        for ours, theirs in zip(other(x, positions), trained, strict=True):
            assert torch.equal(ours, theirs)


def test_p77_head_dim_is_written_and_read(tmp_path):
    changes = {"hidden_size": 40, "target_hidden_size": 40, "head_dim": 16}
    drafter = make(**changes)
    folder = write(drafter, tmp_path / "out", hidden_size=40)
    config = config_of(folder)
    assert (config["head_dim"], config["num_attention_heads"]) == (16, 4)
    loaded = load(folder)
    assert loaded.layers[0].self_attn.q_proj.weight.shape == (64, 80)
    assert torch.equal(loaded.lm_head.weight, drafter.lm_head.weight)


def test_an_engine_is_told_a_revision_of_the_hub_alone(tmp_path):
    info = replace(TargetInfo.of(tiny_target()), path="org/name", revision="v2")
    assert info.hub_revision == "v2"
    assert replace(info, path=str(tmp_path)).hub_revision is None


def test_p78_tied_target_gives_an_untied_head_of_its_own(tmp_path):
    target = tiny_target(tie_word_embeddings=True)
    info = TargetInfo.of(target)
    drafter = Eagle3(
        Eagle3Config(
            **SHAPE
            | {
                "vocab_size": info.vocab_size,
                "aux_layers": (1, 2, 3),
                "max_position_embeddings": info.max_position_embeddings,
            }
        )
    )
    drafter.get_buffer("d2t").fill_(10)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.head_weight_VH[drafter.draft_ids_D])
    save(drafter, tmp_path / "out", "vllm", torch.float32, info, ORIGIN)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    head = load(tmp_path / "out", info).lm_head.weight
    assert head.shape == (64, 32)
    assert torch.equal(head, target.embed_weight_VH[10:74])


def test_p80_config_and_tensor_headers(tmp_path):
    folder = write(make(), tmp_path / "out", dtype=torch.bfloat16)
    config = config_of(folder)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (200, 64)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == ("I64", "BOOL")
    assert set(dtypes.values()) == {"BF16"}
    assert not any(name.startswith(("model.", "midlayer.")) for name in dtypes)
