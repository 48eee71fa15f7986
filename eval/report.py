"""The leaderboard as a view of result records: records -> rows -> Markdown and HTML.

Nothing is computed here: every number is read from a record (eval.record), sorted and formatted.
One row is one (drafter, task, temperature) at one batch size and number of drafted tokens. Both
views print the same text for the same cell, and None prints as "n/a".

Order of rows: target, task, temperature (so T=0 comes first), batch size, then speedup, fastest
first; rows without a speedup come last. Within one task at T=0 the first row is the fastest.
"""

import json
import math
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from eval.record import Identity, Lossless, Settings, TaskResult, validate
from recipes.errors import UserError

Row = dict[str, Any]

TEMPLATE = Path(__file__).with_name("report_page.html")
MISSING = "n/a"
ORDER = "target, task, temperature (T=0 first), batch size, then speedup (fastest first)"


class Column(NamedTuple):
    """One column of the table: its key in a row, its heading, its text and its definition."""

    key: str
    title: str
    text: Callable[[Row], str]
    definition: str


def number(value: Any, spec: str = "", unit: str = "") -> str:
    """A number in a format spec with its unit, or "n/a" for None."""
    return MISSING if value is None else f"{value:{spec}}{unit}"


def value_of(key: str, spec: str = "", unit: str = "") -> Callable[[Row], str]:
    """The text of a key, with the interval in brackets where the row holds KEY_ci95."""

    def text(row: Row) -> str:
        interval = row.get(f"{key}_ci95")
        bounds = "" if interval is None else f" [{interval[0]:{spec}}, {interval[1]:{spec}}]"
        return number(row[key], spec, unit) + bounds

    return text


def drafter_text(row: Row) -> str:
    """The drafter's name, with its method where the name does not say it."""
    name, method = row["drafter"], row["method"]
    return name if method in name else f"{name} ({method})"


def split_text(row: Row) -> str:
    """Milliseconds a round as "draft + verify + other"."""
    split = row["ms_per_round"]
    return " + ".join(number(split[part], ".1f") for part in ("draft", "verify", "other"))


def lossless_text(row: Row) -> str:
    """Greedy identity and the p-value of the sampled tokens, each "n/a" where it was not run."""
    greedy, p_value = row["greedy_identical"] or MISSING, row["pit_p_value"]
    if p_value is None:
        return f"greedy {greedy}, PIT p {MISSING}"
    shown = "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
    return f"greedy {greedy}, PIT p {shown} ({number(row['pit_num_tokens'], ',')} tokens)"


# fmt: off
COLUMNS = tuple(Column(*column) for column in (
    ("drafter", "Drafter", drafter_text, "What proposes the tokens, with its method."),
    ("temperature", "T", value_of("temperature", "g"), "Sampling temperature; 0 is greedy."),
    ("batch_size", "Batch", value_of("batch_size"), "Prompts decoded together."),
    ("num_draft_tokens", "K", value_of("num_draft_tokens"), "Tokens proposed a round, at most."),
    ("tau", "tau", value_of("tau", ".2f"),
     "Tokens emitted a round, with the bonus or correction token: tokens / rounds. In brackets its "
     "95% interval, by a cluster bootstrap over prompts."),
    ("alpha", "alpha", value_of("alpha", ".3f"),
     "Mean over the verified positions of sum_v min(p(v), q(v)), p the target's and q the "
     "drafter's final distribution: the chance that one proposed token is accepted."),
    ("acceptance_rate", "Acceptance", value_of("acceptance_rate", ".1%"),
     "Accepted / proposed tokens. It falls with K even for the same drafter."),
    ("mean_accepted", "Mean accepted", value_of("mean_accepted", ".2f"),
     "Accepted tokens / rounds, without the bonus token."),
    ("speedup", "Speedup", value_of("speedup", ".2f", "x"),
     "Tokens/s / baseline tokens/s, same engine and settings. In brackets its 95% interval."),
    ("predicted_speedup", "Predicted", value_of("predicted_speedup", ".2f", "x"),
     "Speedup that the measured tau and the measured times of a round and of a baseline token "
     "predict. Far above the measured one: time is lost outside the rounds."),
    ("predicted_from_alpha", "From alpha", value_of("predicted_from_alpha", ".2f", "x"),
     "Speedup predicted from alpha alone, as if every proposed token were accepted independently "
     "with this chance."),
    ("tokens_per_second", "Tokens/s", value_of("tokens_per_second", ".1f"),
     "Generated tokens / decoding seconds, with the drafter."),
    ("baseline_tokens_per_second", "Baseline tokens/s",
     value_of("baseline_tokens_per_second", ".1f"), "The same for the target alone."),
    ("ms_per_round", "ms/round", split_text, "Milliseconds a round: draft + verify + other."),
    ("lossless", "Lossless", lossless_text,
     "Greedy: prompts whose fp32 tokens equal the target's own / prompts checked. PIT p: p-value "
     "of the test that every sampled token was drawn from the target's distribution; below 0.001 "
     "says that it was not."),
))
# fmt: on


