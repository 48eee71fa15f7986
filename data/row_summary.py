"""What a set of rows adds up to, row after row: none is kept but a few examples.

V = tokens of the target's vocabulary. A row leaves 24 bytes behind, for histograms and medians.
"""

from array import array
from collections.abc import Iterable
from typing import Any

import torch

from data.benchmarks import BENCHMARKS, benchmark_ngrams
from data.prompt_rows import ngrams
from data.row_file import RowTotals
from recipes.errors import UserError

NUM_EXAMPLES = 5


class RowSummary:
    """Sums of each split, lengths of each row, overlaps with evaluation tasks, first examples.

    overlaps: for each task the rows that share 8 words in a row with it, in what is asked and in
    what is answered; or the reason, where the task's prompts are not installed.
    """

    def __init__(self, vocab_size: int) -> None:
        self.train = RowTotals(torch.zeros(vocab_size, dtype=torch.int64))
        self.heldout = RowTotals(torch.zeros(vocab_size, dtype=torch.int64))
        self.lengths, self.before, self.learned = array("q"), array("q"), array("q")
        self.examples: list[dict[str, Any]] = []
        self._blocked: dict[str, set[str]] = {}
        self.overlaps: dict[str, list[int] | str] = {}
        for name in BENCHMARKS:
            try:
                self._blocked[name] = benchmark_ngrams([name])
                self.overlaps[name] = [0, 0]
            except UserError as error:
                self.overlaps[name] = str(error)

    def add(self, row: dict[str, Any]) -> None:
        """Take a row in the form of rows.jsonl; without `split` it is a training row."""
        heldout = row.get("split") == "heldout"
        (self.heldout if heldout else self.train).add(row)
        self.lengths.append(len(row["ids"]))
        self.before.append(row["spans"][0][0])
        self.learned.append(sum(end - start for start, end in row["spans"]))
        if not heldout and len(self.examples) < NUM_EXAMPLES:
            self.examples.append(row)
        asked, answered = set[str](), set[str]()
        for message in row["messages"]:
            said = answered if message["role"] == "assistant" else asked
            said.update(ngrams(message["content"]))
        for name, blocked in self._blocked.items():
            counts = self.overlaps[name]
            assert isinstance(counts, list)
            counts[0] += not blocked.isdisjoint(asked)
            counts[1] += not blocked.isdisjoint(answered)


def summarize(rows: Iterable[dict[str, Any]], vocab_size: int) -> RowSummary:
    """The summary of all rows, read once."""
    summary = RowSummary(vocab_size)
    for row in rows:
        summary.add(row)
    return summary
