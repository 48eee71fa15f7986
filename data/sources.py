"""Raw rows of files and hub sets, in an order shuffled by a seed, without holding them all.

A .jsonl file is read line by line through its line offsets, a .parquet file stays in Arrow's
columns, a hub set stays in its memory map; only .json and .csv files are read whole.
"""

import csv
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from data.turns import BadRow
from recipes.errors import UserError

_WINDOW = 10_000  # rows that a streamed set is shuffled in


def shuffled_rows(source: str, seed: int, streaming: bool = False) -> Iterator[tuple[int, Any]]:
    """Rows of a source with their numbers (from 1), in an order that depends on the seed alone.

    Args:
        source: as `read_rows`.
        seed: of the order.
        streaming: read a hub set row by row; numbers then count rows as they come.

    Raises:
        UserError: as `read_rows`.
    """
    if streaming and source.startswith("hub:"):
        stream = _load_hub(source, streaming=True).shuffle(seed=seed, buffer_size=_WINDOW)
        yield from enumerate(stream, start=1)
        return
    rows = read_rows(source)
    order = array("q", range(len(rows)))
    random.Random(f"{seed} {source}").shuffle(order)
    for i in order:
        yield i + 1, rows[i]


def read_rows(source: str) -> Sequence[Any]:
    """Raw rows of a file (.jsonl, .json, .parquet, .csv) or of hub:ORG/NAME[/CONFIG][:SPLIT].

    Returns:
        One entry a row: a dict, or a BadRow where a line of a .jsonl file is no JSON.

    Raises:
        UserError: the file is missing, unreadable or of another kind; the hub set cannot be loaded.
    """
    if source.startswith("hub:"):
        rows: Sequence[Any] = _load_hub(source)
        return rows
    path = Path(source)
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path from the current folder")
    try:
        if path.suffix == ".jsonl":
            return JsonLines(path)
        if path.suffix == ".json":
            return _read_json(path)
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                return [_csv_row(row) for row in csv.DictReader(file)]
        if path.suffix == ".parquet":
            return ParquetRows(path)
    except (ValueError, OSError, csv.Error) as error:  # JSON, UTF-8, Arrow: ValueErrors
        raise UserError(f"{path}: cannot be read: {error}") from error
    raise UserError(f"{path}: unknown kind of file; use .jsonl, .json, .parquet or .csv")


class JsonLines(Sequence[Any]):
    """Lines of a .jsonl file, parsed when asked for; 16 bytes a line are held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._sizes = array("q"), array("q")
        position = 0
        with path.open("rb") as file:
            for line in file:  # at \n only: U+2028 and the like may stand inside a text
                if line.removeprefix(b"\xef\xbb\xbf" if position == 0 else b"").strip():
                    self._starts.append(position)
                    self._sizes.append(len(line))
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.read(self._sizes[index])
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if b"\\ud" in line.lower():  # half a surrogate pair is no character
                json.dumps(row, ensure_ascii=False).encode()
            return row
        except UnicodeError:
            return BadRow("not valid UTF-8")
        except (ValueError, RecursionError):  # too deep, too long a number
            return BadRow("not valid JSON")


class ParquetRows(Sequence[Any]):
    """Rows of a .parquet file, made into dicts when asked for."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet  # slow to import, needed here only

        self._table = parquet.read_table(path, memory_map=True).combine_chunks()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._table.slice(index % len(self), 1).to_pylist()[0]


def _read_json(path: Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise UserError(f"{path}: the file must hold a list of rows")
    return rows


def _csv_row(row: dict[Any, Any]) -> Any:
    if None in row:
        return BadRow("more fields than columns")
    return {name: value or None for name, value in row.items()}


def _load_hub(source: str, streaming: bool = False) -> Any:
    import datasets  # takes seconds to import, needed here only

    _, name, *split = source.split(":")
    config = name.split("/")[2:]
    name = "/".join(name.split("/")[:2])
    try:
        return datasets.load_dataset(
            name, *config, split=split[0] if split else "train", streaming=streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source}: cannot be loaded: {error}; check name and split, sign in with "
            "`hf auth login` if the set is gated, or download it and give a file"
        ) from error
