"""`make demo`, with fewer prompts: real PNG files, the warm start, a kill, and what the sequences were worth."""

from __future__ import annotations

import json
from typing import Any

from tests.deadlines import RUN_S
from tests.demo_runs import inlined
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import Process, wait_gone

_PROMPTS = 1280


def test_the_demo_learns_from_pictures_and_loses_nothing(make_stack: MakeStack) -> None:
    stack = make_stack([], embedded=True)
    directory = stack.directory / "demo"
    demo = stack.sluice("demo", "--prompts", str(_PROMPTS), "--dir", str(directory), "--json")
    assert demo.wait(RUN_S) == 0, demo.tail()
    wait_gone(stack.mark)
    found = answer(demo)
    assert (found["enqueued"], found["trained"]) == (_PROMPTS, _PROMPTS)
    assert [found[key] for key in ("dead", "dropped", "lost", "duplicated", "worker_kills")] == [0, 0, 0, 0, 1]
    assert found["f1_final"] > found["f1_warm"] + 0.1, found
    (run,) = directory.glob("runs/pictures-*")
    assert len(list(run.glob("scenes/*.png"))) == _PROMPTS
    check_report((run / "report.html").read_text(), found)
    assert audited(stack.sluice("audit", str(run), "--json")) > 0


def check_report(page: str, found: dict[str, Any]) -> None:
    """Curves with the kill on them, what the kill cost, and five scenes through time, from this run's own data."""
    curves = inlined(page)
    keys = [one["key"] for one in curves["charts"]]
    assert {"heldout", "rollouts", "sequences", "decoding", "loss", "staleness", "length", "tokens"} <= set(keys)
    heldout = next(one for one in curves["charts"] if one["key"] == "heldout")["lines"][0]
    assert heldout["values"][-1] > heldout["values"][0] + 0.1
    (mark,) = curves["marks"]
    assert mark["name"] == "worker-1 killed"
    assert heldout["at"][0] < mark["at"] < heldout["at"][-1]
    # It is killed by a fresh heartbeat that has a full batch; on a slow machine it may have committed all of it since.
    assert page.count('<rect class="died"') == page.count('<rect class="again"') == found["kill_jobs"]
    assert 0 <= found["kill_decoded_twice"] <= found["kill_decoded_again"]
    assert page.count('<article class="problem">') == 5
    assert page.count('<figure class="frame">') >= 5 * 3  # the warm start, the last, and one between, whatever the pace
    assert page.count("data:image/png;base64,") == page.count('<figure class="frame">')
    assert "<b>warm start</b>" in page
    assert f'<b>last</b> <span class="muted">v{found["versions"]}' in page


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
