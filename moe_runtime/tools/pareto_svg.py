"""A Pareto plot of simulated settings as an SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from moe_runtime.placement.simulate import Outcome, pareto

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 90, 260, 50, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
"""Of Okabe and Ito: told apart by colour-blind eyes too."""
MOST_TICKS = 7
NAME = 60
"""Room for the name of the leftmost setting."""


def pareto_svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Step time (across, shorter is better) against tokens per second and rank (up); the best settings are joined and named."""
    xs = [o.step_us.mean for o in outcomes]
    ys = [o.tokens_per_s_per_rank for o in outcomes]
    best = pareto(outcomes)
    to_x, to_y = _scale(xs, LEFT + NAME, WIDTH - RIGHT), _scale(ys, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
        *_axes(to_x, to_y),
    ]
    front = sorted((x, y) for x, y, good in zip(xs, ys, best, strict=True) if good)
    line = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#666666" stroke-dasharray="4 3"/>')
    names = list(dict.fromkeys((o.setting.algorithm, o.setting.split) for o in outcomes))
    for outcome, x, y, good in zip(outcomes, xs, ys, best, strict=True):
        colour = COLOURS[names.index((outcome.setting.algorithm, outcome.setting.split)) % len(COLOURS)]
        parts.append(
            f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="5" fill="{colour if good else "#ffffff"}" stroke="{colour}"'
            f' stroke-width="2"><title>{escape(outcome.setting.name)}: {x:.1f} us, {y:.0f} tokens/s/rank</title></circle>'
        )
        if good:
            label = f"ep {outcome.setting.cluster.num_ranks} +{outcome.setting.redundant}"
            # Up and to the left of a best setting there is no other, and no line.
            parts.append(
                f'<text x="{to_x(x) - 8:.1f}" y="{to_y(y) - 4:.1f}" font-size="11" text-anchor="end">{label}</text>'
            )
    for i, (algorithm, split) in enumerate(names):
        top = TOP + 20 * i
        parts.append(
            f'<circle cx="{WIDTH - RIGHT + 30}" cy="{top}" r="5" fill="{COLOURS[i % len(COLOURS)]}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT + 42}" y="{top + 4}">{escape(algorithm)}, {escape(split)} split</text>'
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT + 24}" y="{TOP + 20 * len(names) + 10}">filled: no other is better in both</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """From values to places along an axis."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high, self.first, self.last = low, high, first, last

    def __call__(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Round numbers: 1, 2 or 5 times a power of ten apart."""
        least = (self.high - self.low) / MOST_TICKS
        power = 10 ** math.floor(math.log10(least))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= least)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _scale(values: Sequence[float], first: float, last: float) -> _Scale:
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return _Scale(low - margin, high + margin, first, last)


def _axes(to_x: _Scale, to_y: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#000000"/>']
    for value in to_x.ticks():
        x = to_x(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#000000"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.10g}</text>')
    for value in to_y.ticks():
        y = to_y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}h-5" stroke="#000000"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
    parts.append(
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 15}" text-anchor="middle">MoE time of a step, microseconds</text>'
    )
    parts.append(f'<text x="{LEFT - 75}" y="{TOP - 12}">tokens per second and rank</text>')
    return parts
