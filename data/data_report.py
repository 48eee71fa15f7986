"""The page about a run's rows: lengths, what is learned, what was dropped, and what it overlaps.

One file, no script, no network. V = tokens of the target's vocabulary.
"""

from array import array
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.files import write_text
from data.row_file import RowTotals
from data.row_summary import RowSummary
from data.viewer import pieces_of, row_title
from data.vocab import build_draft_vocab

_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
_BARS = 24
_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c1e21, #e4e6e8);
  --soft: light-dark(#666, #999); --line: light-dark(#ddd, #444);
  --bar: light-dark(#3b7a57, #6cc495); --learned: light-dark(#d6f0df, #1d4a30);
  --special: light-dark(#1f6aa5, #6db3ea); }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.2rem; font-size: 1.1rem; }
table { border-collapse: collapse; }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td.n { text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  padding: .6rem; font: 12.5px/1.5 ui-monospace, monospace; }
.soft { color: var(--soft); }
mark { background: var(--learned); color: inherit; }
b.s { color: var(--special); font-weight: 600; }
svg { width: 100%; max-width: 40rem; }
svg rect { fill: var(--bar); }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
"""


def write_report(
    path: Path,
    title: str,
    summary: RowSummary,
    read: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: list[int],
) -> None:
    """Write the page.

    Args:
        path: of the .html file.
        title: heading, e.g. run and target.
        summary: of all rows.
        read: prompts_report.json, or None where there is none.
        tokenizer: of the target.
        eos_ids: always in the draft vocabulary.
    """
    sections = [
        _numbers(summary),
        _histograms(summary),
        _drops(read),
        _coverage(summary, eos_ids),
        _overlap(summary),
        _examples(summary.examples, tokenizer),
    ]
    write_text(
        path,
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{''.join(sections)}</html>\n",
    )


def coverage_by_size(
    train_V: Tensor, heldout_V: Tensor, eos_ids: list[int]
) -> list[tuple[int, float, float]]:
    """(size, share of supervised tokens kept in the training rows, in the held-out rows).

    The draft vocabulary is chosen by the training rows alone; NaN where no row is held out.

    Args:
        train_V: how often each token is supervised in the training rows.
        heldout_V: the same in the held-out rows.
        eos_ids: always kept.
    """
    vocab_size = len(train_V)
    sizes = [size for size in _SIZES if len(eos_ids) <= size < vocab_size]
    vocabs = [build_draft_vocab(train_V, size, eos_ids) for size in [*sizes, vocab_size]]
    return [(v.size, v.coverage(train_V), v.coverage(heldout_V)) for v in vocabs]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Cells are escaped; those that are not text stand right."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        cells = [
            f"<td>{escape(cell)}</td>" if isinstance(cell, str) else f"<td class=n>{cell:,}</td>"
            for cell in row
        ]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "<table>" + "".join(lines) + "</table>"


def _numbers(summary: RowSummary) -> str:
    def line(name: str, sums: RowTotals) -> tuple[Any, ...]:
        share = f"{sums.num_supervised / sums.num_tokens:.1%}" if sums.num_tokens else "-"
        counts = (sums.num_rows, sums.num_tokens, sums.num_supervised)
        return (name, *counts, share, sums.num_truncated)

    head = ("", "rows", "tokens", "supervised", "share", "cut at the token cap")
    lines = [line("train", summary.train), line("held out", summary.heldout)]
    return "<h2>Rows</h2>" + _table(head, lines)


def _histograms(summary: RowSummary) -> str:
    pairs = zip(summary.learned, summary.lengths, strict=True)
    shares = array("d", (100 * learned / length for learned, length in pairs))
    return (
        "<h2>Lengths</h2>"
        + histogram("tokens a row", summary.lengths)
        + histogram("tokens before the first answer", summary.before)
        + histogram("supervised tokens a row", summary.learned)
        + histogram("supervised share of a row, percent", shares)
    )


def histogram(name: str, values: "Sequence[float] | array[int] | array[float]") -> str:
    """Bars of equal width from 0 to the largest value, as SVG with median and extremes in words."""
    if not values:
        return f"<p>{escape(name)}: no rows</p>"
    ordered, top = sorted(values), max(values) or 1
    counts = [0] * _BARS
    for value in values:
        counts[min(int(value / top * _BARS), _BARS - 1)] += 1
    bars, width = [], 600 / _BARS
    for i, count in enumerate(counts):
        height = 80 * count / max(counts)
        low, high = top * i / _BARS, top * (i + 1) / _BARS
        bars.append(
            f"<rect x={i * width + 1:.1f} y={80 - height:.1f} width={width - 2:.1f} "
            f"height={height:.1f}><title>{low:.0f} to {high:.0f}: {count:,} rows</title></rect>"
        )
    words = f"least {ordered[0]:,.0f}, median {median(ordered):,.0f}, most {top:,.0f}"
    return (
        f"<p>{escape(name)}: {words}</p><svg viewBox='0 0 600 96' role=img "
        f"aria-label='{escape(name)}'>{''.join(bars)}<text x=0 y=94>0</text>"
        f"<text x=600 y=94 text-anchor=end>{top:,.0f}</text></svg>"
    )


def _drops(read: dict[str, Any] | None) -> str:
    if read is None:
        return "<h2>Sources</h2><p>No counts of the sources: the data was prepared elsewhere.</p>"
    sources = [(name, count, read["kept"].get(name, 0)) for name, count in read["read"].items()]
    page = "<h2>Sources</h2>" + _table(("source", "rows read", "kept"), sources)
    if read.get("left_out"):
        page += "<h2>Left out after reading</h2>"
        page += _table(("reason", "conversations"), list(read["left_out"].items()))
    page += "<h2>Dropped</h2>"
    if not read["drops"]:
        return page + "<p>No row was dropped.</p>"
    page += _table(("reason", "rows"), list(read["drops"].items()))
    for reason, samples in read.get("samples", {}).items():
        lines = "\n".join(f"{sample['where']}: {sample['row']}" for sample in samples)
        page += f"<p class=soft>{escape(reason)}</p><pre>{escape(lines)}</pre>"
    return page


def _coverage(summary: RowSummary, eos_ids: list[int]) -> str:
    train_V, heldout_V = summary.train.counts_V, summary.heldout.counts_V
    lines = [
        (size, f"{kept:.2%}", f"{other:.2%}" if summary.heldout.num_rows else "-")
        for size, kept, other in coverage_by_size(train_V, heldout_V, eos_ids)
    ]
    head = ("drafter.draft_vocab_size", "supervised tokens kept, train", "held out")
    return "<h2>Draft vocabulary</h2>" + _table(head, lines)


def _overlap(summary: RowSummary) -> str:
    lines = [
        (name, found, "") if isinstance(found, str) else (name, *found)
        for name, found in summary.overlaps.items()
    ]
    head = ("task", "rows that ask it", "rows that answer with it")
    return (
        "<h2>Overlap with evaluation tasks</h2><p>Rows that share 8 words in a row with a prompt "
        "of the task. Prompts of the tasks in data.decontaminate were dropped before.</p>"
        + _table(head, lines)
    )


def _examples(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    page = (
        "<h2>Examples</h2><p>What is learned is <mark>marked</mark>, special tokens are blue.</p>"
    )
    for row in rows:
        text = ""
        for piece in pieces_of(tokenizer, row["ids"], row["spans"]):
            part = escape(piece.text)
            part = f"<b class=s>{part}</b>" if piece.special else part
            text += f"<mark>{part}</mark>" if piece.supervised else part
        page += f"<p class=soft>{escape(row_title(row))}</p><pre>{text}</pre>"
    return page
