"""YAML text to plain values and back, by the YAML 1.2 rules for scalars.

PyYAML follows YAML 1.1, where `1e-4` is a string, `off` is a boolean, `010` is eight, `1:30` is
ninety and a repeated key silently wins. Here `1e-4` is a number, only `true` and `false` are
booleans, `off` is a word, and a repeated key is an error.
"""

import re
from typing import Any

import yaml

from recipes.errors import UserError

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_SCALARS = [
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class-level table


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes words which only YAML 1.2 reads as numbers."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Build a dict; a key that stands twice in one mapping is an error."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict) or key in seen:
            what = "a list or mapping as key" if isinstance(key, list | dict) else "a repeated key"
            raise yaml.constructor.ConstructorError(
                None, None, f"{what}: {key!r}", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str, where: str) -> Any:
    """Read one YAML document.

    Args:
        text: the document.
        where: file name or `command line`, for messages.

    Returns:
        Plain values: dict, list, str, int, float, bool or None.

    Raises:
        UserError: the text is not YAML; the message holds the line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}{place}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {error}") from error


def dump_yaml(value: Any) -> str:
    """Write plain values as YAML that `parse_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
