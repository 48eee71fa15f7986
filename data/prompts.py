"""The prompts of a recipe: from the book, files and the hub, in fair shares, none of them twice.

Every row read is either kept or counted under the reason for which it was dropped.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data.book import book_prompts, book_size
from data.conversations import BadRow, normalize
from data.prompt_rows import Prompt, cut_prompt, ngrams, prompt_id, prompt_ngrams
from data.sources import shuffled_rows
from recipes.data_section import DataSection
from recipes.errors import UserError

__all__ = ["Prompt", "PromptReport", "magpie_count", "ngrams", "split_heldout", "stream_prompts"]

CONTAMINATED = "shares an 8-gram with an evaluation task"
DUPLICATE = "same content as an earlier row"
NUM_SAMPLES = 3  # rows a reason
SAMPLE_CHARS = 300
MIN_READ = 50  # rows before the share of bad ones is judged

logger = logging.getLogger("draftsmith")


@dataclass
class PromptReport:
    """What became of the rows: num_read == num_kept + the sum of `drops`."""

    read: Counter[str] = field(default_factory=Counter)  # source -> rows looked at
    kept: Counter[str] = field(default_factory=Counter)  # source -> prompts taken
    drops: Counter[str] = field(default_factory=Counter)  # reason -> rows dropped
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # reason -> some rows

    def drop(self, reason: str, where: str, row: Any = None) -> None:
        """Count a row under its reason; the first few, in shuffled order, are kept as samples."""
        self.drops[reason] += 1
        kept = self.samples.setdefault(reason, [])
        if len(kept) < NUM_SAMPLES:
            text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
            kept.append({"where": where, "row": text[:SAMPLE_CHARS]})

    def check_bad_share(self, largest: float) -> None:
        """Stop where too many rows cannot be used; few rows say little, so MIN_READ are waited for.

        Raises:
            UserError: more than `largest` (data.max_bad_share) of the rows read, with the reasons.
        """
        bad = {r: n for r, n in self.drops.most_common() if r not in (CONTAMINATED, DUPLICATE)}
        share = sum(bad.values()) / max(self.num_read, 1)
        if self.num_read < MIN_READ or share <= largest:
            return
        reasons = "; ".join(
            f"{count} {reason} (e.g. {self.samples[reason][0]['where']})"
            for reason, count in list(bad.items())[:5]
        )
        raise UserError(
            f"{sum(bad.values())} of {self.num_read} rows ({share:.0%}) cannot be used, more than "
            f"data.max_bad_share {largest:.0%}: {reasons}; mend the source, name its columns in "
            "data.columns, or raise the limit"
        )

    def as_json(self) -> dict[str, Any]:
        """Form of RUN/data/prompts_report.json."""
        return {
            "read": dict(self.read),
            "kept": dict(self.kept),
            "drops": dict(self.drops.most_common()),
            "samples": self.samples,
        }

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


def stream_prompts(
    section: DataSection, blocked_ngrams: AbstractSet[str], report: PromptReport
) -> Iterator[Prompt]:
    """Prompts of all sources except magpie, one after another; only their ids are held.

    Sources take turns, each in an order shuffled by data.seed, until data.num_prompts less
    `magpie_count` are found; a source that runs out leaves its places to the others. Ids are unique
    and made from the content.

    Args:
        section: of the recipe. With `regenerate` each prompt ends with its first user turn and
            `turns` holds the later ones; without it, the conversations keep their answers.
        blocked_ngrams: from data.benchmarks.benchmark_ngrams; prompts that share one are dropped.
        report: counts are added here as rows are read.

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
    if sources == ["book"]:
        book_prompts(wanted, section.seed)  # says so when the book is too small
    queues = {source: _candidates(source, section) for source in sources}
    taken: set[str] = set()
    while queues and len(taken) < wanted:
        for source in list(queues):
            if len(taken) >= wanted:
                break
            prompt = _next_kept(
                source, queues[source], taken, blocked_ngrams, report, section.max_bad_share
            )
            if prompt is None:
                del queues[source]
            else:
                taken.add(prompt["id"])
                yield prompt
    logger.info("%s", report.summary())
    report.check_bad_share(section.max_bad_share)
    if sources and not taken:
        raise UserError(f"no prompt is left of data.sources {sources}: {report.summary()}")
    if len(taken) < wanted:
        logger.warning("data.num_prompts asks for %d, the sources hold %d", wanted, len(taken))


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


class _Dropped(NamedTuple):
    """A row that is no prompt: why, and the raw row."""

    reason: str
    row: Any


def _candidates(source: str, section: DataSection) -> Iterator[tuple[str, Prompt | _Dropped]]:
    """Rows of a source in shuffled order, with where each stands."""
    if source == "book":
        for number, prompt in enumerate(book_prompts(book_size(), section.seed), start=1):
            yield f"book {number}", prompt
        return
    for number, row in shuffled_rows(source, section.seed, section.streaming):
        where = f"{source} row {number}"
        try:
            yield where, _to_prompt(row, source, section)
        except BadRow as error:
            yield where, _Dropped(error.reason, row)


def _to_prompt(row: Any, source: str, section: DataSection) -> Prompt:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("not an object")
    conversation = normalize(row, section.columns)
    if "ids" in conversation:
        if section.regenerate:
            raise BadRow("token ids cannot be answered again (data.regenerate: true)")
        ids, mask = conversation["ids"], conversation["mask"]
        key = prompt_id([{"ids": ids, "mask": mask}], [])
        return Prompt(id=key, messages=[], source=source, ids=ids, mask=mask)
    if section.regenerate:
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
    queue: Iterator[tuple[str, Prompt | _Dropped]],
    taken: AbstractSet[str],
    blocked: AbstractSet[str],
    report: PromptReport,
    max_bad_share: float,
) -> Prompt | None:
    """The next prompt of a source that is fit to use; the rows passed over are counted."""
    for where, prompt in queue:
        report.read[source] += 1
        if isinstance(prompt, _Dropped):
            row = None if isinstance(prompt.row, BadRow) else prompt.row
            report.drop(prompt.reason, where, row)
            if report.num_read % 1000 == 0:
                report.check_bad_share(max_bad_share)
        elif prompt["id"] in taken:
            report.drop(DUPLICATE, where, prompt["messages"])
        elif blocked and not blocked.isdisjoint(prompt_ngrams(prompt)):
            report.drop(CONTAMINATED, where, prompt["messages"])
        else:
            report.kept[source] += 1
            return prompt
    return None
