"""Images of rows that become rollouts: what the protocol names, which is a URL or the digest of a stored picture."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.store import ImageWriter
from sluice.producers.rollout_client.intake import heads_of
from sluice.producers.source import Row, RowImage
from tests.image_site import Site, site
from tests.pictures import png

__all__ = ["site"]

DATA, OTHER = png("red"), png("blue")
DIGEST = sha256(DATA).hexdigest()


async def named(tmp_path: Path, site: Site | None = None, **image: Any) -> str:
    """The URL of the row's image in the request."""
    images = ImagesConfig(roots=(str(tmp_path),), hosts=(f"127.0.0.1:{site.port}",) if site else ())
    config = Config(run="r", run_dir=str(tmp_path / "runs"), images=images)
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    row = Row(messages=[{"role": "user", "content": content}], images=[RowImage(**image)])
    [head] = await asyncio.to_thread(heads_of, config, row, 0, ImageWriter.of(config))
    part, _ = head.request["messages"][0]["content"]
    return part["image_url"]["url"]


async def test_a_url_stays_one_where_the_path_beside_it_leads_nowhere(tmp_path: Path) -> None:
    url = "http://images.example/a.png"
    assert await named(tmp_path, url=url) == url
    assert await named(tmp_path, path="gone.png", url=url) == url
    (tmp_path / "a.png").write_bytes(DATA)
    assert await named(tmp_path, path="a.png", url=url) == f"sha256:{DIGEST}"


@pytest.mark.parametrize("path", [None, "gone.png"])
async def test_a_url_with_a_digest_is_fetched_once_and_checked(tmp_path: Path, site: Site, path: str | None) -> None:
    site.routes["/a.png"], site.routes["/b.png"] = DATA, OTHER
    for _ in range(2):
        assert await named(tmp_path, site, path=path, url=site.url("/a.png"), sha256=DIGEST) == f"sha256:{DIGEST}"
    assert site.asked["/a.png"] == 1
    with pytest.raises(RequestError, match="its bytes have sha256"):
        await named(tmp_path, site, path=path, url=site.url("/b.png"), sha256="0" * 64)


async def test_an_image_that_is_nowhere_is_an_error_that_says_where_it_was_looked_for(
    tmp_path: Path, site: Site
) -> None:
    (tmp_path / "another.png").write_bytes(OTHER)  # an empty root may be a mount that is away
    with pytest.raises(RequestError, match=r"image 'gone\.png': no such file"):
        await named(tmp_path, path="gone.png")
    with pytest.raises(RequestError, match="no such file"):
        await named(tmp_path, sha256=DIGEST)
    with pytest.raises(RequestError, match=r"answered 404.*its path could not be used: no such file"):
        await named(tmp_path, site, path="gone.png", url=site.url("/c.png"), sha256=DIGEST)
