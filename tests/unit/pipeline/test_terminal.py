"""What a command prints: nothing of a caller's or a model's steers the terminal."""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sluice.pipeline.terminal import Console, escaped, escaped_json, print_json, say

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "a\x1b[2J\x1b]0;title\x07b\rc\x9bd\u202ee\u2028f\x00g\x7fh"
STEERING = {chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0x2066)}


def test_a_line_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    said = capsys.readouterr().out
    assert not STEERING & set(said)
    assert said.startswith("a\\x1b[2J")
    assert escaped("é 東京 🙂\n\tb") == "é 東京 🙂\n\tb"


@pytest.mark.parametrize("kind", ["text", "plain", "panel", "table"])
def test_a_console_steers_by_its_own_styles_alone(kind: str) -> None:
    table = Table("name")
    table.add_row(HOSTILE)
    kinds = {"text": Text(HOSTILE, "red"), "plain": HOSTILE, "panel": Panel(HOSTILE), "table": table}
    shown = kinds[kind]
    for colours in (None, "standard"):
        file = io.StringIO()
        Console(file=file, width=200, force_terminal=colours is not None, color_system=colours).print(
            shown, highlight=False, markup=False
        )
        said = file.getvalue()
        assert "\x1b[2J" not in said
        assert "\x1b]0" not in said
        assert not (STEERING - {"\x1b"}) & set(said)
        assert "\\x1b[2J" in said


def test_a_live_view_still_moves_the_cursor() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    with Live(console=console, auto_refresh=False) as live:
        live.update(Panel(HOSTILE), refresh=True)
        live.update(Panel("b"), refresh=True)
    assert "\x1b[1A" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()


def test_json_stays_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": HOSTILE}, 1)
    said = capsys.readouterr().out
    assert not STEERING & set(said)
    assert json.loads(said)["a"] == HOSTILE
    assert escaped_json('"é"') == '"é"'


def test_all_that_is_printed_goes_through_here() -> None:
    """`demo/run.py` moves its own cursor; nothing of anybody else is in those lines."""
    offenders = []
    for folder in ("pipeline", "workers", "producers", "consumers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "terminal.py" and folder == "pipeline":
                continue
            if re.search(r"\b(print|Console)\b", text := path.read_text()) is None:
                continue
            tree = ast.parse(text)
            ours = any(isinstance(n, ast.ImportFrom) and n.module == "sluice.pipeline.terminal" for n in ast.walk(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    name = node.func.id
                    if name == "print" or (name == "Console" and not ours):
                        offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not offenders
