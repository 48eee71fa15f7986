"""The study as Markdown: tables of its numbers, and advice that follows from them by rule."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipes.errors import UserError
from tests.benchmarks.study_numbers import Bounded, ahead, mean, tau_gain

BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"

Arm = Mapping[str, Any]
Compare = Callable[[str, str], bool]
"""Whether the arm of the first name is ahead of the other's on every task."""


def insert(text: str, section: str, where: str) -> str:
    """The text with everything between the markers replaced.

    Raises:
        UserError: a marker is missing.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{where}: needs one line {BEGIN} and one line {END} after it")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{section}\n{END}{rest.partition(END)[2]}"


def to_markdown(study: Mapping[str, Any], curves: str) -> str:
    """Everything between the markers; curves: address of the plot."""
    arms, speed = study["arms"], study["speed"]
    tasks = list(next(iter(arms.values()))["tau"])
    numbers = [str(num) for num in speed["num_draft_tokens"]]
    timed = list(dict.fromkeys(t for arm in arms.values() for t in _timed_tasks(arm)))
    trained = [arm for arm in _by_tau(arms) if arm["alpha"]]
    lines = [
        f"{study['minutes']:g} minutes of training an arm, {study['num_rows']} answers of "
        f"{study['target']} ({study['num_train_tokens']:,} tokens to learn), "
        f"{study['num_heldout_rows']} held-out rows; tau and accepted "
        f"positions at {study['num_draft_tokens']} draft tokens, T = 0. {_each(arms, 'hardware')}; "
        f"commit {_each(arms, 'commit')}.",
        "",
        *_table(
            ["arm", *(f"tau {task}" for task in tasks), "accepted, by position"],
            [
                [arm["name"], *_by_task(arm["tau"], tasks), _positions(arm["accepted"])]
                for arm in _by_tau(arms)
            ],
        ),
        "",
        f"Speedup at batch size 1, on {', '.join(speed['tasks'])}, at a number of draft tokens:",
        "",
        *_table(
            [
                "arm",
                *(f"{num}: {what}" for num in numbers for what in [*timed, "cost c"]),
            ],
            [_speed(arm, numbers, timed) for arm in _by_tau(arms)],
        ),
        "",
        *_table(
            ["arm", "weights", "tokens seen", "minutes", "alpha by position, held out"],
            [_budget(arm) for arm in trained],
        ),
        "",
        *_table(
            [
                "arm",
                *(f"{q}/4: loss, top-1" for q in (1, 2, 3, 4)),
                "untrained",
                "rise over untrained",
                "over n-gram",
                "alpha over n-gram",
                *(f"tau over lookup, {task}" for task in tasks),
            ],
            [_learning(arm, arms, tasks) for arm in trained],
        ),
        "",
        f"![top-1 agreement against minutes, a panel an arm]({curves})",
        "",
        "### What to choose when",
        "",
        *(f"- {line}" for line in advice(study)),
    ]
    return "\n".join(lines)


def advice(study: Mapping[str, Any]) -> list[str]:
    """One sentence a question. What counts is a difference on every task.

    Of tau the interval of the difference, prompt by prompt; of speed intervals that are apart.
    """
    arms, numbers = study["arms"], [str(num) for num in study["speed"]["num_draft_tokens"]]
    taus = {name: arm["tau"] for name, arm in arms.items()}

    def more(one: str, other: str) -> bool:
        return all(low > 0 for _, low, _ in _gains(arms[one], arms[other]).values())

    def faster(known: Mapping[str, Bounded]) -> Compare:
        return lambda one, other: ahead(known[one], known[other])

    lines = [_first(arms, taus, more, "Most tokens a round", " tokens a round")]
    speeds = {num: speedups(arms, num) for num in numbers}
    for num, known in speeds.items():
        drafted = f"at {num} draft token{'' if num == '1' else 's'}"
        if not known:
            lines.append(f"Speed {drafted}: not run.")
            continue
        gains = [n for n, v in known.items() if all(low > 1 for _, low, _ in v.values())]
        losses = [n for n, v in known.items() if all(high < 1 for *_, high in v.values())]
        lines += [
            _first(arms, known, faster(known), f"Fastest on this machine {drafted}", "x"),
            f"Faster than the target alone on every task, {drafted}: {_listed(gains)}; slower: "
            f"{_listed(losses)}; not timed: {_listed([n for n in arms if n not in known])}.",
        ]
    for question, names in study["contrasts"].items():
        one, title = names[0], question[0].upper() + question[1:]
        for other in names[1:]:
            if one not in arms or other not in arms:
                continue
            gains = (f"{t} {_signed(g)}" for t, g in _gains(arms[one], arms[other]).items())
            said = [f"{_compared('tau', taus, more, one, other)} ({', '.join(gains)})"]
            said += [
                _compared(f"speedup at {num}", known, faster(known), one, other)
                for num, known in speeds.items()
                if one in known and other in known
            ]
            lines.append(f"{title}: {one} and {other}: {'; '.join(said)}.")
    return lines


def _gains(one: Arm, other: Arm) -> Bounded:
    """Task -> how much more tokens a round has, on the same prompts."""
    return {task: tau_gain(other["sums"][task], sums) for task, sums in one["sums"].items()}


def speedups(arms: Mapping[str, Arm], num: str) -> dict[str, Bounded]:
    """Arm -> speedup by task at a number of draft tokens, where it was measured."""
    return {
        name: arm["speed"][num]["speedup"]
        for name, arm in arms.items()
        if arm["speed"] and num in arm["speed"]
    }


def _first(
    arms: Mapping[str, Arm], values: Mapping[str, Bounded], is_ahead: Compare, title: str, unit: str
) -> str:
    best, *rest = sorted(values, key=lambda name: -mean(values[name]))
    head = f"{title}: {best}, {mean(values[best]):.2f}{unit}"
    rivals = [name for name in rest if not is_ahead(best, name)]
    if not rivals:
        return f"{head}, ahead of all others."
    light = min([best, *rivals], key=lambda name: arms[name]["num_params"])
    return f"{head}; not apart from {_listed(rivals)}. Of these {light} has the fewest weights."


def _compared(
    what: str, known: Mapping[str, Bounded], is_ahead: Compare, one: str, other: str
) -> str:
    values = f"{what} {mean(known[one]):.2f} and {mean(known[other]):.2f}"
    if is_ahead(one, other):
        return f"{values}, {one} is ahead"
    return f"{values}, {other} is ahead" if is_ahead(other, one) else f"{values}, not apart"


def _by_tau(arms: Mapping[str, Arm]) -> list[Arm]:
    return sorted(arms.values(), key=lambda arm: -mean(arm["tau"]))


def _each(arms: Mapping[str, Arm], key: str) -> str:
    """The values of all arms, each once."""
    return ", ".join(dict.fromkeys(str(arm[key]) for arm in arms.values()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _bounded(value: Sequence[float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def _signed(value: Sequence[float]) -> str:
    return f"{value[0]:+.2f} [{value[1]:+.2f}, {value[2]:+.2f}]"


def _by_task(values: Bounded, tasks: Sequence[str]) -> list[str]:
    return [_bounded(values[task]) for task in tasks]


def _positions(values: Sequence[Sequence[float] | None]) -> str:
    return ", ".join("-" if value is None else _bounded(value) for value in values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _timed_tasks(arm: Arm) -> list[str]:
    return [task for at in (arm["speed"] or {}).values() for task in at["speedup"]]


def _speed(arm: Arm, numbers: Sequence[str], tasks: Sequence[str]) -> list[str]:
    cells = [arm["name"]]
    for num in numbers:
        at = (arm["speed"] or {}).get(num)
        if at is None:
            cells += ["not run"] * (len(tasks) + 1)
        else:
            cells += [*_by_task(at["speedup"], tasks), _number(at["cost"])]
    return cells


def _budget(arm: Arm) -> list[str]:
    return [
        arm["name"],
        f"{arm['num_params'] / 1e6:.1f}M",
        f"{arm['num_tokens']:,}",
        f"{arm['minutes']:.1f}",
        _positions(arm["alpha"]),
    ]


def _learning(arm: Arm, arms: Mapping[str, Arm], tasks: Sequence[str]) -> list[str]:
    quarters = [
        f"{_number(point['loss'])}, {_number(point['top1'] and point['top1'][0])}"
        for point in arm["curve"]
    ]
    lookup = arms.get("lookup")
    return [
        arm["name"],
        *quarters,
        _bounded(arm["top1_untrained"][0]),
        _judged(arm["rise"]),
        _judged(arm["over_ngram"]),
        _judged(arm["alpha_over_ngram"]),
        *(
            "not measured"
            if lookup is None
            else _judged(tau_gain(lookup["sums"][task], arm["sums"][task]))
            for task in tasks
        ),
    ]


def _judged(rise: Sequence[float]) -> str:
    word = "better" if rise[1] > 0 else "worse" if rise[2] < 0 else "not apart"
    return f"{_bounded(rise)}: {word}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
