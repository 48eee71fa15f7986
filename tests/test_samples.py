"""The page that shows what was guessed while a drafter was validated."""

import re
from pathlib import Path

import pytest

from data.target import Target
from eval.rounds import Decoded, Round
from recipes.schema import TargetSection
from train.samples import write_samples


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TargetSection(model="random:qwen3-tiny", dtype="float32", device="cpu"))


def test_tokens_are_coloured_by_where_they_came_from(target: Target, tmp_path: Path) -> None:
    a, b, c, d, lt, asked = (target.tokenizer.encode(x)[0] for x in "abcd<?")
    answer = Decoded(
        ids=[a, b, lt, d],
        finish="length",
        rounds=[
            Round(proposed=2, accepted=1, emitted=2, drafted_ids=[b, c], p=[1.0, 0.0], q=[1.0, 1.0])
        ],
    )
    answer.rounds.append(
        Round(proposed=1, accepted=0, emitted=1, drafted_ids=[c], p=[0.0], q=[1.0])
    )
    path = tmp_path / "samples" / "step-3.html"
    write_samples(path, "toy: step-3", target, [[asked]], [answer])
    page = path.read_text()
    body = page[page.index("<h2>") :]
    spans = re.findall(r'<span class="(\w+)">(.*?)</span>', body)
    assert spans == [
        ("target", "a"),  # of the prefill
        ("accepted", "b"),
        ("refused", "c"),
        ("target", "&lt;"),
        ("refused", "c"),
        ("target", "d"),
    ]
    assert "<h2>1.50 tokens a round</h2>" in body  # 3 tokens in 2 rounds
    assert '<pre class="prompt">?</pre>' in body
    assert "<script" not in page and "http" not in page


def test_only_a_few_answers_are_shown(target: Target, tmp_path: Path) -> None:
    answers = [Decoded(ids=[97]) for _ in range(5)] + [Decoded()]
    write_samples(tmp_path / "x.html", "t", target, [[63]] * 6, answers)
    assert (tmp_path / "x.html").read_text().count("<h2>") == 3
