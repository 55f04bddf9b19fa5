"""How long a trainer that is away is waited for, when its answer says to ask again, and where a rollout is closed."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from sluice.producers.agents.trainer_client import Clock, Retries, TrainerClient, _segment, retry_after_s
from sluice.producers.http.schemas import RolloutError, RolloutRequest


class Outage:
    """A port that refuses connections until `back_at_s` of a clock whose pauses take no time; then it answers."""

    def __init__(self, back_at_s: float) -> None:
        self.now_s, self._back_at_s = 0.0, back_at_s
        self.clock = Clock(lambda: self.now_s, self._sleep)
        self._port = socket.socket()
        self._port.bind(("127.0.0.1", 0))
        app = web.Application()
        app.router.add_post("/v1/rollout/r/finish", self._finished)
        self._runner = web.AppRunner(app)

    async def _finished(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self._back_at_s and not self._runner.addresses:
            await self._runner.setup()
            await web.SockSite(self._runner, self._port).start()

    async def finish(self, *, within_s: float) -> bool:
        """A rollout's end, told by a client of a rollout server as it starts. Raises RolloutError."""
        asked = {
            "rollout_id": "r",
            "server_url": f"http://127.0.0.1:{self._port.getsockname()[1]}",
            "messages": [{"role": "user", "content": "hi"}],
            "tokenizer_name": "t",
        }
        try:
            async with aiohttp.ClientSession() as http:
                request = RolloutRequest.model_validate(asked)
                client = TrainerClient(http, request, max_bytes=1000, retries=Retries(), clock=self.clock)
                return await client.finish("COMPLETED", until=self.now_s + within_s)
        finally:
            await self._runner.cleanup()
            self._port.close()


async def test_a_gateway_that_is_away_for_several_restarts_is_waited_for() -> None:
    outage = Outage(back_at_s=200)
    assert await outage.finish(within_s=600)
    assert 200 <= outage.now_s < 210


async def test_a_gateway_that_stays_away_is_given_up_before_the_deadline() -> None:
    outage = Outage(back_at_s=600)
    with pytest.raises(RolloutError, match="cannot be reached") as caught:
        await outage.finish(within_s=600)
    assert caught.value.category == "network_error"
    assert 230 < outage.now_s <= 240


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0), ("3", 3), (" 3 ", 3), ("-3", 0), ("1.5", 0), ("soon", 0), ("", 0), ("9" * 400, 999_999_999), ("²", 0)],
)
def test_retry_after_in_seconds(value: str | None, seconds: float) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=100)
    most_s, seconds = 100, retry_after_s(format_datetime(later, usegmt=True))
    least_s = (later - datetime.now(UTC)).total_seconds()
    assert least_s <= seconds <= most_s
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0


@pytest.mark.parametrize("rollout_id", ["a/b", "..", ".", "a b?c#d", "é%2F", "run:1f:0"])
def test_an_id_is_one_segment_of_the_path(rollout_id: str) -> None:
    url = URL(f"http://h/v1/rollout/{_segment(rollout_id)}/finish", encoded=True)
    assert url.raw_path.count("/") == 4
    assert URL(str(url)).raw_parts[-1] == "finish"
    assert not url.query_string
