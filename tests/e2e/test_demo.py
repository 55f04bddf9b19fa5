"""`make demo`, with fewer prompts: real PNG files, the warm start, a kill, and what the sequences were worth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import Process, wait_gone

_PROMPTS = 1280
_DEADLINE_S = 900.0  # the warm start included; an idle machine needs a tenth


@pytest.mark.timeout(1000)
def test_the_demo_learns_from_pictures_and_loses_nothing(make_stack: MakeStack) -> None:
    stack = make_stack([], embedded=True)
    directory = stack.directory / "demo"
    demo = stack.sluice("demo", "--prompts", str(_PROMPTS), "--dir", str(directory), "--json")
    assert demo.wait(_DEADLINE_S) == 0, demo.tail()
    wait_gone(stack.mark)
    found = answer(demo)
    assert (found["enqueued"], found["trained"]) == (_PROMPTS, _PROMPTS)
    assert [found[key] for key in ("dead", "dropped", "lost", "duplicated", "worker_kills")] == [0, 0, 0, 0, 1]
    assert found["f1_final"] > found["f1_warm"] + 0.1, found
    (run,) = directory.glob("runs/pictures-*")
    assert len(list(run.glob("scenes/*.png"))) == _PROMPTS
    assert "data:image/png;base64," in (run / "report.html").read_text()
    assert audited(stack.sluice("audit", str(run), "--json")) > 0


def audited(audit: Process) -> int:
    """The sampled tokens that it recomputed; all of them are right."""
    assert audit.wait() == 0, audit.tail()
    found = answer(audit)
    assert (found["wrong"], found["unchecked"]) == (0, 0)
    return found["tokens"]


def answer(process: Process) -> dict[str, Any]:
    """The JSON object at the end of its output."""
    text = process.text()
    return json.loads(text[text.rindex("\n{") + 1 :] if "\n{" in text else text)
