"""The leaderboard as a view of result records: records -> rows -> Markdown (eval.board_page: HTML).

Nothing is measured here: every number is read from a record (eval.record), sorted and formatted.
One row is one task of one record. Both
views print the same text for the same cell, and None prints as "n/a". A key that an older record
does not have is None.

Order of rows: target, task, temperature (so T=0 comes first), batch size, other settings (the usual
ones first), then speedup, fastest first; rows without a speedup come last.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from eval.record import Identity, Lossless, Settings, TaskResult, validate
from eval.row_settings import compared_at, drafting_text, name_settings

Row = dict[str, Any]

MISSING = "n/a"
ORDER = "target, task, temperature (T=0 first), batch size, settings, then speedup (fastest first)"
PARTS = ("draft", "verify", "sampling", "bookkeeping", "other")
LATER_KEYS = (
    *("per_category", "per_turn", "predicted_curve", "oracle_share", "cost_ratio"),
    *("tau_before_stop", "alpha_teacher_forced", "contamination", "task_hash"),
)


class Column(NamedTuple):
    """One column of the table: its key in a row, its heading, its text and its definition.

    main: the page shows it at once; the others wait behind "all columns".
    optional: left out where no row has a value.
    """

    key: str
    title: str
    text: Callable[[Row], str]
    definition: str
    main: bool = True
    optional: bool = False


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


def drafter_text(row: Mapping[str, Any]) -> str:
    """The drafter's name, with method and way of drafting where they are not said or not usual.

    Args:
        row: or a record's identity and settings; `weights` of it is as in name_settings.
    """
    name, method = row["drafter"], row["method"]
    text = name if method in name else f"{name} ({method})"
    weights = row.get("weights") and f"weights {row['weights']}"
    return ", ".join(word for word in (text, weights, drafting_text(row)) if word)


def time_split(row: Row) -> dict[str, float | None]:
    """Milliseconds a round by part; "other" only where a record does not split it further."""
    split = {part: row["ms_per_round"].get(part) for part in PARTS}
    finer = split["sampling"] is not None or split["bookkeeping"] is not None
    unused = {"other"} if finer else {"sampling", "bookkeeping"}
    return {part: ms for part, ms in split.items() if part not in unused}


def split_text(row: Row) -> str:
    """Milliseconds a round as "draft + verify + sampling + bookkeeping" (older: "+ other")."""
    return " + ".join(number(ms, ".1f") for ms in time_split(row).values())


def lossless_text(row: Row) -> str:
    """Greedy identity, p-value of the sampled tokens, certificate; "n/a" where it was not run."""
    greedy, p_value = row["greedy_identical"] or MISSING, row["pit_p_value"]
    text = f"greedy {greedy}, PIT p {MISSING}"
    if p_value is not None:
        shown = "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
        text = f"greedy {greedy}, PIT p {shown} ({number(row['pit_num_tokens'], ',')} tokens)"
    certificate = row["certificate"]
    return text if certificate is None else f"{text}, certificate {certificate['verdict']}"


def contamination_text(row: Row) -> str:
    """Prompts of the task that are like training prompts, as "overlapping/prompts"."""
    found = row["contamination"]
    return MISSING if found is None else f"{found['num_overlapping']}/{found['num_prompts']}"


def best_num_draft_tokens(curve: list[dict[str, Any]] | None, survival: list[float]) -> int | None:
    """The number with the largest predicted speedup; 0 where none beats the target alone.

    Only of numbers whose every position some round reached, and a round of one token gains nothing.
    """
    known = (curve or [])[: len(survival)]
    if not known:
        return None
    best = max(known, key=lambda point: point["speedup"])
    return best["num_draft_tokens"] if best["speedup"] > 1 and best["tau"] > 1 else 0


# fmt: off
COLUMNS = tuple(Column(*column) for column in (
    ("drafter", "Drafter", drafter_text,
     "What proposes the tokens, with its method and, where unusual, how: block or tree (its "
     "shape), sampled drafts, n-grams."),
    ("settings", "Settings", lambda row: row["settings"] or "",
     "Settings that are not the usual ones, or that differ among the rows of a target. Only rows "
     "with equal ones are compared.", True, True),
    ("temperature", "T", value_of("temperature", "g"), "Sampling temperature; 0 is greedy."),
    ("batch_size", "Batch", value_of("batch_size"), "Prompts decoded together."),
    ("num_draft_tokens", "K", value_of("num_draft_tokens"), "Tokens proposed a round, at most."),
    ("tau", "tau", value_of("tau", ".2f"),
     "Tokens emitted a round, with the bonus or correction token: tokens / rounds. In brackets its "
     "95% interval, by a cluster bootstrap over prompts."),
    ("alpha", "alpha", value_of("alpha", ".3f"),
     "Mean over the verified positions of sum_v min(p(v), q(v)), p the target's and q the "
     "drafter's final distribution: the chance that one proposed token is accepted."),
    ("tau_before_stop", "tau before stop", value_of("tau_before_stop", ".2f"),
     "tau as engines count it: answers are not cut at their end token.", False, True),
    ("alpha_teacher_forced", "alpha, forced", value_of("alpha_teacher_forced", ".3f"),
     "alpha along the target's own answers, on every position.", False, True),
    ("acceptance_rate", "Acceptance", value_of("acceptance_rate", ".1%"),
     "Accepted / proposed tokens. It falls with K even for the same drafter.", False),
    ("mean_accepted", "Mean accepted", value_of("mean_accepted", ".2f"),
     "Accepted tokens / rounds, without the bonus token.", False),
    ("speedup", "Speedup", value_of("speedup", ".2f", "x"),
     "Tokens/s / baseline tokens/s, same engine and settings. In brackets its 95% interval."),
    ("predicted_speedup", "Predicted", value_of("predicted_speedup", ".2f", "x"),
     "Speedup that the measured tau and the measured times of a round and of a baseline token "
     "predict. Far above the measured one: time is lost outside the rounds."),
    ("predicted_from_alpha", "From alpha", value_of("predicted_from_alpha", ".2f", "x"),
     "Speedup predicted from alpha alone, as if every proposed token were accepted independently "
     "with this chance.", False),
    ("oracle_share", "Of perfect", value_of("oracle_share", ".0%"),
     "Measured speedup / that of a perfect drafter, which proposes the target's own tokens, "
     "as many a round, at the same cost. The rest is what a better drafter of this size could "
     "still win.", True, True),
    ("best_num_draft_tokens", "Best K", value_of("best_num_draft_tokens"),
     "The number of drafted tokens with the largest predicted speedup, of those that rounds "
     "reached; 0: none beats the target alone.", True, True),
    ("cost_ratio", "c", value_of("cost_ratio", ".3f"),
     "Time to draft one token / time of one token of the target alone.", False, True),
    ("tokens_per_second", "Tokens/s", value_of("tokens_per_second", ".1f"),
     "Generated tokens / decoding seconds, with the drafter."),
    ("baseline_tokens_per_second", "Baseline tokens/s",
     value_of("baseline_tokens_per_second", ".1f"), "The same for the target alone.", False),
    ("ms_per_round", "ms/round", split_text,
     "Milliseconds a round: draft + verify + sampling + bookkeeping (the last two are one number, "
     "other, in older records)."),
    ("lossless", "Lossless", lossless_text,
     "Greedy: prompts whose fp32 tokens equal the target's own / prompts checked. PIT p: p-value "
     "of the test that every sampled token was drawn from the target's distribution; below 0.001 "
     "says that it was not. Certificate: whether the test also rejects verifiers that were broken "
     "on purpose."),
    ("contamination", "Overlap", contamination_text,
     "Prompts of the task that share eight words in a row with a prompt that the drafter was "
     "trained on / prompts.", False, True),
    ("trained_tokens", "Trained on", value_of("trained_tokens", ","),
     "Tokens the drafter was trained on, repeats counted.", False, True),
    ("train_minutes", "Minutes", value_of("train_minutes", ",.0f"),
     "Minutes of training.", False, True),
))
# fmt: on


def make_rows(record: Any, source: str, certificate: Mapping[str, Any] | None = None) -> list[Row]:
    """One row per task of a record.

    Args:
        source: the record's file, named in the views and errors.
        certificate: that of the drafter (eval.shown_certificate). It is of this project's loop, so
            records of other engines do not get it.

    Raises:
        UserError: it is not a result record.
    """
    valid: dict[str, Any] = dict(validate(record, source))
    lossless = valid.get("lossless") or {}
    shared = {
        key: valid["identity"].get(key) for key in (*Identity.__annotations__, "train_minutes")
    }
    shared |= {key: valid["settings"].get(key) for key in Settings.__annotations__}
    shared["compared_at"] = compared_at(valid["settings"])
    shared |= {key: lossless.get(key) for key in Lossless.__annotations__}
    ours = certificate if shared["engine"] == "torch" else None
    shared["certificate"] = lossless.get("certificate", ours)
    keys = (*TaskResult.__annotations__, *LATER_KEYS)
    rows = [
        {"source": source, "task": name, **shared} | {key: task.get(key) for key in keys}
        for name, task in valid["tasks"].items()
    ]
    for row in rows:
        row["best_num_draft_tokens"] = best_num_draft_tokens(
            row["predicted_curve"], row["survival"]
        )
    return name_settings(rows)


def used_columns(rows: list[Row]) -> list[Column]:
    """The columns without those optional ones that no row has a value for."""
    return [c for c in COLUMNS if not c.optional or any(row[c.key] is not None for row in rows)]


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows in the order that this module's docstring gives."""

    def key(row: Row) -> tuple:
        speedup = -math.inf if row["speedup"] is None else row["speedup"]
        place = (row["target"], row["task"], row["temperature"], row["batch_size"])
        return (
            *place,
            row["settings"] or "",
            -speedup,
            row["drafter"],
            row["num_draft_tokens"],
            row["source"],
        )

    return sorted(rows, key=key)


