"""`GET /docs`: the application's OpenAPI document in FastAPI's Swagger UI page, without external resources.

- Clusters have no internet access, so this module serves script and style: Swagger UI 5.35.0, as in npm's
  swagger-ui-dist.
- The page and its files are public, because they reveal nothing about this server. The document and every request the
  page sends need the key if one is set; start.js asks for it, and closing the page forgets it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

PATH = "/docs"
_STATIC = Path(__file__).parent / "static"
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "start.js")
OPEN_PATHS = (PATH, *(f"{PATH}/static/{name}" for name in _FILES))
"""What is answered without a key."""

_POLICY = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/static/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/static/swagger-ui-bundle.js"></script>
<script src="docs/static/start.js"></script>
</body>
</html>
"""


def add_api_page(app: FastAPI) -> None:
    """The application must be made with `docs_url=None, redoc_url=None`."""
    app.mount(f"{PATH}/static", StaticFiles(directory=_STATIC), name="api page")

    @app.get(PATH, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.format(title=escape(app.title)), headers=_POLICY)
