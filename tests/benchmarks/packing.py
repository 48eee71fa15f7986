"""Packed against padded batches of the same rows (`make bench`): supervised tokens a second.

    python tests/benchmarks/packing.py [--target embedded:smollm2-135m] [--batch-tokens 2048]

Rows have the lengths of chats (log-normal). Some batches of a long epoch's padded plan are drawn;
their rows are then packed, and padded as they come, without sorting by length. Every arm takes the
same rows through target and drafter, forward and backward. Seconds are those of the processor,
which other processes on the machine do not change much.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from training import make_distiller

from data.batch import Batch, Row, collate, num_places, plan_batches
from data.target import Target
from recipes.schema import TargetSection
from train.validate import with_states

NUM_ROWS = 20_000
MEDIAN_TOKENS, SPREAD = 190, 0.8  # of the log-normal lengths


def chat_lengths(longest: int) -> list[int]:
    rng = random.Random(0)
    drawn = (int(MEDIAN_TOKENS * rng.lognormvariate(0, SPREAD)) for _ in range(NUM_ROWS))
    return [min(max(16, n), longest) for n in drawn]


def as_they_come(rows: list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Padded batches up to a budget, in the order given."""
    plan: list[list[int]] = [[]]
    for row in rows:
        longest = max(lengths[i] for i in [*plan[-1], row])
        if plan[-1] and longest * (len(plan[-1]) + 1) > batch_tokens:
            plan.append([])
        plan[-1].append(row)
    return plan


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=3, help="of the padded plan")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    budget = args.batch_tokens
    lengths = chat_lengths(budget)
    padded = plan_batches(lengths, budget, 1, seed=0, epoch=0)
    packed = plan_batches(lengths, budget, 1, seed=0, epoch=0, packing=True)
    mixed = as_they_come(list(range(NUM_ROWS)), lengths, budget)
    fill = sum(lengths) / (len(packed) * budget)
    shares = [1 - sum(lengths) / num_places(plan, lengths, False) for plan in (padded, mixed)]
    print(
        f"{NUM_ROWS:,} rows, mean {sum(lengths) / NUM_ROWS:.0f} tokens, batches of {budget}: "
        f"padding {shares[0]:.1%} by length, {shares[1]:.1%} as rows come, 0% packed (packed rows "
        f"fill {fill:.1%} of the budget)"
    )

    target = Target.load(TargetSection(model=args.target, dtype="float32", device="cpu"))
    distiller = make_distiller(target, 3, min(8192, target.vocab_size))
    by_length = random.Random(1).sample(padded, args.batches)
    chosen = [i for batch in by_length for i in batch]
    random.Random(2).shuffle(chosen)
    sizes = [lengths[i] for i in chosen]
    tight = plan_batches(sizes, budget, 1, seed=0, epoch=0, packing=True)
    rows = {}
    for i in chosen:
        ids_S = torch.randint(0, target.vocab_size, (lengths[i],))
        mask_S = torch.arange(lengths[i]) >= lengths[i] // 3
        rows[i] = Row(id=str(i), ids_S=ids_S, mask_S=mask_S)

    def batches(plan: list[list[int]], packing: bool = False) -> list[Batch]:
        return [collate([rows[i] for i in batch], 0, packing) for batch in plan]

    arms = {
        "packed": batches([[chosen[i] for i in batch] for batch in tight], packing=True),
        "by length": batches(by_length),
        "as they come": batches(as_they_come(chosen, lengths, budget)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(args.repeats + 1):
        for name, arm in arms.items():
            start = time.process_time()
            for batch in arm:
                distiller.zero_grad()
                ready = with_states(target, batch, distiller.drafter.aux_layers)
                distiller(ready)[0].backward()
            if turn:
                seconds[name].append(time.process_time() - start)
    supervised = sum(int(row.mask_S.sum()) for row in rows.values())
    for name, arm in arms.items():
        places = sum(batch.ids_BS.numel() for batch in arm)
        ratios = [a / b for a, b in zip(seconds[name], seconds["packed"], strict=True)]
        print(
            f"{name}: {len(arm)} batches, padding {1 - sum(sizes) / places:.1%}, "
            f"{supervised / statistics.median(seconds[name]):,.0f} supervised tokens/s; packed "
            f"rows take {statistics.median(ratios):.2f}x as many a second"
        )


if __name__ == "__main__":
    main()
