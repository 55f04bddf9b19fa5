"""Jobs and sequences over HTTP: a real run, and a history of real detection results with pictures."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import msgspec
import pytest
from PIL import Image
from redis.asyncio import Redis

from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.groups import Group
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.recorder import Recorder, TrainedRecorder
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.registry import load_task
from sluice.pipeline.config.types import BrokerConfig, Config, DataConfig, ModelConfig, RolloutMatchingConfig
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.run.provenance import store
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import ImageRef, SequenceResult
from tests.dashboard_site import Site
from tests.detection_rollouts import answer, context, obj, rollout
from tests.factories import decode_job
from tests.integration.dashboard.asking import ask
from tests.roles import run_config
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_codec

EVIL = "<script>alert(1)</script>\x1b[31m\u202eevil"
TRUTH = [obj("seven", 0, 0, 500, 500), obj("nine", 600, 600, 999, 999)]
SAID = [obj("seven", 0, 0, 500, 400), obj("zero", 700, 0, 900, 100)]
LOG = (
    b"1000000\te\t0\t\t\n1001000\tc\t1\tw-1\t\n1005000\tl\t1\tw-1\tno sign <b>of life\n"
    b"1006000\tc\t2\tw-2\t\n1009000\tx\t2\t\tcommitted\n"
)


def groups(run: str) -> list[list[SequenceResult]]:
    """A detection with a picture, one long, one that the task cannot match, one under a hostile id."""
    codec = tiny_codec("words")
    ids = codec.encode(answer(SAID, codec))
    fields: dict[str, Any] = {"truth": TRUTH, "worker": "w-2", "backend": "hf", "metadata": {"picture": "scenes/a.png"}}

    def one(name: str, tokens: list[int] = ids, **changes: Any) -> list[SequenceResult]:
        job = f"{run}:{name}"
        return [rollout(tokens, f"{job}:0", group_id=job, **{**fields, **changes})]

    return [
        one("scene"),
        one("long", [ids[at % len(ids)] for at in range(9000)], worker="w-1", metadata={}),
        one("odd", truth=EVIL, metadata={"picture": "../secret.png", "note": EVIL}, text=EVIL),
        one(EVIL.replace("\x1b", ""), finish_reason="length", triggers={"repeat_terminate": 1, "rule": EVIL}),
        one("turns", codec.encode("first tool second"), reward=0.5, images=[ImageRef(path="scenes/a.png")] * 2),
    ]


async def record(config: Config, run: str) -> None:
    codec = tiny_codec("words")
    sampler = Sampler(load_task(config.rollout_matching), context(codec), config.consumer, image_token_id=99_999)
    recorder, trainer = Recorder(config, 0), TrainedRecorder(config)
    for results in groups(run):
        group = Group(results[0].group_id, 1, {(0, 0): results[0]}, parts={0: 1})
        samples, letters = sampler.samples_of(group)
        recorder.log(group.group_id, LOG)
        recorder.note(group, samples, letters)
        if group.group_id.endswith(":scene"):
            trainer.note(7, 5, samples, [])
    for each in (recorder, trainer):
        await each.flush()
        await each.close()


@pytest.fixture
async def shelf(
    broker_config: BrokerConfig, client: Redis, keys: Keys, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """The real application over that history, and the run's name."""
    save_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "data" / "scenes").mkdir(parents=True)
    Image.new("L", (60, 30), 128).save(tmp_path / "data" / "scenes" / "a.png")
    Image.new("L", (60, 30), 128).save(tmp_path / "secret.png")
    given = run_config(
        broker_config, keys, tmp_path / "runs", data=DataConfig(path=str(tmp_path / "data" / "train.jsonl"))
    )
    model, matching = ModelConfig(path=str(tmp_path / "model")), RolloutMatchingConfig(task="detection")
    config = msgspec.structs.replace(given, model=model, rollout_matching=matching)
    store(config, tmp_path / "runs" / keys.run)
    await record(config, keys.run)
    waiting = [decode_job(f"{keys.run}:waits-{at}", messages=[{"role": "user", "content": EVIL}]) for at in range(30)]
    await JobQueue(client, keys).enqueue(waiting, Credit(100, 100, 1))
    reader = HistoryReader(history_directory(config))
    monitor = Monitor(given, client, reader)  # which says neither model nor task: the run's own configuration does
    await monitor.refresh()
    transport = httpx.ASGITransport(make_app(monitor), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
        yield browser, keys.run
    reader.close()


Shelf = tuple[httpx.AsyncClient, str]


def address(kind: str, run: str, name: str) -> str:
    return f"/{kind}/" + quote(f"{run}:{name}", safe="")


async def text_of(browser: httpx.AsyncClient, path: str, status: int = 200, target: str = "") -> str:
    """A page; whatever it shows, nothing of it is markup or hides."""
    found = await browser.get(path, headers={"HX-Target": target} if target else {})
    assert found.status_code == status, found.text[-500:]
    assert not re.search(r"<script>|\x1b|\u202e|\sstyle=|\son\w+=|javascript:", found.text)
    return found.text


async def test_the_list_and_its_filters(shelf: Shelf) -> None:
    browser, run = shelf
    whole = await text_of(browser, "/sequences")
    assert "5 finished and kept" in whole
    assert whole.count('<tr class="answer">') == 5
    for query, count in (
        ("worker=w-1", 1), ("worker=w-2", 4), ("state=dropped", 1), ("search=long", 1),
        ("search=%3Cscript", 1), ("version=9999999", 0),
        ("finish_reason=length&triggered=yes", 1), ("triggered=no", 4), ("task=detection", 5), ("worker=w%00-%1b1", 1),
        ("version=x", 5), (f"job_id={run}:odd", 1), ("text=%2A", 0), ("text=evil", 1), ("text=nobody", 0),
        ("reward_min=0.4", 1), ("reward_min=0.6", 0), ("sort=best", 1), ("sort=longest", 5), ("length_min=5000", 1),
        ("reward_max=x", 5), ("sort=longest&worker=w-2", 4), (f"sort=longest&job_id={run}:odd", 1),
    ):  # fmt: skip
        page = await text_of(browser, f"/sequences?{query}")
        assert page.count('<tr class="answer">') == count, query
    assert "is an integer" in await text_of(browser, "/sequences?version=x")
    assert '<small class="parts">invalid truth</small>' in await text_of(browser, "/sequences?state=dropped")


async def test_htmx_gets_the_table_and_an_address_to_share(shelf: Shelf) -> None:
    browser, _ = shelf
    part = await browser.get(
        "/sequences?search=long&state=&version=", headers={"HX-Request": "true", "HX-Target": "found"}
    )
    assert part.headers["HX-Push-Url"] == "/sequences?search=long"
    assert part.text.startswith('<section id="found"')
    assert "<html" not in part.text
    assert part.headers["Vary"] == "HX-Target"


async def test_a_place_in_the_list_that_is_none_is_refused(shelf: Shelf) -> None:
    browser, _ = shelf
    for before in ("x", "consumer-0_", "_", "9" * 5000, "%00"):
        await text_of(browser, f"/sequences?before={before}", 400)
        await text_of(browser, f"/sequences?sort=best&before={before}", 400)
        await text_of(browser, f"/jobs?before={before}", 400)


async def test_a_scene_with_its_boxes_and_its_picture(shelf: Shelf) -> None:
    browser, run = shelf
    page = await text_of(browser, address("sequences", run, "scene:0"))
    drawn = page.partition('<ol class="waterfall">')[2].partition("</ol>")[0]
    stages = re.findall(r'class="name d(\d)">(\w[\w ]*)<', drawn)
    assert stages[:5] == [("0", "job"), ("1", "queue"), ("1", "attempt"), ("1", "queue"), ("1", "attempt")]
    assert "<b>not done</b>, no sign &lt;b&gt;of life" in drawn
    assert "1 matched, 1 false positive, 1 missed, 0 dropped" in page
    assert 'viewBox="0 0 720.0 360.0"' in page
    for css in ("truth matched", "prediction matched", "prediction false-positive", "truth missed"):
        assert f'<g class="{css}">' in page
    assert re.search(r">0\.80</td>", page)
    assert "trained in step 7, from version 5" in page
    [source] = re.findall(r'href="(/pictures/[^"]+)"', page)
    picture = await browser.get(source)
    assert (picture.status_code, picture.headers["Content-Type"]) == (200, "image/png")
    assert picture.headers["X-Content-Type-Options"] == "nosniff"
    assert picture.content.startswith(b"\x89PNG")


async def test_a_prompt_of_several_pictures_shows_them_all(shelf: Shelf) -> None:
    browser, run = shelf
    page = await text_of(browser, address("sequences", run, "turns:0"))
    first, second = re.findall(r'<im(?:age|g)[^>]* (?:href|src)="(/pictures/[^"]+)"', page)
    assert second == f"{first}?number=1"
    for source in (first, second):
        assert (await browser.get(source)).headers["Content-Type"] == "image/png"
    for number in ("2", "-1", "x", "9" * 5000):
        wanted = 404 if number == "2" else 200
        assert (await browser.get(f"{first}?number={number}")).status_code == wanted


async def test_a_picture_outside_is_never_served(shelf: Shelf) -> None:
    browser, run = shelf
    assert "is outside the configured roots" in await text_of(browser, address("pictures", run, "odd:0"), 404)
    assert "The picture is not shown" in await text_of(browser, address("sequences", run, "odd:0"))
    for name in ("long:0", "nobody:0", "..%2f..%2fsecret.png"):
        await text_of(browser, address("pictures", run, name), 404)


async def test_tokens_with_all_that_is_known_of_them(shelf: Shelf) -> None:
    browser, run = shelf
    here = address("sequences", run, "scene:0")
    codec = tiny_codec("words")
    ids = codec.encode(answer(SAID, codec))
    sampled = await text_of(browser, here + "?sheet=sampled&colour=version")
    rows = re.findall(r"<tr><th scope=\"row\" class=\"number\">\d+</th>.*?</tr>", sampled, re.S)
    assert len(rows) == 3 + len(ids)
    assert "<td>sampled</td>" in rows[3]
    assert ">-0.5000<" in rows[3]
    assert ">3</td>" in rows[3]
    assert re.search(r'id="by-version"[^>]* checked', sampled)
    shown = "".join(re.findall(r'<span class="t k-sampled[^"]*" title="[^"]*">(.*?)</span>', sampled, re.S))
    assert shown.replace("&#34;", '"') == codec.decode(ids)
    trained = await text_of(browser, here + "?sheet=trained")
    assert "added by the task" in trained
    assert "appended desc" in trained
    assert await text_of(browser, here + "?sheet=x&colour=%3Cb%3E&start=-1")


async def test_a_long_sequence_is_drawn_in_parts(shelf: Shelf) -> None:
    browser, run = shelf
    here = address("sequences", run, "long:0")
    first = await text_of(browser, here)
    assert "of 9,003" in first
    assert first.count('" title="#') == 500
    last = await text_of(browser, here + "?start=8800")
    assert "Tokens 8,800 to 9,002 of 9,003" in last
    assert last.count('" title="#') == 203
    assert "Tokens 9,002 to 9,002" in await text_of(browser, here + "?start=999999999")


async def test_what_a_task_cannot_do_is_a_message(shelf: Shelf) -> None:
    browser, run = shelf
    page = await text_of(browser, address("sequences", run, "odd:0"))
    assert "truth is str; give a list of" in page
    assert "invalid truth" in page
    assert "\\u202eevil" in page
    evil = quote(f"{run}:{EVIL}:0".replace("\x1b", ""), safe="")
    assert "&lt;script&gt;" in await text_of(browser, f"/sequences/{evil}")
    await text_of(browser, address("jobs", run, EVIL.replace("\x1b", "")))


async def test_a_job_shows_when_what_happened(shelf: Shelf) -> None:
    browser, run = shelf
    page = await text_of(browser, address("jobs", run, "scene"))
    rows = re.findall(r'<th scope="row" class="nowrap">(.*?)</th>\s*<td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>', page)
    assert rows == [
        ("in the queue", "+0.0 s", "1.0 s"), ("attempt 1", "+1.0 s", "4.0 s"),
        ("in the queue", "+5.0 s", "1.0 s"), ("attempt 2", "+6.0 s", "3.0 s"),
    ]  # fmt: skip
    assert "no sign &lt;b&gt;of life" in page
    assert "w-2" in page
    assert page.count('<rect class="bar ') == 4
    assert f'href="/sequences/{quote(run + ":scene:0", safe="")}"' in page


async def test_jobs_in_the_queue_above_those_that_are_over(shelf: Shelf) -> None:
    browser, run = shelf
    page = await text_of(browser, "/jobs")
    assert "30 ready" in page
    assert page.index(":waits-") < page.index('id="finished"') < page.index(f"{run}:long")
    assert "There are more" in page
    one = await text_of(browser, "/jobs?search=waits-7&state=ready")
    assert one.count('<th scope="row">') == 1
    assert 'id="finished"' not in one
    assert 'id="queue-table" tabindex="0"' in one, "the focus finds it again when it is swapped"
    part = await text_of(browser, "/jobs?search=waits-7", target="live")
    assert part.lstrip().startswith('<section id="live"')
    assert part.count('<th scope="row">') == 1
    over = await text_of(browser, "/jobs?state=finished")
    assert over.count('<th scope="row">') == 5
    assert "waits" not in over
    assert "/sequences?worker=w-1" in await text_of(browser, "/jobs?worker=w-1")
    payload = await text_of(browser, address("jobs", run, "waits-7"))
    assert "waiting for a worker" in payload
    assert "&lt;script&gt;" in payload
    assert "at most 8 tokens" in payload
    await text_of(browser, address("jobs", run, "nobody"), 404)


def test_a_real_run_shows_its_jobs_and_sequences(site: Site) -> None:
    jobs = ask(site.port, "/jobs").text
    assert "row-3" in jobs
    assert "too-long" in jobs
    job = ask(site.port, "/jobs/" + quote(site.job_id("row-3"), safe="")).text
    assert "attempt 1" in job
    assert "worker-0" in job
    dead = ask(site.port, "/jobs/" + quote(site.job_id("too-long"), safe="")).text
    assert "/dead-letters/" + quote(site.job_id("too-long:0"), safe="") in dead
    one = ask(site.port, "/sequences/" + quote(site.job_id("row-3:0"), safe="")).text
    for wanted in ("Verdict", ">6</dd>", "tokens/s", 'class="t k-sampled'):
        assert wanted in one
    assert re.search(r"[1-9]\d* sampled", one)  # it may end by itself
    gone = ask(site.port, "/sequences/" + quote(site.job_id("too-long:0"), safe="")).text
    assert "This sequence ended without tokens" in gone
    assert "invalid request" in gone
