"""The images of a request: by URL, as bytes, by digest; and what is refused before anything is decoded."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.admission import Limits, admit_request
from sluice.pipeline.wire.messages import ImageRef, Message
from sluice.producers.gateway.images import RequestImages
from sluice.producers.gateway.refusals import Refusal
from tests.deadlines import HANG_S
from tests.pictures import huge_png, png, progressive_jpeg

CAT = "http://pictures.example:8000/cat.png"
DIGEST = sha256(png()).hexdigest()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def parts(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, *content]}]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    images = ImagesConfig(hosts=("pictures.example:8000",), max_per_prompt=3, max_mb=1, store_mb=1)
    return Config(run="r", run_dir=str(tmp_path), images=images)


@pytest.fixture
def images(config: Config) -> Iterator[RequestImages]:
    found = RequestImages(config)
    yield found
    found.close()


def soon() -> float:
    return time.monotonic() + HANG_S


async def stored(images: RequestImages, messages: list[dict[str, Any]]) -> tuple[list[Message], list[ImageRef]]:
    taken = await images.of_messages(messages, soon())
    await images.store(taken, soon())
    return taken.messages, taken.refs


async def test_what_is_taken_is_not_stored_before_it_is_asked_for(images: RequestImages, tmp_path: Path) -> None:
    taken = await images.of_messages(parts(shown(data_url(png()))), soon())
    assert taken.refs == [ImageRef(sha256=DIGEST)]
    assert not list(tmp_path.iterdir())


async def test_a_model_without_vision_gets_no_picture(config: Config, tmp_path: Path) -> None:
    images = RequestImages(config, model_takes_images=False)
    assert (await images.of_messages(parts(), soon())).refs == []
    for url in (data_url(png()), CAT):
        with pytest.raises(Refusal, match="this model takes none") as refused:
            await images.of_messages(parts(shown(url)), soon())
        assert (refused.value.status, refused.value.path) == (400, "messages.0.content.1")
    assert not list(tmp_path.iterdir())


async def test_a_picture_takes_no_longer_than_its_call_may(images: RequestImages, tmp_path: Path) -> None:
    taken = await images.of_messages(parts(shown(data_url(png()))), soon())
    with pytest.raises(Refusal, match=r"gateway\.request_timeout_s") as refused:
        await images.store(taken, time.monotonic() - 1)
    assert refused.value.status == 504
    assert not list(tmp_path.iterdir())


async def test_a_digest_may_be_written_in_capitals(images: RequestImages) -> None:
    await stored(images, parts(shown(data_url(png()))))
    assert (await stored(images, parts(shown(f"SHA256:{DIGEST.upper()}"))))[1] == [ImageRef(sha256=DIGEST)]


async def test_images_keep_the_order_of_their_parts_and_bytes_become_digests(
    images: RequestImages, tmp_path: Path
) -> None:
    given = [*parts(shown(data_url(png())), shown(CAT)), {"role": "assistant", "content": None}]
    given += parts({"type": "image_url", "image_url": data_url(png("blue"))})
    messages, refs = await stored(images, given)
    blue = sha256(png("blue")).hexdigest()
    assert refs == [ImageRef(sha256=DIGEST), ImageRef(url=CAT), ImageRef(sha256=blue)]
    assert [message["content"] for message in messages] == [
        [{"type": "text", "text": "what is it?"}, shown(f"sha256:{DIGEST}"), shown(CAT)],
        None,
        [{"type": "text", "text": "what is it?"}, shown(f"sha256:{blue}")],
    ]
    assert (tmp_path / "r/images/sha256" / DIGEST).read_bytes() == png()
    assert await stored(images, messages) == (messages, refs), "what was stored is named by its digest"


async def test_a_picture_is_shown_in_full_or_refused(images: RequestImages) -> None:
    def detailed(detail: str) -> list[dict[str, Any]]:
        return parts({"type": "image_url", "image_url": {"url": CAT, "detail": detail}})

    for detail in ("auto", "high"):
        assert (await stored(images, detailed(detail)))[0] == parts(shown(CAT))
    with pytest.raises(Refusal, match=r"model\.preprocess") as refused:
        await stored(images, detailed("low"))
    assert (refused.value.status, refused.value.path) == (400, "messages.0.content.1.image_url.detail")


async def test_messages_without_images_stay_as_they_are(images: RequestImages, tmp_path: Path) -> None:
    given = [{"role": "user", "content": "text"}, *parts()]
    assert await stored(images, given) == (given, [])
    assert not list(tmp_path.iterdir())


async def test_images_beside_the_messages_belong_to_their_parts(images: RequestImages) -> None:
    messages, refs = (await images.of_list(parts({"type": "image"}), [data_url(png())], "images", soon()))[:2]
    assert (messages, refs) == (parts(shown(f"sha256:{DIGEST}")), [ImageRef(sha256=DIGEST)])
    with pytest.raises(Refusal, match="1 images, and the messages have 0 image parts"):
        await images.of_list(parts(), [CAT], "images", soon())


BAD = (
    (shown("http://other.example/cat.png"), 400, "not a listed host"),
    (shown("file:///etc/passwd"), 400, "files are not accepted"),
    (shown("/etc/passwd"), 400, "files are not accepted"),
    (shown(7), 400, "files are not accepted"),
    ({"type": "image_url"}, 400, "files are not accepted"),
    ({"type": "image"}, 400, "files are not accepted"),
    ({"type": "input_audio", "input_audio": {}}, 400, "input_audio"),
    ({"type": "text", "text": 5}, 400, "a part must be of type text, with a text"),
    ({"type": "text", "text": "a", **{"image_url": CAT}}, 400, "a part must be of type text"),
    ("text", 400, "a part must be of type text, with a text"),
    (shown(data_url(png(), "text/html")), 400, "a data URL begins with data:image/"),
    (shown(data_url(png(), "image/" + "x" * 300)), 400, "a data URL begins with data:image/"),
    (shown("data:image/png," + "a" * 8), 400, "a data URL begins with data:image/"),
    (shown("data:image/png;base64"), 400, "a data URL begins with data:image/"),
    (shown("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()), 400, "accepted are"),
    (shown(data_url(b"<html>")), 400, "accepted are"),
    (shown(data_url(b"")), 400, "accepted are"),
    (shown("data:image/png;base64,AA=A"), 400, "holds no base64"),
    (shown("data:image/png;base64,AAA"), 400, "holds no base64"),
    (shown("data:image/png;base64,AA\nAA"), 400, "holds no base64"),
    (shown("data:image/png;base64,AA-_"), 400, "holds no base64"),
    (shown("data:image/png;base64,AAé="), 400, "holds no base64"),
    (shown(data_url(bytes(1 << 20) + b"x")), 413, "images.max_mb"),
    (shown("data:image/png;base64," + "*" * (2 << 20)), 413, "images.max_mb"),
    (shown(f"sha256:{DIGEST}"), 400, "images.store"),
    (shown("sha256:../../etc/passwd"), 400, "64 hexadecimal digits"),
)


@pytest.mark.parametrize(("part", "status", "words"), BAD)
async def test_what_is_no_image_of_a_request_is_refused_with_its_place(
    images: RequestImages, tmp_path: Path, part: Any, status: int, words: str
) -> None:
    with pytest.raises(Refusal, match=words) as refused:
        await stored(images, parts(part))
    assert (refused.value.status, refused.value.path) == (status, "messages.0.content.1")
    assert len(str(refused.value)) < 400, "it never repeats what was sent"
    assert not list(tmp_path.rglob("sha256/*"))


async def test_one_bad_part_stores_none_of_the_others(images: RequestImages, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not a listed host"):
        await stored(images, parts(shown(data_url(png())), shown("http://other.example/a.png")))
    assert not list(tmp_path.iterdir())


async def test_too_many_images_are_refused_before_any_is_looked_at(images: RequestImages, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"4 images; at most 3 are taken \(images.max_per_prompt\)") as refused:
        await stored(images, parts(*[shown(data_url(png()))] * 4))
    assert (refused.value.status, refused.value.path) == (400, "messages.0.content.4")
    assert not list(tmp_path.iterdir())


async def test_a_full_store_is_no_answer_to_ask_again_for(images: RequestImages) -> None:
    await stored(images, parts(shown(data_url(png() + bytes(900 << 10)))))
    with pytest.raises(Refusal, match=r"images\.store_mb") as refused:
        await stored(images, parts(shown(data_url(png("blue") + bytes(900 << 10)))))
    assert (refused.value.status, refused.value.headers) == (507, {"x-should-retry": "false"})
    assert refused.value.body()["error"]["code"] == "insufficient_storage"


async def test_a_bomb_is_stored_and_never_decoded_here(images: RequestImages) -> None:
    _, refs = await stored(images, parts(shown(data_url(huge_png()))))
    assert refs == [ImageRef(sha256=sha256(huge_png()).hexdigest())]
    slow = progressive_jpeg(side=600, num_bytes=1 << 19)
    assert (await stored(images, parts(shown(data_url(slow, "image/jpeg")))))[1]


def test_a_data_url_is_no_text_of_the_prompt_and_images_are_counted_at_the_door() -> None:
    limits = Limits(1024, images=2, data_urls=True)
    large = shown(data_url(bytes(4 << 20)))
    admit_request({"messages": parts(large, large)}, limits)
    with pytest.raises(RequestError, match=r"3 images; at most 2 are taken \(images.max_per_prompt\)"):
        admit_request({"messages": parts(large, large, large)}, limits)
    with pytest.raises(RequestError, match=r"has \d+ bytes"):
        admit_request({"messages": parts(large)}, Limits(1024, images=2))
    text = {"type": "text", "text": "data:" + "a" * (4 << 20)}
    with pytest.raises(RequestError, match=r"has \d+ bytes"):
        admit_request({"messages": parts(text)}, limits)
    with pytest.raises(RequestError, match="1001 parts"):
        admit_request({"messages": parts(*[shown(CAT)] * 1000)}, limits)
