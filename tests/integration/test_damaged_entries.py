"""Whatever lies in the broker: every view shows the run and names the entry, and every role goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Publish, PublishKeys
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerRefused
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.queue.dead_letters import DeadLetters, Selection, listing
from sluice.pipeline.status import inspection, report
from sluice.pipeline.status.descriptions import verdict_text
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.terminal import json_line
from sluice.pipeline.top.panels import Feed, frame
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.keys import Keys
from sluice.producers.submit import produce
from tests.damage import ENTRIES, KINDS, LETTERS, letter, other_type, put
from tests.factories import decode_job
from tests.integration.stalls.looking import config_of, consuming
from tests.roles import role_of

PAGES = ("/", "/jobs", "/sequences", "/workers", "/weights", "/dead-letters", "/config", "/metrics", "/metrics/targets")
NAMES_NOTHING = ("letter: ", "state: ", "source: limits")  # a letter has a name of its own: unreadable_letter
PLENTY = Credit(1000, 1000, 1)


@pytest.fixture
async def config(broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path) -> Config:
    """A run with rows, jobs, a live row of a consumer and a dead letter."""
    config = config_of(broker_config, keys, tmp_path, 3)
    await produce(config)
    queue = JobQueue(client, keys, worker="w")
    [claim] = (await queue.claim(1, 30, 3)).claims
    await queue.fail(claim, "invalid_request", "because")
    return config


@pytest.mark.parametrize("name", ENTRIES)
async def test_every_view_names_it_and_shows_the_rest(config: Config, client: Any, keys: Keys, name: str) -> None:
    async with role_of(config, "consumer", "c"):
        await asyncio.sleep(0)
        await ENTRIES[name](client, keys)
        now = await inspect(client, keys, 1)
        assert (now.enqueued, now.queued_jobs, now.dead) == (3, 2, 1)
        assert not now.complete
        if not name.startswith(NAMES_NOTHING):
            assert now.unreadable
            assert now.unreadable[0].partition(":")[0] == "sluice"
            assert "unreadable" in [stall.kind for stall in now.stalls]
        assert report.as_text(now)
        assert json_line(now, 3)
        why = await asyncio.to_thread(inspection.look_twice, config, 0.0)
        assert verdict_text(why.now, why.verdict)
        assert report.why_text(why)
        assert json_line(report.why_json(why), 3)


@pytest.mark.parametrize("name", KINDS)
async def test_both_dashboards_go_on(config: Config, client: Any, keys: Keys, name: str) -> None:
    await KINDS[name](client, keys)
    feed = Feed(config)
    view = await feed.look()
    await feed.close()
    assert view.problem == ""
    assert keys.run in frame(view, 80)
    reader = HistoryReader(history_directory(config))
    monitor = Monitor(config, client, reader)
    await monitor.refresh()
    assert monitor.problem is None
    transport = httpx.ASGITransport(make_app(monitor))  # pyright: ignore[reportArgumentType]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as browser:
        for page in PAGES:
            answer = await browser.get(page)
            lacks = {"versions: another type": "/weights", "dead: another type": "/dead-letters"}.get(name)
            assert answer.status_code in ((400, 503) if page == lacks else (200,)), (page, answer.text)
    reader.close()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "results: another type"])
async def test_a_consumer_a_producer_and_a_worker_go_on(config: Config, client: Any, keys: Keys, name: str) -> None:
    """Before it stops a consumer asks whether the run is over: it would end with what it cannot read."""
    queue = JobQueue(client, keys, worker="w")
    async with consuming(config):
        await KINDS[name](client, keys)
        if not name.startswith(("alone:", "dead:", "batches:")):
            assert len((await queue.claim(8, 30, 3)).claims) == 2
            assert await queue.enqueue([decode_job(f"{keys.run}:new")], PLENTY) == ["enqueued"]
        now = await snapshot(client, keys)
        assert now.enqueued >= 3
        assert await WeightsRegistry(client, keys).latest() in (None, 0)


async def test_the_newest_version_is_mended_by_the_next(config: Config, client: Any, keys: Keys) -> None:
    owner = Ownership(client, keys, "trainer")
    await owner.try_acquire()
    for value in (b"x", b"9" * 30):
        await client.set(keys.latest, value)
        names = PublishKeys(versions=keys.versions, latest=keys.latest, owner=owner.key)
        request = Publish(nonce=owner.nonce, version=4, digest="d", manifest=b"m", forgotten=[2])
        assert (await Scripts(client).ask(names, request), await client.get(keys.latest)) == ("ok", b"4")
        await client.delete(keys.versions)


async def test_a_position_that_is_none_begins_with_the_first_row_and_enqueues_nothing_twice(
    config: Config, client: Any, keys: Keys
) -> None:
    await client.hset(keys.source, "cursor", "x:y")
    await produce(config)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.exhausted) == (3, True)


@pytest.mark.parametrize("name", LETTERS)
async def test_a_damaged_dead_letter_is_shown_and_dropped(config: Config, client: Any, keys: Keys, name: str) -> None:
    await letter(**LETTERS[name])(client, keys)
    found = await asyncio.to_thread(lambda: listing(config, job=None, reason=None, limit=10))
    assert found.total == 2
    letters = DeadLetters(client, config)
    done = await letters.drop(Selection(everything=True))
    assert [each.problem for each in done] == [None, None]
    assert await client.xlen(keys.dead) == 0


@pytest.mark.parametrize("attribute", ["jobs", "alone", "leases"])
async def test_a_key_of_another_type_is_named(config: Config, client: Any, keys: Keys, attribute: str) -> None:
    await other_type(attribute)(client, keys)
    with pytest.raises(BrokerRefused, match=f"{getattr(keys, attribute)} is a list and must be a"):
        await JobQueue(client, keys, worker="w").claim(8, 30, 3)


async def test_an_entry_that_is_mended_is_read_again(config: Config, client: Any, keys: Keys) -> None:
    await put("latest", "x")(client, keys)
    assert (await snapshot(client, keys)).unreadable
    await put("latest", "3")(client, keys)
    now = await snapshot(client, keys)
    assert (now.latest_version, now.unreadable) == (3, [])
