"""Plain and speculative decoding of the same prompts, side by side: outputs, rounds and seconds.

Units: the first token of an answer comes from the prefill and belongs to no round. It counts
neither as a token nor as time: both are those of the rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from data.prompt_rows import Prompt
from data.target import Target
from drafters.base import DecodingDrafter, Sampling, TrainedDrafter
from drafters.methods import METHODS
from eval.arms import BASELINE, ORACLE, Answer, Arm, answering, run_arms, unseen
from eval.costs import PassTimes
from eval.decode import DecodeSettings
from eval.forced import Forced, teacher_forced
from eval.lossless import GreedyComparison, greedy_identical
from eval.record import TaskResult
from eval.round_texts import Sample, make_samples
from eval.task_result import make_task_result
from eval.tasks import Task
from eval.tree import TreeSpec, parse_tree
from eval.turns import ids_of
from recipes.errors import UserError
from recipes.schema import EvalSection


@dataclass
class Measured:
    """One drafter on one task.

    comparison: with the baseline's tokens (T=0 only). num_draft: tokens a round, at most.
    """

    result: TaskResult
    samples: list[Sample]
    pit: list[list[float]]
    comparison: GreedyComparison | None
    num_draft: int


def most_drafted(drafter: DecodingDrafter, wanted: int) -> int:
    """The most tokens that a round proposes where `wanted` are asked for.

    A Medusa head drafts one, a block of L slots L or L - 1.
    """
    if not isinstance(drafter, TrainedDrafter):
        return wanted
    return min(wanted, METHODS[drafter.method].form.num_tokens(drafter.config, wanted))


def decode_settings(section: EvalSection, temperature: float) -> DecodeSettings:
    """The settings of all arms; the one without a drafter proposes nothing."""
    sampling = Sampling(
        temperature=temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        draft_sampled=section.draft_sampling == "sampled",
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
    )
    return DecodeSettings(
        max_new_tokens=section.max_new_tokens,
        num_draft=section.num_draft_tokens,
        sampling=sampling,
        seed=section.seed,
        verification="token" if section.verification == "tree" else section.verification,
        fixed_shapes=section.compile is not None,
    )


def render_all(
    target: Target,
    prompts: Sequence[Prompt],
    template_kwargs: dict[str, object] | None,
    max_new_tokens: int,
) -> list[list[int]]:
    """Ids of the first turn of each prompt, with the generation prompt.

    Raises:
        UserError: a prompt and its answer do not fit into the target's context.
    """
    return [ids_of(target, p["messages"], p, template_kwargs, max_new_tokens) for p in prompts]


def tree_of(section: EvalSection) -> TreeSpec | None:
    """What drafters grow in a round; None = a chain."""
    if section.verification != "tree":
        return None
    return parse_tree(section.tree, section.siblings)


def make_answer(
    target: Target,
    prompts: Sequence[Prompt],
    section: EvalSection,
    template_kwargs: dict[str, object] | None,
) -> Answer:
    """How the prompts of a task are answered under these settings."""
    tree = tree_of(section)
    return answering(target, prompts, template_kwargs, section.turns == "all", tree)


def measure(
    target: Target,
    drafters: Mapping[str, DecodingDrafter],
    task: Task,
    section: EvalSection,
    temperature: float,
    template_kwargs: dict[str, object] | None = None,
    advance: Callable[[int], None] = unseen,
    times: PassTimes | None = None,
) -> dict[str, Measured]:
    """Measure every drafter on every prompt of a task.

    Args:
        times: of passes by size, for predictions at other numbers of draft tokens.

    Raises:
        UserError: a name is that of another arm; a model gives NaN.
    """
    if taken := {BASELINE, ORACLE} & drafters.keys():
        raise UserError(f"a drafter may not be called {taken.pop()!r}")
    settings = decode_settings(section, temperature)
    arms = run_arms(
        make_answer(target, task.prompts, section, template_kwargs),
        drafters,
        len(task.prompts),
        settings,
        section.batch_size,
        section.repeats,
        oracle=oracle_of(drafters, section, temperature),
        advance=advance,
    )
    baseline, perfect = arms.pop(BASELINE), arms.pop(ORACLE, None)
    texts = [(turn.prompt, turn.decoded.ids) for turn in baseline.turns]
    found = {}
    for name, arm in arms.items():
        comparison = compare(arm, baseline) if temperature == 0 else None
        forced = teacher_forced(target, drafters[name], texts, settings.sampling, section.seed)
        oracle = perfect if name == ORACLE_OF else None
        found[name] = Measured(
            make_task_result(
                task, baseline, arm, section, comparison, _as_dict(forced), oracle, times, name
            ),
            make_samples(target, task.prompts, arm.turns),
            [value for answer in arm.answers for value in answer.pit],
            comparison,
            most_drafted(drafters[name], section.num_draft_tokens),
        )
    return found


ORACLE_OF = "drafter"  # the arm whose ceiling eval.oracle measures


def oracle_of(
    drafters: Mapping[str, DecodingDrafter], section: EvalSection, temperature: float
) -> DecodingDrafter | None:
    """The drafter at whose cost a perfect one is timed, if one is."""
    wanted = section.oracle and temperature == 0 and section.verification != "tree"
    return drafters.get(ORACLE_OF) if wanted else None


def _as_dict(forced: Forced) -> dict[str, float | None]:
    return {"alpha_teacher_forced": forced.alpha, "top1_agreement": forced.top1}


def num_batches(
    num_prompts: int, num_drafters: int, batch_size: int, repeats: int = 1, oracle: bool = False
) -> int:
    """How often `measure` calls `advance`."""
    return -(-num_prompts // batch_size) * (num_drafters + 1 + oracle) * repeats


def greedy_check(
    target: Target,
    drafters: Mapping[str, DecodingDrafter],
    prompts: Sequence[Prompt],
    section: EvalSection,
    template_kwargs: dict[str, object] | None = None,
    advance: Callable[[int], None] = unseen,
) -> dict[str, GreedyComparison]:
    """Greedy tokens of every drafter against the target's own; both should be in float32."""
    answer = make_answer(target, prompts, section, template_kwargs)
    settings = decode_settings(section, 0.0)
    arms = run_arms(
        answer,
        drafters,
        len(prompts),
        settings,
        section.batch_size,
        warm_up=False,
        advance=advance,
    )
    baseline = arms.pop(BASELINE)
    return {name: compare(arm, baseline) for name, arm in arms.items()}


def check_prompts(tasks: Sequence[Task], num_prompts: int) -> list[Prompt]:
    """The first prompts of all tasks, which take turns."""
    columns = zip_longest(*(task.prompts for task in tasks))
    return [p for p in chain.from_iterable(columns) if p is not None][:num_prompts]


def compare(arm: Arm, baseline: Arm) -> GreedyComparison:
    """All turns of an arm against the baseline's. A turn whose history differs is left out."""
    same = [
        (ours.decoded.ids, theirs.decoded.ids)
        for ours, theirs in zip(arm.turns, baseline.turns, strict=True)
        if ours.prompt == theirs.prompt
    ]
    return greedy_identical([ours for ours, _ in same], [theirs for _, theirs in same])
