"""One fetch for equal references; a bounded cache; errors that name the image."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.store import ImageStore
from sluice.pipeline.wire.messages import ImageRef
from tests.deadlines import HANG_S
from tests.image_site import Site
from tests.pictures import huge_png, png

RED = hashlib.sha256(png()).hexdigest()
OTHER = "0" * 64


def config(root: Path | None = None, site: Site | None = None, **changes: object) -> ImagesConfig:
    """Open to the directory and to the site."""
    roots = (str(root),) if root else ()
    hosts = (f"127.0.0.1:{site.port}",) if site else ()
    return ImagesConfig(roots=roots, hosts=hosts, **changes)  # type: ignore[arg-type]


async def test_a_path_a_url_and_a_digest_lead_to_the_image(tmp_path: Path, site: Site) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "sha256").mkdir()
    (tmp_path / "sha256" / RED).write_bytes(png())
    site.routes["/a.png"] = png()
    async with ImageStore(config(tmp_path, site)) as images:
        for ref in (
            ImageRef(path="a.png"),
            ImageRef(path=str(tmp_path / "a.png")),
            ImageRef(url=site.url("/a.png")),
            ImageRef(sha256=RED),
            ImageRef(path="a.png", sha256=f"sha256:{RED.upper()}"),
        ):
            image = await images.get(ref)
            assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (8, 6), (255, 0, 0))
        assert (images.fetched, images.hits) == (3, 2)  # both paths are one file, both digests one content


async def test_twenty_callers_share_one_fetch(site: Site) -> None:
    release = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.Response:
        await release.wait()
        return web.Response(body=png())

    site.routes["/a.png"] = slow
    async with ImageStore(config(site=site)) as images:
        ref = ImageRef(url=site.url("/a.png"))
        callers = [asyncio.create_task(images.get(ref)) for _ in range(20)]
        await asyncio.wait_for(site.was_asked.wait(), HANG_S)
        callers[0].cancel()  # the one that began the fetch
        await asyncio.wait(callers[:1], timeout=HANG_S)
        release.set()
        first, *others = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert {id(image) for image in others} == {id(await images.get(ref))}
        assert (images.fetched, images.hits, site.asked["/a.png"]) == (1, 20, 1)


async def test_a_fetch_goes_on_when_all_callers_gave_up(site: Site) -> None:
    async def slow(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response(body=png())

    site.routes["/a.png"] = slow
    async with ImageStore(config(site=site)) as images:
        ref = ImageRef(url=site.url("/a.png"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(images.get(ref), 0.02)
        await images.get(ref)
        assert (images.fetched, site.asked["/a.png"]) == (1, 1)


async def test_a_failed_fetch_is_not_kept(tmp_path: Path, site: Site) -> None:
    (tmp_path / "other.png").write_bytes(png())
    async with ImageStore(config(tmp_path, site)) as images:
        for ref in (ImageRef(path="late.png"), ImageRef(url=site.url("/late.png"))):
            results = await asyncio.gather(*(images.get(ref) for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [RequestError] * 3
        assert site.asked["/late.png"] == 1
        (tmp_path / "late.png").write_bytes(png())
        site.routes["/late.png"] = png()
        await images.get(ImageRef(path="late.png"))
        await images.get(ImageRef(url=site.url("/late.png")))
        assert (images.fetched, images.hits) == (2, 0)


async def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png("red"))
    os.utime(file, ns=(1, 1))
    async with ImageStore(config(tmp_path)) as images:
        await images.get(ImageRef(path="a.png"))
        file.write_bytes(png("blue"))
        assert (await images.get(ImageRef(path="a.png"))).getpixel((0, 0)) == (0, 0, 255)
        assert images.fetched == 2


async def test_the_least_recently_used_image_goes_first(tmp_path: Path) -> None:
    """A cache of 1 MiB holds two images of 320 x 320 x 4 bytes, not three, and never one of 600 x 600."""
    for name, side in (("a", 320), ("b", 320), ("c", 320), ("large", 600)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{name}.png")
    async with ImageStore(config(tmp_path, cache_mb=1)) as images:
        for name in ("a", "b", "a", "c", "large", "a", "b"):
            await images.get(ImageRef(path=f"{name}.png"))
        assert (images.fetched, images.hits) == (5, 2)


async def test_without_a_cache_each_call_fetches(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    async with ImageStore(config(tmp_path, cache_mb=0)) as images:
        for _ in range(2):
            await images.get(ImageRef(path="a.png"))
        assert images.fetched == 2


async def test_the_path_comes_first_and_the_url_when_there_is_no_such_file(tmp_path: Path, site: Site) -> None:
    (tmp_path / "a.png").write_bytes(png())
    site.routes["/a.png"] = png("blue")
    async with ImageStore(config(tmp_path, site)) as images:
        here = await images.get(ImageRef(path="a.png", url=site.url("/a.png")))
        assert (here.getpixel((0, 0)), site.asked["/a.png"]) == ((255, 0, 0), 0)
        there = await images.get(ImageRef(path="none.png", url=site.url("/a.png")))
        assert there.getpixel((0, 0)) == (0, 0, 255)
        with pytest.raises(RequestError, match=r"answered 404.*its path could not be used: no such file"):
            await images.get(ImageRef(path="none.png", url=site.url("/none.png")))


async def test_wrong_bytes_are_refused_with_both_digests(tmp_path: Path, site: Site) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / OTHER).write_bytes(png())
    site.routes["/a.png"] = png()
    async with ImageStore(config(tmp_path, site)) as images:
        for source in ({"path": "a.png"}, {"url": site.url("/a.png")}, {}):
            with pytest.raises(RequestError, match=f"have sha256 {RED}, the job asks for {OTHER}"):
                await images.get(ImageRef(sha256=OTHER, **source))


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (ImageRef(), "give a path, a url or a sha256"),
        (ImageRef(path="", url=""), "give a path, a url or a sha256"),
        (ImageRef(sha256="abc"), "image sha256 abc: its sha256 must be 64 hexadecimal digits"),
        (ImageRef(sha256=OTHER), "no such file below images.roots"),
        (ImageRef(path="bomb.png"), r"image 'bomb\.png': is 60000 x 60000 pixels"),
        (ImageRef(path="large.png"), r"image 'large\.png': has at least 2\d+ bytes"),
        (ImageRef(path="text.png"), r"image 'text\.png': is data that starts with b'some text'"),
        (ImageRef(path="/dev/zero"), "outside the configured roots"),
        (
            ImageRef(url="http://user:secret@evil.org/a.png?key=secret"),
            r"image http://evil\.org/a\.png\?…: .*set images",
        ),
    ],
)
async def test_an_error_names_the_image_and_keeps_secrets(tmp_path: Path, ref: ImageRef, reason: str) -> None:
    (tmp_path / "bomb.png").write_bytes(huge_png())
    (tmp_path / "large.png").write_bytes(bytes(2**20 * 2 + 10))
    (tmp_path / "text.png").write_bytes(b"some text")
    async with ImageStore(config(tmp_path, max_mb=2)) as images:
        with pytest.raises(RequestError, match=reason) as caught:
            await images.get(ref)
    assert "secret" not in str(caught.value)


async def test_closing_ends_what_is_under_way_and_refuses_what_comes_later(site: Site) -> None:
    async def never(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    site.routes["/a.png"] = never
    images, ref = ImageStore(config(site=site)), ImageRef(url=site.url("/a.png"))
    caller = asyncio.create_task(images.get(ref))
    await asyncio.wait_for(site.was_asked.wait(), HANG_S)
    await images.close()
    with pytest.raises(RequestError, match="was closed meanwhile"):
        await asyncio.wait_for(caller, HANG_S)
    with pytest.raises(RequestError, match="is closed"):
        await images.get(ref)


@pytest.mark.parametrize("step", ["_source._roots.read", "decoders.decode"])
async def test_the_loop_goes_on_while_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each step that blocks waits in a thread: what it waits for here, the loop does."""
    (tmp_path / "a.png").write_bytes(png())
    goes_on, here = threading.Event(), asyncio.get_running_loop()
    async with ImageStore(config(tmp_path)) as images:
        *way, name = step.split(".")
        owner: Any = functools.reduce(getattr, way, images)
        real = getattr(owner, name)

        def held(*asked: Any) -> Any:
            here.call_soon_threadsafe(goes_on.set)
            assert goes_on.wait(HANG_S)
            return real(*asked)

        monkeypatch.setattr(owner, name, held)
        await images.get(ImageRef(path="a.png"))
    assert goes_on.is_set()
