"""What a user sees of a run: a panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from io import StringIO

from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.status.snapshot import Process, Snapshot
from sluice.pipeline.terminal import Console


def beat(role: str = "worker", cause: str | None = None, age_s: float = 0.0, **facts: object) -> Process:
    at = time.time() - age_s
    row = {"role": role, "name": f"{role}-0", "pid": 1, "host": "h", "started": at, "at": at}
    return Process(**row, age_s=age_s, waiting_for=cause, facts=dict(facts))  # pyright: ignore[reportArgumentType]


def state(**changes: object) -> Snapshot:
    fields: dict[str, object] = {"run": "r", "state": "running", "enqueued": 8, "total": 20, "trained": 4}
    return Snapshot(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def test_without_a_terminal_it_prints_plain_lines_now_and_then() -> None:
    out = StringIO()
    with Progress("title", Console(file=out, width=400)) as progress:
        for _ in range(3):
            progress.update(state(latest_version=3, metrics={"rollout/f1": 0.5}))
    assert out.getvalue().count("\n") == 1
    for words in ("enqueued 8 of 20", "trained 4", "version 3", "rollout F1 0.50"):
        assert words in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_run_on_rewards_shows_them() -> None:
    cells = Progress("title").cells(state(metrics={"rollout/reward_mean": 0.1, "policy/reward_mean": 0.25}))
    assert cells["reward"] == "0.25"
    assert "rollout F1" not in cells


def test_in_a_terminal_it_draws_a_panel_with_every_process_and_its_cause() -> None:
    out = StringIO()
    with Progress("the title", Console(file=out, force_terminal=True, width=120)) as progress:
        progress.extra["held-out F1"] = "0.90"
        progress.update(state(processes=[beat(cause="jobs (none is ready)"), beat("trainer")]))
    for words in ("the title", "worker-0", "waits for jobs", "trainer-0", "working", "held-out F1"):
        assert words in out.getvalue()


def test_brackets_in_a_cause_are_text_and_no_markup() -> None:
    out = StringIO()
    with Progress("run [/a]", Console(file=out, force_terminal=True, width=120)) as progress:
        progress.update(state(processes=[beat(cause="the model at [/models/x] to load")]))
        progress.say("killed [/b]")
    assert "[/models/x]" in out.getvalue()
    assert "killed [/b]" in out.getvalue()


def test_the_rates_come_from_what_was_seen() -> None:
    progress = Progress("t", Console(file=StringIO()))
    assert progress.cells(state())["tokens/s"] == "0"
    assert progress.cells(state())["ETA"] == "-"
    progress.update(state(tokens=0, trained=0))
    progress.update(state(tokens=500, trained=10))
    assert int(progress.cells(state(trained=10))["tokens/s"]) > 0
    assert progress.cells(state(trained=10))["ETA"].endswith(" s")
    assert progress.cells(state(exhausted=True, enqueued=4, trained=4))["ETA"] == "done"


def test_complete_means_exhausted_and_every_sequence_ended() -> None:
    assert not state(exhausted=True).complete
    assert not state(trained=8).complete
    assert state(exhausted=True, trained=5, dead=2, dropped=1).complete


def test_lag_and_life_are_those_of_fresh_heartbeats() -> None:
    now = state(latest_version=5, processes=[beat(version=4), beat(version=1, age_s=60)])
    assert now.version_lag == 1
    assert len(now.alive("worker")) == 1
    assert state(latest_version=5).version_lag == 0


def test_triggers_are_counted_where_a_guard_is_on() -> None:
    progress = Progress("t", Console(file=StringIO()))
    assert not {"triggers", "rollout F1"} & set(progress.cells(state(processes=[beat()]))), "this run has none of them"
    watched = {"processes": [beat(repeat_terminate="on")]}
    assert progress.cells(state(**watched))["triggers"] == "0"
    metrics = {"total/rollout/repeat_terminate_triggered_sequences": 3.0}
    assert progress.cells(state(**watched, metrics=metrics))["triggers"] == "3"


def test_a_line_said_beside_the_panel_shows_its_brackets_and_leaves_the_panel_its_styles() -> None:
    out = StringIO()
    with Progress("title", Console(file=out, force_terminal=True, force_interactive=True, width=120)) as progress:
        progress.update(state())
        assert progress.live is not None
        progress.live.refresh()  # from now on, what is printed brings the panel along
        progress.say("worker-1 [bold]stays[/bold]")
    assert "worker-1 [bold]stays[/bold]" in out.getvalue()
    assert "enqueued" in out.getvalue()
    assert "[dim]" not in out.getvalue()
