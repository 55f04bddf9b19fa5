"""Line and bar charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 44, 36
_COLOURS = ("#1f6feb", "#bf6b00", "#2da44e")


@dataclass(frozen=True)
class Line:
    """Points (x, y) under one name."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Axes:
    """Data ranges 0..right and 0..top, with rounded steps."""

    right: float
    top: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Data to drawing coordinates."""
        across = _LEFT + x / self.right * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - min(y / self.top, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    def draw_heights(self) -> list[str]:
        """Horizontal grid lines and their numbers."""
        parts: list[str] = []
        for y in _ticks(self.top):
            _, down = self.place(0, y)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}" class="grid"/>')
            parts.append(_text(_LEFT - 6, down + 4, f"{y:,g}", 'text-anchor="end"'))
        return parts

    def draw(self) -> list[str]:
        """Grid lines and their numbers, both ways."""
        parts = self.draw_heights()
        for x in _ticks(self.right):
            parts.append(_text(self.place(x, 0)[0], _HEIGHT - _BOTTOM + 16, f"{x:,g}", 'text-anchor="middle"'))
        return parts


def line_chart(
    title: str, x_name: str, lines: Sequence[Line], *, top: float | None = None, mark: float | None = None
) -> str:
    """An SVG element; `mark` draws a vertical line (the kill) at an x."""
    points = [point for line in lines for point in line.points] or [(1.0, 1.0)]
    axes = _Axes(max(max(x for x, _ in points), 1e-9), top or max(max(y for _, y in points) * 1.05, 1e-9))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>')
    parts += axes.draw()
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 4, x_name, 'text-anchor="end"'))
    if mark is not None:
        x, _ = axes.place(mark, 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark"/>')
        parts.append(_text(x + 4, _TOP + 10, "SIGKILL to a worker"))
    for index, line in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (axes.place(*point) for point in line.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_LEFT + 230 * index, 34, f"● {line.name}", f'style="fill:{colour}"'))
    return "".join([*parts, "</svg>"])


def bar_chart(title: str, x_name: str, y_name: str, bars: Sequence[tuple[str, float]]) -> str:
    """An SVG element; one bar per (name, value >= 0), with its value above it."""
    axes = _Axes(float(max(len(bars), 1)), max([value for _, value in bars], default=0.0) * 1.1 or 1.0)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>')
    parts += axes.draw_heights()
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 4, x_name, 'text-anchor="end"'))
    parts.append(_text(_LEFT, 34, f"● {y_name}", f'style="fill:{_COLOURS[0]}"'))
    for index, (name, value) in enumerate(bars):
        left, top = axes.place(index + 0.2, value)
        right, bottom = axes.place(index + 0.8, 0)
        middle = (left + right) / 2
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
            f'fill="{_COLOURS[0]}"/>'
        )
        parts.append(_text(middle, top - 4, f"{value:,g}", 'text-anchor="middle"'))
        parts.append(_text(middle, bottom + 16, name, 'text-anchor="middle"'))
    return "".join([*parts, "</svg>"])


def _ticks(top: float) -> list[float]:
    """About five round values from 0 to `top`."""
    raw = top / 5
    base = 10 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw)
    return [round(step * index, 10) for index in range(int(top / step + 1e-9) + 1)]


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="axis" {attributes}>{escape(words)}</text>'
