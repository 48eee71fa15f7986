"""Reading a config.json strictly: the steps that every architecture's form shares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from data.target_config import DTYPES
from drafters.base import TrainedDrafter
from recipes.errors import UserError

D = TypeVar("D", bound=TrainedDrafter)


def read_shape(shape_type: Any, fields: dict[str, Any], faults: Any, where: Path) -> Any:
    """A config of `shape_type`, or a UserError that lists every fault."""
    try:
        shape = TypeAdapter(shape_type).validate_python(fields)
    except ValidationError as error:
        found = [f"{e['loc'][0]}: {e['msg']} (is {e['input']!r})" for e in error.errors()]
        raise UserError(f"{where}: {'; '.join(found)}") from error
    if found := faults(shape):
        raise UserError(f"{where}: {'; '.join(found)}")
    return shape


def build_on_meta(drafter_type: Callable[[Any], D], shape: Any, where: Path) -> D:
    """A drafter without memory: tensor shapes only."""
    try:
        with torch.device("meta"):
            return drafter_type(shape)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: no drafter has this shape: {error!r}") from error


def read_dtype(config: dict[str, Any], where: Path) -> torch.dtype:
    """The dtype of the weights."""
    if config["dtype"] not in DTYPES:
        raise UserError(f"{where}: dtype {config['dtype']!r} is none of {', '.join(DTYPES)}")
    return DTYPES[config["dtype"]]


def require_equal(section: dict[str, Any], expected: dict[str, Any], where: Path) -> None:
    """Every key that decides the computation is there and agrees with the others."""
    missing = [key for key in expected if key not in section]
    if missing:
        raise UserError(f"{where}: missing keys: {', '.join(missing)}")
    for key, value in expected.items():
        if section[key] != value:
            raise UserError(
                f"{where}: {key} is {section[key]!r}; with the other keys it would be {value!r}"
            )
