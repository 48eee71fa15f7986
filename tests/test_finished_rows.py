"""Rows of a batch that are finished leave it: the others go on as they would have."""

from typing import Any

import pytest
import torch

from data.cache import KVCache
from drafters.base import Sampling
from drafters.lookup import Lookup, LookupThen
from drafters.suffix import Suffix
from eval.decode import DecodeSettings, Run, decode
from eval.decode_tree import decode_tree
from eval.oracle import Replay
from eval.tree import parse_tree
from tests.scripted import ScriptedTarget
from tests.test_drafter_cases import make
from tests.test_drafter_family import SECTIONS
from tests.tiny_targets import tiny_target

PROMPTS = [[3], [1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 4, 5, 6, 7, 8], [9, 8, 7, 9], [40], [5, 5, 5]]
NAMES = [*SECTIONS, "lookup", "suffix", "lookup+eagle3", "replay", "tree"]
DRAWN = Sampling(1.0, draft_sampled=True, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def target() -> Any:
    """Every twelfth token ends an answer, so that the rows end one after another."""
    changes = {"num_hidden_layers": 6, "head_dim": 16, "tie_word_embeddings": True}
    ends = [257, *range(0, 256, 12)]
    return tiny_target("qwen3", initializer_range=0.1, eos_token_id=ends, **changes)


def widths_of(target: Any, monkeypatch: Any) -> list[int]:
    """The rows of every pass of the target from now on."""
    widths, forward = [], target.forward

    def spy(ids_BS: torch.Tensor, *rest: Any) -> Any:
        widths.append(len(ids_BS))
        return forward(ids_BS, *rest)

    monkeypatch.setattr(target, "forward", spy)
    return widths


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_and_rounds_are_those_of_rows_that_stay(name, sampling, target, monkeypatch):
    if name == "tree" and sampling.draft_sampled:
        sampling = Sampling(1.0, repetition_penalty=1.3)
    settings = DecodeSettings(max_new_tokens=14, num_draft=3, sampling=sampling, seed=4)

    def run(keep: bool) -> tuple[Any, list[tuple[int, list[int]]], list[int]]:
        told: list[tuple[int, list[int]]] = []
        with monkeypatch.context() as patch:
            if keep:
                patch.setattr(Run, "drop_finished", lambda _self: None)
            widths = widths_of(target, patch)
            if name == "tree":
                eagle, spec = make("eagle3", target), parse_tree("3,2")
                rows, _ = decode_tree(
                    target, eagle, PROMPTS, settings, spec, None, lambda *gain: told.append(gain)
                )
            else:
                drafter = drafters[name]()
                rows, _ = decode(
                    target, drafter, PROMPTS, settings, None, lambda *gain: told.append(gain)
                )
        return rows, told, widths

    drafters: dict[str, Any] = {
        **{method: (lambda m=method: make(m, target)) for method in SECTIONS},
        "lookup": lambda: Lookup(1, 3),
        "suffix": lambda: Suffix(),
        "lookup+eagle3": lambda: LookupThen(Lookup(1, 3), make("eagle3", target)),
        "replay": lambda: Replay(make("eagle3", target), {(9, 8, 7, 9): [1, 2, 3]}),
    }
    (stayed, told_stayed, all_rows), (left, told, fewer) = run(True), run(False)
    assert [row.ids for row in left] == [row.ids for row in stayed]
    assert [row.rounds for row in left] == [row.rounds for row in stayed]
    assert [row.finish for row in left] == [row.finish for row in stayed]
    for ours, theirs in zip(left, stayed, strict=True):
        assert ours.alpha_sum == pytest.approx(theirs.alpha_sum, abs=1e-5)
        assert torch.allclose(torch.tensor(ours.pit), torch.tensor(theirs.pit), atol=1e-5)
        assert [r.p for r in ours.rounds] == [pytest.approx(r.p, abs=1e-5) for r in theirs.rounds]
    for number, row in enumerate(left):  # streamed under the right number, in order
        gained = [ids for n, ids in told if n == number]
        assert [token for ids in gained for token in ids] == row.ids
    assert sorted(told) == sorted(told_stayed)
    assert set(all_rows) == {6}
    assert fewer == sorted(fewer, reverse=True) and len(set(fewer)) > 1
    # No pass carries a row that has ended.
    assert sum(fewer[1:]) == sum(len(row.rounds) for row in left)


def test_only_rows_that_take_a_place_are_copied():
    cache = KVCache(1, 5, 4, 1, 1, torch.float32)
    cache.begin(3)
    values = torch.arange(15.0).view(5, 1, 3, 1)
    cache.append(0, values, -values)
    cache.advance(torch.tensor([3, 1, 2, 3, 2]))
    buffer = cache.keys[0]
    cache.keep_rows([0, 4, 2])  # rows 1 and 3 have ended
    assert cache.lengths_B.tolist() == [3, 2, 2]
    assert cache.rows_B.tolist() == [0, 1, 2]
    assert cache.batch_size == 3
    assert cache.keys[0].data_ptr() == buffer.data_ptr()
    assert cache.keys[0][1, 0, :2, 0].tolist() == [12, 13]
    assert cache.values[0][2, 0, :2, 0].tolist() == [-6, -7]
    assert cache.keys[0][0, 0, :3, 0].tolist() == [0, 1, 2]


def test_seeds_stay_with_their_rows():
    """A row draws what it draws alone, whoever ends before it."""
    table_VV = torch.zeros(8, 8)
    target = ScriptedTarget(table_VV, eos_ids=[0, 1, 2])
    settings = DecodeSettings(max_new_tokens=12, sampling=Sampling(1.0), seed=2)
    together, _ = decode(target, None, [[3]] * 16, settings)
    alone = [decode(target, None, [[3]], settings, [i])[0][0] for i in range(16)]
    assert [row.ids for row in together] == [row.ids for row in alone]
    assert len({len(row.ids) for row in together}) > 4
