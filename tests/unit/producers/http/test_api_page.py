"""The page of an OpenAPI document: every route, nothing from elsewhere, and no text that becomes markup."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Body, FastAPI
from pydantic import BaseModel, Field
from redis.asyncio import Redis
from yarl import URL

from sluice.pipeline.config.types import Config
from sluice.pipeline.wire.keys import Keys
from sluice.producers.agents.runs import open_runs
from sluice.producers.agents.server import build_app
from sluice.producers.agents.state import app_state
from sluice.producers.gateway.server import make_app
from sluice.producers.gateway.service import make_service
from sluice.producers.http.api_page import PATH, add_api_page, api_page
from sluice.producers.tokenizer import load_renderer
from tests.tiny_models import save_tiny_model

HERE = "http://127.0.0.1:8081"
HOSTILE = '<script>alert(1)</script><img src="http://far.example/x.png" onerror=x> `<b>code</b>` {{ 7 * 7 }}'


class Seen(HTMLParser):
    """Elements and their attributes, by name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture(params=["gateway", "rollout server"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FastAPI]:
    config = Config()
    if request.param == "gateway":
        client = Redis()  # nothing is asked of it
        yield make_app(make_service(config, client, Keys("unit"), load_renderer(str(save_tiny_model(tmp_path)))), "key")
        await client.aclose()
    else:
        async with app_state(config) as state, open_runs(state) as runs:
            yield build_app(state, runs, key="key")


async def test_every_route_is_there_and_nothing_from_elsewhere(app: FastAPI) -> None:
    document = app.openapi()
    page = api_page(document, HERE, needs_key=True)
    operations = [(path, one) for path, item in document["paths"].items() for one in item.values()]
    assert len(operations) >= 7
    for path, operation in operations:
        assert f'class="path">{path}</span></h3>' in page
        assert operation["summary"], path
        assert operation["description"], path
    seen = Seen(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.tags)
    assert all(link == "openapi.json" or link.removeprefix("#") in seen.ids for link in seen.links)
    assert len(seen.ids) == len(set(seen.ids))
    hosts = {URL(url).host for url in re.findall(r"https?://[^\s\"'&<]+", page)}
    assert hosts == {"127.0.0.1"}
    assert not re.search(r"url\(|@import", page)


async def test_what_fastapi_would_fetch_from_elsewhere_is_off(app: FastAPI) -> None:
    paths = [getattr(route, "path", "") for route in app.routes]
    assert paths.count(PATH) == 1
    assert not {"/redoc", "/docs/oauth2-redirect"} & set(paths)
    assert PATH not in app.openapi()["paths"]


async def test_every_field_of_a_body_is_explained(app: FastAPI) -> None:
    schemas: dict[str, Any] = app.openapi()["components"]["schemas"]
    for name in {"ChatRequest", "RolloutRequest", "SamplingParams", "FinishRequest"} & schemas.keys():
        for field, schema in schemas[name]["properties"].items():
            assert "description" in schema or "$ref" in str(schema), (name, field)


HOSTILE_BODY = Body(openapi_examples={"one": {"summary": HOSTILE, "value": {"name": "it's </pre><script>"}}})
FAILS: dict[int | str, dict[str, Any]] = {400: {"description": HOSTILE}}


class Inner(BaseModel):
    """<b>Inner</b>"""

    text: str = Field(description=HOSTILE)


class Outer(BaseModel):
    """Bounds, defaults, lists and choices."""

    size: int = Field(ge=1, le=9)
    share: float | None = Field(default=None, gt=0)
    name: str = Field(default="<i>me</i>", max_length=5)
    inner: list[Inner] = []


def test_hostile_texts_stay_texts() -> None:
    app = FastAPI(title=HOSTILE, description=HOSTILE, openapi_tags=[{"name": "<u>tag", "description": HOSTILE}])

    @app.post("/<b>path", tags=["<u>tag"], summary=HOSTILE, description=HOSTILE, responses=FAILS)
    async def take(body: Annotated[Outer, HOSTILE_BODY], q: str = "<em>") -> Outer:  # pyright: ignore[reportUnusedFunction]
        return body

    page = api_page(app.openapi(), HERE + "/<s>")
    seen = Seen(page)
    assert not {"script", "img", "u", "i", "em", "s"} & set(seen.tags)
    assert not re.search("<b>(code|path|Inner)", page)
    assert "<code>&lt;b&gt;code&lt;/b&gt;</code>" in page
    assert "{{ 7 * 7 }}" in page
    assert all(link == "openapi.json" or link.startswith("#") for link in seen.links)


def test_types_bounds_and_defaults_are_said_in_words() -> None:
    app = FastAPI()
    add_api_page(app, needs_key=False)

    @app.post("/take")
    async def take(body: Outer) -> Outer:  # pyright: ignore[reportUnusedFunction]
        return body

    text = re.sub(r"<[^>]+>", "", api_page(app.openapi(), HERE))
    assert "size required" in text
    assert "integer, 1 to 9" in text
    assert "number, above 0 or null" in text
    assert "string, at most 5 characters = &#34;&lt;i&gt;me&lt;/i&gt;&#34;" in text
    assert "list of Inner" in text
    assert "curl http://127.0.0.1:8081/take" in text
    assert "$KEY" not in text
