"""Where an answer ends: an end token, a stop string or the cap, whichever comes first."""

from data.target import Target
from eval.rounds import Decoded, DecodeSettings


def cut(row: Decoded, new: list[int], settings: DecodeSettings, target: Target) -> list[int]:
    """The part of `new` that belongs to the answer; sets `row.finish`, adds nothing to it.

    The token that ends the answer (an end token, or one that completes a stop string) belongs to
    it. A stop goes before the cap: at the last token that the cap allows, it is a stop.
    """
    for i, token in enumerate(new):
        if len(row.ids) + i + 1 > settings.max_new_tokens:
            row.finish = "length"
            return new[:i]
        if token in target.eos_ids:
            row.finish = "stop"
            return new[: i + 1]
        if settings.stop:
            text = target.tokenizer.decode(row.ids + new[: i + 1])
            if any(s in text for s in settings.stop):
                row.finish = "stop"
                return new[: i + 1]
    if len(row.ids) + len(new) == settings.max_new_tokens:
        row.finish = "length"
    return new
