"""Rows to look at without the target's weights: those prepared, or those of the source itself.

They come one after another; none is kept.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from data import embedded
from data.conversations import eos_ids
from data.files import read_json
from data.json_lines import read_lines
from data.pipeline import data_dir
from data.prompts import PromptReport
from data.row_splits import split_rows
from data.source_rows import rows_of_source, set_template
from recipes.data_section import DataSection
from recipes.errors import UserError
from recipes.schema import Recipe


@dataclass(frozen=True)
class Look:
    """Rows in the form of rows.jsonl and what is needed to show them.

    rows: to be read once. read: prompts_report.json once all rows are read, None where it is
    missing. vocab_size: V of the target.
    """

    rows: Iterator[dict[str, Any]]
    read: Callable[[], dict[str, Any] | None]
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos_ids: list[int]


def look_at(recipe: Recipe, all_rows: bool) -> Look | None:
    """The rows of a recipe, or None where the target has to write the answers first.

    With data.regenerate: false they are rendered anew, so that they follow the recipe as it is.

    Args:
        recipe: of the run.
        all_rows: all are going to be read; otherwise those of a source come without their split,
            which is known only after the last of them.

    Raises:
        UserError: the tokenizer or a source cannot be read.
    """
    folder, section = data_dir(recipe), recipe.data
    if section.regenerate and not (folder / "rows.jsonl").exists():
        return None
    target = recipe.target
    path = embedded.resolve(target.model)
    common = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        config = AutoConfig.from_pretrained(path, **common).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"target.model {target.model!r} cannot be loaded: {error}") from error
    try:
        generation = GenerationConfig.from_pretrained(path, revision=target.revision or "main")
    except OSError:  # many models have none
        generation = None
    set_template(tokenizer, section)
    counts, report = PromptReport(), folder / "prompts_report.json"

    def read() -> dict[str, Any] | None:
        if not section.regenerate:
            return counts.as_json()
        found: dict[str, Any] | None = read_json(report) if report.exists() else None
        return found

    if section.regenerate:
        rows = read_lines(folder / "rows.jsonl")
    else:
        rows = rows_of_source(section, tokenizer, counts)
        rows = _with_splits(rows, section) if all_rows else rows
    ends = eos_ids(generation, config, tokenizer)
    return Look(rows, read, tokenizer, int(config.vocab_size), ends)


def _with_splits(rows: Iterator[dict[str, Any]], section: DataSection) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from split_rows(Path(folder), rows, section)
