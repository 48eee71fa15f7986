"""Which rows can be compared, and what each says of its settings.

Compared are the ways of drafting (number of tokens, verification, tree, n-grams), which leave the
target's law alone. All other settings must be equal; temperature and batch size have columns.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from recipes.schema import EvalSection

Row = dict[str, Any]

DRAFTING = ("draft_sampling", "verification", "tree", "siblings", "lookup", "suffix")
SHOWN = ("temperature", "batch_size", "num_draft_tokens")
UNSET = ("top_p", "top_k", "min_p", "repetition_penalty", "seed", "compile")
# What a record that does not have the key was decoded with; of others, such as dtype, no value is
# the usual one.
DEFAULTS: dict[str, Any] = {
    **{key: EvalSection.model_fields[key].default for key in UNSET},
    "template_kwargs": {},
    "engine_flags": "",
    "api": "completions",
}
LOOKUP = [EvalSection.model_fields[f"lookup_{end}"].default for end in ("min", "max")]
SUFFIX = [
    EvalSection.model_fields[f"suffix_{key}"].default
    for key in ("max_tree_depth", "max_spec_factor", "min_token_prob", "cached_answers")
]
HASH = 8  # letters of one


def drafting_text(row: Mapping[str, Any]) -> str:
    """How tokens are drafted and judged where that is not the usual way, as "block, sampled".

    Args:
        row: or a record's identity and settings.
    """
    rule, tree, siblings = row["verification"], row.get("tree"), row.get("siblings")
    words = [] if rule == "token" else [rule]
    if rule == "tree":
        drawn = siblings if siblings != "top" else None
        words = [" ".join(word for word in (rule, tree, drawn) if word)]
    parts = row["method"].split("+")
    if row["draft_sampling"] == "sampled" and rule != "tree" and set(parts) - {"lookup", "suffix"}:
        words.append("sampled")  # drawn siblings say it
    if "lookup" in parts and row.get("lookup") not in (None, LOOKUP):
        words.append("n-grams " + "-".join(map(str, row["lookup"])))
    if "suffix" in parts and row.get("suffix") not in (None, SUFFIX):
        words.append("suffix " + "/".join(map(_text, row["suffix"])))
    return ", ".join(words)


def compared_at(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that comparable rows share, without those at their default."""
    kept = {k: v for k, v in settings.items() if k not in DRAFTING and k not in SHOWN}
    return {k: kept[k] for k in sorted(kept) if kept[k] != DEFAULTS.get(k)}


def name_settings(rows: Iterable[Row]) -> list[Row]:
    """The rows, each with what tells it from others of its names.

    `settings`: the text of what is not usual in it, None for nothing. That is all of `compared_at`
    that has a default; of the rest, what differs among the rows of its target.
    `weights`: the first letters of their hash, None where it is not known, or all rows of the
    drafter's name that know theirs have the same.
    """
    rows = list(rows)
    hashes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row["drafter_hash"] is not None:
            hashes.setdefault((row["target"], row["drafter"]), set()).add(row["drafter_hash"])
    keys = {key for row in rows for key in row["compared_at"]}
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for key in keys - DEFAULTS.keys():
            values = found.setdefault((row["target"], key), set())
            values.add(_text(row["compared_at"].get(key), key))
    for row in rows:
        at = row["compared_at"]
        varied = {key for key in keys if len(found.get((row["target"], key), ())) > 1}
        words = [
            f"{key} {_text(at.get(key), key)}" for key in sorted(varied | DEFAULTS.keys() & at)
        ]
        row["settings"] = ", ".join(words) or None
        several = len(hashes.get((row["target"], row["drafter"]), ())) > 1
        row["weights"] = row["drafter_hash"][:HASH] if several and row["drafter_hash"] else None
    return rows


def _text(value: Any, key: str = "") -> str:
    if isinstance(value, str):
        return value[:HASH] if key.endswith("_hash") else value
    if isinstance(value, float):
        return f"{value:g}"
    return "n/a" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
