"""Templates → pages, fragments, and streams of changed fragments.

    page ──render──▶ response                                                             GET /jobs
    Monitor.next ─▶ Live: rendered once for all ─▶ every stream that hasn't sent it       GET /events?show=verdict

- A page only needs `render(request, "jobs.html.j2", rows=rows)`.
- Autoescape is on, and an undefined name is an error.
- Every page has: `monitor`, `now` (the newest Snapshot), `run`, `path`, `allow_actions`, and `FILTERS`.
- A filter makes untrusted text visible: every control, formatting or unassigned character becomes its escape (`\\x00`,
  `\\u202e`), so nothing can hide, reverse the line or break the page's encoding. Line breaks and tabs stay, with a
  symbol before them. That isn't HTML escaping; the templates do it.
- Errors become helpful pages; for htmx and programs they are short. User input is never echoed without being escaped
  and truncated, and no traceback reaches a browser.
- A stream ends with the dashboard, with its browser, or after `_LIFE_S` (the browser reconnects). At most
  `MOST_STREAMS` at a time; one more gets a 503, and its page stays as loaded.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.http.errors import problem_response
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.descriptions import condition
from sluice.pipeline.status.text import length

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
NOTHING = "–"


def visible(text: object, limit: int = 0) -> str:
    """One line of text with invisible characters escaped; `limit` > 0 truncates it and says so."""
    shown = _HIDDEN.sub(_escape, str(text)).replace("\n", "\u23ce").replace("\t", "\u21e5")
    return shown if not limit or len(shown) <= limit else shown[: limit - 1] + "\u2026"


def block(text: object, limit: int = 20_000) -> str:
    """Multi-line text for a <pre>; its line breaks and tabs are kept."""
    shown = _HIDDEN.sub(_escape, str(text))
    return shown if len(shown) <= limit else f"{shown[:limit]}\n\u2026 ({len(shown) - limit} more characters)"


def token_text(text: str) -> str:
    """Like `block`, with a symbol before line breaks and tabs; a token with no complete character is a middle dot."""
    return _HIDDEN.sub(_escape, text).replace("\n", "\u23ce\n").replace("\t", "\u21e5\t") or "\u00b7"


def pretty(value: Any, limit: int = 20_000) -> str:
    """JSON of any message content, for a <pre>."""
    try:
        return block(json.dumps(value, indent=2, ensure_ascii=False, default=repr), limit)
    except (TypeError, ValueError):  # keys that JSON doesn't have
        return block(repr(value), limit)
    except RecursionError:
        return "(nested too deeply to be shown)"


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


TEXT_FILTERS = {"visible": visible, "block": block, "pretty": pretty}


def number(value: float | None, digits: int = 0) -> str:
    """1234567 → 1,234,567."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """A number per second with about three figures."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def figure(value: float) -> str:
    """A metric, short: 0.0123, 12.3, 1,234, 1.2e-05."""
    size = abs(value)
    if value % 1 == 0 and size < 1e15:
        return f"{int(value):,}"
    if 1000 <= size < 1e15:
        return f"{value:,.0f}"
    return f"{value:.1e}" if size < 1e-3 else f"{value:.4g}"


def size(num_bytes: float | None) -> str:
    """12.3 MiB."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def span(seconds: float | None) -> str:
    """A duration."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    return length(seconds)


def ago(at: float | None) -> str:
    """Time since a Unix time."""
    return NOTHING if not at else f"{length(max(0.0, time.time() - at))} ago"


def when(at: float | None) -> str:
    """A Unix time as 2026-05-04 12:34:56 UTC."""
    return NOTHING if not at else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def clock(at: float | None) -> str:
    """A Unix time as 12:34:56 UTC."""
    return NOTHING if not at else time.strftime("%H:%M:%S UTC", time.gmtime(at))


def url(part: str) -> str:
    """An id as one URL path segment, whatever it contains."""
    return quote(part, safe="")


def query(fields: Mapping[str, object]) -> str:
    """The query string of an address: the fields that are set, so the address can be shared."""
    return urlencode({name: value for name, value in fields.items() if value not in ("", None)}, errors="replace")


def sentence(text: str) -> list[str]:
    """Our own sentence, split where `code` begins and ends: capitalised, unless it begins with a name."""
    if text.partition(" ")[0].isalpha():
        text = text[:1].upper() + text[1:]
    return (text if text.endswith((".", "?", "!")) else text + ".").split("`")


FILTERS = {
    "number": number, "rate": rate, "figure": figure, "size": size, "span": span, "ago": ago, "when": when,
    "clock": clock, "url": url, "sentence": sentence,
} | TEXT_FILTERS  # fmt: skip


HERE = Path(__file__).parent
STATIC = HERE / "static"
NAVIGATION = (
    ("/", "Overview"),
    ("/sequences", "Sequences"),
    ("/jobs", "Jobs"),
    ("/workers", "Processes"),
    ("/weights", "Weights"),
    ("/dead-letters", "Dead letters"),
    ("/config", "Config"),
    ("/runs", "Runs"),
)
STAGE_COLOURS = {"queue": 0, "decode": 1, "wait for a batch": 2, "score": 3, "train": 4, "publish": 5, "first token": 0}
"""Of what time is spent on: the same on every page and in every run, whichever of them a run has."""
MOST_ID = 512  # characters
MOST_CHARS = 300
MOST_CURSOR = 4000
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_TITLES = {400: "That cannot be read", 403: "Not allowed", 404: "Not here", 405: "Not allowed", 503: "Not now"}
_AWAY = "The broker does not answer. The overview shows the last known state; find the reason with `sluice doctor`."


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page, or a page fragment."""
    monitor = monitor_of(request)
    own = {"path": request.url.path, "allow_actions": request.app.state.allow_actions}
    return HTMLResponse(fragment(monitor, template, **own, **values), status)


def fragment(monitor: Monitor, template: str, **values: Any) -> str:
    """The same without a request."""
    common = {"monitor": monitor, "now": monitor.newest, "run": monitor.config.run, "state": condition(monitor.newest)}
    return templates().get_template(template).render(**common, **values)


@cache
def templates() -> Environment:
    """Compiled once per process."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(FILTERS)
    made.globals.update(asset=asset, navigation=NAVIGATION, stage_colours=STAGE_COLOURS)
    return made


