"""Plain and speculative decoding of the same prompts, side by side: outputs, rounds and seconds.

The arms are the target alone and each drafter. They take turns on every batch of prompts, in an
order that moves on by one each time, after all of them have been warmed up; so a machine that
slows down slows all of them.

Units: the first token of an answer comes from the prefill and belongs to no round. It counts
neither as a token nor as time: both are those of the rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

from typing_extensions import TypedDict

from data.conversations import render_prompt
from data.prompt_rows import Prompt
from data.target import Target
from drafters.base import DecodingDrafter, Sampling
from eval import metrics, theory
from eval.decode import Decoded, DecodeSettings, Seconds, decode
from eval.lossless import GreedyComparison, greedy_identical
from eval.record import TaskResult
from eval.tasks import Task
from recipes.errors import UserError
from recipes.schema import EvalSection

BASELINE = "baseline"  # name of the arm without a drafter
NUM_SAMPLES = 3  # prompts a task whose rounds are kept for the report


def unseen(_num: int) -> None:
    """Progress that nobody looks at."""


class MeasuredTask(TaskResult):
    """A task's entry in the record, with what schema 1 leaves free."""

    task_hash: str  # of prompts and order (eval.tasks)
    turns: int  # user turns answered of each prompt: the first
    repeats: int  # timed runs of each prompt; the spread is in speedup_ci95
    same_as_baseline: str | None  # T=0: "x/y" prompts with the baseline's tokens, in this dtype
    other_lengths: list[list[object]]  # [prompt id, baseline tokens, tokens] where they differ


class SampleRound(TypedDict):
    """Token texts of one round; next is "" where it ended inside the draft."""

    accepted: list[str]
    rejected: list[str]
    next: str


class Sample(TypedDict):
    """One answer, for the report; its first round is the token that the prefill gave."""

    prompt: str
    rounds: list[SampleRound]


@dataclass
class Arm:
    """What one arm did: answers in the order of the prompts, and time."""

    answers: list[Decoded] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of decoding, a prompt's share of its batch
    total: Seconds = field(default_factory=Seconds)
    num_steps: int = 0  # rounds of the loop; those of a batch run together

    def add(self, answers: list[Decoded], seconds: Seconds) -> None:
        self.answers += answers
        self.seconds += [seconds.decode / len(answers)] * len(answers)
        self.num_steps += max(len(answer.rounds) for answer in answers)
        self.total.prefill += seconds.prefill
        self.total.draft += seconds.draft
        self.total.verify += seconds.verify
        self.total.sampling += seconds.sampling
        self.total.bookkeeping += seconds.bookkeeping


@dataclass
class Measured:
    """One drafter on one task. comparison: with the baseline's tokens (T=0 only)."""

    result: MeasuredTask
    samples: list[Sample]
    pit: list[float]
    comparison: GreedyComparison | None


def decode_settings(section: EvalSection, temperature: float) -> DecodeSettings:
    """The settings of all arms; the one without a drafter proposes nothing."""
    sampled = section.draft_sampling == "sampled"
    return DecodeSettings(
        max_new_tokens=section.max_new_tokens,
        num_draft=section.num_draft_tokens,
        sampling=Sampling(temperature, section.top_k, section.top_p, draft_sampled=sampled),
        seed=section.seed,
    )


def render_all(
    target: Target, prompts: Sequence[Prompt], template_kwargs: dict[str, object] | None
) -> list[list[int]]:
    """Ids of the first turn of each prompt, with the generation prompt."""
    tokenizer = target.tokenizer
    return [
        render_prompt(tokenizer, p["messages"], p.get("tools"), template_kwargs) for p in prompts
    ]


