"""All prompts or rows of a data section at once, for tests that compare them."""

from collections.abc import Set as AbstractSet
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.prompts import Prompt, PromptReport, stream_prompts
from data.source_rows import rows_of_source
from recipes.data_section import DataSection


def load_prompts(
    section: DataSection, blocked_ngrams: AbstractSet[str] = frozenset()
) -> tuple[list[Prompt], PromptReport]:
    """The prompts of the sources, and what became of the rows."""
    report = PromptReport()
    return list(stream_prompts(section, blocked_ngrams, report)), report


def load_rows(
    section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[dict[str, Any]], PromptReport]:
    """The rows of the sources' own answers, and what became of the rows read."""
    report = PromptReport()
    return list(rows_of_source(section, tokenizer, report)), report
