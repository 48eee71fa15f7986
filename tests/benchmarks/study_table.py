"""The study's table: arms as whole recipes, what joins and compares them, and what is timed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from recipes.errors import UserError
from recipes.keys import describe_errors
from recipes.schema import Recipe
from recipes.yaml_text import parse_yaml
from tests.benchmarks.study_measure import Speed

SECTIONS = ("recipe", "heldout", "arms", "joined", "contrasts", "speed")


class Table(NamedTuple):
    """The arms as whole recipes, which of them answer a question together, and what is timed.

    heldout: prompts that are answered to be measured on, beside those the answers hold out.
    An arm of another name than its recipe's (lookup+X) measures the drafter of that run.
    """

    arms: dict[str, Recipe]
    heldout: int
    contrasts: dict[str, list[str]]
    speed: Speed


def read_table(path: Path, minutes: float, folder: Path) -> Table:
    """The table with the budget filled in.

    Raises:
        UserError: a section or key is wrong; arms that do not share target, answers and tasks.
    """
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict) or set(values) != set(SECTIONS):
        raise UserError(f"{path}: expected the sections {', '.join(SECTIONS)}")
    try:
        speed = Speed.model_validate(values["speed"])
    except ValidationError as error:
        raise UserError(f"{path}, speed: {error}") from error
    heldout = values["heldout"]
    if type(heldout) is not int or heldout < 0:
        raise UserError(f"{path}, heldout: {heldout!r} is no number of prompts, 0 or more")
    budget = {"output_dir": str(folder), "train": {"max_minutes": float(minutes)}}
    arms = {}
    for name, changes in values["arms"].items():
        fields = _from_runs(
            merged(merged(merged(values["recipe"], budget), changes), {"name": name}), folder
        )
        try:
            arms[name] = Recipe.model_validate(fields)
        except ValidationError as error:
            raise UserError(describe_errors(error, Recipe, f"{path}, arm {name}", [])) from error
    check_shared(arms, str(path))
    if unknown := set(values["joined"]) - arms.keys():
        raise UserError(f"{path}, joined: no arm {', '.join(sorted(unknown))}")
    for name in values["joined"]:
        section = arms[name].eval.model_copy(update={"drafters": ["lookup+drafter"]})
        arms[f"lookup+{name}"] = arms[name].model_copy(update={"eval": section})
    for question, names in values["contrasts"].items():
        if unknown := set(names) - arms.keys():
            raise UserError(f"{path}, contrast {question!r}: no arm {', '.join(sorted(unknown))}")
    return Table(arms, heldout, values["contrasts"], speed)


def _from_runs(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A drafter.model of {runs}/ARM/export is what that arm, which was run before, exported."""
    model = fields.get("drafter", {}).get("model")
    return merged(fields, {"drafter": {"model": model.format(runs=folder)}}) if model else fields


def check_shared(arms: Mapping[str, Recipe], where: str) -> None:
    """Raises UserError where arms differ in what all of them share."""
    first = next(iter(arms.values()))
    for name, recipe in arms.items():
        drafters = {"drafters": first.eval.drafters}
        same = recipe.target == first.target and recipe.data == first.data
        if not same or recipe.eval.model_copy(update=drafters) != first.eval:
            raise UserError(f"{where}, arm {name}: target, data and eval are those of all arms")
        if len(recipe.eval.drafters) != 1 or recipe.eval.temperatures != [0.0]:
            raise UserError(f"{where}, arm {name}: needs one eval.drafters and temperatures [0.0]")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the changes put over it, section by section."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = merged(inner, value)
        result[key] = value
    return result


def is_trained(recipe: Recipe) -> bool:
    """Whether the arm's drafter has weights."""
    return recipe.eval.drafters[0] not in ("lookup", "suffix")