def run_arms(
    target: Target,
    drafters: Mapping[str, DecodingDrafter],
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
    batch_size: int,
    warm_up: bool = True,
    advance: Callable[[int], None] = unseen,
) -> dict[str, Arm]:
    """Answer the prompts with every arm, interleaved.

    Args:
        drafters: by name; the baseline is added.
        warm_up: run every arm over the first batch, for some rounds, before the clock counts.
        advance: told 1 after every batch of every arm.
    """
    members: list[tuple[str, DecodingDrafter | None]] = [(BASELINE, None), *drafters.items()]
    arms = {name: Arm() for name, _ in members}
    if warm_up and prompts:
        few = min(settings.max_new_tokens, 2 * (settings.num_draft + 1) + 1)
        for _, drafter in members:
            short = replace(settings, max_new_tokens=few)
            decode(target, drafter, list(prompts[:batch_size]), short)
    for number, start in enumerate(range(0, len(prompts), batch_size)):
        batch = list(prompts[start : start + batch_size])
        indices = range(start, start + len(batch))
        first = number % len(members)
        for name, drafter in members[first:] + members[:first]:
            arms[name].add(*decode(target, drafter, batch, settings, indices))
            advance(1)
    return arms


def measure(
    target: Target,
    drafters: Mapping[str, DecodingDrafter],
    task: Task,
    section: EvalSection,
    temperature: float,
    template_kwargs: dict[str, object] | None = None,
    advance: Callable[[int], None] = unseen,
) -> dict[str, Measured]:
    """Measure every drafter on the first turn of every prompt of a task.

    Raises:
        UserError: a name is that of the baseline; a model gives NaN.
    """
    if BASELINE in drafters:
        raise UserError(f"a drafter may not be called {BASELINE!r}")
    prompts = render_all(target, task.prompts, template_kwargs)
    settings = decode_settings(section, temperature)
    arms = run_arms(target, drafters, prompts, settings, section.batch_size, advance=advance)
    baseline = arms.pop(BASELINE)
    return {
        name: Measured(
            _task_result(task, baseline, arm, section, temperature),
            make_samples(target, task.prompts, arm.answers),
            [value for answer in arm.answers for value in answer.pit],
            _compare(arm, baseline) if temperature == 0 else None,
        )
        for name, arm in arms.items()
    }


