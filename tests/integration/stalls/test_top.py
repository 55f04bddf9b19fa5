"""`sluice top` on a real run, in a terminal of 80 x 24."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import ContentSwitcher, Static

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.queue import JobQueue
from sluice.pipeline.top.app import Help, TopApp
from sluice.pipeline.top.panels import Feed, frame, print_once
from sluice.pipeline.wire.keys import Keys
from sluice.producers.submit import produce
from tests.integration.stalls.looking import config_of, consuming
from tests.killable_broker import KillableBroker
from tests.roles import eventually, run_config

SIZE = (80, 24)
DETAIL = "the prompt is too long: [/INST] \x1b[2J"  # neither markup nor commands to the terminal


@pytest.fixture
async def config(broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path) -> AsyncIterator[Config]:
    """A run without a worker, with a consumer and a dead letter."""
    config = config_of(broker_config, keys, tmp_path, 5)
    await produce(config)
    queue = JobQueue(client, keys, worker="w")
    [claim] = (await queue.claim(1, 30, 3)).claims
    await queue.fail(claim, "invalid_request", DETAIL)
    async with consuming(config):
        yield config


def screen(app: TopApp) -> list[str]:
    """The lines that are shown."""
    return ["".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips()]


def shows(app: TopApp, *words: str) -> Any:
    async def holds() -> bool:
        text = " ".join(" ".join(screen(app)).split())
        return all(word in text for word in words)

    return holds


async def test_pages_keys_and_help_at_80_by_24(config: Config) -> None:
    app = TopApp(config, 0.2)
    async with app.run_test(size=SIZE) as pilot:
        await eventually(shows(app, f"run {config.run}: running", "no worker is alive, and 4 jobs wait"), "the head")
        await eventually(shows(app, "producer", "stalled", "all rows are enqueued"), "the stages")
        await eventually(shows(app, "tab next page", "q quit", "? help"), "the keys")
        assert all(len(line) <= SIZE[0] for line in screen(app))
        for key, page, words in (
            ("tab", "processes", "consumer-0"),
            ("right", "why", "do: start one with `sluice worker"),
            ("tab", "letters", "the prompt is too long"),
            ("tab", "stages", "all rows are enqueued"),
            ("left", "letters", "invalid_request"),
        ):
            await pilot.press(key)
            await eventually(shows(app, words), f"the page {page}")
            assert app.query_one(ContentSwitcher).current == page
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, Help)
        await eventually(shows(app, "shift+tab", "Any key closes this help"), "the help")
        await pilot.press("x")
        await pilot.pause()
        assert not isinstance(app.screen, Help)
        await pilot.press("q")
    assert app.return_code == 0


async def test_it_outlives_a_broker_that_goes_away(keys: Keys, tmp_path: Path) -> None:
    server = KillableBroker(tmp_path)
    config = run_config(BrokerConfig(url=server.url), keys, tmp_path)
    app = TopApp(config, 0.2)
    try:
        async with app.run_test(size=SIZE):
            await eventually(shows(app, "no answer from the broker for"), "the silence to be said")
            server.start()
            await eventually(shows(app, f"run {config.run}: nothing enqueued yet"), "the broker's answer")
            server.kill()
            await eventually(
                shows(app, "no answer from the broker for", "Showing the last known state; retrying."), "the silence"
            )
            assert app.query_one("#head", Static).is_attached
            server.start()

            async def again() -> bool:
                return not await shows(app, "no answer from the broker")()

            await eventually(again, "the broker's second answer")
    finally:
        server.kill()


async def test_one_frame_as_plain_text(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    await asyncio.to_thread(print_once, config, 0.1)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[/INST] \\x1b[2J" in said
    for words in ("why", "stages", "processes", "dead letters", "no worker is alive", "the prompt is too long"):
        assert words in said
    feed = Feed(config)
    lines = frame(await feed.look(), 60).splitlines()
    await feed.close()
    assert max(map(len, lines)) <= 60


async def test_a_state_of_another_release_is_said_and_ends_nothing(config: Config, client: Any, keys: Keys) -> None:
    feed = Feed(config)
    await client.hset(keys.processes, "other", b'{"role": 7}')
    view = await feed.look()
    assert not view.problem
    assert "skipping 1 entry of the run in the broker that cannot be read" in " ".join(frame(view, 80).split())
    await asyncio.to_thread(print_once, config, 0.0)
    await client.hdel(keys.processes, "other")
    assert "cannot be read" not in frame(await feed.look(), 80)
    await feed.close()
