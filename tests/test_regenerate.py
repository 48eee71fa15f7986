"""Continuous batching against transformers' own generate, and the states it keeps on the way."""

import random

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from data.embedded import byte_tokenizer
from data.regenerate import Answer, MagpiePrompt, Request, _Places, generate, magpie_prompt
from data.target import Target
from recipes.schema import TargetSection
from tests.tiny_targets import tiny_target

MAX_LENGTH, LAYERS = 48, (1, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The random target, with three ids that end an answer, so that some answers end early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        section = TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu")
        target = Target.load(section)
    target.eos_ids = [*range(30), 257]
    return target


def requests(count: int = 20, **fields: float) -> list[Request]:
    """Prompts of 1..25 tokens with 1..20 tokens to write."""
    rng = random.Random(0)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=[rng.randrange(256) for _ in range(rng.randint(1, 25))],
            max_new_tokens=rng.randint(1, 20),
            seed=1000 + i,
            **fields,
        )
        for i in range(count)
    ]


def run(target: Target, work: list[Request], batch_size: int = 4, **kwargs) -> dict[str, Answer]:
    answers = list(generate(target, work, batch_size, MAX_LENGTH, **kwargs))
    found = {answer.request.id: answer for answer in answers}
    assert len(found) == len(answers)
    return found


def test_p22_greedy_answers_equal_generate_of_transformers(target):
    work = requests()
    answers = run(target, work)
    assert sorted(answers) == sorted(r.id for r in work)
    finishes = {"stop": 0, "length": 0}
    for request in work:
        config = GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=target.eos_ids,
            pad_token_id=258,
            use_cache=False,
        )
        prompt = torch.tensor([request.prompt_ids])
        expected = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config
        )[0, prompt.shape[1] :].tolist()
        answer = answers[request.id]
        assert answer.ids == expected
        assert answer.finish == ("stop" if expected[-1] in target.eos_ids else "length")
        finishes[answer.finish] += 1
    assert min(finishes.values()) >= 4  # both ways of ending have been seen


def test_p22_stop_at_the_last_token_allowed_is_a_stop(target):
    stopped = next(a for a in run(target, requests()).values() if a.finish == "stop")
    exact = Request(id="x", prompt_ids=stopped.request.prompt_ids, max_new_tokens=len(stopped.ids))
    assert run(target, [exact])["x"].finish == "stop"


@pytest.mark.parametrize("kind", ["gemma3", "gemma2", "mistral"])
def test_other_architectures_answer_alike_in_any_batch(kind):
    target, work = tiny_target(kind), requests(8)
    alone = {k: v.ids for r in work for k, v in run(target, [r], 1).items()}
    assert {k: v.ids for k, v in run(target, work, 3).items()} == alone


@pytest.mark.parametrize("batch_size", [4, 32])
def test_answer_does_not_depend_on_the_batch(target, batch_size):
    work = requests(12, temperature=0.9, top_k=50, top_p=0.95)
    mixed = [r if i % 3 else Request(**{**vars(r), "temperature": 0.0}) for i, r in enumerate(work)]
    alone = {k: v.ids for r in mixed for k, v in run(target, [r], 1).items()}
    random.Random(batch_size).shuffle(mixed)
    assert {k: v.ids for k, v in run(target, mixed, batch_size).items()} == alone


