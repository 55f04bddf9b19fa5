"""Pictures at the gateway: questions about them, rollouts with several turns of them, and what attacks with them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from PIL import Image
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config, ImagesConfig, RolloutServerConfig
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.images.store import ImageWriter, images_directory
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import ImageRef
from sluice.producers.agents.tools import ToolImage, tool
from sluice.producers.gateway.parsers import Call, Parsed
from sluice.producers.rollout_client.intake import heads_of
from sluice.producers.source import Row, RowImage
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.agents import rollout_server
from tests.integration.gateway.harness import Gateway, kept, published, said, serving, user
from tests.pictures import encoded, huge_png, png
from tests.roles import run_config
from tests.tiny_vlms import picture, save_tiny_qwen_vl

SHORT = {"max_tokens": 6, "temperature": 0}
FIRST, SECOND = encoded(picture(40, 30, 0)), encoded(picture(24, 40, 1))
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    worker = {"poll_s": 0.01, "max_batch": 4, "drain_s": 10.0}
    images = ImagesConfig(max_mb=1, max_per_prompt=3)
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)}, images=images)


def shown(data: bytes | str) -> dict[str, Any]:
    url = data if isinstance(data, str) else f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def asks(*images: bytes | str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [*map(shown, images), {"type": "text", "text": "what is it?"}], **more}


def pads(config: Config, token_ids: list[int]) -> int:
    return token_ids.count(AutoTokenizer.from_pretrained(config.model.path).convert_tokens_to_ids(PAD))


async def test_a_data_url_is_the_same_question_as_its_file(
    config: Config, backend: HfBackend, keys: Keys, client: Any
) -> None:
    async with serving(config, backend) as gateway:
        answer = await gateway.chat([asks(FIRST, SECOND)], **SHORT)
        again = await gateway.chat([asks(*(f"sha256:{sha256(data).hexdigest()}" for data in (FIRST, SECOND)))], **SHORT)
        other = await gateway.chat([asks(SECOND, FIRST)], **SHORT)
        assert answer["prompt_token_ids"] == again["prompt_token_ids"]
        assert answer["token_ids"] == again["token_ids"]
        assert (answer["prompt_token_ids"], answer["token_ids"]) != (other["prompt_token_ids"], other["token_ids"])
        parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what is it?"}]
        urls = [shown(data)["image_url"]["url"] for data in (FIRST, SECOND)]
        listed = {"messages": [{"role": "user", "content": parts}], "images": urls}
        call = {"infer_requests": [listed, {"messages": [asks(FIRST, SECOND)]}]}
        status, envelopes = await gateway.post("/infer/", call | {"request_config": {"max_tokens": 4}})
        assert status == 200, envelopes
        assert [one["response"]["prompt_token_ids"] for one in envelopes] == [answer["prompt_token_ids"]] * 2


async def test_images_of_several_turns_are_context_of_one_sequence(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    turns: list[dict[str, Any]] = []
    async with serving(config, backend) as gateway:
        history = [asks(FIRST)]
        for more in (asks(SECOND, role="tool", tool_call_id="1"), user("and now?"), None):
            turns.append(await gateway.chat(history, rollout_id="r", **SHORT))
            if more is not None:
                history += [said(turns[-1]), more]
        for before, after in pairwise(turns):
            assert after["prompt_token_ids"][: len(kept(before))] == kept(before)
        plain = await gateway.chat([asks(FIRST)], **SHORT)
        assert plain["prompt_token_ids"] == turns[0]["prompt_token_ids"]
        assert (await gateway.finish("r"))[1]["parts"] == 1
    [result] = await published(client, keys)
    assert [image.sha256 for image in result.images] == [sha256(data).hexdigest() for data in (FIRST, SECOND)]
    assert list(result.prompt_token_ids) + list(result.token_ids) == kept(turns[-1])
    mask, token_ids = result.response_mask.expand(), list(result.token_ids)
    sampled = [token for turn in turns for token in turn["token_ids"]]
    assert [token for token, on in zip(token_ids, mask, strict=True) if on] == sampled
    assert pads(config, list(result.prompt_token_ids)) > 1
    assert pads(config, [token for token, on in zip(token_ids, mask, strict=True) if not on]) > 1
    assert b"base64" not in b"".join([fields[b"r"] for _, fields in await client.xrange(keys.results + "0")])


@tool
def look(at: str) -> Any:
    """A picture."""
    return [f"here is {at}", ToolImage(FIRST if at == "it" else SECOND)]


def look_in_every_text(text: str) -> Parsed:
    """A tool parser for a model that writes no calls."""
    return Parsed("", [Call("look", msgspec.json.encode({"at": "it" if len(text) % 2 else "that"}).decode())])


async def test_a_tool_shows_images_to_a_rollout_of_ours(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    config = msgspec.structs.replace(
        config,
        gateway=msgspec.structs.replace(config.gateway, tool_parser=f"{__name__}:look_in_every_text"),
        rollout_server=RolloutServerConfig(tools=(f"{__name__}:look",)),
    )
    async with serving(config, backend) as gateway, rollout_server(config, gateway.url) as server:
        asked = {"messages": [asks(SECOND)], "max_turns": 3, "max_tokens_total": 400}
        sampling = {"temperature": 0.0, "max_tokens": 6}
        answer = await server.post("/rollout", "r", "", **asked, sampling_params=sampling)
        assert (answer["status"], answer["finish_reason"]) == ("COMPLETED", "max_turns"), answer
    [result] = await published(client, keys)
    parts = [part for one in answer["final_messages"] for part in one.get("content") or () if isinstance(part, dict)]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert urls == [f"sha256:{image.sha256}" for image in result.images]
    assert len(urls) == 3
    assert urls[0] == f"sha256:{sha256(SECOND).hexdigest()}"
    mask, token_ids = result.response_mask.expand(), list(result.token_ids)
    assert result.turn == 3
    assert pads(config, [token for token, on in zip(token_ids, mask, strict=True) if not on]) > 2
    assert pads(config, [token for token, on in zip(token_ids, mask, strict=True) if on]) == 0
    inputs = VisionProcessor.load(config.model, transformers).match(
        [*result.prompt_token_ids, *token_ids], [Image.open(BytesIO(_kept(config, url))).convert("RGB") for url in urls]
    )
    assert len(inputs.images) == 3, "a trainer finds every image's expansion in the tokens of the sequence"


def _kept(config: Config, url: str) -> bytes:
    return (images_directory(config) / url.replace(":", "/")).read_bytes()


async def test_a_bomb_and_a_cut_picture_fail_their_call_alone(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        calls = [
            gateway.post("/v1/chat/completions", {"messages": [asks(data)], **SHORT})
            for data in (huge_png(), FIRST[:-60], FIRST)
        ]
        (bomb, why), (cut, broken), (status, _) = await asyncio.gather(*calls)
        assert (bomb, cut, status) == (400, 400, 200)
        assert "images.max_pixels" in why["error"]["message"]
        assert "is damaged" in broken["error"]["message"]


ATTACKS = (
    (asks("data:image/png;base64," + "A" * (3 << 20)), 413, "images.max_mb"),
    (asks("data:image/png;base64," + "*" * 1000), 400, "no base64"),
    (asks("data:text/html;base64,PGh0bWw+"), 400, "data:image/"),
    (asks(b"<html>" * 1000), 400, "accepted are"),
    (asks(*["data:image/png;base64,AAAA"] * 1000), 413, "1001 parts"),
    (asks(*[png()] * 4), 413, "images.max_per_prompt"),
    (asks("sha256:" + "0" * 64), 400, "images.store"),
)


async def test_hostile_pictures_are_refused_before_anything_is_stored_or_asked(
    config: Config, client: Any, keys: Keys
) -> None:
    async with serving(config, None) as gateway:
        for message, status, words in ATTACKS:
            for path, body in (
                ("/v1/chat/completions", {"messages": [message]}),
                ("/v1/chat/completions", {"messages": [message], "rollout_id": "r"}),
                ("/infer/", {"infer_requests": [{"messages": [message]}]}),
            ):
                got, answer = await gateway.post(path, body)
                assert (got, words in answer["error"]["message"]) == (status, True), (path, answer)
                assert len(answer["error"]["message"]) < 500
        got, answer = await gateway.post("/v1/chat/completions", {"messages": [asks("A" * (17 << 20))]})
        assert got == 413
        assert (await gateway.finish("r"))[0] == 404
    assert not images_directory(config).exists()
    assert await client.zcard(keys.jobs) == 0


async def test_a_call_that_is_refused_for_another_reason_leaves_no_picture(config: Config) -> None:
    rollout, mask = {"rollout_id": "r"}, {"response_mask": [0]}
    async with serving(config, None) as gateway:
        for path, body, words in (
            ("/v1/chat/completions", {"messages": [asks(FIRST)], **mask}, "mask_error"),
            ("/v1/chat/completions", {"messages": [asks(FIRST)], **rollout, **mask}, "mask_error"),
            ("/v1/chat/completions", {"messages": [asks(FIRST, "a.png")]}, "sha256:"),
            ("/infer/", {"infer_requests": [{"messages": [asks(FIRST)]}, {"messages": [asks(b"<html>")]}]}, "accepted"),
        ):
            status, answer = await gateway.post(path, body)
            assert (status, words in answer["error"]["message"]) == (400, True), answer
    assert not images_directory(config).exists()


async def test_large_data_urls_do_not_hold_up_other_calls(config: Config) -> None:
    noise = encoded(picture(500, 600, 3), "BMP")
    async with serving(config, None) as gateway:
        calls = [asyncio.create_task(_ask(gateway, noise + bytes([n]))) for n in range(8)]
        for _ in range(20):
            async with gateway.http.get(gateway.url + "/health") as answer:
                assert answer.status == 200
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _ask(gateway: Gateway, data: bytes) -> None:
    await gateway.post("/v1/chat/completions", {"messages": [asks(data)], **SHORT})


def test_rows_with_images_become_rollouts_that_name_them(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FIRST)
    config = msgspec.structs.replace(config, images=ImagesConfig(roots=(str(tmp_path),)))
    writer = ImageWriter.of(config)
    stored = writer.put(SECOND, "here")
    content = [{"type": "image"}, {"type": "text", "text": "?"}, {"type": "image"}, {"type": "image"}]
    url = "http://images.example/c.png"
    images: list[str | RowImage] = ["a.png", RowImage(sha256=stored), url]
    [head] = heads_of(config, Row(messages=[{"role": "user", "content": content}], images=images), 0, writer)
    digest = sha256(FIRST).hexdigest()
    assert head.request["messages"][0]["content"] == [
        shown(f"sha256:{digest}"), {"type": "text", "text": "?"}, shown(f"sha256:{stored}"), shown(url)
    ]  # fmt: skip
    assert writer.has(digest)
    assert [ref for ref in Row(messages=[{"role": "user", "content": content}], images=images).image_refs()] == [
        ImageRef(path="a.png"), ImageRef(sha256=stored), ImageRef(url=url)
    ]  # fmt: skip
