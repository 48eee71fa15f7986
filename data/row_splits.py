"""Rows on their way to rows.jsonl: out of answers or sources, each with its split."""

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from data.conversations import BadRow
from data.json_lines import read_lines, write_lines
from data.prompts import split_heldout
from data.sources import JsonLines
from data.talks import rows_of
from recipes.data_section import DataSection
from recipes.errors import UserError

log = logging.getLogger("draftsmith")

CUT = "answer cut at max_new_tokens (data.keep_truncated: false)"


def rows_of_responses(
    folder: Path,
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    dropped: Counter[str],
) -> Iterator[dict[str, Any]]:
    """Rows of responses.jsonl by rising id; all rows of a conversation have one split.

    Args:
        folder: RUN/data.
        section: of the recipe.
        tokenizer: renders answers that came as text.
        dropped: conversations that give no row are counted here, by reason.

    Raises:
        UserError: a line is damaged, or an id stands twice.
    """
    path = folder / "responses.jsonl"
    ids, numbers = [], array("q")
    for number, record in enumerate(read_lines(path)):
        if not record.get("answers"):
            raise UserError(
                f"{path} is damaged: line {number + 1} has no answers; delete that line"
            )
        only = len(record["answers"]) == 1 and record["finish"] == "length"
        if only and not section.keep_truncated:
            dropped[CUT] += 1
        else:
            ids.append(record["id"])
            numbers.append(number)
    if not ids:
        return
    train, _ = split_heldout(ids, section.heldout_fraction)
    lines = JsonLines(path)
    for place in sorted(range(len(ids)), key=ids.__getitem__):
        split = "train" if ids[place] in train else "heldout"
        try:
            for row in rows_of(lines[numbers[place]], section, tokenizer):
                yield {**row, "split": split}
        except BadRow as bad:
            dropped[bad.reason] += 1


def split_rows(
    folder: Path, rows: Iterator[dict[str, Any]], section: DataSection
) -> Iterator[dict[str, Any]]:
    """The same rows with their split, which is known only after the last of them is."""
    path, ids = folder / f".rows.{uuid4().hex}.tmp", list[str]()

    def noted() -> Iterator[dict[str, Any]]:
        for row in rows:
            ids.append(row["id"])
            yield row

    try:
        write_lines(path, noted())
        train, _ = split_heldout(ids, section.heldout_fraction)
        for row in read_lines(path):
            yield {**row, "split": "train" if row["id"] in train else "heldout"}
    finally:
        path.unlink(missing_ok=True)
