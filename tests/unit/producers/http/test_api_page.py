"""The page of an OpenAPI document: every route is explained, and nothing comes from elsewhere. See test_api_page.py of
tests/integration/http for what a browser makes of it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from sluice.pipeline.config.types import Config
from sluice.pipeline.wire.keys import Keys
from sluice.producers.agents.runs import open_runs
from sluice.producers.agents.server import build_app
from sluice.producers.agents.state import app_state
from sluice.producers.gateway.server import make_app
from sluice.producers.gateway.service import make_service
from sluice.producers.http.api_page import OPEN_PATHS, PATH
from sluice.producers.tokenizer import load_renderer
from tests.tiny_models import save_tiny_model


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


async def test_every_route_is_explained(app: FastAPI) -> None:
    operations = [(path, one) for path, item in app.openapi()["paths"].items() for one in item.values()]
    assert len(operations) >= 7
    for path, operation in operations:
        assert operation["summary"], path
        assert operation["description"], path


async def test_the_page_and_its_files_are_from_here_and_ask_for_no_key(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app)  # pyright: ignore[reportArgumentType]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        page = await http.get(PATH)
        assert page.status_code == 200
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert [f"/{link}" for link in links if link != "data:,"] == list(OPEN_PATHS[1:])
        assert "<script>" not in page.text
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        assert "unsafe" not in page.headers["Content-Security-Policy"]
        for path in OPEN_PATHS[1:]:
            assert (await http.get(path)).status_code == 200, path
        for path in ("/openapi.json", f"{PATH}/", f"{PATH}/static/", f"{PATH}/static/other.js"):
            assert (await http.get(path)).status_code == 401, path


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
