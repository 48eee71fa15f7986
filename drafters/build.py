"""A fresh EAGLE-3 drafter for a target: its shape from target and recipe, its first weights.

Dimension letters: D draft vocabulary, V target vocabulary, H width.
"""

import torch
from torch import nn

from data.target import Target
from data.vocab import DraftVocab
from drafters.eagle3 import Eagle3, Eagle3Config
from recipes.errors import UserError
from recipes.schema import DrafterSection

INIT_STD = 0.02


def eagle3_config(
    section: DrafterSection,
    target_config: dict[str, object],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> Eagle3Config:
    """The drafter's shape: the recipe's values, else the target's (a transformers config dict)."""
    fields = target_config
    heads = section.num_attention_heads or _int(fields["num_attention_heads"])
    hidden = section.hidden_size or _int(fields["hidden_size"])
    if hidden != _int(fields["hidden_size"]):
        raise UserError(
            f"drafter.hidden_size {hidden}: the drafter shares the target's embedding, so it must "
            f"be {fields['hidden_size']} or left out"
        )
    kv_heads = section.num_key_value_heads or _int(fields.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UserError(
            f"drafter.num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _int(fields.get("head_dim") or 0)
    if not head_dim:
        if hidden % heads:
            raise UserError(
                f"hidden_size {hidden} is no multiple of {heads} heads and the target names no "
                "head_dim; set drafter.num_attention_heads"
            )
        head_dim = hidden // heads
    rope = fields.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
    assert isinstance(rope, dict)
    if "rope_theta" not in rope:  # one set for each layer type: the drafter's layers are global
        rope = rope["full_attention"]
    return Eagle3Config(
        target_hidden_size=_int(fields["hidden_size"]),
        hidden_size=hidden,
        intermediate_size=section.intermediate_size or _int(fields["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_int(fields["vocab_size"]),
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        num_layers=section.num_layers,
        rms_norm_eps=float(str(fields.get("rms_norm_eps") or 1e-6)),
        rope_parameters=dict(rope),
        max_position_embeddings=_int(fields.get("max_position_embeddings") or 2048),
        norm_before_residual=section.norm_before_residual,
        norm_before_fc=section.norm_before_fc,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
    )


def build_eagle3(
    section: DrafterSection,
    target: Target,
    aux_layers: tuple[int, ...],
    vocab: DraftVocab,
    seed: int,
) -> Eagle3:
    """A drafter in fp32 on the target's device; its first weights by `seed` or from the target."""
    config = eagle3_config(section, target.config.to_dict(), aux_layers, vocab.size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3(config)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
    drafter.get_buffer("d2t").copy_(vocab.d2t)
    with torch.no_grad():
        if section.head_init == "target":
            drafter.lm_head.weight.copy_(target.head_weight_VH[vocab.ids_D.to(target.device)])
            drafter.norm.weight.copy_(target.decoder.norm.weight)
        if section.init == "target":
            _warm_start(drafter, target)
    drafter.lm_head.weight.requires_grad_(section.train_head)
    drafter.to(target.device).use_embeddings(target.embed_weight_VH)
    return drafter


def _warm_start(drafter: Eagle3, target: Target) -> None:
    """Start as the target's last layer on its last captured state.

    fc passes that state through; the first layer's half for the state is the target's last layer,
    its half for the embedding stays random; deeper layers copy the last layer as it is.
    """
    source = target.decoder.layers[-1].state_dict()
    H = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -H:].copy_(torch.eye(H))
    for index, layer in enumerate(drafter.layers):
        for name, parameter in layer.named_parameters():
            first_norm = index == 0 and name in ("input_layernorm.weight", "hidden_norm.weight")
            values = source.get("input_layernorm.weight" if first_norm else name)
            if name == "input_layernorm.weight" and index == 0:
                continue  # norm of the embedding: ones
            part: torch.Tensor = parameter
            if index == 0 and name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                part = parameter[:, H:]
            if values is None or values.shape != part.shape:
                raise UserError(
                    f"drafter.init 'target': {name} of the drafter has shape {list(part.shape)}, "
                    f"the target's last layer {None if values is None else list(values.shape)}; "
                    "use init: random, or leave the drafter's sizes out"
                )
            part.copy_(values)


def _int(value: object) -> int:
    return int(str(value))
