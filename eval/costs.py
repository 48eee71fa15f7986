"""Time of the passes of a round by size, measured on the device: what eval.theory predicts from.

Dimension letters: B rows, N positions of a pass, S prompt positions.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.target import Target
from drafters.base import DecodingDrafter, Sampling

VERIFY_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 17)
DRAFT_SIZES = (1, 2, 4, 8, 16)
NUM_REPEATS = 5

Passes = dict[tuple[str, int], Callable[[], object]]
Clock = Callable[[], float]


class PassTimes(NamedTuple):
    """Milliseconds. verify: by positions a row; draft: by drafter, then by tokens drafted."""

    verify: dict[int, float]
    draft: dict[str, dict[int, float]]


def measure_passes(
    target: Target,
    drafters: Mapping[str, DecodingDrafter],
    prompts: Sequence[list[int]],
    batch_size: int,
    sampling: Sampling,
    num_repeats: int = NUM_REPEATS,
    clock: Clock = time.perf_counter,
) -> PassTimes:
    """Times behind a batch of prompts; medians over interleaved repeats, after one warm-up.

    Drafting K tokens is the proposal and the reading of K + 1 committed positions.

    Args:
        prompts: token ids, at least one; the first batch_size, over again where there are fewer.
        clock: seconds; the device is waited for before each reading.
    """
    batch = [list(prompts[i % len(prompts)]) for i in range(batch_size)]
    passes: Passes = _verify_passes(target, batch)
    for name, drafter in drafters.items():
        passes |= _draft_passes(target, name, drafter, batch, sampling)
    seconds = interleaved(passes, num_repeats, target.device, clock)
    ms = {key: 1000 * value for key, value in seconds.items()}
    return PassTimes(
        {size: ms["verify", size] for size in VERIFY_SIZES},
        {
            name: {K: ms[f"propose {name}", K] + ms[f"observe {name}", K] for K in DRAFT_SIZES}
            for name in drafters
        },
    )


def interleaved(
    passes: Passes, num_repeats: int, device: torch.device, clock: Clock = time.perf_counter
) -> dict[tuple[str, int], float]:
    """Median seconds of each pass; all run once unclocked, then in turn, again and again.

    Every other turn goes backwards, so that none always follows the same one.
    """
    spent: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    for repeat in range(num_repeats + 1):
        turn = list(passes.items())
        for key, call in turn[:: -1 if repeat % 2 else 1]:
            _wait(device)
            start = clock()
            call()
            _wait(device)
            if repeat:
                spent[key].append(clock() - start)
    return {key: statistics.median(times) for key, times in spent.items()}


def _padded(batch: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, S] and lengths [B]."""
    ids_BS = pad_sequence([torch.tensor(prompt) for prompt in batch], batch_first=True)
    return ids_BS.to(device), torch.tensor([len(prompt) for prompt in batch], device=device)


@torch.inference_mode()
def _verify_passes(target: Target, batch: list[list[int]]) -> Passes:
    """Passes of the target behind the prompts; none of them moves the cache on."""
    ids_BS, lengths_B = _padded(batch, target.device)
    cache = target.new_cache(len(batch), ids_BS.shape[1] + max(VERIFY_SIZES))
    target.forward(ids_BS, cache)
    cache.advance(lengths_B)
    tokens_BN = ids_BS[:, :1].repeat(1, max(VERIFY_SIZES))

    def verify(num: int) -> Tensor:
        with torch.inference_mode():
            return target.logits(target.forward(tokens_BN[:, :num], cache).hidden_BSH)

    return {("verify", num): partial(verify, num) for num in VERIFY_SIZES}


@torch.inference_mode()
def _draft_passes(
    target: Target,
    name: str,
    drafter: DecodingDrafter,
    batch: list[list[int]],
    sampling: Sampling,
) -> Passes:
    """Proposals behind the prompts, and reading passes that commit nothing."""
    (ids_BS, lengths_B), most = _padded(batch, target.device), max(DRAFT_SIZES)
    B, S = ids_BS.shape
    cache = target.new_cache(B, S)
    states = target.forward(ids_BS, cache, drafter.aux_layers)
    state = drafter.start(batch, S + most + 1)
    drafter.observe(state, ids_BS.roll(-1, 1), states.aux_BSF, lengths_B)
    tokens_BN = ids_BS[:, :1].repeat(1, most + 1)
    aux_BNF = states.aux_BSF[:, :1].repeat(1, most + 1, 1)
    draws_BN = torch.rand(B, most, generator=torch.Generator().manual_seed(0)).to(target.device)
    seen_BV = None
    if sampling.needs_history:
        seen_BV = torch.zeros(B, target.vocab_size, dtype=torch.bool, device=target.device)

    def propose(num: int) -> object:
        with torch.inference_mode():
            return drafter.propose(state, num, sampling, draws_BN[:, :num], seen_BV)

    def observe(num: int) -> None:
        with torch.inference_mode():
            nothing_B = torch.zeros_like(lengths_B)
            drafter.observe(state, tokens_BN[:, : num + 1], aux_BNF[:, : num + 1], nothing_B)

    passes: Passes = {}
    for num in DRAFT_SIZES:
        passes[f"propose {name}", num] = partial(propose, num)
        passes[f"observe {name}", num] = partial(observe, num)
    return passes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
