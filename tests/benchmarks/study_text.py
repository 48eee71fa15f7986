"""The study as Markdown: tables of its numbers, and advice that follows from them by rule."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.errors import UserError
from tests.benchmarks.study_numbers import ahead, behind, mean

BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"

Arm = Mapping[str, Any]


def insert(text: str, section: str, where: str) -> str:
    """The text with everything between the markers replaced.

    Raises:
        UserError: a marker is missing.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{where}: needs one line {BEGIN} and one line {END} after it")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{section}\n{END}{rest.partition(END)[2]}"


def to_markdown(study: Mapping[str, Any]) -> str:
    """Everything between the markers."""
    arms = study["arms"]
    tasks = list(next(iter(arms.values()))["tau"])
    lines = [
        f"{study['minutes']:g} minutes of training an arm, {study['num_rows']} answers of "
        f"{study['target']} ({study['num_train_tokens']:,} tokens to learn), tau at "
        f"{study['num_draft_tokens']} draft tokens, T = 0, one prompt at a time. "
        f"{_each(arms, 'hardware')}; commit {_each(arms, 'commit')}.",
        "",
        *_table(
            ["arm", *(f"tau {task}" for task in tasks)], [_tau(a, tasks) for a in _by_tau(arms)]
        ),
        "",
        *_table(
            ["arm", "drafted", *(f"speedup {task} (predicted)" for task in tasks), "cost c"],
            [_speed(arm, tasks) for arm in _sorted(arms, "speedup")],
        ),
        "",
        *_table(
            ["arm", "weights", "tokens seen", "minutes", "alpha by position, held out"],
            [_budget(arm) for arm in _by_tau(arms) if arm["alpha"]],
        ),
        "",
        *_table(
            ["arm", *(f"{q}/4: loss, alpha" for q in (1, 2, 3, 4)), "untrained", "rise", "n-gram"],
            [_learning(arm, arms) for arm in _by_tau(arms) if arm["alpha"]],
        ),
        "",
        "### What to choose when",
        "",
        *(f"- {line}" for line in advice(study)),
    ]
    return "\n".join(lines)


def advice(study: Mapping[str, Any]) -> list[str]:
    """One sentence a question. A difference counts where intervals are apart on every task."""
    arms = study["arms"]
    lines = [
        _first(arms, "speedup", "Fastest on this machine", "x"),
        _first(arms, "tau", "Most tokens a round", " tokens a round"),
    ]
    gains = [n for n, a in arms.items() if all(low > 1 for _, low, _ in a["speedup"].values())]
    losses = [n for n, a in arms.items() if all(high < 1 for *_, high in a["speedup"].values())]
    lines.append(f"Faster than the target alone on every task: {_listed(gains)}.")
    lines.append(f"Slower than it on every task, even at their best number: {_listed(losses)}.")
    for question, names in study["contrasts"].items():
        known = [name for name in names if name in arms]
        lines += [
            f"{question[0].upper()}{question[1:]}: {_contrast(arms, known[0], other)}"
            for other in known[1:]
            if known[0] == names[0]
        ]
    return lines


def _first(arms: Mapping[str, Arm], key: str, title: str, unit: str) -> str:
    best, *rest = _sorted(arms, key)
    head = f"{title}: {best['name']}, {mean(best[key]):.2f}{unit}"
    rivals = [arm for arm in rest if not ahead(best[key], arm[key])]
    if not rivals:
        return f"{head}, its intervals above those of all others."
    light = min([best, *rivals], key=lambda arm: arm["num_params"])
    return (
        f"{head}; its intervals are not apart from those of "
        f"{_listed([arm['name'] for arm in rivals])}. Of these {light['name']} has the fewest "
        "weights."
    )


def _contrast(arms: Mapping[str, Arm], one: str, other: str) -> str:
    said = []
    for key in ("tau", "speedup"):
        ours, theirs = arms[one][key], arms[other][key]
        values = f"{key} {mean(ours):.2f} and {mean(theirs):.2f}"
        if ahead(ours, theirs):
            said.append(f"{values}, {one} is ahead")
        elif behind(ours, theirs):
            said.append(f"{values}, {other} is ahead")
        else:
            said.append(f"{values}, not apart")
    return f"{one} and {other}: {'; '.join(said)}."


def _sorted(arms: Mapping[str, Arm], key: str) -> list[Arm]:
    return sorted(arms.values(), key=lambda arm: -mean(arm[key]))


def _by_tau(arms: Mapping[str, Arm]) -> list[Arm]:
    return _sorted(arms, "tau")


def _each(arms: Mapping[str, Arm], key: str) -> str:
    """The values of all arms, each once."""
    return ", ".join(dict.fromkeys(str(arm[key]) for arm in arms.values()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _bounded(value: Sequence[float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def _numbers(values: Sequence[float | None] | None) -> str:
    return "-" if values is None else " ".join("-" if v is None else f"{v:.2f}" for v in values)


def _tau(arm: Arm, tasks: Sequence[str]) -> list[str]:
    return [arm["name"], *(_bounded(arm["tau"][task]) for task in tasks)]


def _speed(arm: Arm, tasks: Sequence[str]) -> list[str]:
    cells = [f"{_bounded(arm['speedup'][t])} ({arm['predicted'][t]:.2f})" for t in tasks]
    return [arm["name"], str(arm["best_num_draft"]), *cells, _numbers([arm["cost"]])]


def _budget(arm: Arm) -> list[str]:
    return [
        arm["name"],
        f"{arm['num_params'] / 1e6:.1f}M",
        f"{arm['num_tokens']:,}",
        f"{arm['minutes']:.1f}",
        _numbers(arm["alpha"]),
    ]


def _learning(arm: Arm, arms: Mapping[str, Arm]) -> list[str]:
    cells = []
    for point in arm["curve"]:
        loss = "-" if point["loss"] is None else f"{point['loss']:.2f}"
        cells.append(f"{loss}, {_numbers(None if point['alpha'] is None else point['alpha'][:1])}")
    rise = arm["alpha_gain"]
    lookup = arms.get("lookup")
    return [
        arm["name"],
        *cells,
        _numbers(arm["alpha_untrained"][:1]),
        f"{_bounded(rise)}: {'better' if rise[1] > 0 else 'worse' if rise[2] < 0 else 'not apart'}",
        "not measured" if lookup is None else _against(arm["tau"], lookup["tau"]),
    ]


def _against(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> str:
    if ahead(ours, theirs):
        return "better"
    return "worse" if behind(ours, theirs) else "not apart"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
