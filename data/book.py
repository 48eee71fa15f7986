"""The prompt book: thousands of distinct training prompts composed from this project's own text.

A group crosses templates with fills; a category holds groups. Prompts are taken category by
category in turn, and inside a group each fill is used once before any is used again, so that a
small book already touches most topics. About one prompt in four has a follow-up user turn.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, zip_longest

from data import book_topics as topics
from data.book_code import code_tasks
from data.book_templates import (
    FOLLOW_UPS,
    MATH,
    NOTE_TASKS,
    NOTES,
    REASONING,
    TEMPLATES,
)
from data.files import stable_hash
from data.prompt_rows import Prompt, make_prompt
from recipes.errors import UserError

Fill = dict[str, str]
Group = tuple[list[str], list[Fill]]  # templates, fills

_NUM_FILLS = 48  # number sets for the word problems, puzzles and notes
_FOLLOW_UP_EVERY = 4


def book_size() -> int:
    """How many distinct prompts the book holds."""
    return len(_ordered(0))


def book_prompts(num: int, seed: int) -> list[Prompt]:
    """The first `num` prompts of the order that `seed` gives.

    Returns:
        prompts of one user message, in equal shares of the categories as long as these
        last; `turns` holds follow-up user messages, `category` the category.

    Raises:
        UserError: more prompts are asked than the book holds.
    """
    ordered = _ordered(seed)
    if num > len(ordered):
        raise UserError(
            f"the prompt book holds {len(ordered)} prompts, {num} were asked; lower "
            "data.num_prompts or add another source (magpie, a file, hub:ORG/NAME)"
        )
    return [_prompt(category, text) for category, text in ordered[:num]]


def _prompt(category: str, text: str) -> Prompt:
    which, rest = divmod(int(stable_hash(text), 16), _FOLLOW_UP_EVERY)
    choices = FOLLOW_UPS[category]
    turns = [choices[which % len(choices)]] if rest == 0 else []
    return make_prompt("book", text, turns, category)


@lru_cache(maxsize=4)
def _ordered(seed: int) -> tuple[tuple[str, str], ...]:
    """All (category, prompt) pairs of the book, categories taking turns."""
    rng = random.Random(seed)
    columns = []
    for category, groups in _groups().items():
        texts = _take_turns([list(_spread(group, rng)) for group in groups])
        columns.append([(category, text) for text in dict.fromkeys(texts)])
    rng.shuffle(columns)
    return tuple({text: (category, text) for category, text in _take_turns(columns)}.values())


def _spread(group: Group, rng: random.Random) -> Iterator[str]:
    """Each (template, fill) pair once; every fill comes up before one comes up again."""
    templates, fills = list(group[0]), list(group[1])
    rng.shuffle(templates)
    rng.shuffle(fills)
    for lap in range(len(templates)):
        for i, fill in enumerate(fills):
            text = templates[(i + lap) % len(templates)].format(**fill)
            yield text[0].upper() + text[1:]


def _take_turns(columns: list[list]) -> list:
    """[[1, 2, 3], [4]] -> [1, 4, 2, 3]."""
    gap = object()
    return [x for x in chain.from_iterable(zip_longest(*columns, fillvalue=gap)) if x is not gap]


def _groups() -> dict[str, list[Group]]:
    """Category -> its groups; the same for each seed."""
    code = [
        {"signature": t.signature, "call": t.call, "value": t.value, "description": t.description}
        for t in code_tasks()
    ]
    numbers = [_number_fill(random.Random(i)) for i in range(_NUM_FILLS)]
    note_prompts = [f"{task}\n\n{note}" for note in NOTES for task in NOTE_TASKS]
    return {
        "explanation": [(TEMPLATES["explain"], _topic_fills(topics.EXPLAIN))],
        "writing": [
            (TEMPLATES["story"], _topic_fills(topics.STORIES)),
            (TEMPLATES["email"], _topic_fills(topics.EMAILS)),
            (TEMPLATES["article"], _topic_fills(topics.ARTICLES)),
            (TEMPLATES["speech"], _topic_fills(topics.OCCASIONS)),
            (TEMPLATES["poem"], _topic_fills(topics.POEM_SUBJECTS)),
        ],
        "code": [
            (TEMPLATES["function"], code),
            (TEMPLATES["completion"], code),
            (TEMPLATES["concept"], _topic_fills(topics.CODE_CONCEPTS)),
            (TEMPLATES["program"], _topic_fills(topics.PROGRAMS)),
            (TEMPLATES["query"], _topic_fills(topics.QUERIES)),
        ],
        "math": [(MATH, numbers)],
        "reasoning": [(REASONING, numbers)],
        "extraction": [(note_prompts, numbers[:16])],
        "rewriting": [(TEMPLATES["rewrite"], _topic_fills(topics.SENTENCES))],
        "roleplay": [(TEMPLATES["roleplay"], _topic_fills(topics.CHARACTERS))],
        "stem": [(TEMPLATES["stem"], _topic_fills(topics.STEM))],
        "humanities": [(TEMPLATES["humanities"], _topic_fills(topics.HUMANITIES))],
        "lists": [(TEMPLATES["list"], _topic_fills(topics.LIST_TOPICS))],
        "advice": [(TEMPLATES["advice"], _topic_fills(topics.ADVICE))],
    }


def _topic_fills(words: list[str]) -> list[Fill]:
    return [{"topic": word} for word in words]


def _number_fill(rng: random.Random) -> Fill:
    """Names and numbers for one set of word problems; divisions come out even."""
    names = rng.sample(topics.NAMES, 4)
    things = rng.sample(topics.ITEMS, 3)
    places = rng.sample(topics.PLACES, 2)
    a, b, c = rng.sample(range(3, 13), 3)
    big = rng.randrange(20, 95)
    percent = rng.choice([10, 20, 25, 40, 50, 75])
    low, high = sorted(rng.sample(range(14, 60), 2))
    values = {
        "a": a,
        "b": b,
        "c": c,
        "ab": a * b,
        "bc": b * c,
        "abc": a * b * c,
        "abc_sum": a * b + c,
        "big": big,
        "bigger": big + a * c,
        "percent": percent,
        "price": 20 * rng.randrange(2, 30),
        "low": low,
        "high": high,
        "hour": rng.randrange(7, 12),
        "minute": rng.choice(["05", "10", "20", "35", "40", "55"]),
        "day": rng.choice(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]),
        "month": rng.choice(["March", "April", "May", "June", "September", "October"]),
        "date": rng.randrange(1, 29),
        "name": names[0],
        "other": names[1],
        "third": names[2],
        "fourth": names[3],
        "item": things[0],
        "item2": things[1],
        "item3": things[2],
        "place": places[0],
        "place2": places[1],
    }
    return {key: str(value) for key, value in values.items()}
