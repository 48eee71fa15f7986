"""What would load silently as something else is refused, at save and at load."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.vllm_format import load
from recipes.errors import UserError
from tests.tiny_exports import TARGET, D, H, V, config_of, edit_config, edit_tensors, make, write


def test_p24_map_that_was_never_set_is_refused(tmp_path):
    drafter = make()
    drafter.get_buffer("d2t").zero_()
    with pytest.raises(UserError, match="d2t is all zeros"):
        write(drafter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_p24_absolute_ids_are_refused(tmp_path):
    drafter = make()
    drafter.get_buffer("d2t").copy_(drafter.draft_ids_D)  # ids 3i + 1 where 2i + 1 belongs
    with pytest.raises(UserError, match="absolute ids"):
        write(drafter, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("t2d"), "d2t without t2d"),
        (lambda t: t.pop("d2t"), "t2d without d2t"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "no d2t and t2d"),
        (
            lambda t: t.update(d2t=t["d2t"][:-1]),
            r"d2t has shape \[63\], the config asks for \[64\]",
        ),
        (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d has shape \[199\]"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t is torch.float32, expected torch.int64"),
        (lambda t: t.update(t2d=~t["t2d"]), "name different tokens"),
    ],
)
def test_p31_broken_map_is_refused(tmp_path, change, message):
    folder = write(make(), tmp_path / "out")
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_p31_map_of_a_full_vocabulary_is_refused(tmp_path):
    folder = write(make(draft_vocab_size=V), tmp_path / "out")
    edit_tensors(folder, lambda t: t.update(d2t=torch.zeros(V, dtype=torch.int64)))
    with pytest.raises(UserError, match="unexpected tensors: d2t"):
        load(folder)


@pytest.mark.parametrize("aux_layers", [(2, 4, 9), (2, 5, 4), (-1, 2, 4)])
def test_p34_layer_ids_that_an_engine_reads_otherwise_are_refused(tmp_path, aux_layers):
    with pytest.raises(UserError, match="aux layers"):
        write(make(aux_layers=aux_layers), tmp_path / "out")


def test_p40_repeated_layer_ids_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"aux layers \[1, 1, 1\] must be ascending and distinct"):
        write(make(aux_layers=(1, 1, 1)), tmp_path / "out", num_layers=5)


def test_p75_two_spellings_of_rope_must_agree(tmp_path):
    folder = write(make(), tmp_path / "out")
    edit_config(folder, lambda c: c.update(rope_theta=500000.0))
    with pytest.raises(UserError, match=r"rope_theta is 500000\.0; .* it would be 10000\.0"):
        load(folder)


def test_p77_width_that_is_no_multiple_of_the_heads_is_refused(tmp_path):
    folder = write(make(), tmp_path / "out")
    edit_config(folder, lambda c: c.update(hidden_size=42, num_attention_heads=5))
    with pytest.raises(UserError, match="hidden_size must be a multiple of the heads"):
        load(folder)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_p78_each_missing_tensor_is_named(tmp_path, form):
    folder = write(make(norm_before_fc=True, fc_norm=True, num_layers=2), tmp_path / "out", form)
    whole = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in whole
    for name in whole.keys() - {"d2t", "t2d"}:
        save_file({k: v for k, v in whole.items() if k != name}, folder / "model.safetensors")
        with pytest.raises(UserError, match=f"missing tensors: {name}"):
            load(folder)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_each_missing_key_is_named(tmp_path, form):
    folder = write(make(), tmp_path / "out", form)
    text = (folder / "config.json").read_text()
    whole = json.loads(text)
    free = {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version"}
    free |= {"architectures", "speculators_model_type"}  # these say which form it is
    free |= {"speculators_version", "speculators_config", "transformer_layer_config"}
    free |= {"tie_word_embeddings"} if form == "speculators" else set()
    for key in whole.keys() - free:
        (folder / "config.json").write_text(text)
        edit_config(folder, lambda c, key=key: c.pop(key))
        with pytest.raises(UserError, match=rf"config\.json: missing keys: {key}"):
            load(folder)
    for key in whole.get("transformer_layer_config", {}).keys() - free - {"dtype"}:
        (folder / "config.json").write_text(text)
        edit_config(folder, lambda c, key=key: c["transformer_layer_config"].pop(key))
        with pytest.raises(UserError, match=rf"config\.json: missing keys: {key}"):
            load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no drafter that is known here"),
        ({"hidden_size": "wide"}, "hidden_size: Input should be a valid integer"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers is '1'"),
        ({"draft_vocab_size": 300}, "draft_vocab_size 300 is above vocab_size 200"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "must be ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}, "eagle_config is"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({"norm_before_residual": "yes please"}, "norm_before_residual: Input should be"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"target_hidden_size": 64}, "reads the target's embedding"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "no drafter has"),
        ({"dtype": "float64"}, "dtype 'float64' is none of float32"),
        ({"dtype": "bfloat16"}, "fc.weight is torch.float32, config.json says torch.bfloat16"),
        ({"intermediate_size": 56}, r"gate_proj.weight has shape \[48, 32\], expected \[56, 32\]"),
        ({"fc_norm": True}, r"missing tensors: fc_norm\.0\.weight, fc_norm\.1\.weight"),
        ({"num_hidden_layers": 2}, r"missing tensors: layers\.1\."),
        ({"draft_vocab_size": 60}, r"lm_head.weight has shape \[64, 32\], expected \[60, 32\]"),
    ],
)
def test_config_that_contradicts_itself_or_the_weights_is_refused(tmp_path, change, message):
    folder = write(make(), tmp_path / "out")
    edit_config(folder, lambda c: c.update(change))
    with pytest.raises(UserError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_unexpected_tensor_is_named(tmp_path):
    folder = write(make(), tmp_path / "out")
    edit_tensors(folder, lambda t: t.update({"model.fc.weight": t.pop("fc.weight")}))
    with pytest.raises(
        UserError, match=r"missing tensors: fc\.weight; .*unexpected tensors: model\.fc"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 201}, "vocab_size is 200, that of the target org/tiny is 201"),
        ({"hidden_size": 64}, "target_hidden_size is 32, that of the target org/tiny is 64"),
        ({"max_position_embeddings": 9}, "max_position_embeddings is 512"),
        ({"num_layers": 4}, r"aux layers \[2, 4, 5\] are not within 0..4"),
    ],
)
def test_another_target_is_refused_at_save_and_load(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        write(make(), tmp_path / "other", **change)
    folder = write(make(), tmp_path / "out")
    with pytest.raises(UserError, match=message):
        load(folder, replace(TARGET, **change))


def test_files_that_are_absent_or_damaged_are_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere/config\.json: no such file"):
        load(tmp_path / "nowhere")
    folder = write(make(), tmp_path / "out")
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: no such file"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object"):
        load(folder)


def test_head_of_another_size_is_refused_at_save(tmp_path):
    drafter = make()
    drafter.lm_head = torch.nn.Linear(H, D + 1, bias=False)
    with pytest.raises(
        UserError, match=r"lm_head.weight has shape \[65, 32\], expected \[64, 32\]"
    ):
        write(drafter, tmp_path / "out")


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (1e6, torch.float16)])
def test_values_that_are_not_finite_are_refused_at_save(tmp_path, value, dtype):
    drafter = make()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = value
    with pytest.raises(UserError, match=r"fc\.weight is not finite"):
        write(drafter, tmp_path / "out", dtype=dtype)


def test_dtype_that_no_engine_serves_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"dtype torch\.float64 is none of"):
        write(make(), tmp_path / "out", dtype=torch.float64)


def test_p72_foreign_files_are_kept(tmp_path):
    folder = write(make(), tmp_path / "out")
    (folder / "thesis.docx").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.docx"):
        write(make(), folder)
    assert (folder / "thesis.docx").read_text() == "mine"
    (folder / "thesis.docx").unlink()
    write(make(), folder, "speculators")
    assert "speculators_config" in config_of(folder)


def test_p72_model_of_somebody_else_is_kept(tmp_path):
    folder = write(make(), tmp_path / "out")
    (folder / "draftsmith.json").unlink()
    with pytest.raises(UserError, match=r"config\.json, model\.safetensors; name another"):
        write(make(), folder)
