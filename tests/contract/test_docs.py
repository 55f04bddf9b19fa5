"""The examples of the documents, word for word, over a tiny real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python runnable\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)


def run_block(block: str, model_dir: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"model_dir": str(model_dir)}
    exec(compile(block, "docs", "exec"), names)
    return names


def test_the_guide_to_plugins(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [result] = run_block(blocks("plugins.md")[0], model_dir)["results"]
    assert result.finish_reason in ("stop", "length")
    assert result.text in capsys.readouterr().out
