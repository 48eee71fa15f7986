"""What a row looks like to the loss: text pieces with special tokens and what is learned visible.

Printed with colours where there are some; without, lines that are learned begin with "+".
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

_STYLES = {  # (supervised, special) -> how it is printed
    (True, True): "bold black on green",
    (True, False): "bold green",
    (False, True): "cyan",
    (False, False): "bright_black",
}


class Piece(NamedTuple):
    """A run of tokens of one kind; a special token is always a piece of its own."""

    text: str
    supervised: bool
    special: bool


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], spans: list[list[int]]
) -> Iterator[Piece]:
    """The tokens of a row in runs that are learned or not, decoded together.

    Args:
        tokenizer: of the target.
        ids: S token ids.
        spans: half-open supervised ranges, as in rows.jsonl.
    """
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    supervised = [False] * len(ids)
    for start, end in spans:
        supervised[start:end] = [True] * (end - start)

    def kind(position: int) -> tuple[bool, int]:
        return supervised[position], position if ids[position] in special_ids else -1

    for (learned, special), run in groupby(range(len(ids)), key=kind):
        text = str(tokenizer.decode([ids[i] for i in run], skip_special_tokens=False))
        yield Piece(text, learned, special >= 0)


def row_text(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> Text:
    """One row of rows.jsonl for the terminal.

    Every line break of the text is written out; each answer begins with a border and a new line.
    """
    text, before, number = Text(), False, 0
    fresh = True  # at the start of a printed line
    for piece in pieces_of(tokenizer, row["ids"], row["spans"]):
        if piece.supervised != before:
            text.append("" if fresh else "\n")
            fresh, before = True, piece.supervised
            if piece.supervised:
                number += 1
                text.append(f"  ---- answer {number}\n", style="dim")
        style = _STYLES[piece.supervised, piece.special]
        for line in piece.text.splitlines(keepends=True):
            if fresh:
                text.append("+ " if piece.supervised else "  ", style="dim")
            fresh = line != line.rstrip("\r\n")
            text.append(line.rstrip("\r\n").replace("\t", "\\t"), style=style)
            text.append("\\n\n" if fresh else "", style="dim")
    return text


def row_title(row: dict[str, Any]) -> str:
    """Id, split and counts of a row."""
    num = sum(end - start for start, end in row["spans"])
    split = f" ({row['split']})" if "split" in row else ""
    cut = ", cut" if row["finish"] == "length" else ""
    return f"{row['id']}{split}: {num} of {len(row['ids'])} tokens supervised{cut}"
