"""The colours of tokens and boxes can be read, in light and dark; every class has its rule."""

from __future__ import annotations

import re

import pytest

from sluice.consumers.dashboard.render import STATIC
from sluice.consumers.dashboard.tokens import COLOURINGS, HUES, KINDS, PROXIMAL, SURPRISE
from tests.unit.consumers.dashboard.test_palette import DARK, LIGHT, contrast, palette

SHEET = (STATIC / "sequences.css").read_text()
OWN = re.findall(r":root \{(.*?)\}", SHEET, re.S)
THEMES = [pytest.param(0, LIGHT, id="light"), pytest.param(1, DARK, id="dark")]


def mixed(colour: str, ground: str, share: float) -> str:
    """As `color-mix` with transparent, over the ground."""
    pairs = ((int(colour[at : at + 2], 16), int(ground[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(over * share + under * (1 - share)):02x}" for over, under in pairs)


@pytest.mark.parametrize(("theme", "block"), THEMES)
def test_text_can_be_read_on_every_hue(theme: int, block: str) -> None:
    text = palette(block)["text"]
    hues = dict(re.findall(r"--(hue\d): (#[0-9a-f]{6})", OWN[theme]))
    assert len(hues) == HUES
    for name, ground in hues.items():
        assert contrast(text, ground) >= 4.5, name


@pytest.mark.parametrize(("theme", "block"), THEMES)
def test_text_can_be_read_on_every_logprob(theme: int, block: str) -> None:
    colours = palette(block)
    shares = [int(share) / 100 for share in re.findall(r"var\(--bad\) (\d+)%", SHEET)]
    assert len(shares) == len(SURPRISE)
    for share in shares:
        assert contrast(colours["text"], mixed(colours["bad"], colours["card"], share)) >= 4.5, share


@pytest.mark.parametrize(("theme", "block"), THEMES)
def test_boxes_can_be_seen_on_the_plain_field(theme: int, block: str) -> None:
    field = palette(block)["sunken"]
    for name, colour in re.findall(r"--(truth|predicted|false|missed): (#[0-9a-f]{6})", OWN[theme]):
        assert contrast(colour, field) >= 3, name


def test_every_colouring_has_its_rules_and_its_key() -> None:
    names = [*(f"v{rank}" for rank in range(HUES)), *(f"l{rank}" for rank in range(1, len(SURPRISE) + 1))]
    names += [*(f"k-{kind}" for kind in KINDS), *(f"p-{state}" for state in PROXIMAL)]
    for name in names:
        assert f":checked) .{name} {{" in SHEET, name
    for name in COLOURINGS:
        assert f"#by-{name}:checked) .for-{name}" in SHEET