def test_answer_depends_on_its_seed(target):
    work = [
        Request(id=str(s), prompt_ids=[5, 6], max_new_tokens=12, temperature=1.0, seed=s // 2)
        for s in range(8)
    ]
    answers = run(target, work)
    assert all(answers[str(s)].ids == answers[str(s + 1)].ids for s in range(0, 8, 2))
    assert len({tuple(a.ids) for a in answers.values()}) == 4


def test_answers_follow_the_targets_law(target):
    count = 1500
    work = [
        Request(id=str(s), prompt_ids=[5, 6, 7], max_new_tokens=1, temperature=0.7, seed=s)
        for s in range(count)
    ]
    drawn = torch.tensor([a.ids[0] for a in run(target, work, 256).values()])
    logits_V = target.logits(target.forward(torch.tensor([[5, 6, 7]])).hidden_BSH)[0, -1]
    law_V = (logits_V / 0.7).softmax(-1)
    shares_V = torch.bincount(drawn, minlength=264) / count
    assert (shares_V - law_V).abs().max() < 4 * 0.5 / count**0.5  # four standard errors


def full_pass(target: Target, answer: Answer) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([answer.request.prompt_ids + answer.ids])
    states = target.forward(ids, aux_layers=LAYERS)
    return states.aux_BSF[0], states.hidden_BSH[0], target.logits(states.hidden_BSH)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_captured_states_equal_those_of_a_full_pass(target, kind, temperature):
    work = requests(10, temperature=temperature)
    tolerance = {"rtol": 8e-3, "atol": 1e-3} if kind == torch.bfloat16 else {}
    kwargs = {} if kind == torch.bfloat16 else {"capture_dtype": kind}
    for answer in run(target, work, capture=LAYERS, **kwargs).values():
        aux_SF, hidden_SH, logits_SV = full_pass(target, answer)
        states, prompt = answer.states, len(answer.request.prompt_ids)
        last = prompt + len(answer.ids) - 1  # the target never ran over this token
        assert states.aux_SF.shape == (last + 1, 3 * 64)
        assert states.hidden_SH.shape == (last + 1, 64)
        assert states.aux_SF.dtype == states.hidden_SH.dtype == kind
        if not tolerance:
            tolerance = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(states.aux_SF[:last].float(), aux_SF[:last], **tolerance)
        torch.testing.assert_close(states.hidden_SH[:last].float(), hidden_SH[:last], **tolerance)
        at = slice(prompt - 1, last)  # where an answer's token is predicted
        expected_S = logits_SV.logsumexp(-1)
        torch.testing.assert_close(states.lse_S[at], expected_S[at], atol=1e-3, rtol=0)
        assert states.lse_S.dtype == torch.float32
        assert states.argmax_S[at].tolist() == logits_SV.argmax(-1)[at].tolist()
        for values_S in (states.lse_S, states.argmax_S):
            assert not values_S[: prompt - 1].any() and values_S[last] == 0
        assert not states.aux_SF[last].any() and not states.hidden_SH[last].any()


def test_last_state_alone_can_be_captured(target):
    # No captured layer is not the same as no capture; the rows that shrinking keeps must hold it.
    for answer in run(target, requests(8), capture=(), capture_dtype=torch.float32).values():
        _, hidden_SH, _ = full_pass(target, answer)
        assert answer.states.aux_SF.shape[1] == 0
        torch.testing.assert_close(
            answer.states.hidden_SH[:-1], hidden_SH[:-1], rtol=1e-4, atol=1e-4
        )


def test_nothing_is_captured_unless_asked_for(target):
    assert all(a.states is None for a in run(target, requests(3)).values())


def test_captured_states_are_copies(target):
    # A place is used again: states of an earlier row must not change under its owner.
    kept = [
        (a, a.states.hidden_SH.clone())
        for a in generate(target, requests(6), 2, MAX_LENGTH, capture=LAYERS)
    ]
    assert all(torch.equal(a.states.hidden_SH, copy) for a, copy in kept)


def test_stop_taking_leaves_the_rest(target):
    work, taken = requests(10), 0

    def enough() -> bool:
        nonlocal taken
        taken += 1
        return taken > 6

    answers = run(target, work, stop_taking=enough)
    expected = run(target, work[:6])
    assert sorted(answers) == sorted(r.id for r in work[:6])
    assert all(answers[k].ids == expected[k].ids and answers[k].finish for k in answers)


def test_stopped_before_the_first_and_empty_work(target):
    assert run(target, requests(), stop_taking=lambda: True) == {}
    assert run(target, []) == {}


def test_requests_are_taken_only_as_places_become_free(target):
    pulled = []

    def work():
        for request in requests():
            pulled.append(request.id)
            yield request

    next(iter(generate(target, work(), 4, MAX_LENGTH)))
    assert len(pulled) < 20


def test_shrink_keeps_rows_right(target):
    work = requests(6, temperature=0.8)
    expected = run(target, work, capture=LAYERS)
    with torch.inference_mode():
        places = _Places(target, 6, MAX_LENGTH, LAYERS, torch.bfloat16)
        places.fill(work, [3, 1, 5, 0, 2, 4])
        answers: dict[str, Answer] = {}
        sizes = []
        while True:
            answers |= {a.request.id: a for a in places.collect()}
            if len(places.free()) == places.size:
                break
            places = places.shrink()  # after every step, far more often than `generate` does
            sizes.append(places.size)
            places.step()
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2
    for key, answer in expected.items():
        assert answers[key].ids == answer.ids
        torch.testing.assert_close(
            answers[key].states.hidden_SH, answer.states.hidden_SH, rtol=1e-2, atol=1e-3
        )


def test_request_that_fills_its_place_exactly_fits(target):
    request = Request(id="x", prompt_ids=[65] * 30, max_new_tokens=MAX_LENGTH - 30)
    eos_ids, target.eos_ids = target.eos_ids, []
    try:
        answer = run(target, [request], 2, capture=LAYERS)["x"]
    finally:
        target.eos_ids = eos_ids
    assert (len(answer.ids), answer.finish, len(answer.states.lse_S)) == (18, "length", 48)


def test_magpie_prompt_ends_where_the_users_words_begin(target):
    asked = magpie_prompt(target)
    assert byte_tokenizer().decode(asked.ids) == "<|im_start|>user\n"
    assert asked.stop_ids == (257,)  # <|im_end|>


@pytest.mark.parametrize(
    ("template", "stops", "closing"),
    [
        ("{{ messages[0]['content'] }}<|im_end|>\n<|im_start|>assistant\n", (257,), ""),
        ("[INST] {{ messages[0]['content'] }} [/INST]", (), "[/INST]"),
        ("User: {{ messages[0]['content'] }}\n\nAssistant:", (), "Assistant:"),
    ],
)
def test_magpie_knows_what_ends_a_users_turn(target, template, stops, closing, monkeypatch):
    # Where no end-of-sequence token stands behind the user's words, what does must end them.
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    asked = magpie_prompt(target)
    assert (asked.stop_ids, asked.closing) == (stops, closing)


def test_magpie_words_end_where_the_template_goes_on():
    by_text = MagpiePrompt([], (), "[/INST]")
    assert by_text.cut("What is a leap year? [/INST] A year", False) == (
        "What is a leap year?",
        True,
    )
    assert by_text.cut("What is a leap", False) == ("What is a leap", False)
    assert MagpiePrompt([], (257,), "").cut(" Hi there ", True) == ("Hi there", True)


def test_a_requests_own_stop_ids_end_it(target):
    eos_ids, target.eos_ids = target.eos_ids, []
    try:
        request = Request(id="x", prompt_ids=[5, 6], max_new_tokens=12)
        free = run(target, [request], 1)["x"].ids
        stopped = Request(**{**vars(request), "stop_ids": (free[3],)})
        answer = run(target, [stopped], 1)["x"]
    finally:
        target.eos_ids = eos_ids
    assert answer.ids == free[: free.index(free[3]) + 1] and answer.finish == "stop"


def test_requests_that_come_late_are_answered_alike(target):
    # None = nothing to ask until an answer is out, as with the later turns of a conversation.
    work, ready = requests(9), requests(9)[:3]
    waiting = {f"r{i}": work[i + 3] for i in range(6)}

    def queue():
        while ready or waiting:
            yield ready.pop() if ready else None

    answers = {}
    for answer in generate(target, queue(), 4, MAX_LENGTH, capture=LAYERS):
        answers[answer.request.id] = answer.ids
        if answer.request.id in waiting:
            ready.append(waiting.pop(answer.request.id))
    assert answers == {k: v.ids for k, v in run(target, work).items()}
