"""rows.jsonl as a sequence: a row is read when it is asked for, its length is known before.

S tokens of a row, V tokens of the target's vocabulary.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from data.batch import Row
from data.json_lines import write_lines


@dataclass
class RowTotals:
    """Sums over the rows of one split. counts_V: how often each token is supervised."""

    counts_V: Tensor
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0

    def add(self, record: dict[str, Any]) -> None:
        ids_S = torch.tensor(record["ids"])
        learned = torch.cat([ids_S[start:end] for start, end in record["spans"]])
        self.counts_V.index_add_(0, learned, torch.ones_like(learned))
        self.num_rows += 1
        self.num_tokens += len(ids_S)
        self.num_supervised += len(learned)
        self.num_truncated += record["finish"] == "length"


@dataclass
class RowFile(Sequence[Row]):
    """Some rows of a rows.jsonl; 12 bytes and an id a row are held.

    lengths: S of each row.
    """

    path: Path
    ids: list[str] = field(default_factory=list)
    lengths: "array[int]" = field(default_factory=lambda: array("l"))
    starts: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "RowFile": ...
    def __getitem__(self, index: int | slice) -> "Row | RowFile":
        if isinstance(index, slice):
            return RowFile(self.path, self.ids[index], self.lengths[index], self.starts[index])
        return to_row(self.record(index))

    def record(self, index: int) -> dict[str, Any]:
        """The row as it stands in the file, messages included."""
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            record: dict[str, Any] = json.loads(file.readline())
        return record

    def only(self, chosen: Iterable[int]) -> "RowFile":
        """Some of these rows."""
        part = RowFile(self.path)
        for index in chosen:
            part.ids.append(self.ids[index])
            part.lengths.append(self.lengths[index])
            part.starts.append(self.starts[index])
        return part


def join(parts: Sequence[RowFile]) -> RowFile:
    """The rows of several parts of one file, one part after the other."""
    joined = RowFile(parts[0].path)
    for part in parts:
        joined.ids += part.ids
        joined.lengths += part.lengths
        joined.starts += part.starts
    return joined


def write_rows(
    path: Path, records: Iterable[dict[str, Any]], vocab_size: int
) -> dict[str, tuple[RowFile, RowTotals]]:
    """Write rows.jsonl as its rows come; "train" and "heldout" with what they add up to."""
    parts = {
        split: (RowFile(path), RowTotals(torch.zeros(vocab_size, dtype=torch.int64)))
        for split in ("train", "heldout")
    }
    splits: list[RowFile] = []
    starts = array("q")

    def counted() -> Iterator[dict[str, Any]]:
        for record in records:
            rows, totals = parts[record["split"]]
            totals.add(record)
            rows.ids.append(record["id"])
            rows.lengths.append(len(record["ids"]))
            splits.append(rows)
            yield record

    write_lines(path, counted(), starts)
    for rows, start in zip(splits, starts, strict=True):
        rows.starts.append(start)
    return parts


def to_row(record: dict[str, Any]) -> Row:
    """A row of rows.jsonl as tensors."""
    mask_S = torch.zeros(len(record["ids"]), dtype=torch.bool)
    for start, end in record["spans"]:
        mask_S[start:end] = True
    return Row(id=record["id"], ids_S=torch.tensor(record["ids"]), mask_S=mask_S)
