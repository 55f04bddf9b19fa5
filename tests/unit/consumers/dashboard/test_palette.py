"""The colours of the style sheet can be read: contrast by WCAG 2, in light and dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.consumers.dashboard.render import STATIC

SHEET = (STATIC / "sluice.css").read_text()
LIGHT, DARK = re.findall(r":root \{(.*?)\}", SHEET, re.S)[:2]
GROUNDS = ("ground", "card", "sunken")
TEXTS = ("text", "muted", "link", "bad")
SIGNS = [(name, f"{name}-ground") for name in ("good", "warn", "bad", "calm")]
NOTES = [("text", f"{name}-ground") for name in ("good", "warn", "bad")]
MUTED = [("muted", f"{name}-ground") for name in ("good", "warn", "bad")]
PAIRS = [*((text, ground) for text in TEXTS for ground in GROUNDS), *SIGNS, *NOTES, *MUTED]


def palette(block: str) -> dict[str, str]:
    return {
        **dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", LIGHT)),
        **dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)),
    }


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("block", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_can_be_read_on_its_ground(block: str, text: str, ground: str) -> None:
    colours = palette(block)
    assert contrast(colours[text], colours[ground]) >= 4.5


@pytest.mark.parametrize("block", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("line", ["focus", "edge"])
def test_edges_of_controls_and_the_focus_can_be_seen(block: str, line: str) -> None:
    colours = palette(block)
    assert all(contrast(colours[line], colours[ground]) >= 3 for ground in GROUNDS)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """The style sheet and our scripts name no other host; what others wrote has its licence beside it."""
    assert "url(" not in SHEET
    assert "@import" not in SHEET
    ours = Path(STATIC / "live.js").read_text()
    assert "http" not in ours
    notice = (STATIC / "NOTICE").read_text()
    for file in STATIC.glob("*.min.js"):
        assert file.name in notice
    assert "htmx 2.0.11" in notice
    assert 'version:"2.0.11"' in (STATIC / "htmx.min.js").read_text()
