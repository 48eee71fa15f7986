"""Ratios that a person wants to know of this machine (`make bench`): interleaved, medians.

    python tests/benchmarks/speed.py [TARGET] [--tokens 48] [--repeats 5]

Prints: our autoregressive loop against `generate` of transformers (same weights, same dtype, same
process), a verification pass over k tokens against one over a single token, and the share of a
round that is spent outside the models.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from interleave import head, interleaved, row
from transformers import AutoModelForCausalLM

from data import embedded
from data.conversations import render_prompt
from data.target import Target
from drafters.lookup import Lookup
from eval.decode import DecodeSettings, decode
from recipes.schema import TargetSection

PROMPTS = [
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to pack for a week in the mountains.",
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default="embedded:smollm2-135m")
    parser.add_argument("--tokens", type=int, default=48, help="tokens an answer")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    target = Target.load(TargetSection(model=args.target))
    path = embedded.resolve(args.target)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype).to(target.device).eval()
    ids = [render_prompt(target.tokenizer, [{"role": "user", "content": p}]) for p in PROMPTS]
    print(f"{args.target}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads")

    head()
    settings = DecodeSettings(max_new_tokens=args.tokens)
    same = []
    for prompt in ids:
        tensor = torch.tensor([prompt], device=target.device)
        answers: dict[str, list[int]] = {}

        def ours(prompt: list[int] = prompt, answers: dict[str, list[int]] = answers) -> None:
            answers["ours"] = decode(target, None, [prompt], settings)[0][0].ids

        def theirs(tensor: torch.Tensor = tensor, answers: dict[str, list[int]] = answers) -> None:
            mask = torch.ones_like(tensor)
            out = plain.generate(
                tensor, attention_mask=mask, max_new_tokens=args.tokens, do_sample=False
            )
            answers["theirs"] = out[0, tensor.shape[1] :].tolist()

        seconds = interleaved({"ours": ours, "theirs": theirs}, args.repeats)
        rates = {name: len(answers[name]) / s for name, s in seconds.items()}
        same.append(answers["ours"] == answers["theirs"])
        row(
            f"decoding without a drafter against generate of transformers, prompt {len(same)}",
            f"{rates['ours'] / rates['theirs']:.2f}x the tokens a second ({rates['ours']:.1f}; "
            f"same tokens: {same[-1]})",
        )

    cache = target.new_cache(1, 320)
    cache.lengths_B += 256
    passes = {
        str(k): lambda k=k: target.logits(
            target.forward(torch.full((1, k), 100, device=target.device), cache).hidden_BSH
        )
        for k in (1, 2, 3, 4, 5, 6, 8)
    }
    seconds = interleaved(passes, 3 * args.repeats)
    row(
        "verification of k tokens at context 256 against one token",
        "  ".join(f"{k}: {s / seconds['1']:.2f}x" for k, s in seconds.items()),
    )

    spent = [
        decode(target, Lookup(2, 4), [p], DecodeSettings(max_new_tokens=args.tokens, num_draft=3))
        for p in ids
    ]
    outside = sum(s.sampling + s.bookkeeping + s.draft for _, s in spent)
    other = outside / sum(s.decode for _, s in spent)
    row("decoding outside the target's passes (lookup, verification, bookkeeping)", f"{other:.1%}")


if __name__ == "__main__":
    main()
