"""`sluice bench NAME --json`."""

from __future__ import annotations

from cyclopts import App

app = App(help="Measure; with --json the last line is one JSON object.")
