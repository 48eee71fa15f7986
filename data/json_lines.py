"""Files of one JSON object a line, read and written without holding them whole."""

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from data.files import make_folder
from recipes.errors import UserError

_BLOCK = 1 << 20


def cut_last_line(path: Path) -> bool:
    """Take away a last line that a kill cut short; says whether there was one."""
    if not path.exists():
        return False
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)
    return end < size


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one after another; none where it is missing.

    Raises:
        UserError: a line is no JSON object with an id.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path} is damaged: line {number}: {error}; delete that line"
                ) from error
            if not (isinstance(row, dict) and "id" in row):
                raise UserError(
                    f"{path} is damaged: line {number} is no object with an id; delete that line"
                )
            yield row


def write_lines(path: Path, rows: Iterable[Any], starts: "array[int] | None" = None) -> int:
    """Write objects as they come, whole or not at all; returns how many there were.

    Args:
        path: of the file; its folder is made.
        rows: the objects.
        starts: where each line begins is appended here, in bytes.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")  # several ranks may write it
    count = position = 0
    try:
        with temporary.open("w", encoding="ascii", newline="\n") as file:
            for row in rows:
                line = json.dumps(row) + "\n"
                file.write(line)
                if starts is not None:
                    starts.append(position)
                position += len(line)  # ASCII: characters are bytes
                count += 1
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count
