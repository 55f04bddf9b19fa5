"""A real Chromium that notices everything a page must not do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.deadlines import HANG_S

CHROMIUM = Path("/usr/bin/chromium")
_HANG_MS = 1000 * HANG_S
expect.set_options(timeout=_HANG_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Started once for a module; skips where there is none."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM} (Debian's package chromium); the dashboard is tried in it")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """What a page did that it must not: errors, refusals by its policy, failed or foreign requests."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url, self.faults = page, url, list[str]()
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda one: self._note(urlsplit(one.url).netloc != urlsplit(url).netloc, f"asks {one.url}"))
        page.on("response", lambda one: self._note(one.status >= 400, f"{one.status} {one.url}"))

    def _note(self, holds: bool, fault: str) -> None:
        if holds:
            self.faults.append(fault)

    def visit(self, path: str) -> None:
        """Load a page of the dashboard."""
        self.page.goto(self.url + path)


@contextlib.contextmanager
def watched(browser: Browser, url: str, *, width: int = 1280, scripts: bool = True) -> Iterator[Watched]:
    """A fresh window; a fault of any page in it fails the test."""
    with window(browser, viewport={"width": width, "height": 800}, java_script_enabled=scripts) as page:
        seen = Watched(page, url)
        yield seen
        assert seen.faults == []


@contextlib.contextmanager
def window(browser: Browser, **options: Any) -> Iterator[Page]:
    """A fresh one that nobody watches."""
    context = browser.new_context(**options)
    context.set_default_timeout(_HANG_MS)
    try:
        yield context.new_page()
    finally:
        context.close()
