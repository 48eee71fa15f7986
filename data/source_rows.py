"""Training rows with the answers of the source itself (data.regenerate: false)."""

import logging
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.benchmarks import benchmark_ngrams
from data.conversations import BadRow, Row, render
from data.parallel import worker_map
from data.prompts import Prompt, PromptReport, stream_prompts
from recipes.data_section import DataSection
from recipes.errors import UserError

log = logging.getLogger("draftsmith")


def set_template(tokenizer: PreTrainedTokenizerBase, section: DataSection) -> None:
    """Give the tokenizer the recipe's own chat template (data.chat_template), if there is one.

    Raises:
        UserError: the file cannot be read.
    """
    if section.chat_template is None:
        return
    try:
        tokenizer.chat_template = section.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template cannot be read: {error}") from error


def rows_of_source(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, report: PromptReport
) -> Iterator[dict[str, Any]]:
    """Rows in the form of rows.jsonl (without `split`), one after another.

    Args:
        section: of the recipe; with num_workers they are rendered by that many processes.
        tokenizer: of the target.
        report: what becomes of each row read is counted here.

    Raises:
        UserError: a source cannot be read, too many rows cannot be used, or none is left.
    """
    conversations = stream_prompts(section, benchmark_ngrams(section.decontaminate), report)
    num_kept = num_tokens = 0
    with worker_map(section.num_workers, render_row, (section, tokenizer)) as rendered:
        for c, row in rendered(conversations):
            num_tokens += "ids" in c
            if isinstance(row, BadRow):
                report.kept[c["source"]] -= 1
                report.drop(row.reason, f"{c['source']} id {c['id']}", c["messages"])
                if report.drops.total() % 1000 == 0:
                    report.check_bad_share(section.max_bad_share)
                continue
            num_kept += 1
            yield row
    if num_tokens and section.decontaminate:
        log.warning("%d rows came as tokens: not compared with evaluation tasks", num_tokens)
    report.check_bad_share(section.max_bad_share)
    if not num_kept:
        raise UserError(f"no row of data.sources {section.sources} can be used: {report.summary()}")


def render_row(
    c: Prompt, settings: tuple[DataSection, PreTrainedTokenizerBase]
) -> dict[str, Any] | BadRow:
    """One row, or why there is none."""
    section, tokenizer = settings
    try:
        row = _given(c, section, len(tokenizer)) if "ids" in c else _render(c, section, tokenizer)
    except BadRow as bad:
        return bad
    result = {
        "id": c["id"],
        "ids": row.ids,
        "spans": spans_of(row.mask),
        "finish": "stop",
        "messages": c["messages"],
    }
    return result | ({"tools": c["tools"]} if "tools" in c else {})


def _render(c: Prompt, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Row:
    return render(
        tokenizer,
        c["messages"],
        c.get("tools"),
        section.template_kwargs,
        section.max_length,
        section.supervise,
        section.train_on_thinking,
    )


def _given(c: Prompt, section: DataSection, num_ids: int) -> Row:
    ids, mask = c["ids"][: section.max_length], c["mask"][: section.max_length]
    if max(ids) >= num_ids:
        raise BadRow("a token id outside the target's tokenizer")
    if not any(mask):
        raise BadRow("nothing supervised within max_length")
    return Row(ids, mask)


def spans_of(mask: list[int]) -> list[list[int]]:
    """Half-open ranges of the ones in a mask."""
    ones, spans, end = bytes(mask), list[list[int]](), 0
    while (start := ones.find(1, end)) >= 0:
        end = ones.find(0, start)
        if end < 0:
            end = len(ones)
        spans.append([start, end])
    return spans