@cache
def asset(name: str) -> str:
    """The address of a static file; it changes with the content, so browsers may cache it."""
    return f"/static/{name}?v={sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"


def clean(text: str) -> str:
    """Without control characters, which no id may contain, and truncated."""
    return _CONTROL.sub("", text).strip()[:MOST_CHARS].strip()


def checked_id(text: str) -> str:
    """An id from an address; 404 if it can't be one."""
    if not text or len(text) > MOST_ID or any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise HTTPException(404, "Not a valid id: it is empty, too long, or has control characters.")
    return text


def add_problem_pages(app: FastAPI) -> None:
    """Turn every error of a route into a page."""

    async def http(request: Request, error: Any) -> Response:
        says = error.detail if error.detail != "Not Found" else "There is no such page."
        return problem_page(request, error.status_code, str(says), dict(error.headers or {}))

    async def schema(request: Request, error: Any) -> Response:
        where = ", ".join(sorted({str(part["loc"][-1]) for part in error.errors()}))
        return problem_page(request, 400, f"The address has values that cannot be read: {where}.")

    async def away(request: Request, error: Any) -> Response:
        return problem_page(request, 503, _AWAY)

    async def refused(request: Request, error: Any) -> Response:
        return problem_page(request, 400, str(error))

    async def broken(request: Request, error: Any) -> Response:
        get_logger().error("a page failed", path=request.url.path, error=repr(error))
        return problem_page(request, 500, "This page failed; the dashboard's log has the reason.")

    app.exception_handler(StarletteHTTPException)(http)
    app.exception_handler(RequestValidationError)(schema)
    for kind in (BrokerError, RedisError, OSError, TimeoutError):
        app.exception_handler(kind)(away)
    app.exception_handler(SluiceError)(refused)
    app.exception_handler(Exception)(broken)


def problem_page(request: Request, status: int, says: str, headers: dict[str, str] | None = None) -> Response:
    """The page, or a shorter form that fits the client."""
    if "HX-Request" in request.headers:
        answer = render(request, "problem_fragment.html.j2", status, says=says)
    elif "text/html" in request.headers.get("Accept", "*/*") or "*/*" in request.headers.get("Accept", "*/*"):
        title = _TITLES.get(status, "That went wrong")
        answer: Response = render(request, "problem.html.j2", status, title=title, says=says, code=status)
    else:
        return problem_response(status, says, headers=headers)
    answer.headers.update(headers or {})
    return answer


MOST_STREAMS = 64
_LIFE_S = 900.0
_RETRY_MS = 2000

Values = Callable[[Monitor], dict[str, object]]
FRAGMENTS: dict[str, tuple[str, Values]] = {}
"""Name → its template, and what the template needs besides the snapshot; that is called in a thread."""
router = APIRouter()


class Live:
    """The fragments of one dashboard; pages register theirs with `live`."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.streams = monitor, 0
        self._made: dict[str, tuple[int, str]] = {}
        self._rendering = asyncio.Lock()

    def render(self, name: str) -> str:
        """A fragment for the newest snapshot; raises KeyError. Blocking: that of many processes takes a while."""
        template, values = FRAGMENTS[name]
        made, number = self._made.get(name), self.monitor.number
        if made is None or made[0] != number:
            made = self._made[name] = (number, fragment(self.monitor, template, **values(self.monitor)))
        return made[1]

    async def rendered(self, names: Sequence[str]) -> dict[str, str]:
        """The same in a thread; one stream renders, those that wait take what it made."""
        async with self._rendering:
            return await asyncio.to_thread(lambda: {name: self.render(name) for name in names})

    async def stream(self, names: Sequence[str]) -> AsyncIterator[bytes]:
        """Server-sent events: each changed fragment, and `tick` at every snapshot."""
        sent: dict[str, str] = {}
        until = time.monotonic() + _LIFE_S
        yield f"retry: {_RETRY_MS}\n\n".encode()
        while not self.monitor.closing.is_set() and time.monotonic() < until:
            newest = await self.rendered(names)
            fresh = {name: html for name, html in newest.items() if sent.get(name) != html}
            sent.update(fresh)
            yield "".join(
                [*(event(*one) for one in fresh.items()), event("tick", clock(self.monitor.seen_at))]
            ).encode()
            await self.monitor.next()


def live(name: str, template: str, values: Values = lambda monitor: {}) -> None:
    """A page's module calls this once."""
    FRAGMENTS[name] = (template, values)


def event(name: str, text: str) -> str:
    """One server-sent event; each line of text becomes a line of data."""
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"


class _Counted(StreamingResponse):
    """Counts itself for exactly as long as it is open."""

    def __init__(self, live: Live, names: list[str]) -> None:
        super().__init__(live.stream(names), media_type="text/event-stream")
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.streams -= 1


@router.get("/events")
async def events(request: Request, show: str = "overview") -> Response:
    """503 if there are too many streams already."""
    live: Live = request.app.state.live
    names = [name for name in FRAGMENTS if name in show.split(",")]
    if not names:
        raise HTTPException(404, "No such live section.")
    if live.streams >= MOST_STREAMS:
        raise HTTPException(503, "Too many pages are open; this one is not updated.", {"Retry-After": "30"})
    return _Counted(live, names)
