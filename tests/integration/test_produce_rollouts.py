"""The producer that asks a rollout server, against a real broker and a rollout server that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sluice.pipeline.config.types import BrokerConfig, Config, DataConfig, ImagesConfig, PreflightConfig, RolloutConfig
from sluice.pipeline.errors import ConfigError, DataError, DeadlineExceeded, SluiceError, first_cause
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.store import StoreError, images_directory
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.producers.rollout_client import dispatcher, polling
from sluice.producers.submit import produce
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.far_side import Body, FarSide, answer
from tests.image_site import Site, site
from tests.pictures import png
from tests.roles import eventually, run_config

__all__ = ["site"]

KEYS = {"SLUICE_ROLLOUT_API_KEY": "server-secret", "SLUICE_GATEWAY_API_KEY": "gateway-secret"}
MakeConfig = Callable[..., Awaitable[Config]]
Look = Callable[[], Awaitable[Snapshot]]


@pytest.fixture
async def far(client: Any, keys: Keys) -> AsyncIterator[FarSide]:
    made = FarSide(client, keys)
    yield made
    await made.stop()


@pytest.fixture
def make_config(broker_config: BrokerConfig, keys: Keys, tmp_path: Path, far: FarSide) -> MakeConfig:
    """A run of so many rows whose rollouts the far side answers."""

    async def make(count: int = 4, *, url: str = "", group: int = 1, credit: int = 1000, **rollout: Any) -> Config:
        path = tmp_path / "rows.jsonl"
        asks = [{"messages": [{"role": "user", "content": f"q{i}"}], "id": i, "truth": i} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in asks))
        peers = {"url": url or await far.start(), "gateway_url": await far.start_gateway()}
        producer = {"max_in_flight": credit, "samples_per_version": credit, "poll_s": 0.01, "group_size": group}
        settings = RolloutConfig(**{**peers, "timeout_s": HANG_S, **rollout})
        return run_config(
            broker_config, keys, tmp_path / "runs", producer=producer, data=DataConfig(path=str(path)), rollout=settings
        )

    return make


@pytest.fixture
def state(client: Any, keys: Keys) -> Look:
    return lambda: snapshot(client, keys)


async def cause_of(config: Config) -> BaseException:
    """What ends the producer."""
    with pytest.raises((SluiceError, ExceptionGroup)) as caught:
        await asyncio.wait_for(produce(config), HANG_S)
    return first_cause(caught.value)


@pytest.fixture(autouse=True)
def _long_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a producer tells the server beside its requests arrives, however slow this machine is."""
    monkeypatch.setattr(dispatcher, "_FORGET_S", HANG_S)
    monkeypatch.setattr(polling, "_CANCEL_S", HANG_S)


async def run_out_of_time(
    config: Config, monkeypatch: pytest.MonkeyPatch, begun: Callable[[], bool], what: str
) -> None:
    """Produce; the time of the requests is over once they have `begun`."""
    producing = asyncio.create_task(produce(config))

    async def look() -> bool:
        return begun() or producing.done()

    await eventually(look, what)
    skip(monkeypatch)
    await asyncio.wait_for(producing, HANG_S)


