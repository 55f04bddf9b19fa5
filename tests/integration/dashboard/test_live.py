"""Server-sent events: what changed and no more, a bounded number of streams, and a broker that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections.abc import Iterator
from pathlib import Path

from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.render import MOST_STREAMS
from sluice.pipeline.broker import connection as broker
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.run_end import RunEnd, write_end
from tests.dashboard_site import Site
from tests.deadlines import HANG_S
from tests.integration.dashboard.asking import ask
from tests.served import served

PATH = "/events?show=verdict,overview,nonsense"


@contextlib.contextmanager
def stream(port: int) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    connection.request("GET", PATH)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def next_event(answer: http.client.HTTPResponse) -> tuple[str, str]:
    """Name and data."""
    name, data = "", []
    while line := answer.readline().decode().rstrip("\n"):
        kind, _, text = line.partition(": ")
        if kind == "event":
            name = text
        elif kind == "data":
            data.append(text)
    return name, "\n".join(data)


def test_a_stream_begins_with_all_its_parts_and_then_says_what_changed(site: Site) -> None:
    with stream(site.port) as answer:
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream; charset=utf-8")
        assert next_event(answer) == ("", ""), "how soon to come back"
        seen = dict(next_event(answer) for _ in range(3))
        assert sorted(seen) == ["overview", "tick", "verdict"]
        ticks = 0
        while ticks < 3:
            name, data = next_event(answer)
            ticks += name == "tick"
            assert name == "tick" or data != seen[name], "the same again"
            seen[name] = data


def test_an_unknown_part_is_no_stream(site: Site) -> None:
    assert ask(site.port, "/events?show=nonsense").status == 404
    assert ask(site.port, "/events?show=").status == 404


def test_streams_are_bounded_and_free_their_place(site: Site) -> None:
    with site.another() as port:
        with contextlib.ExitStack() as scope:
            for _ in range(MOST_STREAMS):
                assert scope.enter_context(stream(port)).status == 200
            refused = ask(port, PATH)
            assert refused.status == 503
            assert refused.headers["Retry-After"]
            assert ask(port, "/").status == 200, "pages are still there"
        until = time.monotonic() + HANG_S
        while True:
            with stream(port) as answer:
                if answer.status == 200:
                    break
            assert time.monotonic() < until, "closed streams keep their places"
            time.sleep(0.1)


async def test_streams_end_with_the_dashboard(site: Site) -> None:
    """Well before the grace time, which a stream without an end would use up."""
    monitor = Monitor(site.config, broker.connect(site.config.broker), site.reader)
    async with served(make_app(monitor), grace_s=60) as server:
        await monitor.refresh()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        await reader.readuntil(b"event: tick")
        monitor.close()
        async with asyncio.timeout(HANG_S):
            assert (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
    await monitor.client.aclose()


async def test_a_run_that_is_interrupted_while_it_is_looked_at_is_not_healthy(site: Site, tmp_path: Path) -> None:
    away = broker.connect(BrokerConfig(url="redis://127.0.0.1:1"))
    monitor = Monitor(site.config, broker.connect(site.config.broker), site.reader, tmp_path)
    async with served(make_app(monitor), grace_s=1) as server:
        await monitor.refresh()
        assert monitor.seen_at is not None
        await monitor.client.aclose()
        monitor.client = away
        await monitor.refresh()
        assert '<span class="pill warn">unknown</span>' in (await asyncio.to_thread(ask, server.port, "/")).text
        write_end(tmp_path, RunEnd(at=time.time() - 60, state="interrupted", command="sluice run -c mine.yaml"))
        page = (await asyncio.to_thread(ask, server.port, "/")).text
        assert '<span class="pill warn">interrupted</span>' in page
        assert "<code>sluice run -c mine.yaml</code>" in page
        assert "since the run has ended" in page
    await away.aclose()


async def test_a_broker_that_is_away_is_said_and_nothing_hangs(site: Site) -> None:
    away = broker.connect(BrokerConfig(url="redis://127.0.0.1:1"))
    monitor = Monitor(site.config, away, site.reader)
    async with served(make_app(monitor), grace_s=1) as server:
        await monitor.refresh()
        assert monitor.number == 1
        for path, status, words in (
            ("/", 200, "The broker does not answer, and nothing is known about the run yet."),
            ("/workers", 200, "<h1>Processes</h1>"),  # those of the timeline, if it has some
            ("/config", 200, "worker.max_batch"),
            ("/weights", 503, "sluice doctor"),
            ("/health", 503, "the broker does not answer"),
        ):
            answer = await asyncio.to_thread(ask, server.port, path)
            assert (answer.status, words in answer.text) == (status, True), path
    await away.aclose()
