"""The leaderboard as one HTML page that needs no network: rows and samples in, text out.

The page lies in eval/page/ as HTML, CSS and scripts, which are put into one file here. Its data is
one JSON blob in which "<" is written as an escape, so that no text in it can end the element.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.report import ORDER, Row, drafter_text, time_split, used_columns
from recipes.errors import UserError

FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("base.js", "table.js", "charts.js", "panels.js", "rounds.js")  # each uses those before
DIGITS = 4  # of p and q in samples


def make_samples(
    record: Any, source: str, also: str | None = None, weights: str | None = None
) -> list[dict[str, Any]]:
    """A valid record's samples for the round viewer, labelled with its drafter and settings.

    Args:
        source: the record's file, for error messages.
        also, weights: the settings and the weights that its rows name.

    Returns:
        [{"label", "verification", "prompt", "rounds": [{"accepted": [text], "rejected": [text],
        "next": text}]}]. Where the record has them, a round also holds p and q of the proposed
        tokens in order, and next_p.

    Raises:
        UserError: a sample has another shape.
    """
    settings = record["settings"]
    drafter = drafter_text(record["identity"] | settings | {"weights": weights})
    label = f"{drafter}, T={settings['temperature']:g}, K={settings['num_draft_tokens']}"
    label += f", batch {settings['batch_size']}" + (f", {also}" if also else "")
    shared = {"label": label, "verification": settings["verification"]}
    try:
        return [
            {**shared, "prompt": "" + s["prompt"], "rounds": [_read_round(r) for r in s["rounds"]]}
            for s in record.get("samples") or []
        ]
    except (KeyError, TypeError) as error:
        needed = "samples must be prompts with rounds of accepted, rejected and next, all text"
        raise UserError(f"{source}: {needed}; p and q numbers ({error!r})") from error


def _read_round(found: Mapping[str, Any]) -> dict[str, Any]:
    """The round with the keys that the page reads; TypeError and KeyError for another shape."""
    if not isinstance(found["accepted"], list) or not isinstance(found["rejected"], list):
        raise TypeError("accepted and rejected are lists of text")
    "".join([*found["accepted"], *found["rejected"], found["next"]])
    shown: dict[str, Any] = {key: found[key] for key in ("accepted", "rejected", "next")}
    for key in ("p", "q"):
        if found.get(key) is not None:
            shown[key] = [_shorten(value) for value in found[key]]
    if found.get("next_p") is not None:
        shown["next_p"] = _shorten(found["next_p"])
    return shown


def _shorten(value: float | None) -> float | None:
    return None if value is None else float(f"{0.0 + value:.{DIGITS}g}")


def to_html(rows: list[Row], samples: list[dict[str, Any]]) -> str:
    """The sorted rows and the samples (make_samples) as one self-contained page."""
    columns = used_columns(rows)
    heads = [
        {"key": c.key, "title": c.title, "definition": c.definition, "main": c.main}
        for c in columns
    ]
    shown = [
        row | {"text": {c.key: c.text(row) for c in columns}, "split": time_split(row)}
        for row in rows
    ]
    blob = {"columns": heads, "rows": shown, "samples": samples, "order": ORDER}
    text = json.dumps(blob, allow_nan=False).replace("<", r"\u003c")
    page = _read("page.html").replace("/*CSS*/", _read("page.css"))
    page = page.replace("/*JS*/", "".join(_read(name) for name in SCRIPTS))
    return page.replace("/*DATA*/null", text)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
