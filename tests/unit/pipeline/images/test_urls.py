"""Fetching over HTTP: bounded, from listed hosts, and not fooled by the server."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images import urls as module
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.urls import PAUSES_S, UrlFetcher
from tests.deadlines import HANG_S
from tests.image_site import Handler, Site
from tests.integration.http.names import Names
from tests.pictures import png

TRIES = len(PAUSES_S) + 1


@asynccontextmanager
async def fetcher(
    site: Site, host: str = "127.0.0.1", max_bytes: int = 2000, timeout_s: float = 10
) -> AsyncIterator[UrlFetcher]:
    """Bound to the site; closed at the end."""
    config = ImagesConfig(hosts=(f"{host}:{site.port}",), max_mb=max_bytes / 2**20, fetch_timeout_s=timeout_s)
    urls = UrlFetcher(config)
    try:
        yield urls
    finally:
        await urls.close()


def answers(*statuses: int, body: bytes = b"body", headers: dict[str, str] | None = None) -> Handler:
    """One status after the other, the last one for ever."""
    left = list(statuses)

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(status=left.pop(0) if len(left) > 1 else left[0], body=body, headers=headers)

    return answer


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_bytes_of_a_listed_host(site: Site, host: str) -> None:
    site.routes["/a.png"] = png()
    async with fetcher(site, host) as urls:
        assert await urls.fetch(site.url("/a.png?x=1", host), "x") == png()
    assert site.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::ffff:0.0.0.0]"])
async def test_an_address_that_leads_here_by_a_detour_is_refused_though_it_is_listed(site: Site, host: str) -> None:
    site.routes["/a.png"] = png()
    async with fetcher(site, host) as urls:
        with pytest.raises(RequestError, match=r"^x: its host resolves to .*unspecified address"):
            await urls.fetch(site.url("/a.png", host), "x")
    assert not site.asked


async def test_a_listed_name_does_not_lead_to_this_host(site: Site) -> None:
    site.routes["/a.png"] = png()
    names = Names(here_example=["127.0.0.1"])
    urls = UrlFetcher(ImagesConfig(hosts=("here.example:*",)), names)
    try:
        with pytest.raises(RequestError, match=r"^x: its host resolves to 127\.0\.0\.1, this machine, and"):
            await urls.fetch(site.url("/a.png", "here.example"), "x")
    finally:
        await urls.close()
    assert not site.asked


async def test_this_host_is_asked_where_the_list_names_it_with_the_port(site: Site) -> None:
    site.routes["/a.png"] = png()
    hosts = ("here.example:*", f"127.0.0.1:{site.port}")
    urls = UrlFetcher(ImagesConfig(hosts=hosts), Names(here_example=["127.0.0.1"]))
    try:
        assert await urls.fetch(site.url("/a.png", "here.example"), "x") == png()
    finally:
        await urls.close()


async def test_no_cookie_comes_back(site: Site) -> None:
    site.routes["/a"] = answers(200, headers={"Set-Cookie": "a=b; Path=/"})
    async with fetcher(site, "localhost") as urls:
        for _ in range(2):
            await urls.fetch(site.url("/a", "localhost"), "x")
    assert all("Cookie" not in headers for headers in site.headers)


async def test_the_environment_s_proxy_is_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    site.routes["/a"] = b"body"
    async with fetcher(site) as urls:
        assert await urls.fetch(site.url("/a"), "x") == b"body"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (301, "redirect"),
        (302, "redirect"),
        (307, "redirect"),
        (404, "check the URL"),
        (403, "403"),
        (204, "check the URL"),
    ],
)
async def test_an_answer_that_is_final_is_not_tried_again(site: Site, status: int, reason: str) -> None:
    site.routes |= {"/a": answers(status, headers={"Location": "/b"}), "/b": b"body"}
    async with fetcher(site) as urls:
        with pytest.raises(RequestError, match=f"^x: the server answered {status}.*") as caught:
            await urls.fetch(site.url("/a"), "x")
    assert reason in str(caught.value)
    assert not isinstance(caught.value, SourceUnavailable)
    assert dict(site.asked) == {"/a": 1}


async def test_a_server_s_trouble_is_tried_again_and_then_told(site: Site) -> None:
    site.routes |= {"/once": answers(503, 200), "/always": answers(500)}
    async with fetcher(site) as urls:
        assert await urls.fetch(site.url("/once"), "x") == b"body"
        with pytest.raises(SourceUnavailable, match=f"^x: the server answered 500, {TRIES} times"):
            await urls.fetch(site.url("/always"), "x")
    assert dict(site.asked) == {"/once": 2, "/always": TRIES}


@pytest.mark.parametrize("status", [408, 425, 429])
async def test_a_client_that_came_too_soon_tries_again(site: Site, status: int) -> None:
    site.routes["/a"] = answers(status, 200, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
    async with fetcher(site) as urls:
        assert await urls.fetch(site.url("/a"), "x") == b"body"
    assert site.asked["/a"] == 2


@pytest.mark.parametrize(("said", "after_s"), [("30", 30), ("999999", 60), ("never", 0), ("-1", 0)])
async def test_a_server_that_wants_to_be_left_alone_is(site: Site, said: str, after_s: float) -> None:
    """For longer than the time limit of a fetch: the caller is told how long."""
    site.routes["/a"] = answers(429, headers={"Retry-After": said})
    async with fetcher(site) as urls:
        with pytest.raises(SourceUnavailable, match=r"^x: the server answered 429") as caught:
            await urls.fetch(site.url("/a"), "x")
    assert caught.value.after_s == after_s
    assert site.asked["/a"] == (1 if after_s else TRIES)


async def test_a_refused_connection_is_told() -> None:
    nobody = Site()
    nobody.port = 1
    async with fetcher(nobody) as urls:
        with pytest.raises(SourceUnavailable, match=f"^x: Cannot connect .*, {TRIES} times"):
            await urls.fetch(nobody.url("/a"), "x")


@pytest.mark.parametrize("said", [True, False])
async def test_a_body_over_the_limit_is_cut_off_whatever_its_length_was_said_to_be(site: Site, said: bool) -> None:
    sent = 0

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Length": "9999999"} if said else {})
        await response.prepare(request)
        while sent < 9_999_999:
            await response.write(bytes(1000))
            sent += 1000
        return response

    site.routes["/a"] = endless
    async with fetcher(site) as urls:
        with pytest.raises(RequestError, match=r"^x: has at least \d+ bytes, images\.max_mb allows 2000"):
            await urls.fetch(site.url("/a"), "x")
    assert site.asked["/a"] == 1


async def test_a_compressed_answer_is_not_unpacked(site: Site) -> None:
    site.routes["/a"] = answers(200, body=gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": "gzip"})
    async with fetcher(site, max_bytes=100_000) as urls:
        with pytest.raises(RequestError, match="is compressed"):
            await urls.fetch(site.url("/a"), "x")


async def test_a_connection_that_breaks_halfway_is_tried_again(site: Site) -> None:
    async def halfway(request: web.BaseRequest) -> web.StreamResponse:
        if site.asked["/a"] > 1:
            return web.Response(body=b"whole")
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    site.routes["/a"] = halfway
    async with fetcher(site) as urls:
        assert await urls.fetch(site.url("/a"), "x") == b"whole"


@pytest.mark.parametrize("trickle", [False, True])
async def test_a_server_that_stalls_or_trickles_meets_the_time_limit(site: Site, trickle: bool) -> None:
    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(200):
            await asyncio.sleep(0.05)
            if trickle:
                await response.write(b".")
        return response

    site.routes["/a"] = slow
    async with fetcher(site, timeout_s=0.3) as urls:
        with pytest.raises(RequestError, match=r"^x: not fetched within 0\.3 s \(images\.fetch_timeout_s\)"):
            await urls.fetch(site.url("/a"), "x")


async def test_a_server_that_stalls_is_tried_again_while_there_is_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stalls_once(request: web.BaseRequest) -> web.StreamResponse:
        if site.asked["/a"] == 1:
            await asyncio.sleep(HANG_S)
        return web.Response(body=b"whole")

    site.routes["/a"] = stalls_once
    monkeypatch.setattr(module, "PAUSES_S", (0.0,) * 600)  # so a try has half a second, and there are many
    async with fetcher(site, timeout_s=HANG_S) as urls:
        assert await urls.fetch(site.url("/a"), "x") == b"whole"
    assert site.asked["/a"] > 1
