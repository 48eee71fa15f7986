"""DSpark: the sequential head, the confidence head, and lengths that keep the target's law."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from data.vocab import full_vocab
from drafters.base import Sampling
from drafters.dspark import DSpark, DSparkSlots, MarkovHead
from drafters.methods import build_drafter
from drafters.vllm_format import load, save
from eval.decode import DecodeSettings, decode
from eval.lossless import pit_p_value
from recipes.drafter_sections import DSparkSection
from recipes.errors import UserError
from recipes.schema import LossSection
from tests.block_drafters import (
    TARGET,
    check_training_equals_decoding,
    for_target,
    make,
    make_batch,
    trained_logits,
)
from tests.decoding import PROMPTS, greedy_answers, small_target
from tests.tiny_exports import ORIGIN, config_of, edit_config, edit_tensors
from train.calibration import calibrate, calibration_error, fit_temperatures
from train.distiller import Distiller
from train.loop import with_states

SWITCHES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "bonus_anchor": {"sample_from_anchor": False, "markov_head_type": "rnn"},
    "reduced": {"draft_vocab_size": 12, "causal": True},
    "no_confidence": {"confidence_head": False},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_training_equals_decoding_at_every_depth(switches, monkeypatch):
    # Rows of 11 and 7 tokens, the first 3 a prompt: anchors 3..9 and 3..5, fewer a depth later.
    drafter = make("dspark", **switches)
    num_slots = check_training_equals_decoding(drafter, monkeypatch)
    depths = 4 if drafter.config.sample_from_anchor else 3
    assert num_slots == sum([7, 6, 5, 4][:depths]) + sum([3, 2, 1, 0][:depths])


@pytest.mark.parametrize(("from_anchor", "most"), [(True, 8), (False, 7)])
def test_p37_the_anchor_may_draft_too(from_anchor, most):
    drafter = make("dspark", block_size=8, sample_from_anchor=from_anchor)
    state = drafter.start([[1, 2]], 16)
    drafter.observe(state, torch.tensor([[2, 3]]), torch.randn(1, 2, 64), torch.tensor([2]))
    assert drafter.config.max_draft == most
    assert drafter.propose(state, 20, Sampling(), None).tokens_BK.shape == (1, most)
    with pytest.raises(UserError, match=rf"block_size 8 drafts {most} tokens"):
        drafter.slots(make_batch(drafter), most + 1)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_sequential_head_is_its_formula(kind):
    config = make("dspark", markov_head_type=kind).config
    torch.manual_seed(1)
    head, R = MarkovHead(config), 6
    e, h, s = torch.randn(R), torch.randn(32), torch.randn(R)
    f, after = head(e, h, s)
    if kind == "vanilla":
        expected, state = e, s
    elif kind == "gated":
        W, b = head.gate.weight, head.gate.bias
        expected, state = torch.sigmoid(W @ torch.cat([h, e]) + b) * e, s
    else:
        g, c, o = (head.rnn.weight @ torch.cat([s, e, h]) + head.rnn.bias).split(R)
        expected = torch.tanh(o)
        state = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
    torch.testing.assert_close(f, expected)
    torch.testing.assert_close(after, state)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_depth_k_reads_the_tokens_up_to_it_and_none_behind(kind):
    # Anchor at 4: depth k stands behind token 4 + k; vanilla reads that one alone.
    drafter = make("dspark", markov_head_type=kind)
    batch = replace(make_batch(drafter, (11,)), anchors_A=torch.tensor([4]))
    before = trained_logits(drafter, batch)
    ids_BS = batch.ids_BS.clone()
    ids_BS[0, 5] = (ids_BS[0, 5] + 1) % 40
    after = trained_logits(drafter, replace(batch, ids_BS=ids_BS))
    changed = [not torch.equal(before[4, k], after[4, k]) for k in range(4)]
    assert changed == [False, True, kind == "rnn", kind == "rnn"]


def test_a_fresh_one_drafts_what_its_backbone_does():
    target = small_target()
    section = DSparkSection(num_layers=1, block_size=3, num_aux_layers=1, markov_rank=4)
    drafter = build_drafter(section, target, (1,), full_vocab(12), seed=0)
    assert isinstance(drafter, DSpark) and not drafter.markov_head.markov_w2.weight.any()
    assert drafter.num_anchors == 512 and drafter.confidence_decay == pytest.approx(
        math.exp(-1 / 4), abs=1e-4
    )
    lengths = drafter.markov_head.markov_w1.weight.detach().norm(dim=1)
    assert 0.2 < lengths.mean().item() < 2


def test_confidence_learns_alpha_by_cross_entropy():
    drafter = make("dspark")
    drafter.confidence_weight, drafter.confidence_decay = 2.0, 0.5
    batch = make_batch(drafter)
    slots = drafter.slots(batch, 3)
    assert isinstance(slots, DSparkSlots) and slots.confidence_N is not None
    alpha_N = torch.rand(len(slots.anchor_N), generator=torch.Generator().manual_seed(0))
    loss = drafter.extra_loss(batch, slots, alpha_N)
    expected = 0.0
    for logit, alpha, k in zip(
        slots.confidence_N.tolist(), alpha_N.tolist(), slots.depth_N.tolist(), strict=True
    ):
        c = 1 / (1 + math.exp(-logit))
        expected -= 2 * 0.5**k * (alpha * math.log(c) + (1 - alpha) * math.log(1 - c))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    without = make("dspark", confidence_head=False)
    assert without.extra_loss(batch, without.slots(batch, 3), alpha_N) is None


def test_the_loss_of_a_step_holds_the_confidence_term():
    # Over the loss of the tokens alone, it is what extra_loss gives for the true alphas.
    target = small_target()
    drafter = for_target("dspark", target)
    distiller = Distiller(drafter, LossSection(num_steps=4, renormalize=False), full_vocab(12))
    distiller.use_target(target)
    batch = replace(make_batch(drafter), aux_BSF=None, ids_BS=make_batch(drafter).ids_BS % 12)
    batch = with_states(target, batch, drafter.aux_layers)
    total = distiller(batch)[0]
    slots = drafter.slots(batch, 4)
    q_NV = (slots.head_NW @ torch.cat(drafter.head_weights()[0], 1).T).softmax(-1)
    p_SV = target.logits(batch.hidden_BSH.flatten(0, 1)).softmax(-1)
    alpha_N = torch.minimum(p_SV[slots.anchor_N + slots.depth_N], q_NV).sum(-1).detach()
    extra = drafter.extra_loss(batch, slots, alpha_N)
    drafter.confidence_weight = 0.0
    without = distiller(batch)[0]
    assert extra.item() > 1
    torch.testing.assert_close(total - without, extra, rtol=1e-4, atol=1e-3)


def test_a_draft_stops_where_its_predicted_survival_falls_below():
    drafter = make("dspark", confidence_threshold=0.3, confidence_head_with_markov=False)
    with torch.no_grad():  # every token is accepted with 0.6: 0.6, 0.36, 0.216
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(math.log(0.6 / 0.4))
    state = drafter.start([[1, 2]], 16)
    drafter.observe(state, torch.tensor([[2, 3]]), torch.randn(1, 2, 64), torch.tensor([2]))
    proposal = drafter.propose(state, 4, Sampling(), None)
    assert proposal.num_proposed_B.tolist() == [2] and proposal.tokens_BK.shape == (1, 2)
    with torch.no_grad():
        drafter.confidence_head.proj.bias.fill_(-3.0)
    nothing = drafter.propose(state, 4, Sampling(), None)
    assert nothing.num_proposed_B.tolist() == [0] and nothing.tokens_BK.shape == (1, 0)


def test_logits_of_the_prediction_are_divided_by_the_temperature_of_their_depth():
    # The head says 0.6 everywhere (logit 0.405). At temperatures 0.5 and 2: 0.692, then 0.55 more.
    drafter = make(
        "dspark",
        confidence_threshold=0.375,
        confidence_head_with_markov=False,
        confidence_temperatures=(0.5, 2.0, 1.0, 1.0),
    )
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(math.log(0.6 / 0.4))
    state = drafter.start([[1, 2]], 16)
    drafter.observe(state, torch.tensor([[2, 3]]), torch.randn(1, 2, 64), torch.tensor([2]))
    # 0.692, 0.381, 0.229: two tokens; without temperatures 0.6, 0.36: one.
    assert drafter.propose(state, 4, Sampling(), None).num_proposed_B.tolist() == [2]
    drafter.config = replace(drafter.config, confidence_temperatures=None)
    assert drafter.propose(state, 4, Sampling(), None).num_proposed_B.tolist() == [1]


def test_temperatures_undo_a_head_that_is_too_sure():
    # The truth is known: acceptances c; the head says logit(c) * its depth's error.
    generator = torch.Generator().manual_seed(0)
    true_AG = 0.3 + 0.65 * torch.rand(4000, 3, generator=generator, dtype=torch.float64)
    errors_G = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64)
    logits_AG, known_AG = true_AG.logit() * errors_G, torch.ones(4000, 3, dtype=torch.bool)
    found = fit_temperatures(logits_AG, true_AG, known_AG)
    assert found == pytest.approx([2.0, 0.5, 4.0], rel=0.15)
    survival_A = true_AG.prod(1)
    before = calibration_error(logits_AG.sigmoid().prod(1), survival_A)
    after = calibration_error((logits_AG / torch.tensor(found)).sigmoid().prod(1), survival_A)
    assert before > 0.05 and after < 0.01
    known_AG[49:, 2] = False  # too few drafts that deep
    assert fit_temperatures(logits_AG, true_AG, known_AG)[2] == 1.0
    right = fit_temperatures(true_AG.logit(), true_AG, known_AG)
    assert right == pytest.approx((1.0, 1.0, 1.0))


def test_calibration_error_is_the_gap_of_each_bin():
    predicted, true = torch.tensor([0.01, 0.05, 0.91, 0.99]), torch.tensor([0.03, 0.09, 0.5, 1.0])
    # Bins of 1/15: (0.01, 0.05), (0.91), (0.99); gaps 0.06, 0.41, 0.01 over four drafts.
    assert calibration_error(predicted, true) == pytest.approx(0.48 / 4)


def test_calibration_reads_held_out_rows_and_changes_no_weight():
    target = small_target()
    drafter = for_target("dspark", target)
    with torch.no_grad():
        drafter.confidence_head.proj.weight *= 20  # far too sure
    distiller = Distiller(drafter, LossSection(num_steps=4, renormalize=False), full_vocab(12))
    distiller.use_target(target)
    rows = replace(make_batch(drafter), aux_BSF=None, ids_BS=make_batch(drafter).ids_BS % 12)
    batch = with_states(target, rows, drafter.aux_layers)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    calibrate(distiller, [batch] * 12)
    temperatures = drafter.config.confidence_temperatures
    assert len(temperatures) == 4 and temperatures[0] > 2
    assert all(torch.equal(before[name], value) for name, value in drafter.state_dict().items())
    without = for_target("dspark", target, confidence_head=False)
    calibrate(Distiller(without, LossSection(num_steps=4), full_vocab(12)), [batch])
    assert without.config.confidence_temperatures is None


def length_law(drafter: Any, num_rows: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Many drafts behind one prefix with tokens drawn: how long each is, and its tokens."""
    state = drafter.start([[1, 2]] * num_rows, 16)
    aux_12F = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(5))
    drafter.observe(
        state,
        torch.tensor([[2, 3]]).expand(num_rows, -1),
        aux_12F.expand(num_rows, -1, -1),
        torch.full((num_rows,), 2),
    )
    uniforms_BK = torch.rand(num_rows, 4, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=8.0, draft_sampled=True)  # no token is sure
    proposal = drafter.propose(state, 4, sampling, uniforms_BK)
    return proposal.num_proposed_B, proposal.tokens_BK


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_whether_a_token_is_proposed_does_not_depend_on_it(kind):
    # Rows that drafted the same first j tokens agree on whether token j is proposed at all.
    drafter = make("dspark", markov_head_type=kind, confidence_threshold=0.25)
    with torch.no_grad():  # predictions that the token before decides
        drafter.confidence_head.proj.weight[:, :32] = 0
        drafter.confidence_head.proj.weight[:, 32:] *= 5
        drafter.confidence_head.proj.bias.fill_(0.5)
    num_B, tokens_BK = length_law(drafter)
    assert len(set(num_B.tolist())) >= 3  # lengths do depend on earlier tokens
    for j in range(tokens_BK.shape[1]):
        decided: dict[tuple[int, ...], set[bool]] = {}
        for num, tokens in zip(num_B.tolist(), tokens_BK.tolist(), strict=True):
            if num >= j:
                decided.setdefault(tuple(tokens[:j]), set()).add(num > j)
        assert all(len(answers) == 1 for answers in decided.values())


