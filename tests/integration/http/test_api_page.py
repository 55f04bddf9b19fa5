"""An OpenAPI document in Chromium: every route is shown under its policy, and texts of others stay texts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (`make setup` does)")

from fastapi import FastAPI
from playwright.sync_api import Browser, Dialog, expect

from sluice.pipeline.http.middleware import OPEN_PATHS, BearerAuth
from sluice.producers.http import api_page
from tests.deadlines import HANG_S
from tests.integration.dashboard.browsing import chromium, watched
from tests.served import Served, served

HOSTILE = '<script>document.title = "taken"</script><img src="http://far.example/x" onerror="document.title=1"> word'
KEY = "a-key-of-the-test"


def described(text: str, key: str | None) -> FastAPI:
    app = FastAPI(title="Served here", description=text, docs_url=None, redoc_url=None)

    @app.post("/take/{name}", summary="Take <b>one</b>", description=text)
    async def take(name: str) -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        return {"taken": name}

    api_page.add_api_page(app)
    app.add_middleware(BearerAuth, key=key, open_paths=(*OPEN_PATHS, *api_page.OPEN_PATHS))
    return app


@contextlib.contextmanager
def in_thread(app: FastAPI) -> Iterator[Served]:
    """Playwright's own calls block this one."""
    begun: Future[tuple[Served, asyncio.Event, asyncio.AbstractEventLoop]] = Future()

    async def run() -> None:
        async with served(app) as here:
            end = asyncio.Event()
            begun.set_result((here, end, asyncio.get_running_loop()))
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    here, end, loop = begun.result(HANG_S)
    try:
        yield here
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(HANG_S)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
def test_every_route_is_shown_and_can_be_tried(browser: Browser, key: str | None) -> None:
    prompts: list[str] = []

    def give(dialog: Dialog) -> None:
        prompts.append(dialog.message)
        dialog.accept(KEY)

    with in_thread(described("A word.", key)) as site, watched(browser, site.url("")) as seen:
        seen.page.on("dialog", give)
        seen.visit("/docs")
        route = seen.page.locator(".opblock-post")
        expect(route).to_contain_text("/take/{name}")
        route.locator("button.opblock-summary-control").click()
        expect(route).to_contain_text("A word.")
        route.get_by_role("button", name="Try it out").click()
        route.get_by_placeholder("name").fill("it")
        route.get_by_role("button", name="Execute").click()
        expect(route.locator(".live-responses-table")).to_contain_text(re.compile(r'"taken":\s*"it"'))
        assert len(prompts) == (key is not None)
        if key is not None:  # the document was asked for without the key, once
            assert [one for one in seen.faults if "401" not in one] == []
            seen.faults.clear()


def test_texts_of_others_run_nothing_and_fetch_nothing(browser: Browser) -> None:
    with in_thread(described(HOSTILE, None)) as site, watched(browser, site.url("")) as seen:
        seen.visit("/docs")
        route = seen.page.locator(".opblock-post")
        expect(route).to_contain_text("Take <b>one</b>")
        route.locator("button.opblock-summary-control").click()
        expect(route).to_contain_text("word")
        assert seen.page.title() == "Served here"
        assert seen.page.locator("#swagger-ui script, #swagger-ui [onerror]").count() == 0
        stopped = [one for one in seen.faults if "Content Security Policy" in one or one == "asks http://far.example/x"]
        assert seen.faults == stopped
        seen.faults.clear()
