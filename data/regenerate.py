"""The target writes: answers to prompts (and, Magpie style, prompts) by continuous batching.

Dimension letters: B places side by side, T cache length, F captured width, H hidden width,
V vocabulary.

A place whose row has finished is handed to the next request at once, so the batch stays full. The
states that training needs pass by anyway while the target writes; with `capture` they are kept, and
no second pass over the data is needed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from data.batch import States
from data.cache import KVCache
from data.sampling import final_probs, sample
from data.target import Target, TargetStates

PREFILL_TOKENS = 1024  # of one prefill; more would gain nothing and pad more
_END = object()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer to be written; temperature 0 is greedy. `seed` fixes its draws alone.

    stop_ids: end it as the target's own end-of-sequence ids do.
    """

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Answer:
    """ids: generated tokens, end-of-turn token included when finish is "stop" (else "length").

    states: of prompt and answer together, [prompt + answer] positions; the last one, which the
    target never ran over, is zero.
    """

    request: Request
    ids: list[int] = field(default_factory=list)
    finish: str = ""
    states: States | None = None


class _Places:
    """The B rows of the running batch: cache, captured states and who sits where."""

    def __init__(
        self,
        target: Target,
        size: int,
        length: int,
        capture: tuple[int, ...] | None,
        capture_dtype: torch.dtype,
    ) -> None:
        self.target, self.size, self.length = target, size, length
        self.capture, self.capture_dtype = capture, capture_dtype
        self.cache = target.new_cache(size, length)
        self.answers: list[Answer | None] = [None] * size
        self.generators: list[torch.Generator | None] = [None] * size
        self.last_B = torch.zeros(size, dtype=torch.int64, device=target.device)
        if capture is not None:
            H = target.hidden_size
            self.aux_BTF = torch.zeros(size, length, len(capture) * H, dtype=capture_dtype)
            self.hidden_BTH = torch.zeros(size, length, H, dtype=capture_dtype)
            self.lse_BT = torch.zeros(size, length)
            self.argmax_BT = torch.zeros(size, length, dtype=torch.int32)

    def free(self) -> list[int]:
        return [b for b, answer in enumerate(self.answers) if answer is None]

    def fill(self, requests: list[Request], places: list[int]) -> None:
        """Prefill new rows in a cache of their own, then move them into their places."""
        prompts = [torch.tensor(r.prompt_ids) for r in requests]
        lengths = torch.tensor([len(p) for p in prompts])
        small = self.target.new_cache(len(requests), int(lengths.max()))
        states = self.target.forward(
            pad_sequence(prompts, batch_first=True).to(self.target.device), small, self.aux_layers
        )
        rows = torch.arange(len(requests))
        for i, (request, place) in enumerate(zip(requests, places, strict=True)):
            self.answers[place] = Answer(request=request)
            self.generators[place] = torch.Generator().manual_seed(request.seed)
            n = len(request.prompt_ids)
            for layer in range(len(small.keys)):
                self.cache.keys[layer][place, :, :n] = small.keys[layer][i, :, :n]
                self.cache.values[layer][place, :, :n] = small.values[layer][i, :, :n]
            self.cache.lengths_B[place] = n
            if self.capture is not None:
                self.aux_BTF[place, :n] = states.aux_BSF[i, :n].to("cpu")
                self.hidden_BTH[place, :n] = states.hidden_BSH[i, :n].to("cpu")
        last = TargetStates(
            states.hidden_BSH[rows, lengths - 1][:, None],
            states.aux_BSF[rows, lengths - 1][:, None],
        )
        self.draw(places, last, (lengths - 1).tolist())

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.capture or ()

    def step(self) -> None:
        """One new token in every place (places without a row compute on leftovers)."""
        places = [b for b, answer in enumerate(self.answers) if answer is not None]
        states = self.target.forward(self.last_B[:, None], self.cache, self.aux_layers)
        positions = self.cache.lengths_B.tolist()
        busy_B = torch.zeros_like(self.cache.lengths_B)
        busy_B[places] = 1
        self.cache.advance(busy_B)
        if len(places) < self.size:
            states = TargetStates(states.hidden_BSH[places], states.aux_BSF[places])
        self.draw(places, states, [positions[b] for b in places])

    def draw(self, places: list[int], states: TargetStates, positions: list[int]) -> None:
        """Choose the next token of `places` from the states at `positions`, and keep the states."""
        logits_BV = self.target.logits(states.hidden_BSH[:, 0])
        best_B = logits_BV.argmax(-1)
        ids = best_B.clone()
        requests = [self._answer(b).request for b in places]
        drawn = [i for i, r in enumerate(requests) if r.temperature > 0]
        for setting in {
            (requests[i].temperature, requests[i].top_k, requests[i].top_p) for i in drawn
        }:
            temperature, top_k, top_p = setting
            rows = [
                i
                for i in drawn
                if (requests[i].temperature, requests[i].top_k, requests[i].top_p) == setting
            ]
            uniforms = torch.cat(
                [torch.rand(1, generator=self.generators[places[i]]) for i in rows]
            )
            probs = final_probs(logits_BV[rows], temperature, top_k, top_p, "target logits")
            ids[rows] = sample(probs, uniforms.to(probs.device))
        if self.capture is not None:
            at = (torch.tensor(places), torch.tensor(positions))
            self.aux_BTF[at] = states.aux_BSF[:, 0].to("cpu", self.aux_BTF.dtype)
            self.hidden_BTH[at] = states.hidden_BSH[:, 0].to("cpu", self.hidden_BTH.dtype)
            self.lse_BT[at] = logits_BV.logsumexp(-1).to("cpu")
            self.argmax_BT[at] = best_B.to("cpu", torch.int32)
        self.last_B[places] = ids
        for place, token in zip(places, ids.tolist(), strict=True):
            answer = self._answer(place)
            answer.ids.append(token)
            if token in self.target.eos_ids or token in answer.request.stop_ids:
                answer.finish = "stop"
            elif len(answer.ids) == answer.request.max_new_tokens:
                answer.finish = "length"

    def _answer(self, place: int) -> Answer:
        answer = self.answers[place]
        assert answer is not None
        return answer

    def collect(self) -> Iterator[Answer]:
        """Finished answers; their places become free."""
        for place, answer in enumerate(self.answers):
            if answer is None or not answer.finish:
                continue
            n = len(answer.request.prompt_ids) + len(answer.ids)
            if self.capture is not None:
                self.aux_BTF[place, n - 1] = 0
                self.hidden_BTH[place, n - 1] = 0
                for kept_BT in (self.lse_BT, self.argmax_BT):  # an earlier row's stand there
                    kept_BT[place, : len(answer.request.prompt_ids) - 1] = 0
                    kept_BT[place, n - 1] = 0
                answer.states = States(
                    aux_SF=self.aux_BTF[place, :n].clone(),
                    hidden_SH=self.hidden_BTH[place, :n].clone(),
                    lse_S=self.lse_BT[place, :n].clone(),
                    argmax_S=self.argmax_BT[place, :n].clone(),
                )
            self.answers[place] = None
            self.cache.lengths_B[place] = 0
            yield answer

    def shrink(self) -> "_Places":
        """Half the places, once no more requests come and no more than half are taken."""
        keep = [b for b, answer in enumerate(self.answers) if answer is not None]
        small = _Places(self.target, len(keep), self.length, self.capture, self.capture_dtype)
        captured = ("aux_BTF", "hidden_BTH", "lse_BT", "argmax_BT")
        for name in ("last_B", *(() if self.capture is None else captured)):
            setattr(small, name, getattr(self, name)[keep])
        small.answers = [self.answers[b] for b in keep]
        small.generators = [self.generators[b] for b in keep]
        cache: KVCache = small.cache
        cache.keys = [k[keep] for k in self.cache.keys]
        cache.values = [v[keep] for v in self.cache.values]
        cache.lengths_B = self.cache.lengths_B[keep]
        return small