@pytest.mark.parametrize("rule", ["token", "block"])
def test_text_of_drafts_that_stop_early_follows_the_targets_law(rule):
    target = small_target()
    drafter = for_target("dspark", target, confidence_threshold=0.4)
    sampling = Sampling(temperature=1.0, draft_sampled=True)
    settings = DecodeSettings(
        max_new_tokens=10, num_draft=4, sampling=sampling, verification=rule, seed=1
    )
    rows, _ = decode(target, drafter, PROMPTS[:2] * 100, settings)
    rounds = [r for row in rows for r in row.rounds]
    assert {0, 1, 2} <= {r.proposed for r in rounds}
    assert sum(r.accepted for r in rounds) > 50
    p_value = pit_p_value([value for row in rows for value in row.pit])
    assert p_value is not None and p_value > 1e-3


def test_greedy_text_of_drafts_that_stop_early_is_the_targets():
    target = small_target()
    drafter = for_target("dspark", target, confidence_threshold=0.4, markov_head_type="gated")
    answers = greedy_answers(target, PROMPTS, 12)
    rows, _ = decode(target, drafter, PROMPTS, DecodeSettings(max_new_tokens=12, num_draft=4))
    assert [row.ids for row in rows] == [answers[tuple(p)] for p in PROMPTS]


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_export_loads_again_equal(form, kind, tmp_path):
    temperatures = (0.5, 2.0, 1.0, 4.0)
    drafter = make(
        "dspark",
        markov_head_type=kind,
        confidence_threshold=0.25,
        confidence_temperatures=temperatures,
    )
    save(drafter, tmp_path / "e", form, torch.float32, TARGET, ORIGIN)
    back = load(tmp_path / "e", TARGET)
    assert back.config == drafter.config
    states = drafter.state_dict(), back.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    back.use_weights(drafter._embedding[0], drafter._target_head[0])
    (ours, our_tokens), (theirs, their_tokens) = length_law(drafter, 20), length_law(back, 20)
    assert torch.equal(ours, theirs) and torch.equal(our_tokens, their_tokens)