def one_line(text: Any) -> str:
    """Text that stays text in Markdown: no new line, element, link or column begins in it."""
    words = " ".join(escape(str(text), quote=False).split())
    return words.replace("](", r"]\(").replace("|", r"\|")


def table(titles: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; cell text is escaped so that no value can break a line or a column."""

    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(one_line(cell) for cell in cells) + " |"

    titles = list(titles)
    return "\n".join([line(titles), "|" + " --- |" * len(titles), *map(line, lines)])


def _cell(row: Row, key: str) -> str:
    return row[key] or ("usual" if key == "settings" else MISSING)


def to_markdown(rows: list[Row]) -> str:
    """The sorted rows as Markdown: one table a task, where each row comes from, definitions."""
    columns = used_columns(rows)
    parts = ["# Leaderboard", f"Rows are sorted by {ORDER}."]
    for (target, task), group in groupby(rows, key=lambda row: (row["target"], row["task"])):
        lines = [[column.text(row) for column in columns] for row in group]
        parts += [
            f"## {one_line(task)} on {one_line(target)}",
            table([column.title for column in columns], lines),
        ]
    keys = ["source", "engine", "dtype", "hardware", "commit", "draft_sampling", "verification"]
    titles = ["File", "Engine", "Dtype", "Hardware", "Commit", "Drafting", "Verification"]
    for key in ("tree", "siblings", "settings"):
        if any(row[key] is not None for row in rows):
            keys, titles = [*keys, key], [*titles, key.capitalize()]
    records = {row["source"]: [_cell(row, key) for key in keys] for row in rows}
    parts += ["## Records", table(titles, [records[source] for source in sorted(records)])]
    definitions = "\n".join(f"- **{column.title}**: {column.definition}" for column in columns)
    return "\n\n".join([*parts, "## Definitions", definitions]) + "\n"
