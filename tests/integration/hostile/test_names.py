"""Names that callers choose: in a header, a log line or a path they stay what they are, a name."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import web

from sluice.pipeline import logs
from sluice.pipeline.config.types import Config, GatewayConfig, ImagesConfig
from sluice.pipeline.wire.keys import Keys
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.image_site import Site
from tests.integration.gateway.harness import Gateway, serving
from tests.integration.rollout.conftest import Serve, a_request
from tests.roles import eventually

EVIL = "r\r\nlevel=error event=forged\x1b[2J\x9b\u2028\u202e\x00\x07../%0d%0aX-Injected: 1"
Capture = pytest.CaptureFixture[str]


def assert_clean(captured: Capture, *shown: str) -> None:
    """Every line that was logged is one line of printable text that begins as ours do."""
    written = captured.readouterr()
    lines = (written.out + written.err).split("\n")
    ours = [line for line in lines if "timestamp=" in line]
    assert all(line.startswith("timestamp=") and line.isprintable() for line in ours), ours
    assert not any(char in line for line in lines for char in "\r\x1b\x9b\u2028\u202e\x00\x07")
    for text in shown:
        assert any(text in line for line in ours), ours


async def test_the_rollout_server(serve: Serve, site: Site, capfd: Capture) -> None:
    logs.configure("rollout-server")
    async with serve() as server:
        fields: dict[str, Any] = {"tokenizer_name": EVIL, "metadata": {EVIL: EVIL}}
        async with server.http.post(f"{server.url}/rollout", json=a_request(site.url(""), EVIL, **fields)) as answer:
            body = await answer.json()
            assert (answer.status, body["rollout_id"], body["status"]) == (200, EVIL, "ERROR")
            assert not any("njected" in name for name in answer.headers)
        assert (await server.get(f"/rollout/{quote(EVIL, safe='')}/status"))[1]["status"] == "failure"
    assert all("X-Injected" not in headers for headers in site.headers)
    assert len(site.asked) == 1
    assert_clean(capfd, "event=forged")


async def test_a_trainers_words(serve: Serve, site: Site, capfd: Capture) -> None:
    async def refuses(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=400, body=EVIL.encode())

    logs.configure("rollout-server")
    site.routes["/v1/chat/completions"] = refuses
    async with serve() as server:
        await server.post("/rollout", a_request(site.url(""), tokenizer_name="tools"))
    assert_clean(capfd, "event=forged")


async def test_the_gateway(
    config: Config, client: Any, keys: Keys, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(config, gateway=GatewayConfig(request_timeout_s=LIMIT_S))
    async with serving(config, None) as gateway:
        message = {"role": "user", "content": "hi"}

        async def answered(body: dict[str, Any]) -> int:
            async with gateway.http.post(gateway.url + "/v1/chat/completions", json=body) as answer:
                assert not any("njected" in name for name in answer.headers)
                assert json.loads(await answer.read())["error"]["message"]
                return answer.status

        async def queued(count: int) -> bool:
            return await client.zcard(keys.jobs) == count

        assert await answered({"messages": [message], "model": EVIL}) == 404
        assert await answered({"messages": [{**message, "role": EVIL}]}) == 422
        for count, more in enumerate(({"rollout_id": EVIL}, {"rollout_id": EVIL + "s", "stream": True}), 1):
            asked = asyncio.create_task(answered({"messages": [message], **more}))
            await eventually(partial(queued, count), "its job to be queued")
            skip(monkeypatch)
            assert await asked == 504
        path = f"/v1/rollout/{quote(EVIL, safe='')}"
        assert (await gateway.post(path + "/finish", {"final_status": "ERROR"}))[0] == 200, "its call opened it"
        assert (await gateway.post(path + "2/finish", {"final_status": "ERROR"}))[0] == 404
        async with gateway.http.get(f"{gateway.url}/v1/models/{quote(EVIL, safe='')}") as answer:
            assert answer.status == 404
        async with gateway.http.get(gateway.url + "/metrics") as answer:
            assert "forged" not in await answer.text()
    assert_clean(capfd)


async def test_control_characters_in_the_rollouts_header(config: Config) -> None:
    async with serving(config, None) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        for value in (b"a\x1bb", b"a\x00b", b"a\rX-Injected: 1", b"a\x7f"):
            assert (await _raw(port, value)).startswith(b"HTTP/1.1 400 ")


async def _raw(port: int, value: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n"
    async with asyncio.timeout(HANG_S):
        writer.write(head + b"X-Rollout-Id: " + value + b"\r\n\r\n{}")
        answer = await reader.read()
    writer.close()
    return answer


IMAGES = (
    "http://127.0.0.2:{port}/a.png",
    "http://localhost:{port}/a.png",
    "http://169.254.169.254/latest/meta-data",
    "http://2130706433:{port}/a.png",
    "http://0x7f000001:{port}/a.png",
    "http://0177.0.0.1:{port}/a.png",
    "http://[::ffff:127.0.0.1]:{port}/a.png",
    "http://user@127.0.0.1:{port}/a.png",
    "http://127.0.0.1:{port}@127.0.0.2:{port}/a.png",
    "http://127.0.0.1:{port}/\r\nX: 1",
    "data:text/html;base64,iVBORw0KGgo=",
    "data:image/png;base64,PGh0bWw+",
    "data:image/png;base64,*",
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "/etc/passwd",
    "../a.png",
    "",
)


async def test_images_come_from_listed_hosts_alone(config: Config, site: Site, client: Any, keys: Keys) -> None:
    hosts = (f"127.0.0.1:{site.port}",)
    async with serving(msgspec.structs.replace(config, images=ImagesConfig(hosts=hosts)), None) as gateway:
        for url in (url.format(port=site.port) for url in IMAGES):
            await _refused(gateway, url)
    assert not site.asked
    assert await client.zcard(keys.jobs) == 0


async def _refused(gateway: Gateway, url: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    for path, body, where in (
        ("/v1/chat/completions", {"messages": messages}, "messages.0.content.0"),
        ("/infer/", {"infer_requests": [{"messages": messages}]}, "messages.0.content.0"),
        ("/infer/", {"infer_requests": [{"messages": messages, "images": [url]}]}, "infer_requests.0.images.0"),
    ):
        status, answer = await gateway.post(path, body)
        assert (status, answer["error"]["param"]) == (400, where), (path, url, answer)