def test_keys_that_engines_read(tmp_path):
    for form in ("vllm", "speculators"):
        save(make("dspark"), tmp_path / form, form, torch.float32, TARGET, ORIGIN)
    plain, other = config_of(tmp_path / "vllm"), config_of(tmp_path / "speculators")
    for config in (plain, other):
        assert config["architectures"] == ["Qwen3DSparkModel"]
        assert (config["block_size"], config["mask_token_id"], config["markov_rank"]) == (4, 39, 6)
        assert config["enable_confidence_head"] and config["sample_from_anchor"]
    assert plain["target_layer_ids"] == [0, 1] and not plain["dspark_bonus_anchor"]
    assert other["aux_hidden_state_layer_ids"] == [1, 2]
    proposal = other["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 4  # P37: the anchor drafts too


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("vllm", lambda c: c.pop("markov_rank"), "missing keys: markov_rank"),
        ("vllm", lambda c: c.update(markov_head_type="mlp"), "markov_head_type"),
        ("vllm", lambda c: c.update(dspark_bonus_anchor=True), "dspark_bonus_anchor is True"),
        ("vllm", lambda c: c.update(confidence_threshold=2.0), "not within 0 and 1"),
        ("vllm", lambda c: c.update(confidence_temperatures=[1.0]), "needs 4 numbers above 0"),
        ("vllm", lambda c: c.update(confidence_temperatures=[1.0, 1, 1, 0]), "needs 4 numbers"),
        ("vllm", lambda c: c.pop("mask_token_id"), "missing keys: mask_token_id"),
        ("speculators", lambda c: c.pop("sample_from_anchor"), "missing keys: sample_from_anchor"),
    ],
)
def test_damaged_config_is_refused(form, change, message, tmp_path):
    save(make("dspark"), tmp_path / "e", form, torch.float32, TARGET, ORIGIN)
    edit_config(tmp_path / "e", change)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "e", TARGET)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("markov_head.markov_w1.weight", "missing tensors: markov_head.markov_w1.weight"),
        ("confidence_head.proj.bias", "missing tensors: confidence_head.proj.bias"),
    ],
)
def test_damaged_weights_are_refused(name, message, tmp_path):
    save(make("dspark"), tmp_path / "e", "vllm", torch.float32, TARGET, ORIGIN)
    edit_tensors(tmp_path / "e", lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "e", TARGET)


def test_causal_blocks_are_refused_in_the_form_that_cannot_say_so(tmp_path):
    drafter = make("dspark", causal=True)
    with pytest.raises(UserError, match="causal"):
        save(drafter, tmp_path / "e", "speculators", torch.float32, TARGET, ORIGIN)
    save(drafter, tmp_path / "e", "vllm", torch.float32, TARGET, ORIGIN)
    assert load(tmp_path / "e").config.causal