def num_batches(num_prompts: int, num_drafters: int, batch_size: int) -> int:
    """How often `measure` calls `advance`."""
    return -(-num_prompts // batch_size) * (num_drafters + 1)


def greedy_check(
    target: Target,
    drafters: Mapping[str, DecodingDrafter],
    prompts: Sequence[Prompt],
    section: EvalSection,
    template_kwargs: dict[str, object] | None = None,
    advance: Callable[[int], None] = unseen,
) -> dict[str, GreedyComparison]:
    """Greedy tokens of every drafter against the target's own; both should be in float32."""
    ids = render_all(target, prompts, template_kwargs)
    settings, size = decode_settings(section, 0.0), section.batch_size
    arms = run_arms(target, drafters, ids, settings, size, warm_up=False, advance=advance)
    baseline = arms.pop(BASELINE)
    return {name: _compare(arm, baseline) for name, arm in arms.items()}


def check_prompts(tasks: Sequence[Task], num_prompts: int) -> list[Prompt]:
    """The first prompts of all tasks, which take turns."""
    columns = zip_longest(*(task.prompts for task in tasks))
    return [p for p in chain.from_iterable(columns) if p is not None][:num_prompts]


def make_records(prompts: Sequence[Prompt], arm: Arm) -> list[metrics.PromptRecord]:
    """An arm's answers as records; all of them, all their rounds."""
    return [
        metrics.PromptRecord(
            prompt_id=prompt["id"],
            category=prompt.get("category"),
            turn=0,
            proposed=[r.proposed for r in answer.rounds],
            accepted=[r.accepted for r in answer.rounds],
            num_tokens=sum(r.emitted for r in answer.rounds),
            alpha_sum=answer.alpha_sum,
            alpha_count=answer.alpha_count,
            seconds=seconds,
            ends_inside_draft=bool(answer.rounds)
            and answer.rounds[-1].emitted == answer.rounds[-1].accepted,
        )
        for prompt, answer, seconds in zip(prompts, arm.answers, arm.seconds, strict=True)
    ]


def make_samples(
    target: Target, prompts: Sequence[Prompt], answers: Sequence[Decoded]
) -> list[Sample]:
    """Rounds of the first prompts as token texts."""
    samples: list[Sample] = []
    for prompt, answer in list(zip(prompts, answers, strict=True))[:NUM_SAMPLES]:
        texts = [_text(target, token) for token in answer.ids]
        rounds: list[SampleRound] = [{"accepted": [], "rejected": [], "next": texts[0]}]
        place = 1
        for r in answer.rounds:
            kept = texts[place : place + r.emitted]
            place += r.emitted
            stopped = r.emitted == r.accepted  # what was drafted behind a stop is not shown
            rejected = [] if stopped else r.drafted_ids[r.accepted :]
            rounds.append(
                {
                    "accepted": kept[: r.accepted],
                    "rejected": [_text(target, token) for token in rejected],
                    "next": "" if stopped else kept[-1],
                }
            )
        samples.append({"prompt": str(prompt["messages"][-1]["content"]), "rounds": rounds})
    return samples


def _text(target: Target, token: int) -> str:
    return str(target.tokenizer.decode([token]))


def _compare(arm: Arm, baseline: Arm) -> GreedyComparison:
    return greedy_identical([a.ids for a in arm.answers], [a.ids for a in baseline.answers])


def _task_result(
    task: Task, baseline: Arm, arm: Arm, section: EvalSection, temperature: float
) -> MeasuredTask:
    records = make_records(task.prompts, arm)
    rates = metrics.aggregate(records, section.seed)
    speed = metrics.speedup(make_records(task.prompts, baseline), records, section.seed)
    draft, verify, sampling, bookkeeping = (
        _ms(seconds, arm.num_steps)
        for seconds in (
            arm.total.draft,
            arm.total.verify,
            arm.total.sampling,
            arm.total.bookkeeping,
        )
    )
    other = None if sampling is None or bookkeeping is None else sampling + bookkeeping
    plain = _ms(baseline.total.decode, baseline.num_steps)

    def predict(tokens: float | None) -> float | None:
        if tokens is None or draft is None or verify is None or other is None or plain is None:
            return None
        return theory.predicted_speedup(tokens, draft, verify, other, plain)

    alpha = rates["alpha"]
    by_position = theory.expected_tokens_from_conditional(rates["conditional"])
    same = _compare(arm, baseline) if temperature == 0 else None
    return {
        **rates,
        "version": task.version,
        "tokens_per_second": speed.tokens_per_second,
        "baseline_tokens_per_second": speed.baseline_tokens_per_second,
        "speedup": speed.speedup,
        "speedup_ci95": speed.speedup_ci95,
        "ms_per_round": {
            "draft": draft,
            "verify": verify,
            "sampling": sampling,
            "bookkeeping": bookkeeping,
            "other": other,
        },
        "baseline_ms_per_token": plain,
        "predicted_speedup": predict(by_position if rates["num_rounds"] else None),
        "predicted_from_alpha": predict(
            None if alpha is None else theory.expected_tokens(alpha, section.num_draft_tokens)
        ),
        "task_hash": task.hash,
        "turns": 1,
        "repeats": 1,
        "same_as_baseline": None if same is None else count_text(same),
        "other_lengths": [
            [prompt, plain_tokens, tokens]
            for prompt, _turn, plain_tokens, tokens in speed.other_lengths
            if temperature == 0  # drawn answers differ in length anyway
        ],
    }


def count_text(comparison: GreedyComparison) -> str:
    """As "24/25"."""
    return f"{comparison.num_identical}/{comparison.num_prompts}"


def _ms(seconds: float, num_steps: int) -> float | None:
    return 1000 * seconds / num_steps if num_steps else None
