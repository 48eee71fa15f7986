"""Small targets, drafters and references for tests of the decoding loop."""

from functools import cache
from itertools import product
from math import prod

import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from data.sampling import final_probs
from drafters.base import DecodingDrafter
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.lookup import Lookup, LookupThen
from eval.decode import Decoded, DecodeSettings, decode
from tests.scripted import Oracle, ScriptedTarget
from tests.tiny_targets import tiny_target

PROMPTS = [
    [3],
    [1, 2, 3, 1, 2],
    [4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5],
    [9, 8, 7, 9, 8, 7, 9, 8],
]


@cache
def small_target(vocab_size=12, eos=None, kind="qwen3"):
    """Few tokens, so that even random drafters are right now and then."""
    eos = vocab_size - 1 if eos is None else eos
    eos = list(eos) if isinstance(eos, tuple) else eos
    return tiny_target(kind, vocab_size=vocab_size, eos_token_id=eos, pad_token_id=0)


def random_eagle(target, seed=1):
    config = Eagle3Config(
        target_hidden_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(1, 2, 3),
    )
    torch.manual_seed(seed)
    drafter = Eagle3(config).eval()
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    drafter.use_embeddings(target.embed_weight_VH)
    return drafter


def greedy_answers(target, prompts, num_tokens, repetition_penalty=1.0):
    """Token by token with a fresh pass each: no cache, no batch, no loop of ours."""
    answers, penalty = {}, RepetitionPenaltyLogitsProcessor(repetition_penalty)
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + num_tokens and not set(ids[len(prompt) :]) & set(
            target.eos_ids
        ):
            hidden_BSH = target.forward(torch.tensor([ids])).hidden_BSH
            logits_1V = penalty(torch.tensor([ids]), target.logits(hidden_BSH[:, -1]))
            ids.append(int(logits_1V.argmax()))
        answers[tuple(prompt)] = ids[len(prompt) :]
    return answers


def make_drafter(name: str, target, answers) -> DecodingDrafter:
    return {
        "eagle3": lambda: random_eagle(target),
        "lookup": lambda: Lookup(2, 4),
        "lookup+eagle3": lambda: LookupThen(Lookup(1, 3), random_eagle(target)),
        "perfect": lambda: Oracle(answers, target.vocab_size),
        "wrong": lambda: Oracle(answers, target.vocab_size, [0]),
    }[name]()


def law_of_first_three(target, prompt, sampling):
    """Probability of every answer, cut to three tokens, from passes without a cache.

    The repetition penalty is transformers' own, over all ids so far.
    """
    V = target.vocab_size
    penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)

    def next_law(ids):
        hidden_BSH = target.forward(torch.tensor([ids])).hidden_BSH
        logits_1V = penalty(torch.tensor([ids]), target.logits(hidden_BSH[:, -1]))
        s = sampling
        return final_probs(logits_1V, s.temperature, s.top_k, s.top_p, min_p=s.min_p)[0]

    known = {}
    law: dict[tuple[int, ...], float] = {}
    for tokens in product(range(V), repeat=3):
        stop = next((i + 1 for i, t in enumerate(tokens) if t in target.eos_ids), 3)
        kept = tokens[:stop]
        if kept in law:
            continue
        for i in range(stop):
            if kept[:i] not in known:
                known[kept[:i]] = next_law([*prompt, *kept[:i]])
        law[kept] = prod(float(known[kept[:i]][kept[i]]) for i in range(stop))
    return law


def run_chain(chain, eos_ids, num_right=None, **settings) -> tuple[Decoded, ScriptedTarget]:
    """Decode [3] with a scripted target and a drafter that knows the chain."""
    target = ScriptedTarget.chain(chain, eos_ids)
    answer = [chain[3]]
    while answer[-1] in chain and len(answer) < 50:
        answer.append(chain[answer[-1]])
    drafter = Oracle({(3,): answer}, target.vocab_size, num_right)
    rows, _ = decode(target, drafter, [[3]], DecodeSettings(**settings))
    return rows[0], target


SIX = {3: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 10}
