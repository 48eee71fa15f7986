"""What --dry-run states of a step's peak memory against what it takes (`make bench`; Linux).

    python tests/benchmarks/memory.py [--hidden 256 ...] [--length 4096]

A random target of Qwen3-8B's shape, with its vocabulary and draft vocabulary but by default a
narrower hidden width (the true one is 4096), and one step of EAGLE-3 in fp32. Every step runs in a
process of its own, which has all that the step reads before the count begins; what counts is by how
much its resident memory has grown at most. Prints rows in the form of docs/performance.md.
Dimension letters: S positions, V target vocabulary, D draft vocabulary, K rollout steps, H hidden
width.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from interleave import row
from training import make_distiller, random_batch, step_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.embedded import byte_tokenizer
from data.target import Target
from recipes.schema import Recipe
from tests.bare_shapes import bare_shape
from train.step_memory import step_memory
from train.validate import with_states

LAYERS, HEAD_WIDTH = 7, 128  # of the target; a step sees the states of three layers alone


def random_target(args: argparse.Namespace) -> Target:
    """Inner width, heads and kv heads in the proportions of Qwen3-8B."""
    H = args.hidden[0]
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=H,
        intermediate_size=3 * H,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(1, H // HEAD_WIDTH),
        num_key_value_heads=max(1, H // HEAD_WIDTH // 4),
        head_dim=HEAD_WIDTH,
        max_position_embeddings=args.length,
        tie_word_embeddings=False,
    )
    return Target(Qwen3ForCausalLM(config).eval(), byte_tokenizer(), "random", "none")


def stated(target: Target, args: argparse.Namespace) -> int:
    """Bytes of a step beside weights and batch, as the dry run has them."""
    recipe = Recipe.model_validate(
        {
            "name": "memory",
            "target": {"model": "random:qwen3-tiny"},
            "data": {"sources": ["book"], "num_prompts": 1, "states": "cached"},
            "drafter": {"method": "eagle3", "draft_vocab_size": args.draft_vocab},
            "loss": {"num_steps": args.steps, "renormalize": False},
            "train": {"activation_checkpointing": args.checkpointing},
        }
    )
    layers = (2, LAYERS // 2, LAYERS - 3)  # as make_distiller
    shape = bare_shape(target.config.to_dict(), layers, args.draft_vocab, args.length)
    return step_memory(recipe, shape).work


def resident(name: str) -> int:
    """Bytes that /proc says of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def worker(args: argparse.Namespace) -> None:
    """One step; prints bytes stated and measured."""
    target = random_target(args)
    said = stated(target, args)
    distiller = make_distiller(target, args.steps, args.draft_vocab)
    if args.checkpointing:
        distiller.recompute_activations()
    batch = with_states(target, random_batch(target, args.length), distiller.drafter.aux_layers)
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is there now
    before = resident("VmHWM")
    step_of(distiller, batch)()
    print(f"bytes {said} {resident('VmHWM') - before}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256], help="one H or several")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    sizes = f"S {args.length}, V {args.vocab}, D {args.draft_vocab}, K {args.steps}"
    print(f"\n| a step's peak, {sizes} | stated, measured, ratio |\n|---|---|", flush=True)
    for H in args.hidden:
        for how in ("", "--checkpointing"):
            keys = ("length", "vocab", "draft_vocab", "steps")
            options = [f"--{key.replace('_', '-')}={vars(args)[key]}" for key in keys]
            done = subprocess.run(
                [sys.executable, __file__, "--worker", f"--hidden={H}", *options, *how.split()],
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            said, took = map(int, done.stdout.split("bytes ")[1].split())
            what = f"H {H}" + (", activation checkpointing" if how else "")
            row(what, f"{said / 1e9:.3f} GB, {took / 1e9:.3f} GB, {said / took:.2f}")


if __name__ == "__main__":
    main()
