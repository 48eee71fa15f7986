"""Ratios of a training step (`make bench`): interleaved, medians of a few turns.

    python tests/benchmarks/training.py [--target embedded:smollm2-135m] [--length 2048]

Prints a table in the form of docs/performance.md: a step against the bare matrix products in it
(recorded from the step, played again on tensors of the same shapes and strides), parts compiled
against none, states computed in the step against cached ones, activations kept against computed
again, kinds of AdamW, chunked against plain loss (time and peak bytes), cost against S, D, K and
memory against V, and rows a second of 2 processes against 1.
Dimension letters: S positions, D draft vocabulary, K rollout steps, V target vocabulary, N slots, H
hidden width.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from interleave import head, interleaved, row
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from data.batch import Batch, Row, collate
from data.target import Target
from data.vocab import DraftVocab
from drafters.methods import build_drafter
from recipes.drafter_sections import Eagle3Section
from recipes.schema import LossSection, Recipe, TargetSection
from tests.bare_shapes import bare_shape
from train.distiller import Distiller
from train.linear_loss import linear_loss
from train.losses import LOSSES, LossOptions
from train.shape_pass import LiveBytes
from train.step_memory import step_memory
from train.validate import with_states

aten: Any = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.addmm_.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class Recorder(TorchDispatchMode):
    """Matrix products that run under it, with the shapes of what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:

            def shape(x: Any) -> Any:
                return ("tensor", x.shape, x.stride(), x.dtype) if torch.is_tensor(x) else x

            self.calls.append((func, tree_map(shape, args), tree_map(shape, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def replay(self) -> Callable[[], None]:
        """A function that does the same products, on random tensors made here."""
        stock: dict[Any, torch.Tensor] = {}

        def is_shape(x: Any) -> bool:
            return isinstance(x, tuple) and len(x) == 4 and x[0] == "tensor"

        def make(x: Any) -> Any:
            if not is_shape(x):
                return x
            if x not in stock:
                stock[x] = torch.empty_strided(x[1], x[2], dtype=x[3]).normal_(std=0.1)
            return stock[x]

        calls = [
            (func, tree_map(make, args, is_leaf=is_shape), tree_map(make, kw, is_leaf=is_shape))
            for func, args, kw in self.calls
        ]

        def play() -> None:
            for func, args, kwargs in calls:
                func(*args, **kwargs)

        return play


def random_batch(target: Target, length: int) -> Batch:
    """One row without states, every token supervised."""
    ids_S = torch.randint(0, target.vocab_size, (length,))
    return collate([Row(id="a", ids_S=ids_S, mask_S=torch.ones(length, dtype=torch.bool))])


def make_distiller(target: Target, num_steps: int, D: int, **loss: Any) -> Distiller:
    """EAGLE-3 of the target's widths and its most frequent tokens, here the first D."""
    n = target.num_layers
    vocab = DraftVocab(torch.arange(D), target.vocab_size)
    drafter = build_drafter(
        Eagle3Section(draft_vocab_size=D), target, (2, n // 2, n - 3), vocab, seed=0
    )
    section = LossSection(num_steps=num_steps, renormalize=False, **loss)
    distiller = Distiller(drafter, section, vocab)
    distiller.use_target(target)
    return distiller


def step_of(distiller: Distiller, batch: Batch) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        distiller.zero_grad()
        distiller(batch)[0].backward()

    return step


def states_of(target: Target, distiller: Distiller, length: int) -> Batch:
    return with_states(target, random_batch(target, length), distiller.drafter.aux_layers)


def peak_of(call: Callable[[], None]) -> int:
    """Bytes of tensors that live at once, at most, beside those that were there before."""
    with LiveBytes() as live:
        call()
    return live.peak


def bench_step(target: Target, args: argparse.Namespace) -> None:
    distiller = make_distiller(target, args.steps, args.draft_vocab)
    batch = states_of(target, distiller, args.length)
    step = step_of(distiller, batch)
    with Recorder() as recorder:
        step()
    bare = random_batch(target, args.length)
    lean = make_distiller(target, args.steps, args.draft_vocab)
    lean.recompute_activations()
    fast = make_distiller(target, args.steps, args.draft_vocab)
    fast.drafter.compile_training("default", "train.compile")
    compiled = step_of(fast, batch)
    begun = time.perf_counter()
    compiled()
    first = time.perf_counter() - begun

    def online() -> None:
        step_of(distiller, with_states(target, bare, distiller.drafter.aux_layers))()

    arms = {
        "cached": step,
        "products": recorder.replay(),
        "online": online,
        "checkpointing": step_of(lean, batch),
        "compiled": compiled,
    }
    seconds = interleaved(arms, args.repeats)
    base = seconds["cached"]
    row(
        f"a step against its {len(recorder.calls)} matrix products, "
        f"S {args.length}, K {args.steps}, D {args.draft_vocab}",
        f"{base / seconds['products']:.2f}x ({base:.2f} s, {args.length / base:,.0f} tokens/s)",
    )
    row(
        "train.compile against none",
        f"{seconds['compiled'] / base:.2f}x (the first step {first:.0f} s)",
    )
    row("states made in the step against cached ones", f"{seconds['online'] / base:.2f}x")
    kept, again = peak_of(step), peak_of(arms["checkpointing"])
    row(
        "activation checkpointing against none",
        f"{seconds['checkpointing'] / base:.2f}x the time, {again / kept:.2f}x the peak "
        f"({kept / 1e9:.2f} -> {again / 1e9:.2f} GB)",
    )


def bench_loss(args: argparse.Namespace, N: int = 4096, H: int = 256) -> None:
    D = args.draft_vocab
    hidden_NH = torch.randn(N, H, requires_grad=True)
    weight_DH = (torch.randn(D, H) * H**-0.5).requires_grad_()
    p_1D = torch.randn(1, D).softmax(-1)
    labels_N = torch.zeros(N, dtype=torch.int64)

    def chunked() -> None:
        def teacher(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return p_1D.repeat(rows.stop - rows.start, 1), labels_N[rows]

        linear_loss(hidden_NH, weight_DH, teacher, LOSSES["kl"], LossOptions(), 512)[0].backward()

    def plain() -> None:
        log_q_ND = (hidden_NH @ weight_DH.T).log_softmax(-1)
        F.kl_div(log_q_ND, p_1D.repeat(N, 1), reduction="sum").backward()

    seconds = interleaved({"chunked": chunked, "plain": plain}, args.repeats)
    peaks = {name: peak_of(call) for name, call in (("chunked", chunked), ("plain", plain))}
    row(
        f"chunked loss against plain, N {N}, D {D}, H {H}",
        f"{seconds['chunked'] / seconds['plain']:.2f}x the time, "
        f"{peaks['chunked'] / peaks['plain']:.2f}x the peak "
        f"({peaks['plain'] / 1e9:.2f} -> {peaks['chunked'] / 1e9:.2f} GB)",
    )


def bench_optimizer(target: Target, args: argparse.Namespace) -> None:
    """The optimizer's step against the training step, and what its moments weigh."""
    distiller = make_distiller(target, 3, args.draft_vocab)
    step = step_of(distiller, states_of(target, distiller, 512))
    step()
    weights = [p for p in distiller.parameters() if p.requires_grad]
    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for loop": {"foreach": False}}
    arms: dict[str, Callable[[], object]] = {
        name: torch.optim.AdamW(weights, lr=0.0, **options).step for name, options in kinds.items()
    }
    seconds = interleaved({"step": step, **arms}, args.repeats)
    row(
        f"AdamW on {sum(p.numel() for p in weights) / 1e6:.1f}M weights against 512 tokens' step",
        "  ".join(f"{name}: {seconds[name] / seconds['step']:.3f}x" for name in kinds),
    )


def bench_scaling(target: Target, args: argparse.Namespace) -> None:
    """Cost a token against each size, the others held, in multiples of the first."""
    K, D = 2, args.draft_vocab
    sweeps: dict[str, dict[int, tuple[int, int, int]]] = {
        "S": {S: (S, K, D) for S in (512, 1024, 2048, 4096, 8192) if args.longest >= S},
        "K": {k: (1024, k, D) for k in (1, 3, 5, 7)},
        "D": {d: (1024, K, d) for d in (D // 4, D // 2, D, 2 * D) if d <= target.vocab_size},
    }
    for letter, sizes in sweeps.items():
        arms, lengths, peaks = {}, {}, {}
        for size, (S, k, d) in sizes.items():
            distiller = make_distiller(target, k, d)
            arms[str(size)] = step_of(distiller, states_of(target, distiller, S))
            lengths[str(size)] = S
        seconds = interleaved(arms, max(1, args.repeats - 1))
        peaks = {name: peak_of(arm) for name, arm in arms.items()}
        first = next(iter(arms))
        cost = {name: seconds[name] / lengths[name] for name in arms}
        cells = [
            f"{name}: {cost[name] / cost[first]:.2f}x, {peaks[name] / 1e9:.2f} GB" for name in arms
        ]
        row(f"a token's cost and a step's peak against {letter}", "  ".join(cells))


def bench_vocabulary(target: Target, args: argparse.Namespace) -> None:
    """What a step keeps, counted on shapes, for target vocabularies of any size."""
    found = {}
    for V in (32_000, 64_000, 128_256, 151_936, 262_144):
        recipe = Recipe.model_validate(
            {
                "name": "v",
                "target": {"model": args.target},
                "data": {"sources": ["book"], "num_prompts": 1, "states": "cached"},
                "loss": {"num_steps": 3},
            }
        )
        fields = target.config.to_dict() | {"vocab_size": V}
        shape = bare_shape(fields, (1, 2, 3), args.draft_vocab, 1024, states_bytes=2)
        found[V] = step_memory(recipe, shape).work / 1e9
    cells = "  ".join(f"{V}: {size:.3f} GB" for V, size in found.items())
    row("a step's peak beside weights against V", cells)


def worker(target: Target, args: argparse.Namespace) -> None:
    """One rank of the comparison of process counts: seconds of a step, gradients averaged."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    distiller = make_distiller(target, 3, args.draft_vocab)
    batch = states_of(target, distiller, 512)
    model = accelerator.prepare(distiller)
    times = []
    for _ in range(args.repeats + 1):
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        model(batch)[0].backward()
        model.zero_grad()
        times.append(time.perf_counter() - start)
    if accelerator.is_main_process:
        print(f"seconds {sorted(times[1:])[len(times) // 2 - 1]:.4f}")
    accelerator.end_training()


def bench_processes(args: argparse.Namespace) -> None:
    """Rows a second of two processes with half the threads each, against one with all."""
    threads = torch.get_num_threads()
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(2):
        for num in found:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num}"]
            options = ["--worker", "--target", args.target, "--repeats", str(args.repeats)]
            done = subprocess.run(
                [sys.executable, *command, __file__, *options],
                env=os.environ | {"OMP_NUM_THREADS": str(max(1, threads // num))},
                capture_output=True,
                text=True,
                check=True,
            )
            line = next(x for x in done.stdout.splitlines() if x.startswith("seconds "))
            found[num].append(num / float(line.split()[1]))
    ratio = max(found[2]) / max(found[1])
    row(f"2 processes against 1, {threads} threads in all", f"{ratio:.2f}x the rows a second")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--length", type=int, default=2048, help="S of the step")
    parser.add_argument("--longest", type=int, default=8192, help="S of the longest row")
    parser.add_argument("--steps", type=int, default=7, help="K of the step")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = Target.load(TargetSection(model=args.target, dtype="float32", device="cpu"))
    args.draft_vocab = min(args.draft_vocab, target.vocab_size)
    if args.worker:
        worker(target, args)
        return
    print(f"{args.target}, float32, {torch.get_num_threads()} threads")
    head()
    start = time.perf_counter()
    bench_step(target, args)
    bench_optimizer(target, args)
    bench_loss(args)
    bench_scaling(target, args)
    bench_vocabulary(target, args)
    bench_processes(args)
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
