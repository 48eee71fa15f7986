"""DFlash: what training computes is what decoding computes, and nothing else is seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from data.batch import Row, collate
from data.vocab import DraftVocab, full_vocab
from drafters import blocks
from drafters.base import Sampling
from drafters.blocks import block_attention, pack_blocks
from drafters.methods import build_drafter
from drafters.vllm_format import load, save
from eval.decode import DecodeSettings, decode
from recipes.drafter_sections import DFlashSection
from recipes.errors import UserError
from recipes.schema import LossSection
from tests.block_drafters import (
    TARGET,
    H,
    V,
    check_training_equals_decoding,
    make,
    make_batch,
    trained_logits,
)
from tests.decoding import greedy_answers
from tests.tiny_exports import ORIGIN, config_of, edit_config, edit_tensors
from tests.tiny_targets import tiny_target
from train.distiller import Distiller, count_slots
from train.loop import with_states

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"attention_bias": True},
    "reduced": {"draft_vocab_size": 12},
    "block_of_two": {"block_size": 2},
    "partial_rotary": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "no_gqa": {"num_key_value_heads": 4, "num_layers": 1},
}
# Rows of 11 and 7 tokens, the first 3 a prompt: anchors 3..9 and 3..5, fewer a depth later.
SLOTS = {4: (7 + 6 + 5) + (3 + 2 + 1), 2: 7 + 3}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_training_equals_decoding_at_every_depth(switches, monkeypatch):
    drafter = make(**switches)
    num_slots = check_training_equals_decoding(drafter, monkeypatch)
    assert num_slots == SLOTS[drafter.config.block_size]


def test_p36_nothing_at_or_behind_the_anchor_is_seen_but_its_token():
    # Anchor at position 6: its state and later ones, and later tokens, may not matter.
    drafter = make()
    batch = replace(make_batch(drafter, (11,)), anchors_A=torch.tensor([6]))
    before = trained_logits(drafter, batch)
    assert sorted(before) == [(6, 0), (6, 1), (6, 2)]
    aux_BSF, ids_BS = batch.aux_BSF.clone(), batch.ids_BS.clone()
    aux_BSF[:, 6:] += 1.0
    ids_BS[:, 7:] = 1
    after = trained_logits(drafter, replace(batch, aux_BSF=aux_BSF, ids_BS=ids_BS))
    assert all(torch.equal(before[slot], after[slot]) for slot in before)
    for change in ("state", "anchor"):  # while these do
        aux_BSF, ids_BS = batch.aux_BSF.clone(), batch.ids_BS.clone()
        if change == "state":
            aux_BSF[:, 5] += 1.0
        else:
            ids_BS[:, 6] = (ids_BS[:, 6] + 1) % V
        changed = trained_logits(drafter, replace(batch, aux_BSF=aux_BSF, ids_BS=ids_BS))
        assert all((before[slot] - changed[slot]).abs().max() > 1e-3 for slot in before), change


def test_p36_slot_j_learns_token_s_plus_j_from_position_s_plus_j_minus_1():
    # A drafter whose slots answer with one-hot logits at a known token, in a row that counts up.
    drafter = make(draft_vocab_size=V)
    batch = replace(make_batch(drafter, (11,)), anchors_A=torch.tensor([4]))
    slots = drafter.slots(batch, 3)
    assert slots.anchor_N.tolist() == [4, 4, 4] and slots.depth_N.tolist() == [0, 1, 2]
    blocks_ = pack_blocks(torch.tensor([4]), batch.ids_BS.shape)
    outputs_1LH = drafter.run_blocks(batch, blocks_)
    torch.testing.assert_close(slots.head_NW, outputs_1LH[0, 1:])  # the anchor's slot has no loss


def test_p37_a_block_drafts_one_token_fewer_than_it_is_long():
    drafter = make(block_size=8)
    state = drafter.start([[1, 2]], 16)
    drafter.observe(state, torch.tensor([[2, 3]]), torch.randn(1, 2, 64), torch.tensor([2]))
    assert drafter.config.max_draft == 7
    assert drafter.propose(state, 20, Sampling(), None).tokens_BK.shape == (1, 7)
    whole = drafter.propose(state, 7, Sampling(), None).tokens_BK
    assert torch.equal(drafter.propose(state, 3, Sampling(), None).tokens_BK, whole[:, :3])
    with pytest.raises(UserError, match=r"loss.num_steps 8: .*block_size 8 drafts 7"):
        drafter.slots(make_batch(drafter), 8)


def test_block_attention_equals_one_masked_softmax(monkeypatch):
    torch.manual_seed(0)
    B, N, G, S, L, width = 2, 2, 3, 7, 3, 4
    packed = pack_blocks(torch.tensor([1, 4, 5, 7 + 6]), torch.Size([B, S]))
    A = 3
    assert packed.position_BA.tolist() == [[1, 4, 5], [6, 0, 0]] and packed.reach == [6, 4, 5]
    assert packed.index_X[[1, 4, 5, 13]].tolist() == [0, 1, 2, 3] and packed.index_X.max() == 3
    shapes = ((B, N * G, A * L), (B, N, S), (B, N, S), (B, N, A * L), (B, N, A * L))
    leaves = [torch.randn(*shape, width, requires_grad=True) for shape in shapes]
    query, context_key, context_value, key, value = leaves
    sees_LL = torch.ones(L, L, dtype=torch.bool).tril()

    mask = torch.zeros(B, A * L, S + A * L, dtype=torch.bool)
    for b in range(B):
        for a in range(A):
            for j in range(L):
                mask[b, a * L + j, : int(packed.position_BA[b, a])] = True
                mask[b, a * L + j, S + a * L : S + a * L + j + 1] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([context_key, key], 2),
        torch.cat([context_value, value], 2),
        attn_mask=mask[:, None],
        enable_gqa=True,
    )
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for limit in (2**27, 1):  # all at once, block by block
        monkeypatch.setattr(blocks, "MAX_SCORES", limit)
        got = block_attention(query, (context_key, context_value), key, value, packed, sees_LL)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad((got * weight).sum(), leaves), wanted)


def test_rows_of_a_batch_are_independent_and_a_draft_leaves_nothing():
    drafter = make()
    batch = make_batch(drafter, (9, 9, 9))
    first, second = [5, 2, 4], [1, 3, 0]

    def drive(rows: list[int]) -> torch.Tensor:
        state = drafter.start([[1]] * len(rows), 16)
        ids_BS, aux_BSF = batch.ids_BS[rows], batch.aux_BSF[rows]
        num_B = torch.tensor([first[b] for b in rows])
        drafter.observe(state, ids_BS[:, 1:6], aux_BSF[:, :5], num_B)
        drafter.propose(state, 3, Sampling(), None)
        more_B = torch.tensor([second[b] for b in rows])
        at_B3 = num_B[:, None] + torch.arange(3)
        aux_B3F = aux_BSF.gather(1, at_B3[..., None].expand(-1, -1, aux_BSF.shape[-1]))
        drafter.observe(state, ids_BS.gather(1, at_B3 + 1), aux_B3F, more_B)
        assert state.cache.lengths_B.tolist() == (num_B + more_B).tolist()
        return drafter.run_block(state)

    together = drive([0, 1, 2])
    for b in range(3):
        torch.testing.assert_close(together[b], drive([b])[0], atol=1e-5, rtol=1e-4)


def test_gradient_reaches_the_drafter_and_nothing_of_the_target():
    drafter = make(draft_vocab_size=12)
    drafter.lm_head.weight.requires_grad_(False)
    batch = make_batch(drafter)
    embedding, head = torch.randn(V, H), torch.randn(V, H)
    drafter.use_weights(embedding, head)
    drafter.slots(batch, 3).head_NW.square().sum().backward()
    without = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == ["lm_head.weight"]
    assert embedding.grad is None and head.grad is None


def test_bf16_does_not_round_the_rotary_table():
    drafter = make()
    before = drafter._rope[0].inv_freq.clone()
    drafter.bfloat16()
    assert drafter._rope[0].inv_freq.dtype == torch.float32
    assert torch.equal(drafter._rope[0].inv_freq, before)


@pytest.mark.parametrize(
    ("num_layers", "num_aux", "expected"),
    [(36, 5, (2, 10, 18, 26, 34)), (40, 5, (2, 11, 20, 29, 38)), (8, 5, (2, 3, 4, 5, 6))],
)
def test_default_layers_are_those_of_the_published_checkpoints(num_layers, num_aux, expected):
    # Qwen3-4B and 8B: 0-based 1, 9, 17, 25, 33; Qwen3-14B: 1, 10, 19, 28, 37.
    section = DFlashSection(num_aux_layers=num_aux)
    assert section.default_aux_layers(num_layers) == expected


def test_p40_a_shallow_target_needs_fewer_layers():
    with pytest.raises(UserError, match="has 5 layers, too few for 5 default aux layers"):
        DFlashSection().default_aux_layers(5)
    assert DFlashSection(num_aux_layers=2).default_aux_layers(5) == (2, 3)
    assert DFlashSection(num_aux_layers=1).default_aux_layers(5) == (3,)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral"])
def test_real_shapes_train_decode_and_export(kind, tmp_path):
    head_dim = 12 if kind == "gemma3" else 8  # P77: heads * head_dim is not the width
    target = tiny_target(kind, head_dim=head_dim)
    reduced = kind in ("llama", "gemma3")
    vocab = DraftVocab(torch.arange(0, 264, 2), 264) if reduced else full_vocab(264)
    section = DFlashSection(
        num_layers=1,
        block_size=4,
        draft_vocab_size=132 if reduced else None,
        num_anchors=4,
        train_head=reduced,
    )
    drafter = build_drafter(section, target, (1, 2), vocab, seed=0)
    assert drafter.config.head_dim == head_dim and drafter.num_anchors == 4
    distiller = Distiller(drafter, LossSection(num_steps=3, renormalize=False), vocab)
    distiller.use_target(target)
    g = torch.Generator().manual_seed(0)
    rows = [
        Row(id=str(n), ids_S=torch.randint(0, 256, (n,), generator=g), mask_S=torch.arange(n) > 3)
        for n in (12, 9)
    ]
    batch = replace(
        with_states(target, collate(rows), (1, 2)), anchors_A=torch.tensor([4, 7, 9, 16])
    )
    frozen = {n: p.clone() for n, p in target.model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=3e-3), []
    for _ in range(12):
        loss = distiller(batch)[0] / count_slots(batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in target.model.named_parameters())

    drafter.eval()
    prompts, settings = [[3, 4, 5], [9]], DecodeSettings(max_new_tokens=8, num_draft=3)
    rows_, _ = decode(target, drafter, prompts, settings)
    answers = greedy_answers(target, prompts, 8)
    assert [row.ids for row in rows_] == [answers[tuple(p)] for p in prompts]

    info = replace(TARGET, vocab_size=264)
    for form in ("vllm", "speculators"):
        save(drafter, tmp_path / form, form, torch.float32, info, ORIGIN)
        back = load(tmp_path / form, info)
        back.use_target(target)
        again, _ = decode(target, back, prompts, settings)
        assert [r.drafted_ids for row in again for r in row.rounds] == [
            r.drafted_ids for row in rows_ for r in row.rounds
        ]


def test_random_anchors_follow_from_the_seed():
    drafter = make()
    drafter.num_anchors = 2
    batch = make_batch(drafter, (40, 30))

    def anchors(seed: int) -> list[int]:
        return drafter.with_anchors(replace(batch, seed=seed), 3).anchors_A.tolist()

    assert anchors(1) == anchors(1) != anchors(2)
    assert len(anchors(1)) == 4 and sum(a < 40 for a in anchors(1)) == 2


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("switches", [{}, {"draft_vocab_size": 12, "causal": True}])
def test_export_loads_again_equal(form, switches, tmp_path):
    drafter = make(**switches)
    save(drafter, tmp_path / "e", form, torch.float32, TARGET, ORIGIN)
    back = load(tmp_path / "e", TARGET)
    assert back.config == drafter.config
    states = drafter.state_dict(), back.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    back.use_weights(drafter._embedding[0], drafter._target_head[0])
    batch = make_batch(drafter)
    ours, theirs = trained_logits(drafter, batch), trained_logits(back, batch)
    assert all(torch.equal(ours[slot], theirs[slot]) for slot in ours)


def test_p78_a_whole_vocabulary_leaves_the_head_out_and_a_reduced_one_ships_it(tmp_path):
    save(make(), tmp_path / "whole", "vllm", torch.float32, TARGET, ORIGIN)
    save(make(draft_vocab_size=12), tmp_path / "part", "vllm", torch.float32, TARGET, ORIGIN)
    names: dict[str, set[str]] = {}
    for folder in ("whole", "part"):
        edit_tensors(tmp_path / folder, lambda t, folder=folder: names.update({folder: set(t)}))
    assert names["part"] - names["whole"] == {"lm_head.weight", "d2t", "t2d"}
    assert not any("embed" in name for name in names["part"])
    edit_tensors(tmp_path / "part", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"missing tensors: lm_head.weight"):
        load(tmp_path / "part")


def test_p34_layer_ids_are_one_lower_in_the_plain_form(tmp_path):
    for form in ("vllm", "speculators"):
        save(make(), tmp_path / form, form, torch.float32, TARGET, ORIGIN)
    plain, other = config_of(tmp_path / "vllm"), config_of(tmp_path / "speculators")
    assert plain["architectures"] == ["DFlashDraftModel"] and plain["model_type"] == "qwen3"
    assert plain["dflash_config"]["target_layer_ids"] == [0, 1]
    assert other["aux_hidden_state_layer_ids"] == [1, 2]
    proposal = other["speculators_config"]["proposal_methods"][0]
    assert (plain["block_size"], proposal["speculative_tokens"]) == (4, 3)  # P37


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("vllm", lambda c: c["dflash_config"].pop("mask_token_id"), "missing keys: mask_token_id"),
        ("vllm", lambda c: c.pop("dflash_config"), "missing keys: dflash_config"),
        ("vllm", lambda c: c.update(block_size=1), "leaves no slot to draft with"),
        ("vllm", lambda c: c.pop("block_size"), "missing keys: block_size"),
        ("vllm", lambda c: c["dflash_config"].update(mask_token_id=40), "is no token"),
        ("vllm", lambda c: c["dflash_config"].update(target_layer_ids=[1, 0]), "ascending"),
        ("vllm", lambda c: c["dflash_config"].update(target_layer_ids=[0, 9]), "not below 3"),
        ("vllm", lambda c: c["dflash_config"].pop("causal"), "dflash_config is"),
        ("vllm", lambda c: c.update(rope_theta=5.0), "rope_theta is 5.0"),
        ("vllm", lambda c: c.update(num_key_value_heads=3), "do not fit"),
        ("vllm", lambda c: c.update(dtype="int8"), "dtype 'int8' is none of"),
        ("speculators", lambda c: c.pop("transformer_layer_config"), "is missing"),
        ("speculators", lambda c: c.pop("sliding_window_non_causal"), "missing keys: sliding"),
        ("speculators", lambda c: c.update(sample_from_anchor=True), "sample_from_anchor is True"),
    ],
)
def test_damaged_config_is_refused(form, change, message, tmp_path):
    save(make(), tmp_path / "e", form, torch.float32, TARGET, ORIGIN)
    edit_config(tmp_path / "e", change)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "e", TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("hidden_norm.weight"), "missing tensors: hidden_norm.weight"),
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "missing tensors: layers.1"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 32)}), r"shape \[32, 32\]"),
        (lambda t: t.update(embed=torch.zeros(2)), "unexpected tensors: embed"),
    ],
)
def test_damaged_weights_are_refused(change, message, tmp_path):
    save(make(), tmp_path / "e", "vllm", torch.float32, TARGET, ORIGIN)
    edit_tensors(tmp_path / "e", change)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "e", TARGET)


def test_layers_that_no_engine_can_name_are_refused_before_training():
    target = tiny_target()
    for layers in ((0, 1), (1, 3)):
        with pytest.raises(UserError, match=r"after layers 1 to 2 of the target's 3"):
            build_drafter(DFlashSection(), target, layers, full_vocab(264), seed=0)
