"""Make a leaderboard (Markdown, JSON and one HTML page) from result records."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.files import json_text, read_json, write_text
from eval.board_page import make_samples, to_html
from eval.record import validate
from eval.report import ORDER, make_rows, sort_rows, to_markdown, used_columns
from eval.row_settings import name_settings
from eval.shown_certificate import find_certificate
from recipes.errors import UserError

EXAMPLES = """examples:
  python eval/leaderboard.py outputs/demo --out outputs/demo/report
  python eval/leaderboard.py outputs/*/results --out report
  python eval/leaderboard.py mine.json theirs.json --out compare

RESULTS are record files, folders of them (*.json), or run folders (their results/ is read).
DIR gets leaderboard.md, leaderboard.json and leaderboard.html, a page that needs no network."""


def find_records(paths: list[Path]) -> list[Path]:
    """The record files that the arguments name, each once.

    Of a folder's JSON files, leaderboard.json and those of bench.py --plan and --certify are none.

    Raises:
        UserError: a path does not exist, or a folder holds no record.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; name a result file or its folder")
        if path.is_file():
            found.append(path)
            continue
        folder = path / "results" if (path / "results").is_dir() else path
        others = {"leaderboard.json", "plan.json", *(p.name for p in folder.glob("certificate_*"))}
        files = sorted(file for file in folder.glob("*.json") if file.name not in others)
        if not files:
            raise UserError(f"{folder}: no *.json result here; eval/bench.py writes them")
        found += files
    return list({file.resolve(): file for file in found}.values())


def check_targets(paths: Iterable[Path]) -> None:
    """So that not some views are new and some old: a file can take the place of what lies there."""
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path} is a folder; move it, or write to another --out")


def main() -> None:
    """Read the records that the command line names, write the three views."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="made when missing")
    arguments = parser.parse_args()

    targets = [arguments.out / f"leaderboard.{kind}" for kind in ("json", "md", "html")]
    check_targets(targets)
    records = {str(file): read_json(file) for file in find_records(arguments.results)}
    rows: list[dict[str, Any]] = []
    for name, record in records.items():
        certificate = find_certificate(Path(name), validate(record, name))
        rows += make_rows(record, name, certificate)
    if not rows:
        raise UserError("the results hold no task; run eval/bench.py with --tasks")
    rows = sort_rows(name_settings(rows))
    named = {row["source"]: (row["settings"], row["weights"]) for row in rows}
    samples = [
        sample
        for name, record in records.items()
        for sample in make_samples(record, name, *named.get(name, ()))
    ]
    definitions = {column.key: column.definition for column in used_columns(rows)}
    board = {"schema": 1, "order": ORDER, "definitions": definitions, "rows": rows}
    texts = [json_text(board), to_markdown(rows), to_html(rows, samples)]
    for path, text in zip(targets, texts, strict=True):
        write_text(path, text)
    print(f"{len(rows)} rows -> {targets[-1]}, .md and .json")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