def pauses(times: list[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(times)]


async def end(task: asyncio.Task[None]) -> None:
    """As after a kill: no farewell, and only what the broker holds survives."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_every_member_of_every_group_is_asked_for_once_and_counted(
    make_config: MakeConfig, far: FarSide, state: Look, keys: Keys
) -> None:
    config = await make_config(3, group=2)
    await asyncio.wait_for(produce(config), HANG_S)
    now = await state()
    assert (now.enqueued, now.committed, now.total, now.exhausted) == (6, 6, 6, True)
    assert set(Counter(body["rollout_id"] for body in far.posted).values()) == {1}
    assert [body["metadata"]["row"] for body in far.posted] == ["0", "0", "1", "1", "2", "2"], (
        "a group is asked together"
    )
    assert sorted(far.finished) == sorted((body["rollout_id"], "COMPLETED") for body in far.posted)
    one = far.posted[0]
    assert one["rollout_id"].startswith(f"{keys.run}:")
    assert one["rollout_id"].endswith(":0")
    assert one["server_url"] == config.rollout.gateway_url
    assert one["messages"] == [{"role": "user", "content": "q0"}]
    assert one["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 256,
        "stop": None,
        "logprobs": True,
    }
    assert (one["tokenizer_name"], one["max_turns"], one["max_tokens_total"]) == ("policy", 10, 8192)


def show(config: Config, tmp_path: Path, *images: str, on_malformed: str = "skip") -> Config:
    """The run with a row for each image, which are files below tmp_path."""
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    rows = [{"messages": [{"role": "user", "content": content}], "images": [name], "id": name} for name in images]
    Path(config.data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return msgspec.structs.replace(
        config,
        images=ImagesConfig(roots=(str(tmp_path),)),
        data=msgspec.structs.replace(config.data, on_malformed=on_malformed),
    )


async def test_a_row_whose_image_cannot_be_read_is_malformed_and_the_others_are_asked_for(
    make_config: MakeConfig, far: FarSide, state: Look, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    config = show(await make_config(), tmp_path, "a.png", "gone.png", "a.png?")
    (tmp_path / "a.png?").write_bytes(png("blue"))
    await asyncio.wait_for(produce(config), HANG_S)
    now = await state()
    assert (now.committed, now.malformed_rows, now.exhausted) == (2, 1, True)
    assert [body["metadata"]["row"] for body in far.posted] == ['"a.png"', '"a.png?"']


async def test_skipped_rows_are_counted_once_whatever_refused_them_and_however_often_it_starts(
    make_config: MakeConfig, state: Look, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    config = show(await make_config(), tmp_path, "a.png", "gone.png", "a.png?")
    (tmp_path / "a.png?").write_bytes(png("blue"))
    config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, epochs=2))
    lines, counted = Path(config.data.path).read_text(), list[int]()
    Path(config.data.path).write_text(f"{{bad\n{lines}")
    for _ in range(3):
        await asyncio.wait_for(produce(config), HANG_S)
        counted.append((await state()).malformed_rows)
    assert counted == [4, 4, 4]
    assert (await state()).committed == 4


async def test_a_row_whose_image_cannot_be_read_stops_a_run_that_skips_none_and_is_named(
    make_config: MakeConfig, state: Look, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    config = show(await make_config(), tmp_path, "a.png", "gone.png", on_malformed="stop")
    cause = await cause_of(config)
    assert isinstance(cause, DataError)
    assert str(cause).startswith(f"{config.data.path}: row 2: image 'gone.png': no such file")
    assert (await state()).enqueued == 1


async def test_an_image_that_cannot_be_reached_now_skips_no_row(
    make_config: MakeConfig, far: FarSide, state: Look, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    config = show(await make_config(), away, "a.png")
    cause = await cause_of(config)
    assert "away is not a directory" in str(cause), "the look at its rows before the start says so"
    config = msgspec.structs.replace(config, preflight=PreflightConfig(max_s=0))
    cause = await cause_of(config)
    assert isinstance(cause, SourceUnavailable)
    assert str(cause).startswith(f"{config.data.path}: row 1: image 'a.png': {away} is not a directory")
    assert (await state()).malformed_rows == 0
    away.mkdir()
    (away / "a.png").write_bytes(png())
    await asyncio.wait_for(produce(config), HANG_S)
    now = await state()
    assert (now.committed, now.malformed_rows, now.exhausted) == (1, 0, True)


async def test_a_full_image_store_stops_a_run_though_it_skips_malformed_rows(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    config = show(await make_config(), tmp_path, "a.png")
    config = msgspec.structs.replace(config, images=msgspec.structs.replace(config.images, store_mb=1))
    (images_directory(config) / "sha256").mkdir(parents=True)
    (images_directory(config) / "sha256" / ("0" * 64)).write_bytes(bytes(1 << 20))
    cause = await cause_of(config)
    assert isinstance(cause, StoreError)
    assert "images.store_mb" in str(cause)


async def test_the_event_loop_runs_while_the_image_of_a_row_is_fetched(
    make_config: MakeConfig, state: Look, tmp_path: Path, site: Site
) -> None:
    """The site is served by the loop of the producer."""
    site.routes["/a.png"] = png()
    config = show(await make_config(), tmp_path, "")
    [row] = map(json.loads, Path(config.data.path).read_text().splitlines())
    image = {"path": "gone.png", "url": site.url("/a.png"), "sha256": sha256(png()).hexdigest()}
    Path(config.data.path).write_text(json.dumps({**row, "images": [image]}))
    images = ImagesConfig(roots=(str(tmp_path),), hosts=(f"127.0.0.1:{site.port}",))
    config = msgspec.structs.replace(config, images=images)
    await asyncio.wait_for(produce(config), HANG_S)
    assert (await state()).committed == 1
    assert site.asked["/a.png"] == 1


async def test_keys_travel_in_headers_and_are_stored_and_logged_nowhere(
    make_config: MakeConfig, far: FarSide, client: Any, keys: Keys,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    far.script = lambda _, body: web.json_response({"input": body["callback_api_key"]}, status=422)
    await asyncio.wait_for(produce(await make_config(1)), HANG_S)
    assert far.posted[0]["callback_api_key"] == "gateway-secret"
    assert ("/rollout", "Bearer server-secret") in far.headers
    assert ("/tools", "Bearer server-secret") in far.headers
    log = capfd.readouterr().err
    assert "***" in log, "what the server repeats is shown without the keys"
    stored = [await client.dump(name) async for name in client.scan_iter(match=f"{keys.prefix}*")]
    assert stored
    for secret in KEYS.values():
        assert not [raw for raw in stored if raw and secret.encode() in raw]
        assert secret not in log


async def test_a_busy_server_is_asked_again(make_config: MakeConfig, far: FarSide, state: Look) -> None:
    words = [
        web.Response(status=429, headers={"Retry-After": "0"}),
        web.Response(status=503),
        web.Response(status=500, text="x" * 10_000),
    ]
    refusals = iter(words)
    far.script = lambda count, body: answer(body) if count > 3 else next(refusals)
    await asyncio.wait_for(produce(await make_config(1)), HANG_S)
    assert len(far.posted) == 4
    assert (await state()).committed == 1


async def test_a_busy_server_is_left_some_peace_whatever_it_says(
    make_config: MakeConfig, far: FarSide, state: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []

    def busy(*_: Any) -> web.Response:
        times.append(time.monotonic())
        return web.Response(status=429, headers={"Retry-After": "0"})

    far.script = busy
    config = await make_config(1, timeout_s=LIMIT_S)
    await run_out_of_time(config, monkeypatch, lambda: len(times) == 4, "four requests")
    assert all(pause > least for pause, least in zip(pauses(times), (0.1, 0.2, 0.4), strict=False)), "they double"
    assert (await state()).dropped == 1


async def test_the_reward_of_an_answer_goes_to_the_gateway(make_config: MakeConfig, far: FarSide) -> None:
    def script(_: int, body: Body) -> web.Response:
        return answer(body, reward=0.5) if body["metadata"]["row"] == "1" else answer(body)

    far.script = script
    await asyncio.wait_for(produce(await make_config(2)), HANG_S)
    assert sorted(far.rewards, key=str) == [0.5, None]


async def test_a_rollout_that_loses_turns_each_time_it_is_played_is_dropped_by_that_name(
    make_config: MakeConfig, far: FarSide, state: Look
) -> None:
    far.keeps_turns = False
    far.script = lambda _, body: answer(body, num_turns=2)
    await asyncio.wait_for(produce(await make_config(1)), HANG_S)
    now = await state()
    assert (now.dropped, now.reasons, now.exhausted) == (1, {"dropped:turns_lost": 1}, True)
    [rollout_id] = far.forgotten
    assert ([body["rollout_id"] for body in far.posted], far.num_turns) == ([rollout_id] * 2, [2, 2])


async def test_an_error_is_finished_as_one_and_the_run_goes_on(
    make_config: MakeConfig, far: FarSide, state: Look
) -> None:
    def script(_: int, body: Body) -> web.Response:
        return answer(body, "ERROR", error_message="no") if body["metadata"]["row"] == "1" else answer(body)

    far.script = script
    await asyncio.wait_for(produce(await make_config(3)), HANG_S)
    now = await state()
    assert (now.committed, now.dropped, now.exhausted) == (2, 1, True)
    assert [status for _, status in far.finished].count("ERROR") == 1


@pytest.mark.parametrize(
    "answered",
    [
        lambda body: web.Response(status=422, text="no such field"),
        lambda body: web.Response(text="not json"),
        lambda body: web.json_response({"rollout_id": "another", "status": "COMPLETED"}),
        lambda body: web.json_response({"rollout_id": body["rollout_id"], "status": "FINE"}),
        lambda body: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
    ],
    ids=["refused", "no-json", "another-one", "no-status", "redirect"],
)
async def test_what_is_no_answer_drops_that_rollout_alone(
    make_config: MakeConfig, far: FarSide, state: Look, answered: Callable[[Body], web.Response]
) -> None:
    far.script = lambda _, body: answered(body) if body["metadata"]["row"] == "0" else answer(body)
    await asyncio.wait_for(produce(await make_config(2)), HANG_S)
    now = await state()
    assert (now.committed, now.dropped, now.reasons) == (1, 1, {"dropped:rollout_error": 1})
    assert len(far.posted) == 2


async def test_a_server_that_dies_for_good_costs_what_it_held(
    make_config: MakeConfig, far: FarSide, state: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang_up(_: int, body: Body) -> web.Response:
        raise ConnectionResetError

    far.script = hang_up

    def asked() -> bool:
        return len({body["rollout_id"] for body in far.posted}) == 2

    config = await make_config(2, timeout_s=LIMIT_S)
    await run_out_of_time(config, monkeypatch, asked, "both to be asked for")
    now = await state()
    assert (now.dropped, now.reasons, now.exhausted) == (2, {"dropped:rollout_error": 2}, True)


async def test_a_server_that_is_not_there_yet_is_waited_for_by_name(
    make_config: MakeConfig, far: FarSide, state: Look
) -> None:
    with socket.socket() as kept:  # bound and not listening: nobody answers, and no other test gets the port
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        config = await make_config(2, url=f"http://127.0.0.1:{port}")
        running = asyncio.create_task(produce(config))

        async def says_so() -> bool:
            causes = [row.waiting_for or "" for row in (await state()).processes]
            return any("GET /tools" in cause and str(port) in cause for cause in causes)

        await eventually(says_so, "the producer to say whom it waits for")
    await far.start(port)
    await asyncio.wait_for(running, HANG_S)
    assert (await state()).committed == 2


async def test_a_server_that_never_comes_is_an_error_that_names_it(make_config: MakeConfig) -> None:
    error = await cause_of(await make_config(1, url="http://127.0.0.1:1", timeout_s=0.5))
    assert isinstance(error, DeadlineExceeded)
    assert "http://127.0.0.1:1 (GET /tools)" in str(error)


async def test_no_more_than_so_many_are_in_hand(make_config: MakeConfig, far: FarSide, state: Look) -> None:
    release = asyncio.Event()

    async def script(_: int, body: Body) -> web.Response:
        await release.wait()
        return answer(body)

    far.script = script
    running = asyncio.create_task(produce(await make_config(9, max_concurrent=3)))

    async def three() -> bool:
        return far.running == 3

    await eventually(three, "three requests")
    assert (await state()).enqueued == 3, "what cannot be asked for is not opened"
    release.set()
    await asyncio.wait_for(running, HANG_S)
    assert (far.most, (await state()).committed) == (3, 9)


async def test_credit_holds(make_config: MakeConfig, far: FarSide, client: Any, keys: Keys, state: Look) -> None:
    running = asyncio.create_task(produce(await make_config(6, credit=4)))

    async def waits() -> bool:
        now = await state()
        return now.committed == 4 and any("credit" in (row.waiting_for or "") for row in now.processes)

    await eventually(waits, "the credit to be used up")
    await client.hset(keys.counts, "trained", len(far.posted))
    await asyncio.wait_for(running, HANG_S)
    assert (await state()).enqueued == 6


async def test_a_restart_asks_again_for_what_is_open_and_opens_nothing_twice(
    make_config: MakeConfig, far: FarSide, state: Look
) -> None:
    hang = asyncio.Event()

    async def script(count: int, body: Body) -> web.Response:
        if count == 1 and body["metadata"]["row"] in ("1", "2"):
            await hang.wait()
        return answer(body)

    far.script = script
    config = await make_config(5, group=2, credit=10, max_concurrent=4)
    first = asyncio.create_task(produce(config))

    async def stuck() -> bool:
        return far.running == 4 and len(far.finished) == 2

    await eventually(stuck, "four requests that hang")
    await end(first)
    asked = {body["rollout_id"] for body in far.posted if body["metadata"]["row"] in ("1", "2")}
    await asyncio.wait_for(produce(config), HANG_S)
    now = await state()
    assert (now.enqueued, now.committed, now.exhausted) == (10, 10, True)
    assert {body["rollout_id"] for body in far.posted if far.asked(body["rollout_id"]) == 2} == asked
    hang.set()


@pytest.mark.parametrize("forgets", [0, 1])
async def test_the_asynchronous_protocol_waits_for_the_gateway_and_asks_a_forgetful_server_again(
    make_config: MakeConfig, far: FarSide, state: Look, forgets: int
) -> None:
    far.forgets = forgets
    await asyncio.wait_for(produce(await make_config(3, protocol="async")), HANG_S)
    assert ((await state()).committed, far.finished) == (3, [])
    assert len(far.posted) == 3 * (1 + forgets)


class Polled:
    """A script in the protocol in which the result is asked for; `ends` are those of one rollout after another."""

    def __init__(self, *ends: Body) -> None:
        self.ends, self.polls, self.names = list(ends), 0, list[str]()

    def __call__(self, count: int, body: Body) -> web.Response:
        if count >= 0:
            self.names.append(body["rollout_id"])
            lease = {"polling_lease_token": f"lease of {body['rollout_id']}", "status": "queued"}
            timeouts = {"result_wait_timeout_sec": 1.0, "polling_lease_timeout_sec": 5.0}
            return web.json_response({"rollout_id": body["rollout_id"], **lease, **timeouts}, status=202)
        self.polls += 1
        if self.polls % 2:
            return web.json_response({"rollout_id": body["rollout_id"], "status": "running"})
        end = self.ends.pop(0)
        return web.json_response({"rollout_id": body["rollout_id"], **end}, status=end.get("http", 200))


async def test_a_result_is_asked_for_and_brings_the_reward(make_config: MakeConfig, far: FarSide, state: Look) -> None:
    far.script = script = Polled({"status": "success", "sample": {"reward": 0.75, "messages": []}})
    config = await make_config(1, protocol="polling")
    await asyncio.wait_for(produce(config), HANG_S)
    [body], [finished] = far.posted, far.finished
    rollout_id = finished[0]
    assert (finished[1], far.rewards, (await state()).committed) == ("COMPLETED", [0.75], 1)
    assert (script.polls, far.cancelled) == (2, [])
    assert body["rollout_id"].startswith(f"{rollout_id}.")
    assert body["chat_completions_url"] == f"{config.rollout.gateway_url}/v1/rollouts/{rollout_id}"
    assert (body["label"], body["initial_messages"]) == ("0", [{"role": "user", "content": "q0"}])


@pytest.mark.parametrize(
    "end",
    [
        {"status": "failure", "err_message": "no tools today", "err_category": "agent_error"},
        {"status": "cancelled"},
        {"status": "success", "sample": {"reward": 1.0, "remove_sample": True}},
    ],
)
async def test_what_ends_without_a_sample_is_an_error(
    make_config: MakeConfig, far: FarSide, state: Look, end: Body
) -> None:
    far.script = Polled(end)
    await asyncio.wait_for(produce(await make_config(1, protocol="polling")), HANG_S)
    assert ([status for _, status in far.finished], (await state()).dropped) == (["ERROR"], 1)


@pytest.mark.parametrize(
    "lost", [{"status": "running", "http": 404}, {"status": "failure", "err_category": "lease_expired"}]
)
async def test_a_server_that_lost_it_is_asked_again_under_another_name(
    make_config: MakeConfig, far: FarSide, lost: Body
) -> None:
    far.script = script = Polled(lost, {"status": "success"})
    await asyncio.wait_for(produce(await make_config(1, protocol="polling")), HANG_S)
    assert (len(set(script.names)), far.rewards) == (2, [None])


async def test_a_restart_cancels_what_was_asked_for_before(make_config: MakeConfig, far: FarSide, state: Look) -> None:
    far.script = Polled(*[{"status": "running"}] * 100)
    config = await make_config(1, protocol="polling")
    first = asyncio.create_task(produce(config))

    async def asked() -> bool:
        return len(far.posted) == 1

    await eventually(asked, "the first request")
    await end(first)
    far.script = Polled({"status": "success"})
    await asyncio.wait_for(produce(config), HANG_S)
    [finished] = far.finished
    assert far.cancelled == [{"prefix": f"{finished[0]}."}]
    assert (await state()).committed == 1


async def test_a_rollout_that_takes_too_long_is_cancelled(
    make_config: MakeConfig, far: FarSide, state: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.script = script = Polled(*[{"status": "running"}] * 100_000)
    config = await make_config(1, protocol="polling", timeout_s=LIMIT_S)
    await run_out_of_time(config, monkeypatch, lambda: script.polls > 10, "its result to be asked for")
    assert far.cancelled == [{"ids": script.names}]
    assert (await state()).dropped == 1


@pytest.mark.parametrize("bad", [{"status": "fine"}, {"http": 400}, {"http": 410}, {"status": "success", "sample": 7}])
async def test_a_rollout_with_a_bad_answer_is_cancelled(
    make_config: MakeConfig, far: FarSide, state: Look, bad: Body
) -> None:
    far.script = script = Polled(bad)
    await asyncio.wait_for(produce(await make_config(1, protocol="polling")), HANG_S)
    assert far.cancelled == [{"ids": script.names}]
    assert (await state()).dropped == 1


async def test_a_server_that_knows_every_name_is_left_some_peace(
    make_config: MakeConfig, far: FarSide, state: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []

    def knows_it(*_: Any) -> web.Response:
        times.append(time.monotonic())
        return web.Response(status=409)

    far.script = knows_it
    config = await make_config(1, protocol="polling", timeout_s=LIMIT_S)
    await run_out_of_time(config, monkeypatch, lambda: len(times) == 3, "three requests")
    assert min(pauses(times)) > 0.4
    assert len(far.cancelled) >= len(far.posted)
    assert (await state()).dropped == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_key_or_address_ends_the_run_and_drops_nothing(
    make_config: MakeConfig, far: FarSide, state: Look, status: int
) -> None:
    far.script = lambda _, body: web.Response(status=status)
    error = await cause_of(await make_config(3))
    assert isinstance(error, ConfigError)
    assert ("rollout.url" if status == 404 else "SLUICE_ROLLOUT_API_KEY") in str(error)
    now = await state()
    assert (now.dropped, now.exhausted) == (0, False)


async def test_a_row_with_images_and_a_bad_address_are_refused(make_config: MakeConfig, far: FarSide) -> None:
    config = await make_config(1)
    row = {"messages": [{"role": "user", "content": "see"}], "images": ["a.png"]}
    Path(config.data.path).write_text(json.dumps(row) + "\n")
    assert isinstance(await cause_of(config), DataError)
    assert isinstance(await cause_of(await make_config(1, url="localhost:9000")), ConfigError)
