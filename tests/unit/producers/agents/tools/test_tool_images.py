"""Images that tools return: parts of the tool's message, in order; what can't be shown is a failed call."""

from __future__ import annotations

import base64
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import ConfigError
from sluice.producers.agents.tools import ToolBox, ToolImage, tool
from sluice.producers.agents.tools.image import with_digests
from tests.pictures import png

URL = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
PART = {"type": "image_url", "image_url": {"url": URL}}
TEXTS = [{"type": "text", "text": text} for text in ("before", '{"x":1}')]


@tool
def returns(kind: str) -> Any:
    """What the test asks for."""
    return RESULTS[kind]


RESULTS: dict[str, Any] = {
    "one": ToolImage(png()),
    "several": ["before", ToolImage(png()), {"x": 1}, ToolImage(png())],
    "list": ["a", "b"],
    "none": ToolImage(b"<html>"),
    "large": ToolImage(png() + bytes(1 << 20)),
    "missing": ToolImage(path="/nowhere/a.png"),
    "many": [ToolImage(png())] * 4,
    "pair": [ToolImage(png())] * 2,
    "parts": [ToolImage(png()), *["a"] * 256],
    "long": ["a" * 200_000, ToolImage(png()), "b" * 200_000, "c"],
}


async def content(kind: str) -> Any:
    box = ToolBox([returns], 10.0, images=ImagesConfig(max_mb=0.5, max_per_prompt=3))
    call = {"id": "1", "function": {"name": "returns", "arguments": {"kind": kind}}}
    [message] = await box.run([call])
    assert (message["role"], message["tool_call_id"]) == ("tool", "1")
    return message["content"]


async def test_an_image_is_a_part_of_the_tools_message(tmp_path: Path) -> None:
    assert await content("one") == [PART]
    assert await content("several") == [
        {"type": "text", "text": "before"},
        PART,
        {"type": "text", "text": '{"x":1}'},
        PART,
    ]
    assert await content("list") == '["a","b"]'
    (tmp_path / "a.png").write_bytes(png())
    RESULTS["path"] = ToolImage(path=tmp_path / "a.png")
    assert await content("path") == [PART]


@pytest.mark.parametrize("kind", ["none", "large", "missing", "many", "parts"])
async def test_what_can_not_be_shown_is_told_to_the_model(kind: str) -> None:
    said = await content(kind)
    assert said.startswith("Error: returns returned ")
    assert "nowhere" not in said


async def test_the_texts_beside_an_image_have_one_limit_together() -> None:
    first, shown, second, third = await content("long")
    assert (first["text"], shown) == ("a" * 200_000, PART)
    assert second["text"] == "b" * 62_144 + "\n[cut: the first 62144 of 200000 characters]"
    assert third["text"] == "\n[cut: the first 0 of 1 characters]"


async def test_images_beyond_those_of_a_conversation_are_told_to_the_model() -> None:
    def call(at: int, kind: str) -> dict[str, Any]:
        return {"id": str(at), "function": {"name": "returns", "arguments": {"kind": kind}}}

    before = [{"role": "user", "content": [PART]}]
    calls = [call(at, kind) for at, kind in enumerate(["one", "pair", "one", "one", "list"])]
    box = ToolBox([returns], 10.0, images=ImagesConfig(max_per_prompt=3))
    said = [message["content"] for message in await box.run(calls, before)]
    assert said[0] == said[2] == [PART]
    assert said[1].startswith(
        "Error: returns returned images that aren't shown: the conversation would have 4, the limit"
    )
    assert said[3].startswith(
        "Error: returns returned images that aren't shown: the conversation would have 4, the limit"
    )
    assert said[4] == '["a","b"]'
    box = ToolBox([returns], 10.0, body_mb=2.5 * len(URL) / 2**20 / (7 / 8))
    first, second = await box.run([call(0, "one"), call(1, "one")], before)
    assert first["content"] == [PART]
    assert "KiB of them in base64" in second["content"]


def test_an_image_has_one_source() -> None:
    for given in ({}, {"data": b"x", "path": "y"}):
        with pytest.raises(ConfigError, match="give one of them"):
            ToolImage(**given)


def test_a_final_answer_names_images_by_digest() -> None:
    shown = {"type": "image_url", "image_url": {"url": f"sha256:{sha256(png()).hexdigest()}"}}
    text, broken = {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}
    assert with_digests([{"role": "tool", "content": [PART, text, broken]}, {"role": "user", "content": "hi"}]) == [
        {"role": "tool", "content": [shown, text, broken]},
        {"role": "user", "content": "hi"},
    ]
