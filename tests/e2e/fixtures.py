"""Fixtures that tests/e2e and tests/chaos share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import BrokerConfig
from tests.e2e.stack import Row, Stack
from tests.tiny_models import save_tiny_model

MakeStack = Callable[..., Stack]
_WORDS = ("seven", "nine", "zero", "eight")


def detection_rows(count: int) -> list[Row]:
    """Prompts with one or two objects each."""
    rows: list[Row] = []
    for at in range(count):
        truth = [
            {"desc": _WORDS[(at + i) % 4], "bbox_2d": [at % 400, 10 + i, 500 + at % 400, 900]}
            for i in range(1 + at % 2)
        ]
        rows.append({"id": f"row-{at}", "messages": _asks(f"find {at}"), "truth": truth})
    return rows


def text_rows(count: int) -> list[Row]:
    """Prompts with a short answer."""
    return [{"id": at, "messages": _asks(f"say {at}"), "truth": f"the {at}"} for at in range(count)]


def _asks(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model with random weights."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True, groups=1)


@pytest.fixture
def make_stack(tmp_path: Path, broker_config: BrokerConfig, model_dir: Path) -> Iterator[MakeStack]:
    """Makes runs on the session's broker; `embedded=True` leaves the broker to the command under test."""
    made: list[Stack] = []

    def make(rows: list[Row], task: str = "detection", *, embedded: bool = False, **sections: Any) -> Stack:
        directory = tmp_path / f"stack-{len(made)}"
        directory.mkdir()
        stack = Stack(directory, None if embedded else broker_config.url, model_dir, rows, task)
        if embedded:
            stack.configure(broker={"embedded_dir": str(directory / "broker")})
        made.append(stack.configure(**sections))
        return stack

    yield make
    for stack in made:
        stack.close()
