"""MTP layers: MiMo's order and norms, first weights, and their place among the target's tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from data.embedded import byte_tokenizer
from data.target import Target
from data.vocab import DraftVocab
from drafters.export_info import Origin, TargetInfo, serve_command
from drafters.methods import METHODS, build_drafter
from drafters.mtp import MTP
from drafters.mtp_stitch import stitch
from drafters.vllm_format import save
from recipes.drafter_sections import MTPSection
from recipes.errors import UserError
from recipes.schema import TargetSection
from tests.tiny_exports import ORIGIN, TARGET
from tests.tiny_targets import tiny_target

BLOCK = "model.mtp_layers.0.self_attn.q_proj"


def make(target: Target, **section: Any) -> MTP:
    vocab = DraftVocab(torch.arange(target.vocab_size), target.vocab_size)
    aux = (target.num_layers,)
    drafter = build_drafter(MTPSection(**section), target, aux, vocab, seed=0)
    assert isinstance(drafter, MTP)
    return drafter.eval()


def write_target(folder: Path, tied: bool = False) -> Path:
    """A Llama of one safetensors file, with its tokenizer."""
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=257,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load_target(folder: Path) -> Target:
    return Target.load(TargetSection(model=str(folder), dtype="float32", device="cpu"))


def export(drafter: MTP, target: Target, folder: Path, origin: Origin = ORIGIN) -> Path:
    save(drafter, folder, "vllm", torch.float32, TargetInfo.of(target), origin)
    return folder


def only_queries(query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
    return query


def test_p43_the_state_stands_before_the_embedding():
    """MiMo's order: the first half of the projection reads the state, the second the token."""
    target = tiny_target("llama", attention_bias=False)
    drafter = make(target)
    H = drafter.config.hidden_size
    state = torch.randn(1, 1, H)
    with torch.no_grad():
        for weight in drafter.layers.parameters():
            weight.zero_()  # the layer passes on what the projection gives
        for first, second, reads in ((1.0, 0.0, "state"), (0.0, 1.0, "token")):
            eye = torch.eye(H)
            drafter.fc.weight.copy_(torch.cat([first * eye, second * eye], -1))
            ids = torch.tensor([[7]])
            out = drafter.step(ids, state, torch.tensor([[3]]), [only_queries])
            source = state if reads == "state" else drafter.embed(ids)
            expected = drafter.norm(drafter.hidden_norm(source))  # both norms are still ones
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_embedding_at_position_0_is_zero_and_at_no_other():
    drafter = make(tiny_target("qwen3"))
    state = torch.randn(1, 1, 32)
    outputs = {
        (token, place): drafter.step(
            torch.tensor([[token]]),
            state,
            torch.tensor([[place]]),
            [only_queries],
        )
        for token in (5, 6)
        for place in (0, 1)
    }
    assert torch.equal(outputs[5, 0], outputs[6, 0])
    assert not torch.equal(outputs[5, 1], outputs[6, 1])


def test_the_state_that_is_fed_back_is_what_the_head_read():
    drafter = make(tiny_target("llama"))
    state = torch.randn(2, 32)
    assert drafter.head_input(state) is state


def test_sizes_and_switches_are_the_targets():
    shape = make(tiny_target("qwen3", head_dim=12)).config
    assert (shape.head_dim, shape.qk_norm, shape.qkv_bias) == (12, True, False)
    shape = make(tiny_target("llama")).config  # its attention has biases
    assert (shape.head_dim, shape.qk_norm, shape.qkv_bias) == (8, False, True)
    with pytest.raises(ValueError, match="an MTP layer has the target's sizes"):
        MTPSection(hidden_size=64)


def test_init_target_copies_the_last_layer_and_the_final_norm():
    target = tiny_target("qwen3")
    with torch.no_grad():
        target.decoder.norm.weight.normal_(1.0, 0.3)
    drafter = make(target, init="target")
    source = target.decoder.layers[-1].state_dict()
    for name, weight in drafter.layers[0].named_parameters():
        assert torch.equal(weight, source[name]), name
    torch.testing.assert_close(drafter.norm.weight, target.decoder.norm.weight)
    assert torch.equal(drafter.fc.weight[:, :32], torch.eye(32))
    assert not drafter.fc.weight[:, 32:].any()


def test_init_target_refuses_layers_with_norms_that_it_has_no_place_for():
    with pytest.raises(UserError, match="norms behind attention and MLP"):
        make(tiny_target("gemma3"), init="target")


def test_init_native_without_such_a_layer_says_so(tmp_path):
    target = load_target(write_target(tmp_path / "target"))
    with pytest.raises(UserError, match=r"has no model\.mtp_layers\.0\..* \(13 of 13"):
        make(target, init="native")


@pytest.mark.parametrize("tied", [False, True])
def test_stitched_and_read_as_native_it_is_the_same_layer(tmp_path, tied):
    folder = write_target(tmp_path / "target", tied)
    target = load_target(folder)
    drafter = make(target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(1.0, 0.3)
    out = tmp_path / "stitched"
    stitch(folder, export(drafter, target, tmp_path / "export"), out)

    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1
    assert config["tie_word_embeddings"] is False
    files = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len([n for n in files if n.startswith("model.mtp_layers.0.")]) == 13 + 3
    assert "lm_head.weight" in files
    for name, file in files.items():
        assert name in load_file(out / file), name

    # The target itself is the same model: a Qwen2 whose biases are zero.
    own = {**config, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (out / "config.json").write_text(json.dumps(own))
    again = load_target(out)
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again.model(ids).logits, target.model(ids).logits)
    native = make(again, init="native")  # now with biases, all zero
    assert native.config.qkv_bias
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, native.get_parameter(name)), name
    assert not native.get_parameter("layers.0.self_attn.q_proj.bias").any()


def test_a_layer_that_the_target_brings_is_replaced(tmp_path):
    folder = write_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    old = {f"{BLOCK}.weight": torch.zeros(32, 32)}
    save_file(tensors | old, folder / "model.safetensors", metadata={"format": "pt"})
    target = load_target(folder)
    export(make(target), target, tmp_path / "export")
    stitch(folder, tmp_path / "export", tmp_path / "stitched")
    assert f"{BLOCK}.weight" not in load_file(tmp_path / "stitched" / "target.safetensors")
    assert load_file(tmp_path / "stitched" / "mtp.safetensors")[f"{BLOCK}.weight"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3' is none of mimo, qwen2, llama, mistral"),
        ({"head_dim": 16}, "head_dim 16 is not hidden_size / heads"),
        ({"model_type": "mistral", "sliding_window": 64}, "its attention has a window"),
        ({"mlp_bias": True}, "its MLPs have biases"),
        ({"vocab_size": 300}, "the layer was trained for another target"),
    ],
)
def test_targets_that_no_engine_serves_with_such_a_layer_are_refused(tmp_path, change, message):
    folder = write_target(tmp_path / "target")
    target = load_target(folder)
    export(make(target), target, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        stitch(folder, tmp_path / "export", tmp_path / "stitched")
    assert not (tmp_path / "stitched").exists()


def test_the_line_that_serves_names_the_joined_target_and_no_model():
    line = serve_command("runs/x/export", TARGET, METHODS["mtp"].form.engine, 2)
    assert line == (
        "vllm serve runs/x/export-with-target --speculative-config "
        """'{"method": "mtp", "num_speculative_tokens": 2}'"""
    )
