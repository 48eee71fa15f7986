"""Tiny DFlash and DSpark drafters with weights that matter, and one decode of a training row."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch, Row, collate
from data.target import Target
from drafters import dflash, dspark
from drafters.base import Sampling
from drafters.dflash import DFlash, DFlashConfig
from drafters.dspark import DSpark, DSparkConfig
from drafters.vllm_format import TargetInfo

H, V, D = 32, 40, 12
SHAPE: dict[str, Any] = {
    "target_hidden_size": H,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "draft_vocab_size": V,
    "aux_layers": (1, 2),
    "mask_token_id": 39,
    "block_size": 4,
    "num_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 256,
}
TARGET = TargetInfo(
    name="org/tiny",
    path="org/tiny",
    revision="abc123",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=V,
    hidden_size=H,
    num_layers=3,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=[2, 7],
    pad_token_id=0,
    dtype="float32",
)


def make(kind: str = "dflash", **changes: Any) -> Any:
    torch.manual_seed(0)
    fields = SHAPE | changes
    drafter: Any
    if kind == "dflash":
        drafter = DFlash(DFlashConfig(**fields))
    else:
        drafter = DSpark(DSparkConfig(**({"markov_rank": 6} | fields)))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)  # no norm is the identity
    if drafter.config.draft_vocab_size < drafter.config.vocab_size:
        # Draft ids 0, 1, 2 stand for the target's 3, 6, 9.
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size) * 2 + 3)
    drafter.use_weights(torch.randn(V, H), torch.randn(V, H))
    return drafter


def for_target(kind: str, target: Target, seed: int = 1, **changes: Any) -> Any:
    """A random drafter of the target's sizes; the mask is its last token."""
    size = target.vocab_size
    drafter = make(
        kind, vocab_size=size, draft_vocab_size=size, mask_token_id=size - 1, **changes
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    drafter.use_target(target)
    return drafter


def make_batch(drafter: Any, lengths: tuple[int, ...] = (11, 7), start: int = 3) -> Batch:
    """Rows that the drafter can write, the first `start` tokens a prompt, with states."""
    g = torch.Generator().manual_seed(3)
    known, rows = drafter.draft_ids_D, []
    for i, n in enumerate(lengths):
        ids_S = known[torch.randint(0, len(known), (n,), generator=g)]
        rows.append(Row(id=str(i), ids_S=ids_S, mask_S=torch.arange(n) >= start))
    batch = collate(rows, pad_id=5)
    width = drafter.fc.in_features
    aux_BSF = torch.randn(*batch.ids_BS.shape, width, generator=g)
    return replace(batch, aux_BSF=aux_BSF)


class Script:
    """Takes the place of Draft: notes the logits and answers with the row's own tokens."""

    tokens_BK: Tensor
    logits: list[Tensor]

    def __init__(self, *_: Any) -> None:
        self.tokens: list[Tensor] = []
        Script.logits = []

    def draw(self, logits_BD: Tensor) -> Tensor:
        Script.logits.append(logits_BD)
        self.tokens.append(Script.tokens_BK[:, len(self.tokens)])
        return self.tokens[-1]

    def proposal(self, num_proposed_B: Tensor | None = None) -> Tensor | None:
        return num_proposed_B


def decoded_logits(drafter: Any, batch: Batch, b: int, s: int, monkeypatch: Any) -> Tensor:
    """Logits [K, D] of a decode of row b whose last committed token is at s, along the row."""
    for module in (dflash, dspark):
        monkeypatch.setattr(module, "Draft", Script)
    assert batch.aux_BSF is not None
    ids_S, aux_SF = batch.ids_BS[b], batch.aux_BSF[b]
    state = drafter.start([ids_S[:s].tolist()], 32)
    for at in (slice(0, s - 1), slice(s - 1, s)):  # in two pieces
        num_B = torch.tensor([at.stop - at.start])
        drafter.observe(state, ids_S[None, at.start + 1 : at.stop + 1], aux_SF[None, at], num_B)
    most = drafter.config.max_draft
    Script.tokens_BK = torch.nn.functional.pad(ids_S, (0, most))[None, s + 1 : s + 1 + most]
    drafter.propose(state, most, Sampling(), None)
    return torch.stack(Script.logits, 1)[0]


def trained_logits(drafter: Any, batch: Batch) -> dict[tuple[int, int], Tensor]:
    """(flat anchor, depth) -> logits [D] as the loss sees them."""
    slots = drafter.slots(batch, drafter.config.max_draft)
    head = drafter.head_weights()[0]
    weight_DW = torch.cat(head, 1) if isinstance(head, tuple) else head
    logits_ND = slots.head_NW @ weight_DW.T
    places = zip(slots.anchor_N.tolist(), slots.depth_N.tolist(), strict=True)
    return dict(zip(places, logits_ND.detach(), strict=True))


def check_training_equals_decoding(drafter: Any, monkeypatch: Any) -> int:
    """Every supervised slot of two padded rows; how many there were."""
    batch = make_batch(drafter)
    trained = trained_logits(drafter, batch)
    for anchor in sorted({anchor for anchor, _ in trained}):
        b, s = divmod(anchor, batch.ids_BS.shape[1])
        decoded_KD = decoded_logits(drafter, batch, b, s, monkeypatch)
        for (a, k), logits_D in trained.items():
            if a == anchor:
                torch.testing.assert_close(decoded_KD[k], logits_D, atol=1e-4, rtol=1e-4)
    return len(trained)
