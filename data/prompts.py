"""The prompts of a recipe: from the book, files and the hub, in fair shares, none of them twice.

Every row read is either kept or counted under the reason for which it was dropped.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from data.book import book_prompts, book_size
from data.conversations import BadRow, normalize
from data.prompt_rows import Prompt, cut_prompt, ngrams, prompt_id, prompt_ngrams, read_rows
from recipes.errors import UserError
from recipes.data_section import DataSection

__all__ = ["Prompt", "PromptReport", "load_prompts", "magpie_count", "ngrams", "split_heldout"]

CONTAMINATED = "shares an 8-gram with an evaluation task"
DUPLICATE = "same content as an earlier row"

logger = logging.getLogger("draftsmith")


@dataclass
class PromptReport:
    """What became of the rows: num_read == num_kept + the sum of `drops`."""

    read: Counter[str] = field(default_factory=Counter)  # source -> rows looked at
    kept: Counter[str] = field(default_factory=Counter)  # source -> prompts taken
    drops: Counter[str] = field(default_factory=Counter)  # reason -> rows dropped

    @property
    def num_read(self) -> int:
        """Rows looked at; reading stops when data.num_prompts are kept."""
        return self.read.total()

    @property
    def num_kept(self) -> int:
        """Prompts returned."""
        return self.kept.total()

    @property
    def num_contaminated(self) -> int:
        """Rows dropped because they overlap an evaluation task."""
        return self.drops[CONTAMINATED]

    def summary(self) -> str:
        """One line for the log."""
        shares = ", ".join(f"{self.kept[source]} from {source}" for source in self.read)
        reasons = "; ".join(f"{count} {reason}" for reason, count in self.drops.most_common())
        return f"{self.num_kept} prompts ({shares}); dropped {self.drops.total()}" + (
            f": {reasons}" if reasons else ""
        )


def magpie_count(section: DataSection) -> int:
    """How many of data.num_prompts the target writes itself."""
    return round(section.num_prompts * section.magpie_share) if "magpie" in section.sources else 0


def load_prompts(
    section: DataSection, blocked_ngrams: AbstractSet[str] = frozenset()
) -> tuple[list[Prompt], PromptReport]:
    """Prompts of all sources except magpie.

    Sources take turns, each in an order shuffled by data.seed, until data.num_prompts less
    `magpie_count` are found; a source that runs out leaves its places to the others.

    Args:
        section: of the recipe. With `regenerate` each prompt ends with its first user turn and
            `turns` holds the later ones; without it, the conversations keep their answers.
        blocked_ngrams: from data.benchmarks.benchmark_ngrams; prompts that share one are dropped.

    Returns:
        The prompts, ids unique and made from the content, and the report.

    Raises:
        UserError: a source cannot be read, has no answers though regenerate is false, or nothing
            is left.
    """
    wanted = section.num_prompts - magpie_count(section)
    sources = [source for source in section.sources if source != "magpie"]
    if not section.regenerate and {"book", "magpie"} & set(section.sources):
        raise UserError(
            "data.regenerate is false, but book and magpie have no answers; set it to true or "
            "remove them from data.sources"
        )
    report = PromptReport()
    if sources == ["book"]:
        book_prompts(wanted, section.seed)  # says so when the book is too small
    queues = {source: _candidates(source, section) for source in sources}
    prompts: dict[str, Prompt] = {}
    while queues and len(prompts) < wanted:
        for source in list(queues):
            if len(prompts) >= wanted:
                break
            prompt = _next_kept(source, queues[source], prompts, blocked_ngrams, report)
            if prompt is None:
                del queues[source]
            else:
                prompts[prompt["id"]] = prompt
    logger.info("%s", report.summary())
    if sources and not prompts:
        raise UserError(f"no prompt is left of data.sources {sources}: {report.summary()}")
    if len(prompts) < wanted:
        logger.warning("data.num_prompts asks for %d, the sources hold %d", wanted, len(prompts))
    return list(prompts.values()), report


def split_heldout(ids: list[str], fraction: float) -> tuple[set[str], set[str]]:
    """Part conversations into (train, heldout) by the hash of their ids.

    The two are exact complements. Heldout has round(n * fraction) ids, but at least one when
    there are two or more, and train always keeps one; a single id is train. The order of `ids`
    does not matter, and new ids hardly move old ones.

    Raises:
        UserError: no ids, ids that occur twice, or a fraction outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise UserError(f"data.heldout_fraction must lie in [0, 1), not {fraction}")
    train = set(ids)
    if not ids or len(train) < len(ids):
        raise UserError(
            f"the held-out split needs distinct ids: {len(ids)} given, {len(train)} distinct"
        )
    num = 0 if fraction == 0 else min(len(ids) - 1, max(1, round(len(ids) * fraction)))
    heldout = set(sorted(ids, key=lambda key: hashlib.sha256(key.encode()).digest())[:num])
    return train - heldout, heldout


def _candidates(source: str, section: DataSection) -> Iterator[Prompt | BadRow]:
    if source == "book":
        yield from book_prompts(book_size(), section.seed)
        return
    rows = read_rows(source)
    order = list(range(len(rows)))
    random.Random(f"{section.seed} {source}").shuffle(order)
    for i in order:
        try:
            yield _to_prompt(rows[i], source, section.regenerate)
        except BadRow as error:
            yield error


def _to_prompt(row: Any, source: str, regenerate: bool) -> Prompt:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("not an object")
    conversation = normalize(row)
    if regenerate:
        return cut_prompt(conversation, source)
    messages, tools = conversation["messages"], conversation.get("tools")
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("no assistant turn")
    prompt = Prompt(id=prompt_id(messages, [], tools), messages=messages, source=source)
    if tools:
        prompt["tools"] = tools
    return prompt


def _next_kept(
    source: str,
    queue: Iterator[Prompt | BadRow],
    taken: dict[str, Prompt],
    blocked: AbstractSet[str],
    report: PromptReport,
) -> Prompt | None:
    """The next prompt of a source that is fit to use; the rows passed over are counted."""
    for prompt in queue:
        report.read[source] += 1
        if isinstance(prompt, BadRow):
            report.drops[prompt.reason] += 1
        elif prompt["id"] in taken:
            report.drops[DUPLICATE] += 1
        elif blocked and not blocked.isdisjoint(prompt_ngrams(prompt)):
            report.drops[CONTAMINATED] += 1
        else:
            report.kept[source] += 1
            return prompt
    return None
