"""The study's learning curves as one SVG: a panel an arm, all with the same axes."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLUMNS = 4
WIDTH, HEIGHT = 220, 170  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 26, 30  # around its axes
INK, GRID, CURVE, NGRAM = "#444", "#ddd", "#1f6feb", "#cf6a17"

Arm = Mapping[str, Any]


def to_svg(study: Mapping[str, Any]) -> str:
    """Top-1 agreement of the first drafted token against minutes of training.

    Line: training rows, means of quarters, each at the end of its quarter. Circles: held-out rows,
    untrained (hollow) and trained (full). Dashed: n-gram lookup on the held-out rows.
    """
    arms = [arm for arm in study["arms"].values() if arm["alpha"]]
    lookup = study["arms"].get("lookup")
    ngram = lookup["top1"][0][0] if lookup else None
    minutes = max((arm["curve"][-1]["minutes"] for arm in arms), default=0) or 1
    rows = -(-len(arms) // COLUMNS)
    wide, high = COLUMNS * WIDTH, max(rows, 1) * HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="sans-serif" font-size="10">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for number, arm in enumerate(arms):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
        lines += [f'<g transform="translate({x} {y})">', *_panel(arm, minutes, ngram), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _panel(arm: Arm, minutes: float, ngram: float | None) -> list[str]:
    def x(value: float) -> float:
        return LEFT + value / minutes * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    points = [(p["minutes"], p["top1"][0]) for p in arm["curve"] if p["top1"] is not None]
    end = arm["curve"][-1]["minutes"]
    lines = [f'<text x="{LEFT}" y="16" font-size="12" fill="{INK}">{escape(arm["name"])}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        lines += [
            _line([(x(0), y(share)), (x(minutes), y(share))], GRID),
            f'<text x="{LEFT - 4}" y="{y(share) + 3:.1f}" text-anchor="end" fill="{INK}">'
            f"{share:g}</text>",
        ]
    for value, anchor in ((0.0, "start"), (minutes, "end")):
        unit = " min" if value else ""
        lines.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="{anchor}" '
            f'fill="{INK}">{value:.3g}{unit}</text>'
        )
    if ngram is not None:
        lines.append(_line([(x(0), y(ngram)), (x(minutes), y(ngram))], NGRAM, "4 3"))
    lines.append(_line([(x(m), y(share)) for m, share in points], CURVE))
    for at, share, fill in (
        (0.0, arm["top1_untrained"][0][0], "white"),
        (end, arm["top1"][0][0], CURVE),
    ):
        lines.append(
            f'<circle cx="{x(at):.1f}" cy="{y(share):.1f}" r="3.5" stroke="{CURVE}" fill="{fill}"/>'
        )
    return lines


def _line(points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}"{dashed}/>'
