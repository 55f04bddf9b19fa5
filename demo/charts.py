"""Line charts as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 36
_COLOURS = ("#1f6feb", "#bf6b00", "#2da44e")


@dataclass(frozen=True)
class Line:
    """Points (x, y) under one name."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str, x_name: str, lines: Sequence[Line], *, top: float | None = None, mark: float | None = None
) -> str:
    """An SVG element; `mark` draws a vertical line (the kill) at an x."""
    xs = [x for line in lines for x, _ in line.points] or [0.0]
    ys = [y for line in lines for _, y in line.points] or [0.0]
    right, high = max(max(xs), 1e-9), top if top is not None else max(max(ys) * 1.05, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x / right) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - min(y / high, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>')
    for step in range(5):
        parts += _grid(place, right * step / 4, high * step / 4, integer_x=right > 4, top=high)
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" class="axis" text-anchor="end">{escape(x_name)}</text>'
    )
    if mark is not None:
        x, _ = place(mark, 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{_TOP + 10}" class="axis">SIGKILL to a worker</text>')
    for index, line in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{_LEFT + 200 * index}" y="32" class="axis" fill="{colour}">● {escape(line.name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _grid(place, x: float, y: float, *, integer_x: bool, top: float) -> list[str]:
    across, _ = place(x, 0)
    _, down = place(0, y)
    x_text = f"{x:.0f}" if integer_x else f"{x:.1f}"
    y_text = f"{y:.2f}" if top <= 2 else f"{y:,.0f}"
    return [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}" class="grid"/>',
        f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" class="axis" text-anchor="end">{y_text}</text>',
        f'<text x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 16}" class="axis" text-anchor="middle">{x_text}</text>',
    ]
