"""Passes through torch.compile: the same tokens, few shapes, errors that say what to do.

Traced by aot_eager, which needs no compiler; a slow test runs inductor's C++.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.cache import KVCache
from data.compiled import Compiling, compiled
from drafters.base import Sampling
from eval import rounds
from eval.decode import DecodeSettings, decode
from recipes.errors import UserError
from tests import block_drafters
from tests.decoding import PROMPTS, random_eagle
from tests.tiny_targets import tiny_target

DRAWN = Sampling(1.0, draft_sampled=True)


def check_same(
    drafter_of: Any, sampling: Sampling, mode: str, monkeypatch: Any, num_rows: int = 3
) -> None:
    """Rows that end one after another, compiled and not."""
    target = tiny_target("qwen3", eos_token_id=[257, *range(0, 256, 12)])
    drafter = drafter_of(target)
    settings: dict[str, Any] = {"max_new_tokens": 10, "num_draft": 3, "sampling": sampling}
    expected, _ = decode(target, drafter, PROMPTS[:num_rows], DecodeSettings(**settings))
    target.compile_passes(mode, "eval.compile")
    drafter.compile_passes(mode, "eval.compile")
    shapes, once = set(), target._compiled._once

    def spy(cache: Any, ids: torch.Tensor, *rest: Any) -> Any:
        shapes.add(tuple(ids.shape))
        return once(cache, ids, *rest)

    monkeypatch.setattr(target._compiled, "_once", spy)
    rows, _ = decode(
        target, drafter, PROMPTS[:num_rows], DecodeSettings(**settings, fixed_shapes=True)
    )
    assert [row.ids for row in rows] == [row.ids for row in expected]
    counts = [
        [[(r.accepted, r.emitted) for r in row.rounds] for row in arm] for arm in (rows, expected)
    ]
    assert counts[0] == counts[1]
    assert shapes <= {(3, 4), (2, 4), (1, 4)}  # every round is as wide as the first
    assert shapes


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_of_passes_that_are_not_compiled(sampling, monkeypatch):
    check_same(random_eagle, sampling, "aot_eager", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_tokens_of_blocks(kind, monkeypatch):
    def drafter_of(target: Any) -> Any:
        return block_drafters.for_target(kind, target)

    check_same(drafter_of, Sampling(), "aot_eager", monkeypatch)


@pytest.mark.slow
def test_tokens_through_inductor(monkeypatch):
    check_same(random_eagle, Sampling(), "default", monkeypatch, num_rows=1)


def test_fixed_passes_look_at_all_places_and_prompts_do_not():
    cache = KVCache(1, 2, 300, 1, 1, torch.float32, fixed_width=True)
    assert cache.max_length == 512
    cache.begin(5)
    assert not cache.fixed and cache.mask_BST().shape == (2, 5, 5)
    cache.advance(torch.tensor([5, 3]))
    cache.begin(2)
    assert cache.fixed
    mask_BST = cache.mask_BST()
    assert mask_BST.shape == (2, 2, 512)
    assert mask_BST.sum(-1).tolist() == [[6, 7], [4, 5]]
    cache.begin(65)
    assert not cache.fixed


def test_first_runs_of_a_shape_are_on_no_clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: now.s))
    monkeypatch.setattr(Compiling, "seconds", 7.0)
    clock = rounds.Clock(torch.device("cpu"))
    now.s += 30.5
    Compiling.seconds += 30.0
    assert clock.lap() == 0.5
    now.s += 2.0
    assert clock.lap() == 2.0


def test_no_compiler_is_an_error_that_names_the_key():
    patch = {"cpp.cxx": ("/no/compiler/here",), "force_disable_caches": True}
    with torch._inductor.config.patch(patch):
        run = compiled(lambda x: x.sin() + 1, "default", "eval.compile")
        with pytest.raises(UserError, match=r"eval.compile is 'default'.*eval.compile: null"):
            run(torch.ones(3))
