"""Requests that somebody named, over real sockets: only what is listed is ever reached."""

from __future__ import annotations

import asyncio
import gzip

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from sluice.pipeline.errors import RequestError
from sluice.pipeline.http.addresses import AllowedHosts, RefusedAddress
from sluice.producers.http.client import guarded_session, read_bounded, read_json
from tests.image_site import Site, site
from tests.integration.http.names import Names, answer

__all__ = ["site"]

KEY = "rollout_server.hosts"


def session_of(*entries: str, resolver: AbstractResolver | None = None, timeout_s: float = 10) -> aiohttp.ClientSession:
    return guarded_session(AllowedHosts(entries, KEY), timeout_s=timeout_s, resolver=resolver)


async def test_a_listed_host_is_asked_without_anything_of_the_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    site.routes["/"] = _cookie
    async with session_of("127.0.0.1:*") as session:
        for _ in range(2):
            async with session.post(site.url("/"), json={}) as answer:
                assert await read_json(answer, 100) == {"ok": True}
    assert all("Cookie" not in headers for headers in site.headers)
    assert site.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f000001:{port}/",
        "http://127.1:{port}/",
        "http://0:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://[::ffff:169.254.169.254]/latest/meta-data",
        "http://listed.example:80@127.0.0.2:{port}/",
        "http://127.0.0.1:{port}@127.0.0.2:{port}/",
        "http://127.0.0.1:1{port}/",
        "http://127.0.0.2:{port}/#@127.0.0.1",
        "http://127.0.0.2:{port}/\r\nHost: 127.0.0.1",
        "http://127.0.0.2:{port}\r\nX: 127.0.0.1:{port}/",
        "file:///etc/passwd",
    ],
)
async def test_all_other_hosts_are_out_of_reach(site: Site, url: str) -> None:
    async with session_of(f"127.0.0.1:{site.port}", "listed.example") as session:
        with pytest.raises((RequestError, aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
            await session.get(url.format(port=site.port))
    assert not site.asked


async def test_line_ends_in_a_url_do_not_reach_the_wire(site: Site) -> None:
    async with session_of("127.0.0.1:*") as session, session.get(site.url("/a\r\nX-Injected: 1")) as answer:
        assert answer.status == 404
    assert all("X-Injected" not in headers for headers in site.headers)


async def test_line_ends_in_a_key_do_not_reach_the_wire(site: Site) -> None:
    async with session_of("127.0.0.1:*") as session:
        with pytest.raises(ValueError, match=r"Newline|header"):
            await session.get(site.url("/"), headers={"Authorization": "Bearer k\r\nX-Injected: 1"})
    assert not site.asked


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["/secret", "http://169.254.169.254/"])
@pytest.mark.parametrize("follow", [True, False])
async def test_no_redirect_is_followed(site: Site, status: int, target: str, follow: bool) -> None:
    async def elsewhere(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": target})

    site.routes |= {"/": elsewhere, "/secret": b"x"}
    async with session_of("127.0.0.1:*") as session:
        with pytest.raises(RequestError, match=f"answered {status}, redirects are not followed"):
            await session.post(site.url("/"), allow_redirects=follow)
    assert set(site.asked) == {"/"}


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "::ffff:169.254.169.254", "0.0.0.0", "::", "fe80::1", "224.0.0.1"]
)
async def test_a_listed_name_at_a_trap_is_refused(address: str) -> None:
    async with session_of("trap.example:*", resolver=Names(trap_example=[address])) as session:
        with pytest.raises(RefusedAddress, match="which is never fetched from"):
            await session.get("http://trap.example/latest/meta-data")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::ffff:127.0.0.1", "::1"])
async def test_a_listed_name_does_not_open_this_hosts_services(site: Site, address: str) -> None:
    async with session_of("name.example:*", "localhost:1", resolver=Names(name_example=[address])) as session:
        with pytest.raises(RefusedAddress, match="this machine"):
            await session.get(site.url("/", host="name.example"))
    assert not site.asked


async def test_a_name_that_changes_its_answer_is_checked_at_each_connection(site: Site) -> None:
    site.routes["/"] = b"x"
    names = Names(rebinds_example=["127.0.0.1", "169.254.169.254"])
    hosts = AllowedHosts(["rebinds.example:*", f"127.0.0.1:{site.port}"], KEY)
    url = hosts.admit(site.url("/", host="rebinds.example"), "server_url")  # the name is fine, and stays so
    async with guarded_session(hosts, timeout_s=10, resolver=names) as session:
        async with session.get(url, headers={"Connection": "close"}) as answer:
            assert await answer.read() == b"x"
        session.connector.clear_dns_cache()  # type: ignore[union-attr]  # as when its time has run out
        with pytest.raises(RefusedAddress):
            await session.get(url)
    assert site.asked["/"] == 1


@pytest.mark.parametrize("addresses", [["169.254.169.254", "127.0.0.1"], ["127.0.0.2", "169.254.169.254"]])
async def test_one_bad_address_among_several_ends_the_try(site: Site, addresses: list[str]) -> None:
    """127.0.0.2 refuses the connection: the next address is asked, and it is no way around the check."""

    class Several(Names):
        async def resolve(self, *arguments: object, **named: object) -> list[ResolveResult]:
            return [answer(one, site.port) for one in addresses]

    async with session_of("many.example:*", "127.0.0.1:*", resolver=Several()) as session:
        with pytest.raises(RefusedAddress):
            await session.get(site.url("/", host="many.example"))
    assert not site.asked


async def test_a_compressed_answer_is_refused(site: Site) -> None:
    async def bomb(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b"0" * 10_000_000), headers={"Content-Encoding": "gzip"})

    site.routes["/"] = bomb
    async with session_of("127.0.0.1:*") as session:
        with pytest.raises(RequestError, match="is compressed"):
            await session.get(site.url("/"))


@pytest.mark.parametrize("length", ["1000", None])
async def test_an_answer_is_bounded_as_it_comes(site: Site, length: str | None) -> None:
    site.routes["/"] = _endless
    async with session_of("127.0.0.1:*") as session, session.get(site.url("/")) as answer:
        with pytest.raises(RequestError, match="larger than 5000 bytes"):
            await read_bounded(answer, 5000)


async def test_an_answer_that_is_no_json_is_named(site: Site) -> None:
    site.routes["/"] = b"<html>"
    async with session_of("127.0.0.1:*") as session, session.get(site.url("/")) as answer:
        with pytest.raises(RequestError, match="is not JSON"):
            await read_json(answer, 5000)


@pytest.mark.parametrize("stalls", ["before", "within"])
async def test_a_silent_server_has_a_deadline(site: Site, stalls: str) -> None:
    site.routes["/"] = _stall if stalls == "before" else _stall_within
    async with session_of("127.0.0.1:*", timeout_s=0.2) as session:
        with pytest.raises(TimeoutError):
            async with session.get(site.url("/")) as answer:
                await answer.read()


async def _cookie(_: web.BaseRequest) -> web.StreamResponse:
    answer = web.json_response({"ok": True})
    answer.set_cookie("tracked", "1")
    return answer


async def _endless(request: web.BaseRequest) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 1000)


async def _stall(_: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def _stall_within(request: web.BaseRequest) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"x")
    await asyncio.sleep(3600)
    return answer
