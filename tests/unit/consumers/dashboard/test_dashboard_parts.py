"""Words, hosts, charts, events and settings of the dashboard: what needs no server."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import msgspec
import pytest
from fastapi import HTTPException
from redis.asyncio import Redis

from sluice.consumers.dashboard import render
from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.dead_letters import Reasons, in_time
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.overview import points, stacked
from sluice.consumers.dashboard.render import Live, event, fragment
from sluice.consumers.dashboard.runs import settings
from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.config.types import BrokerConfig, Config, ProducerConfig
from sluice.pipeline.http.middleware import host_name, is_loopback
from sluice.pipeline.queue.dead_letters import Row
from sluice.pipeline.status.snapshot import Snapshot, Stall
from sluice.pipeline.wire.messages import DeadLetter


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (0.25, "0.25"), (1.5e-7, "1.5e-07"), (12345.6, "12,346")],
)
def test_a_metric_is_short(value: float, shown: str) -> None:
    assert render.figure(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "–"), (0, "0.0 s"), (0.0364, "36 ms"), (0.144, "0.14 s"), (3.21, "3.2 s"), (300.0, "5 min")],
)
def test_a_short_time_has_digits_that_tell(seconds: float | None, shown: str) -> None:
    assert render.span(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5e15, "4547.5 TiB")],
)
def test_bytes_have_a_unit(value: float | None, shown: str) -> None:
    assert render.size(value) == shown


def test_a_sentence_begins_with_a_capital_unless_it_begins_with_a_name() -> None:
    assert render.sentence("no worker is alive, start `sluice worker`") == [
        "No worker is alive, start ",
        "sluice worker",
        ".",
    ]
    assert render.sentence("worker-0 is working.") == ["worker-0 is working."]


def test_what_is_read_aloud_changes_with_the_kinds_of_the_stalls_alone() -> None:
    monitor = Monitor(Config(), Redis(), HistoryReader(Path("none")))
    live = Live(monitor)

    def heard(*stalls: Stall) -> str:
        monitor.newest, monitor.number = Snapshot(run="r", state="running", stalls=list(stalls)), monitor.number + 1
        return live.render("heard").strip()

    first = heard(Stall(kind="no_worker", role="worker", since=1.0))
    assert first == "Stalled: no worker."
    assert heard(Stall(kind="no_worker", role="worker", since=2.0)) == first
    assert "Nothing blocks" in heard(Stall(kind="credit_exhausted", blocks=False))


def test_nothing_hides_in_a_dead_letter() -> None:
    monitor, hidden = Monitor(Config(), Redis(), HistoryReader(Path("none"))), "a\x1b[31m\u202eb"
    letter = DeadLetter(seq_id=hidden, reason=hidden, detail=hidden, worker=hidden)
    row = Row(entry_id="1-1", letter=letter, job=b"a", index=0, n=1)
    parts = {"reason": hidden, "job": "", "before": "", "next": "", "here": "/", "counted": 1}
    reasons = Reasons("1-1", 1, {hidden: 1}, True)
    page = fragment(
        monitor, "dead_letters.html.j2", **parts, rows=[row], reasons=reasons, path="/dead-letters", allow_actions=False
    )
    shown = re.sub(r'value="[^"]*"', "", page)  # of a form: sent back as it is
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert shown.count(r"a\x1b[31m\u202eb") >= 4


async def test_the_page_of_an_unexpected_error_has_the_headers_of_every_page() -> None:
    monitor = Monitor(Config(), cast(Any, None), HistoryReader(Path("none")))
    transport = httpx.ASGITransport(make_app(monitor), raise_app_exceptions=False, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
        answer = await browser.get("/weights")
    assert answer.status_code == 500
    assert "This page failed" in answer.text
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Cache-Control"] == "no-store"


async def test_an_action_that_takes_too_long_says_so() -> None:
    with pytest.raises(HTTPException, match=r"Not all were dropped within 0\.01 s") as told:
        await in_time(asyncio.get_running_loop().create_future(), "dropped", 0.01)
    assert told.value.headers == {"HX-Trigger": "letters-changed"}


@pytest.mark.parametrize(
    ("header", "name"),
    [("Localhost:80", "localhost"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("a.b", "a.b"), ("", ""), (":80", "")],
)
def test_a_host_header_is_read_without_its_port(header: str, name: str) -> None:
    assert host_name(header) == name


def test_loopback_addresses_are_told_from_others() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example")))


def test_a_line_fills_its_chart_and_stays_in_it() -> None:
    assert points([]) == points([1.0]) == ""
    assert points([0.0, 0.0]) == "0.0,47.0 240.0,47.0"
    assert points([-1.0, 0.0]) == "0.0,47.0 240.0,2.0", "below nothing"
    pairs = [tuple(map(float, pair.split(","))) for pair in points([0, 5, math.pi, 10]).split()]
    assert [at for at, _ in pairs] == [0, 80, 160, 240]
    assert all(0 < height < 48 for _, height in pairs)


def test_parts_of_a_bar_follow_each_other() -> None:
    parts = stacked([("queue", 1.0), ("decode", 3.0)])
    assert [(part.name, part.x, part.width) for part in parts] == [("queue", 0.0, 250.0), ("decode", 250.0, 750.0)]
    assert stacked([]) == []


def test_an_event_of_several_lines_cannot_end_early() -> None:
    assert event("a", "x\n\ny\r\nevent: b") == "event: a\ndata: x\ndata: \ndata: y\ndata: event: b\n\n"


def test_every_key_is_shown_with_its_default_and_no_password() -> None:
    broker = BrokerConfig(url="redis://:secret@host")
    config = Config(broker=broker, producer=ProducerConfig(group_size=3), custom={"at": "http://me:pw@there"})
    found = {one.key: one for one in settings(config)}
    assert (found["producer.group_size"].value, found["producer.group_size"].is_default) == ("3", False)
    assert found["worker.count"].is_default
    assert "secret" not in str(found)
    assert "pw" not in found["custom.at"].value
    assert len(found) > 150
    assert all(one.is_default for one in settings(Config())), "nothing was changed"
    assert msgspec.json.encode(found["sampling.stop"].value) == b'"[]"'
