"""What a drafter guessed while it was validated, as a page: accepted, refused, corrected tokens."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from data.files import write_text
from data.prompt_rows import make_prompt
from data.target import Target
from eval.arms import TurnAnswer
from eval.round_texts import NUM_SAMPLES, Sample, make_samples
from eval.rounds import Decoded

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.7 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }}
pre {{ white-space: pre-wrap; font: inherit }}
.prompt {{ opacity: .7 }}
.accepted {{ background: #2e9e5b55 }}
.refused {{ background: #d33a3a44; text-decoration: line-through }}
.target {{ border-bottom: 2px solid #4a7ddb }}
</style>
<h1>{title}</h1>
<p><span class="accepted">drafted and accepted</span>, <span class="refused">drafted and
refused</span>, <span class="target">the target's own</span></p>
{answers}
</html>
"""


def write_samples(
    path: Path,
    title: str,
    target: Target,
    prompts: Sequence[list[int]],
    answers: Sequence[Decoded],
) -> None:
    """Write the first few answers, each with the rounds that made it.

    Args:
        prompts: token ids, one list an answer.
    """
    turns = [
        TurnAnswer(i, 0, prompt, answer, 0.0)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if answer.ids
    ]
    shown = [make_prompt("validation", str(target.tokenizer.decode(p))) for p in prompts]
    samples = make_samples(target, shown, turns[:NUM_SAMPLES])
    body = "\n".join(_answer(sample) for sample in samples)
    write_text(path, PAGE.format(title=escape(title), answers=body))


def _answer(sample: Sample) -> str:
    pieces = []
    for round_ in sample["rounds"]:
        kinds = (("accepted", round_["accepted"]), ("refused", round_["rejected"]))
        pieces += [_span(kind, text) for kind, texts in kinds for text in texts]
        if round_["next"]:
            pieces.append(_span("target", round_["next"]))
    num_rounds = max(len(sample["rounds"]) - 1, 1)
    num_tokens = sum(len(r["accepted"]) + bool(r["next"]) for r in sample["rounds"][1:])
    return (
        f'<h2>{num_tokens / num_rounds:.2f} tokens a round</h2>\n<pre class="prompt">'
        f"{escape(sample['prompt'])}</pre>\n<pre>{''.join(pieces)}</pre>"
    )


def _span(kind: str, text: str) -> str:
    return f'<span class="{kind}">{escape(text)}</span>'
