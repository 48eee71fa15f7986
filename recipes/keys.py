"""Dotted keys of a recipe: overrides that set one, and errors that name one."""

import difflib
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from recipes.errors import UserError
from recipes.yaml_text import parse_yaml

_MAX_ERRORS = 5
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text (put it in quotes)",
    "list_type": "a list [..., ...]",
    "tuple_type": "a list [..., ...]",
    "dict_type": "a mapping",
    "model_type": "a section with keys of its own",
    "path_type": "a path",
}


def fields_by_key(recipe_type: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for every leaf of a recipe, e.g. `train.lr`.

    A section with several forms (`drafter`) gives the keys of each, so a key may come twice.
    """
    for name, field in recipe_type.model_fields.items():
        sections = sections_of(field.annotation)
        for section in sections:
            for key, leaf in fields_by_key(section):
                yield f"{name}.{key}", leaf
        if not sections:
            yield name, field


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field holds: one, or the forms of a union; [] for a plain value."""
    forms = get_args(annotation) or (annotation,)
    return [form for form in forms if isinstance(form, type) and issubclass(form, BaseModel)]


def apply_override(values: dict[Any, Any], override: str, recipe_type: type[BaseModel]) -> str:
    """Set one `section.key=value` in `values` in place and return its dotted key.

    Raises:
        UserError: the override has no `=`, no key, or goes through a plain value.
    """
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise UserError(f"override {override!r}: write section.key=value, e.g. train.lr=1e-4")
    field = dict(fields_by_key(recipe_type)).get(key)
    # A field that holds text takes the characters as they stand: revision=1234567 is no number.
    is_text = field is not None and _holds_text(field.annotation) and text not in ("null", "~", "")
    value = text if is_text else parse_yaml(text, where=f"override {override!r}")
    for name in names[:-1]:
        if values.get(name) is None:
            values[name] = {}
        values = values[name]
        if not isinstance(values, dict):
            raise UserError(f"override {override!r}: {name} is a value, not a section")
    values[names[-1]] = value
    return key


def _holds_text(annotation: Any) -> bool:
    """Say whether a field takes text (or null) only: str, Path or a Literal of words."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_holds_text(part) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return all(isinstance(word, str) for word in get_args(annotation))
    return isinstance(annotation, type) and annotation.__name__ in ("str", "Path")


def describe_errors(
    error: ValidationError, recipe_type: type[BaseModel], file: str, overridden: list[str]
) -> str:
    """Turn a validation error into lines that name key, origin, value and what was expected.

    Args:
        error: what pydantic raised.
        recipe_type: the model that was to be built.
        file: the recipe's path.
        overridden: dotted keys set on the command line; errors in them name the command line.
    """
    lines = []
    for detail in error.errors(include_url=False)[:_MAX_ERRORS]:
        parts = [str(part) for part in detail["loc"]]
        fields = dict(fields_by_key(recipe_type))
        if (
            len(parts) > 1
            and len(forms := sections_of(recipe_type.model_fields[parts[0]].annotation)) > 1
        ):
            form = parts.pop(1)  # the value of `method`, which pydantic puts into the place
            own = [f for f in forms if f.model_fields["method"].default == form]
            fields = {k: leaf for k, leaf in fields.items() if not k.startswith(f"{parts[0]}.")}
            fields |= {f"{parts[0]}.{k}": leaf for f in own for k, leaf in fields_by_key(f)}
        key = ".".join(parts)
        origin = f"recipe {file}"
        if any(key == name or key.startswith(f"{name}.") for name in overridden):
            origin = "command line"
        elif any(name.startswith(f"{key}.") or not key for name in overridden):
            origin = f"recipe {file} with the command line"
        lines.append(f"{origin}: {_describe(detail, key, fields)}")
    if error.error_count() > _MAX_ERRORS:
        lines.append(f"... and {error.error_count() - _MAX_ERRORS} more")
    return "\n".join(lines)


def _describe(detail: ErrorDetails, key: str, fields: dict[str, FieldInfo]) -> str:
    """Word one error, without its origin."""
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {suggest(key, list(fields))}"
    if kind == "union_tag_invalid":
        context = detail.get("ctx", {})
        given = detail["input"].get("method") if isinstance(detail["input"], dict) else None
        return f"{key}.method: {given!r} is not valid; expected {context['expected_tags']}"
    if kind == "missing":
        return f"{key} is missing; it has no default"
    message = (
        detail["msg"]
        .removeprefix("Value error, ")
        .removeprefix("String should ")
        .removeprefix("Input should be ")
    )
    if kind == "value_error":
        return f"{key}: {message}" if key else message
    expected = _EXPECTED.get(kind, message)
    field = fields.get(key)  # None for an item of a list, which is never null
    if kind == "literal_error" and field and type(None) in get_args(field.annotation):
        expected += " or null"
    return f"{key}: {detail['input']!r} is not valid; expected {expected}"


def suggest(key: str, keys: list[str]) -> str:
    """Name the nearest valid key, or the valid names at that place."""
    section, _, name = key.rpartition(".")
    here = [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == section]
    if not section:
        here += sorted({known.partition(".")[0] for known in keys if "." in known})
    elsewhere = [known for known in keys if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    nearest = difflib.get_close_matches(name, here, n=1, cutoff=0.65)
    if nearest:
        return f"did you mean {section + '.' if section else ''}{nearest[0]}?"
    return f"valid here: {', '.join(here)}"