@torch.inference_mode()
def generate(
    target: Target,
    requests: Iterable[Request | None],
    batch_size: int,
    max_length: int,
    capture: tuple[int, ...] | None = None,
    capture_dtype: torch.dtype | None = None,
    stop_taking: Callable[[], bool] = lambda: False,
) -> Iterator[Answer]:
    """Answers in the order in which they finish.

    Args:
        requests: prompt + max_new_tokens of each must fit into max_length. None stands for
            "nothing now, ask again when an answer is out" and needs one that is being written.
        batch_size: places side by side.
        capture: layer ids whose states are kept (with the last state and the logsumexp of the
            logits); None keeps nothing.
        capture_dtype: of the kept states, None = bfloat16 (the logsumexp is always fp32).
        stop_taking: asked before a new request is taken; once true, the running ones finish and
            the rest is left.
    """
    queue = iter(requests)
    places = _Places(target, batch_size, max_length, capture, capture_dtype or torch.bfloat16)
    more = True
    while True:
        free, dry = places.free(), not more
        # Prefills are bundled, since a pass over two prompts costs little more than over one.
        if more and len(free) >= max(1, places.size // 16):
            taken: list[Request] = []
            while more and not dry and len(taken) < len(free):
                more = not stop_taking()
                request = next(queue, _END) if more else _END
                if isinstance(request, Request):
                    taken.append(request)
                dry, more = request is None or request is _END, request is not _END
            for part in _prefills(taken):
                places.fill(part, places.free()[: len(part)])
            yield from places.collect()
        num_busy = places.size - len(places.free())
        if num_busy == 0 and not more:
            return
        if dry and 0 < num_busy <= places.size // 2:
            places = places.shrink()
        if num_busy:
            places.step()
            yield from places.collect()


def _prefills(requests: list[Request]) -> list[list[Request]]:
    """Requests by length, cut so that a prefill holds few tokens, padding included."""
    parts: list[list[Request]] = []
    for request in sorted(requests, key=lambda r: len(r.prompt_ids)):
        full = parts and (len(parts[-1]) + 1) * len(request.prompt_ids) > PREFILL_TOKENS
        if not parts or full:
            parts.append([])
        parts[-1].append(request)
    return parts


@dataclass(frozen=True)
class MagpiePrompt:
    """What makes the target write a user's message.

    ids: the template up to where the user's words begin. stop_ids: the special token behind them,
    where there is one; else `closing` is the text behind them.
    """

    ids: list[int]
    stop_ids: tuple[int, ...]
    closing: str

    def cut(self, text: str, ended: bool) -> tuple[str, bool]:
        """The user's words, and whether they came to their end."""
        words, found, _ = text.partition(self.closing) if self.closing else (text, "", "")
        return words.strip(), ended or bool(found)


def magpie_prompt(target: Target, template_kwargs: dict[str, Any] | None = None) -> MagpiePrompt:
    """The template around a user's words; continued by the target, they become a user's message.

    Source: Magpie, Xu et al. 2406.08464. The end of a user's turn need not be an end-of-sequence
    token: Mistral writes [/INST], others go on with the assistant's header at once.
    """
    marker, tokenizer = "zq0words0qz", target.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}],
        tokenize=False,
        add_generation_prompt=True,
        **(template_kwargs or {}),
    )
    head, _, tail = str(text).partition(marker)
    ids: list[int] = tokenizer(head, add_special_tokens=False)["input_ids"]
    behind: list[int] = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"]
    special = behind[:1] and tokenizer.added_tokens_decoder.get(behind[0])
    if special:
        return MagpiePrompt(ids, (behind[0],), "")
    lines = tail.strip().splitlines()
    return MagpiePrompt(ids, (), lines[0] if lines else "")
