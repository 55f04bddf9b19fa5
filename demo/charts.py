"""Still pictures of charts as inline SVG, for a page without scripts and before its scripts run.

Colours are classes of the dashboard's style sheet: a strict page has no style attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

from sluice.consumers.history.curves import Chart

_WIDTH, _HEIGHT = 380, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 34
_COLOURS = 8


class Mark(msgspec.Struct, frozen=True):
    """An event to draw on every curve; `at` is Unix time."""

    name: str
    step: float
    at: float


class _Axes(msgspec.Struct, frozen=True):
    """Data ranges left..right and bottom..top."""

    left: float
    right: float
    bottom: float
    top: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Data to drawing coordinates."""
        across = (x - self.left) / (self.right - self.left)
        up = min(max((y - self.bottom) / (self.top - self.bottom), 0.0), 1.0)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def draw_heights(self) -> list[str]:
        """Horizontal grid lines and their numbers."""
        parts: list[str] = []
        for y in _ticks(self.bottom, self.top):
            _, down = self.place(self.left, y)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}" class="grid"/>')
            parts.append(_text(_LEFT - 5, down + 4, f"{y:,g}", "end"))
        return parts

    def draw(self) -> list[str]:
        """Grid lines and numbers, both ways."""
        parts = self.draw_heights()
        for x in _ticks(self.left, self.right):
            parts.append(_text(self.place(x, self.bottom)[0], _HEIGHT - _BOTTOM + 14, f"{x:,g}", "middle"))
        return parts


def still(chart: Chart, marks: Sequence[Mark] = ()) -> str:
    """The lines of a chart over steps, as an SVG element; `marks` are vertical lines."""
    xs = [x for line in chart.lines for x in line.steps] or [0.0]
    ys = [y for line in chart.lines for y in line.values] or [0.0]
    left, bottom = min(0.0, *xs), min(0.0, *ys)
    top = 1.0 if chart.unit == "share" else max(ys) + 0.05 * (max(ys) - bottom)
    axes = _Axes(left, max(max(xs), left + 1e-9), bottom, max(top, bottom + 1e-9))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">', *axes.draw()]
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 4, chart.x, "end"))
    for mark in marks:
        x, _ = axes.place(min(max(mark.step, axes.left), axes.right), 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark"/>')
        parts.append(_text(x + 4, _TOP + 9, mark.name))
    for line in chart.lines:
        points = (axes.place(x, y) for x, y in zip(line.steps, line.values, strict=True))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" class="c{line.colour % _COLOURS}"/>')
    return "".join([*parts, "</svg>"])


def bar_chart(x_name: str, bars: Sequence[tuple[str, float]]) -> str:
    """An SVG element; one bar per (name, value >= 0), with its value above it."""
    top = max([value for _, value in bars], default=0.0) * 1.12 or 1.0
    axes = _Axes(0.0, float(max(len(bars), 1)), 0.0, top)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">', *axes.draw_heights()]
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 4, x_name, "end"))
    for index, (name, value) in enumerate(bars):
        left, up = axes.place(index + 0.2, value)
        right, down = axes.place(index + 0.8, 0)
        middle = (left + right) / 2
        size = f'width="{right - left:.1f}" height="{down - up:.1f}"'
        parts.append(f'<rect x="{left:.1f}" y="{up:.1f}" {size} class="c0"/>')
        parts.append(_text(middle, up - 3, f"{value:,g}", "middle"))
        parts.append(_text(middle, down + 14, name, "middle"))
    return "".join([*parts, "</svg>"])


def tick(span: float, count: int = 4) -> float:
    """The smallest round step (1, 2 or 5 times a power of ten) that needs at most `count` steps for `span`."""
    raw = span / count
    base = 10 ** math.floor(math.log10(raw))
    return next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw * (1 - 1e-9))


def _ticks(bottom: float, top: float) -> list[float]:
    """Multiples of a round step between the two."""
    step = tick(top - bottom)
    return [round(step * index, 10) for index in range(math.ceil(bottom / step), int(top / step + 1e-9) + 1)]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="axis" text-anchor="{anchor}">{escape(words)}</text>'
