"""What types do not say of a record: its numbers fit each other, and are such as JSON can hold."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from recipes.errors import UserError

ROUNDING = 0.01  # relative; other writers may round
LARGEST = 2**64  # of a whole number; beyond it readers of JSON lose digits or overflow


def check_values(record: Mapping[str, Any], source: str) -> None:
    """No NaN, infinity, huge number or half of a surrogate pair anywhere, known key or not.

    Raises:
        UserError: names the source, the key and the value.
    """
    left: list[tuple[str, Any]] = [("", record)]
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{key}.{name}".lstrip("."), inner) for name, inner in value.items()]
            left += [(f"{key}: a key of it", name) for name in value]
        elif isinstance(value, list):
            left += [(f"{key}.{i}", inner) for i, inner in enumerate(value)]
        elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(f"{source}: key {key} is {value!a:.99}: half of a surrogate pair")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{source}: key {key} is {value}: expected a finite number, or null")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{source}: key {key} is {value!r:.20}...: too large a number")


def check_task(task: Mapping[str, Any], key: str, source: str, exact: bool) -> None:
    """Relations that hold for any honest count, and that a swapped or edited key breaks.

    Args:
        task: its keys and types are right (eval.record).
        exact: every token of an answer lies in a counted round; engines' last rounds may be uncut.

    Raises:
        UserError: names the source, the task and the key.
    """
    proposed, accepted = task["num_proposed"], task["num_accepted"]
    wrong = None
    if proposed is not None and accepted is not None and accepted > proposed:
        wrong = ("num_accepted", f"more than num_proposed {proposed}")
    elif not task["num_rounds"] and task["tau"] is not None:
        wrong = ("tau", "expected null without rounds")
    elif any(after > before for before, after in pairwise(task["survival"])):
        wrong = ("survival", "expected shares that never rise")
    wrong = wrong or _wrong_ratio(task, exact) or _wrong_interval(task)
    if wrong is not None:
        raise UserError(f"{source}: key {key}.{wrong[0]} is {task[wrong[0]]}, {wrong[1]}")
    check_pair(task.get("same_as_baseline"), f"{key}.same_as_baseline", source)


def _wrong_ratio(task: Mapping[str, Any], exact: bool) -> tuple[str, str] | None:
    ratios = [
        ("acceptance_rate", "num_accepted", "num_proposed"),
        ("mean_accepted", "num_accepted", "num_rounds"),
        ("speedup", "tokens_per_second", "baseline_tokens_per_second"),
    ]
    if exact and not task["num_missing"]:
        ratios.append(("tau", "num_tokens", "num_rounds"))
    for name, above, below in ratios:
        if task[name] is None or task[above] is None or not task[below]:
            continue
        ratio = task[above] / task[below]
        if not math.isclose(task[name], ratio, rel_tol=ROUNDING, abs_tol=ROUNDING / 10):
            return name, f"but {above} / {below} is {ratio:.4g}"
    tau, mean_accepted = task["tau"], task["mean_accepted"]
    if (
        tau is None
        or mean_accepted is None
        or 0 <= tau - mean_accepted + ROUNDING <= 1 + 2 * ROUNDING
    ):
        return None
    return "tau", f"expected mean_accepted {mean_accepted:.4g} and at most 1 more"


def _wrong_interval(task: Mapping[str, Any]) -> tuple[str, str] | None:
    """A bootstrap interval may leave the point out, but never by its own width."""
    for name in ("tau", "speedup"):
        point, interval = task[name], task[f"{name}_ci95"]
        if interval is None:
            continue
        if len(interval) != 2 or interval[0] > interval[1]:
            return f"{name}_ci95", "expected [low, high]"
        low, high = interval
        room = high - low + ROUNDING * abs(high)
        if point is not None and not low - room <= point <= high + room:
            return name, f"far outside {name}_ci95 {interval}"
    return None


def check_pair(text: str | None, key: str, source: str) -> None:
    """In "x/y", x counts some of y."""
    same, _, checked = (text or "0/0").partition("/")
    if int(same) > int(checked):
        raise UserError(f"{source}: key {key} is {text!r}, more than all")