def make_rows(record: Any, source: str) -> list[Row]:
    """One row per task of a record; `source` names the record's file in the views and errors.

    Raises:
        UserError: it is not a result record.
    """
    valid: dict[str, Any] = dict(validate(record, source))
    shared = {key: valid["identity"][key] for key in Identity.__annotations__}
    shared |= {key: valid["settings"][key] for key in Settings.__annotations__}
    shared |= {key: (valid.get("lossless") or {}).get(key) for key in Lossless.__annotations__}
    return [
        {"source": source, "task": name, **shared}
        | {key: task[key] for key in TaskResult.__annotations__}
        for name, task in valid["tasks"].items()
    ]


def make_samples(record: Any, source: str) -> list[dict[str, Any]]:
    """A valid record's samples for the round viewer, labelled with its drafter and settings.

    Raises:
        UserError: a sample is not {"prompt": text, "rounds": [{"accepted": [text], "rejected":
            [text], "next": text}]}.
    """
    settings, samples = record["settings"], record.get("samples") or []
    label = f"{drafter_text(record['identity'])}, T={settings['temperature']:g}, "
    label += f"K={settings['num_draft_tokens']}"
    try:
        for sample in samples:
            for turn in sample["rounds"]:
                "".join([sample["prompt"], *turn["accepted"], *turn["rejected"], turn["next"]])
    except (KeyError, TypeError) as error:
        needed = "samples must be prompts with rounds of accepted, rejected and next, all text"
        raise UserError(f"{source}: {needed} ({error!r})") from error
    return [{"label": label, "prompt": s["prompt"], "rounds": s["rounds"]} for s in samples]


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows in the order that this module's docstring gives."""

    def key(row: Row) -> tuple:
        speedup = -math.inf if row["speedup"] is None else row["speedup"]
        place = (row["target"], row["task"], row["temperature"], row["batch_size"])
        return (*place, -speedup, row["drafter"], row["num_draft_tokens"], row["source"])

    return sorted(rows, key=key)


def table(titles: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; cell text is escaped so that no value can break a line or a column."""

    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(" ".join(str(c).replace("|", r"\|").split()) for c in cells) + " |"

    titles = list(titles)
    return "\n".join([line(titles), "|" + " --- |" * len(titles), *map(line, lines)])


def to_markdown(rows: list[Row]) -> str:
    """The sorted rows as Markdown: one table a task, where each row comes from, definitions."""
    parts = ["# Leaderboard", f"Rows are sorted by {ORDER}."]
    for (target, task), group in groupby(rows, key=lambda row: (row["target"], row["task"])):
        lines = [[column.text(row) for column in COLUMNS] for row in group]
        parts += [f"## {task} on {target}", table([column.title for column in COLUMNS], lines)]
    keys = ("source", "engine", "dtype", "hardware", "commit", "draft_sampling", "verification")
    records = {row["source"]: [row[key] or MISSING for key in keys] for row in rows}
    titles = ("File", "Engine", "Dtype", "Hardware", "Commit", "Drafting", "Verification")
    parts += ["## Records", table(titles, [records[source] for source in sorted(records)])]
    definitions = "\n".join(f"- **{column.title}**: {column.definition}" for column in COLUMNS)
    return "\n\n".join([*parts, "## Definitions", definitions]) + "\n"


def to_html(rows: list[Row], samples: list[dict[str, Any]]) -> str:
    """The sorted rows and the samples (make_samples) as one self-contained page.

    The page's data is one JSON blob in which "<" is written as an escape, so that no text in it
    can end the script element.
    """
    columns = [{"key": c.key, "title": c.title, "definition": c.definition} for c in COLUMNS]
    shown = [row | {"text": {c.key: c.text(row) for c in COLUMNS}} for row in rows]
    blob = {"columns": columns, "rows": shown, "samples": samples, "order": ORDER}
    text = json.dumps(blob, allow_nan=False).replace("<", r"\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", text)
