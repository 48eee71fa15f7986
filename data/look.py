"""Rows to look at without the target's weights: those prepared, or those of the source itself."""

import json
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from data import embedded
from data.conversations import eos_ids
from data.files import read_json
from data.pipeline import data_dir
from data.prompts import PromptReport, split_heldout
from data.source_rows import rows_of_source, set_template
from recipes.errors import UserError
from recipes.schema import Recipe


@dataclass(frozen=True)
class Look:
    """Rows in the form of rows.jsonl and what is needed to show them.

    vocab_size: V of the target. read: prompts_report.json, None where it is missing.
    """

    rows: list[dict[str, Any]]
    read: dict[str, Any] | None
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos_ids: list[int]


def look_at(recipe: Recipe) -> Look | None:
    """The rows of a recipe, or None where the target has to write the answers first.

    With data.regenerate: false they are rendered anew, so that they follow the recipe as it is.

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
    if section.regenerate:
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line]
        report = folder / "prompts_report.json"
        read = read_json(report) if report.exists() else None
    else:
        counts = PromptReport()
        rows = list(rows_of_source(section, tokenizer, counts))
        train, _ = split_heldout([row["id"] for row in rows], section.heldout_fraction)
        for row in rows:
            row["split"] = "train" if row["id"] in train else "heldout"
        read = counts.as_json()
    ends = eos_ids(generation, config, tokenizer)
    return Look(rows, read, tokenizer, int(config.vocab_size), ends)
