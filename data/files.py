"""Files that are whole or absent: written under a temporary name, then renamed.

A killed run leaves at most a temporary file, never half a result under its final name.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.errors import UserError

_MARGIN = 1.05  # file systems need a little more than the bytes written


def make_folder(path: Path) -> None:
    """Make a folder and its parents; UserError where that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text; parent folders are made."""
    path = Path(path)
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        raise


def json_text(value: Any) -> str:
    """JSON, indented by two; NaN and infinity are refused (they are no JSON)."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as json_text gives it."""
    write_text(path, json_text(value))


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: the file is missing, cannot be read or is not JSON that Python can hold.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:  # a folder of that name, or no right to read
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid JSON: brackets are nested too deep") from error
    except ValueError as error:  # syntax, encoding, a whole number of thousands of digits
        raise UserError(f"{path}: not valid JSON: {error}") from error


@contextmanager
def replace_dir(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder that takes the place of `path` on success.

    On an exception the temporary folder goes and `path` stays as it was. Between the two renames
    at the end `path` is absent for an instant; what stood there is kept until the new one stands.
    """
    path = Path(path)
    make_folder(path.parent)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    old = temporary.with_suffix(".old")
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def require_disk(path: str | Path, num_bytes: int, what: str) -> None:
    """Refuse to start when the disk that holds `path` is short.

    Args:
        path: file or folder to be written; it need not exist yet.
        num_bytes: size of what is to be written.
        what: for the message, e.g. `target states`.

    Raises:
        UserError: fewer than num_bytes and a margin of 5% are free.
    """
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes * _MARGIN:
        raise UserError(
            f"{what} need {num_bytes / 1e9:.1f} GB, but {existing} has {free / 1e9:.1f} GB free; "
            "free some space or set output_dir to another disk"
        )


def sha256(path: str | Path) -> str:
    """Hex digest of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def stable_hash(value: Any) -> str:
    """16 hex characters that depend on the JSON form of a value, not on the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
