"""EAGLE-3: what training computes is what decoding computes, step by step.

A decode is driven with the very tokens that the training pass saw: the head is replaced by one
whose largest logit is at the wanted token, whatever the state, so `propose` must continue the row.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.embedded import byte_tokenizer
from data.sampling import final_probs
from drafters.base import Sampling
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.layers import rotate
from tests.tiny_targets import tiny_target

S, STEPS, H, V = 11, 5, 16, 40
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2},
    "four_aux": {"aux_layers": (0, 2, 3, 5)},
    "reduced": {"draft_vocab_size": 12},
    "no_gqa": {"num_key_value_heads": 4},
    "all": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
        "num_layers": 2,
        "draft_vocab_size": 12,
    },
}


def make(**changes: Any) -> Eagle3:
    fields = {
        "target_hidden_size": 16,
        "hidden_size": H,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": V,
        "draft_vocab_size": V,
        "aux_layers": (1, 2, 3),
        "max_position_embeddings": 64,
    }
    config = Eagle3Config(**(fields | changes))
    torch.manual_seed(0)
    drafter = Eagle3(config)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)  # no norm is the identity
    # Draft ids 0, 1, 2, ... stand for the target's 3, 6, 9, ... when the vocabulary is reduced.
    if config.draft_vocab_size < V:
        drafter.d2t.copy_(torch.arange(config.draft_vocab_size) * 2 + 3)
    drafter.use_embeddings(torch.randn(config.vocab_size, config.hidden_size))
    return drafter


def row(drafter: Eagle3, batch: int = 1, length: int = S) -> tuple[Tensor, Tensor]:
    """Ids that the drafter can propose, and captured states."""
    g = torch.Generator().manual_seed(3)
    known = drafter.draft_ids_D
    ids_BS = known[torch.randint(0, len(known), (batch, length), generator=g)]
    width = drafter.fc.in_features
    return ids_BS, torch.randn(batch, length, width, generator=g)


class Script(nn.Module):
    """A head that notes what it reads and answers with the next token of its script."""

    def __init__(self, draft_ids_KB: Tensor, size: int) -> None:
        super().__init__()
        self.draft_ids_KB, self.size, self.inputs = draft_ids_KB, size, []

    def forward(self, x_BH: Tensor) -> Tensor:
        wanted_B = self.draft_ids_KB[len(self.inputs)]
        self.inputs.append(x_BH)
        return nn.functional.one_hot(wanted_B, self.size).float()


def scripted(drafter: Eagle3, tokens_BK: Tensor) -> Script:
    places = {int(v): i for i, v in enumerate(drafter.draft_ids_D)}
    draft_ids_KB = torch.tensor([[places[int(v)] for v in r] for r in tokens_BK]).t()
    return Script(draft_ids_KB, drafter.config.draft_vocab_size)


def head_inputs_of_a_decode(drafter: Eagle3, ids_S: Tensor, aux_SF: Tensor, t: int) -> list[Tensor]:
    """Observe positions 0..t, then propose tokens t+2, t+3, ... of the row; what the head read."""
    head, drafter.lm_head = drafter.lm_head, scripted(drafter, ids_S[None, t + 2 : t + 2 + STEPS])
    try:
        state = drafter.start([ids_S[: t + 1].tolist()], 32)
        num_B = torch.tensor([t + 1])
        drafter.observe(state, ids_S[None, 1 : t + 2], aux_SF[None, : t + 1], num_B)
        num_draft = min(STEPS, S - t - 2)
        proposal = drafter.propose(state, num_draft, Sampling(), None)
        assert proposal.tokens_BK[0].tolist() == ids_S[t + 2 : t + 2 + num_draft].tolist()
        return [x_BH[0] for x_BH in drafter.lm_head.inputs]
    finally:
        drafter.lm_head = head


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_training_equals_decoding_at_every_step(switches):
    drafter = make(**switches)
    ids_BS, aux_BSF = row(drafter)
    rollout = drafter.rollout(ids_BS, aux_BSF, STEPS)
    assert len(rollout) == STEPS
    compared = 0
    for t in range(S - 2):
        decoded = head_inputs_of_a_decode(drafter, ids_BS[0], aux_BSF[0], t)
        for k, head_input_H in enumerate(decoded):
            torch.testing.assert_close(head_input_H, rollout[k][0, t], atol=1e-4, rtol=1e-4)
            logits = drafter.lm_head(head_input_H), drafter.lm_head(rollout[k][0, t])
            torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared == 9 + 8 + 7 + 6 + 5  # 9 rows have a token to propose, 8 have two, ...


def test_steps_differ_from_each_other():
    drafter = make()
    ids_BS, aux_BSF = row(drafter)
    outputs = drafter.rollout(ids_BS, aux_BSF, STEPS)
    for k in range(1, STEPS):
        assert (outputs[k] - outputs[k - 1]).abs().max() > 0.1


def test_rotary_position_of_step_k_is_t_plus_k():
    drafter, seen = make(), []
    rope = drafter.rope.forward
    drafter.rope.forward = lambda x, positions: (
        seen.append(positions.tolist()) or rope(x, positions)
    )
    ids_BS, aux_BSF = row(drafter, length=4)
    drafter.rollout(ids_BS, aux_BSF, 3)
    assert seen == [[[0, 1, 2, 3]], [[1, 2, 3, 4]], [[2, 3, 4, 5]]]


def test_rotate_is_the_half_split_layout():
    # Width 4, angles 90 and 0 degrees: pairs are (0, 2) and (1, 3).
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = torch.tensor([[[0.0, 1, 0, 1]]]), torch.tensor([[[1.0, 0, 1, 0]]])
    assert rotate(x, cos, sin).flatten().tolist() == [-3, 2, 1, 4]


@pytest.mark.parametrize("switches", [SWITCHES["plain"], SWITCHES["all"]], ids=["plain", "all"])
def test_padding_on_the_right_changes_nothing(switches):
    drafter = make(**switches)
    ids_BS, aux_BSF = row(drafter, batch=2)
    alone = drafter.rollout(ids_BS[:, :6], aux_BSF[:, :6], STEPS)
    padded = drafter.rollout(ids_BS, aux_BSF, STEPS)
    for k in range(STEPS):  # row t reads token t+1+k, which has to be there
        torch.testing.assert_close(padded[k][:, : 5 - k], alone[k][:, : 5 - k])


def test_p06_gradient_reaches_exactly_the_rows_in_the_mask():
    # 8 tokens, the assistant's are 4..7; row t predicts token t+2, so rows 2..5 are supervised.
    drafter = make()
    ids_BS, aux_BSF = row(drafter, length=8)
    head_input = drafter.rollout(ids_BS, aux_BSF, 1)[0]
    mask_S = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    shifted_S = torch.cat([mask_S[2:], torch.zeros(2)])
    head_input.retain_grad()
    (drafter.lm_head(head_input).logsumexp(-1)[0] * shifted_S).sum().backward()
    rows = head_input.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert rows == [2, 3, 4, 5]


def test_more_steps_than_tokens_is_no_error():
    drafter = make()
    ids_BS, aux_BSF = row(drafter, length=2)
    assert [x.shape for x in drafter.rollout(ids_BS, aux_BSF, 5)] == [(1, 2, H)] * 5


@pytest.mark.parametrize("switches", [SWITCHES["plain"], SWITCHES["all"]], ids=["plain", "all"])
def test_observing_in_pieces_equals_at_once(switches):
    drafter = make(**switches)
    ids_BS, aux_BSF = row(drafter, batch=2, length=9)
    states = []
    for pieces in ([8], [1, 2, 5]):
        state, start = drafter.start([[1], [1]], 32), 0
        for size in pieces:
            at = slice(start, start + size)
            num_B = torch.full((2,), size)
            drafter.observe(state, ids_BS[:, 1:][:, at], aux_BSF[:, at], num_B)
            start += size
        states.append(state)
    once, pieces = states
    torch.testing.assert_close(once.last_hidden_BH, pieces.last_hidden_BH)
    assert once.cache.lengths_B.tolist() == pieces.cache.lengths_B.tolist() == [8, 8]
    for a, b in zip(
        once.cache.keys + once.cache.values, pieces.cache.keys + pieces.cache.values, strict=True
    ):
        torch.testing.assert_close(a[:, :, :8], b[:, :, :8])


def test_rows_of_a_batch_are_independent():
    # Three rows take in 6, 2 and 4 positions, then 1, 3 and 0; each must equal a row alone.
    drafter = make(num_layers=2)
    ids_BS, aux_BSF = row(drafter, batch=3, length=12)
    first, second = [6, 2, 4], [1, 3, 0]

    def drive(rows: list[int]) -> Tensor:
        state = drafter.start([[1]] * len(rows), 32)
        num_B = torch.tensor([first[b] for b in rows])
        drafter.observe(state, ids_BS[rows, 1:7], aux_BSF[rows, :6], num_B)
        drafter.propose(state, 4, Sampling(), None)  # leaves nothing behind
        more_B = torch.tensor([second[b] for b in rows])
        at = num_B[:, None] + torch.arange(3)
        aux_B3F = aux_BSF[rows].gather(1, at[..., None].expand(-1, -1, aux_BSF.shape[-1]))
        drafter.observe(state, ids_BS[rows].gather(1, at + 1), aux_B3F, more_B)
        assert state.cache.lengths_B.tolist() == (num_B + more_B).tolist()
        return torch.cat(
            [state.last_hidden_BH, drafter.propose(state, 4, Sampling(), None).tokens_BK], 1
        )

    together = drive([0, 1, 2])
    for b in range(3):
        torch.testing.assert_close(together[b], drive([b])[0])


def test_propose_leaves_the_state_as_it_was():
    drafter = make()
    ids_BS, aux_BSF = row(drafter, batch=2)
    state = drafter.start([[1], [1]], 32)
    drafter.observe(state, ids_BS[:, 1:6], aux_BSF[:, :5], torch.tensor([5, 3]))
    hidden_BH = state.last_hidden_BH.clone()
    keys = [
        row_keys[:, :n].clone() for row_keys, n in zip(state.cache.keys[0], [5, 3], strict=True)
    ]
    proposals = [drafter.propose(state, 4, Sampling(), None) for _ in range(2)]
    assert torch.equal(proposals[0].tokens_BK, proposals[1].tokens_BK)
    assert proposals[0].num_proposed_B.tolist() == [4, 4] and proposals[0].probs_BKV is None
    assert state.cache.lengths_B.tolist() == [5, 3]
    assert torch.equal(state.last_hidden_BH, hidden_BH)
    for row_keys, kept, n in zip(state.cache.keys[0], keys, [5, 3], strict=True):
        assert torch.equal(row_keys[:, :n], kept)


def test_greedy_proposal_is_the_argmax_in_target_ids():
    drafter = make(draft_vocab_size=12)
    ids_BS, aux_BSF = row(drafter)
    state = drafter.start([[1]], 32)
    drafter.observe(state, ids_BS[:, 1:], aux_BSF[:, :-1], torch.tensor([S - 1]))
    token = drafter.propose(state, 1, Sampling(), None).tokens_BK[0, 0]
    logits_D = drafter.lm_head(drafter.rollout(ids_BS, aux_BSF, 1)[0][0, S - 2])
    assert token == 3 + 3 * logits_D.argmax()  # ids 3, 6, 9, ... as `make` sets them


@pytest.mark.parametrize("size", [V, 12])
def test_sampled_tokens_follow_the_stated_probabilities(size):
    drafter, N = make(draft_vocab_size=size), 4000
    ids_BS, aux_BSF = row(drafter)
    state = drafter.start([[1]] * N, 16)
    drafter.observe(
        state, ids_BS[:, 1:4].expand(N, -1), aux_BSF[:, :3].expand(N, -1, -1), torch.full((N,), 3)
    )
    uniforms_BK = torch.rand(N, 2, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.8, top_k=8, top_p=0.95, draft_sampled=True)
    proposal = drafter.propose(state, 2, sampling, uniforms_BK)
    q_BKV = proposal.probs_BKV
    assert q_BKV.shape == (N, 2, V) and q_BKV.dtype == torch.float32
    torch.testing.assert_close(q_BKV.sum(-1), torch.ones(N, 2))
    assert (q_BKV.gather(-1, proposal.tokens_BK[..., None]) > 0).all()
    # Step 0 has one law for all rows: the head's logits through final_probs, on the target's ids.
    logits_D = drafter.lm_head(drafter.rollout(ids_BS[:, :4], aux_BSF[:, :4], 1)[0][0, 2])
    law_V = torch.zeros(V)
    law_V[drafter.draft_ids_D] = final_probs(logits_D[None], 0.8, 8, 0.95)[0]
    torch.testing.assert_close(q_BKV[0, 0], law_V)
    shares_V = torch.bincount(proposal.tokens_BK[:, 0], minlength=V) / N
    assert (shares_V - law_V).abs().max() < 4 * 0.5 / N**0.5  # four standard errors
    # Step 1 has one law for each first token.
    first = int(shares_V.argmax())
    rows_B = proposal.tokens_BK[:, 0] == first
    second_V = torch.bincount(proposal.tokens_BK[rows_B, 1], minlength=V) / rows_B.sum()
    law_V = q_BKV[rows_B, 1].mean(0)
    torch.testing.assert_close(q_BKV[rows_B, 1][0], law_V)
    assert (second_V - law_V).abs().max() < 4 * 0.5 / rows_B.sum() ** 0.5


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(draft_sampled=True)]
)
def test_nothing_is_drawn_unless_asked_for_at_a_temperature(sampling):
    drafter = make()
    ids_BS, aux_BSF = row(drafter)
    state = drafter.start([[1]], 32)
    drafter.observe(state, ids_BS[:, 1:3], aux_BSF[:, :2], torch.tensor([2]))
    assert drafter.propose(state, 3, sampling, None).probs_BKV is None


def test_p43_embedding_stands_before_the_state():
    # q_proj = [I, 0] picks the normed embedding, [0, I] the normed state.
    drafter = make(num_attention_heads=2, num_key_value_heads=2)
    layer, seen = drafter.layers[0], []
    layer.self_attn.v_proj.register_forward_hook(lambda _m, _a, out: seen.append(out))
    eye, none = torch.eye(H), torch.zeros(H, H)
    embeds_BSH, hidden_BSH = torch.randn(1, 3, H), torch.randn(1, 3, H)
    cos, sin = drafter.rope(embeds_BSH, torch.arange(3)[None])
    for weight in (torch.cat([eye, none], 1), torch.cat([none, eye], 1)):
        layer.self_attn.v_proj.weight.data = weight
        layer(embeds_BSH, hidden_BSH, cos, sin, lambda _query, _key, value: value)
    torch.testing.assert_close(seen[0], layer.input_layernorm(embeds_BSH))
    torch.testing.assert_close(seen[1], layer.hidden_norm(hidden_BSH))


@pytest.mark.parametrize("normed", [False, True])
def test_residual_carries_the_state_or_the_normed_state(normed):
    drafter = make(norm_before_residual=normed)
    layer = drafter.layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    hidden_BSH = torch.randn(1, 3, H)
    expected = layer.hidden_norm(hidden_BSH) if normed else hidden_BSH
    cos, sin = drafter.rope(hidden_BSH, torch.arange(3)[None])
    got = layer(
        torch.randn(1, 3, H), hidden_BSH, cos, sin, lambda _q, _k, value: value.repeat(1, 2, 1, 1)
    )
    torch.testing.assert_close(got, expected)


def test_norms_before_fc():
    aux_BSF = torch.randn(1, 3, 48)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    joint, each = make(norm_before_fc=True), make(fc_norm=True)
    expected = joint.fc(normed(aux_BSF, joint.input_norm.weight))
    torch.testing.assert_close(joint.fuse(aux_BSF), expected)
    parts = aux_BSF.chunk(3, -1)
    expected = torch.cat(
        [normed(p, n.weight) for p, n in zip(parts, each.fc_norm, strict=True)], -1
    )
    torch.testing.assert_close(each.fuse(aux_BSF), each.fc(expected))


def test_p60_target_embedding_is_lent_and_never_trained():
    drafter, target = make(target_hidden_size=32, hidden_size=32, vocab_size=264), tiny_target()
    drafter.use_embeddings(target.embed_weight_VH)
    assert drafter.embed(torch.tensor([5])).equal(target.embed_weight_VH[[5]])
    names = [*drafter.state_dict(), *dict(drafter.named_parameters())]
    assert not [name for name in names if "embed" in name]
    ids_BS = torch.arange(6)[None]
    before = target.embed_weight_VH.clone()
    drafter.rollout(ids_BS, torch.randn(1, 6, 96), 2)[1].sum().backward()
    torch.optim.SGD(drafter.parameters(), 1.0).step()
    assert target.embed_weight_VH.grad is None and torch.equal(target.embed_weight_VH, before)


def test_embeddings_of_another_width_are_refused():
    with pytest.raises(ValueError, match="8 wide, the drafter 16"):
        make().use_embeddings(torch.randn(V, 8))


def test_follows_a_real_target_from_prompt_to_proposal():
    # Captured states of a full pass and of cached passes give the same proposal.
    target = tiny_target()
    drafter = make(target_hidden_size=32, hidden_size=32, vocab_size=264, draft_vocab_size=264)
    drafter.use_embeddings(target.embed_weight_VH)
    ids = byte_tokenizer()("once upon a time", return_tensors="pt")["input_ids"]
    aux_BSF = target.forward(ids, aux_layers=(1, 2, 3)).aux_BSF
    proposals = []
    for pieces in ([15], [9, 1, 5]):
        state, cache = drafter.start([ids[0].tolist()], 64), target.new_cache(1, 64)
        for piece, following in zip(
            ids[:, :-1].split(pieces, 1), ids[:, 1:].split(pieces, 1), strict=True
        ):
            states = target.forward(piece, cache, (1, 2, 3))
            cache.advance(piece.shape[1])
            drafter.observe(state, following, states.aux_BSF, torch.tensor([piece.shape[1]]))
        proposals.append(drafter.propose(state, 4, Sampling(), None).tokens_BK[0].tolist())
    logits = drafter.lm_head(drafter.rollout(ids, aux_BSF, 1)[0][0, -2])
    assert proposals[0] == proposals[1] and proposals[0][0] == logits.argmax()
