"""The fallback around two real engines: a text model in front, a vision-language model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import EngineError, RequestError
from sluice.workers.engine.backends import RoutedBackend
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.prompts import Prompts
from tests.contract.engine_fixtures import request
from tests.deadlines import HANG_S
from tests.tiny_vlms import picture, save_tiny_llava, save_tiny_qwen_vl

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
async def routed(llava: Path) -> AsyncIterator[RoutedBackend]:
    """Without images in front: the same model, loaded for text."""
    front = HfBackend(ModelConfig(path=str(llava), device="cpu", variant="text"), max_batch=4)
    backend = RoutedBackend(front, lambda: HfBackend(ModelConfig(path=str(llava), device="cpu"), max_batch=4))
    await backend.start()
    yield backend
    await backend.close()


def seen(llava: Path, key: str = "seen", max_new_tokens: int = 8) -> SequenceRequest:
    prompt = Prompts(ModelConfig(path=str(llava))).vlm(MESSAGES)
    sampling = request([1], max_new_tokens=max_new_tokens).sampling
    return SequenceRequest(key, tuple(prompt), sampling, images=(picture(40, 30),), eos_token_ids=())


async def test_images_go_to_the_fallback_which_says_so_and_text_stays(routed: RoutedBackend, llava: Path) -> None:
    text = await routed.decode(request([1, 2, 3]))
    image = await routed.decode(seen(llava))
    assert text.fallback == {}
    assert (image.fallback["wanted"], image.fallback["used"]) == ("hf", "hf")
    assert image.fallback["version"] == routed.facts.engine_version


async def test_both_have_the_weights_of_the_moment_whenever_the_fallback_is_loaded(
    routed: RoutedBackend, llava: Path, tmp_path: Path
) -> None:
    other = save_tiny_llava(tmp_path, seed=5)
    old = await routed.decode(seen(llava))
    await routed.load_weights(other, 3)
    new = await routed.decode(seen(llava))
    assert new.token_ids != old.token_ids
    assert set(new.versions) == {3}
    late = RoutedBackend(
        HfBackend(ModelConfig(path=str(llava), device="cpu", variant="text")),
        lambda: HfBackend(ModelConfig(path=str(llava), device="cpu")),
    )
    await late.start()
    await late.load_weights(other, 3)
    assert (await late.decode(seen(llava))).token_ids == new.token_ids
    await late.close()


async def test_an_abort_reaches_what_waits_for_the_fallback(routed: RoutedBackend, llava: Path) -> None:
    task = asyncio.create_task(routed.decode(seen(llava, "doomed", 300)))
    await asyncio.sleep(0)
    routed.abort("doomed")
    output = await asyncio.wait_for(task, HANG_S)
    assert output.finish_reason == "cancelled"


async def test_nothing_is_loaded_after_the_close(routed: RoutedBackend, llava: Path) -> None:
    await routed.close()
    with pytest.raises(RequestError, match="closed"):
        await routed.decode(seen(llava))


async def test_a_fallback_that_cannot_be_loaded_refuses_its_requests_and_is_tried_once(
    llava: Path, tmp_path: Path
) -> None:
    made: list[HfBackend] = []

    def broken() -> HfBackend:
        made.append(HfBackend(ModelConfig(path=str(tmp_path / "none"), device="cpu")))
        return made[-1]

    backend = RoutedBackend(HfBackend(ModelConfig(path=str(llava), device="cpu", variant="text")), broken)
    await backend.start()
    for _ in range(2):
        with pytest.raises(RequestError, match="no such directory"):
            await backend.decode(seen(llava))
    assert len(made) == 1
    assert (await backend.decode(request([1, 2]))).finish_reason in ("stop", "length")
    await backend.close()


async def test_without_a_fallback_an_image_is_an_error_that_says_what_to_do(llava: Path) -> None:
    backend = RoutedBackend(HfBackend(ModelConfig(path=str(llava), device="cpu", variant="text")))
    await backend.start()
    with pytest.raises(EngineError, match="use a vision-language model"):
        await backend.for_images()
    await backend.close()


async def test_a_fallback_that_refuses_new_weights_ends_what_it_has_under_the_old_ones(
    llava: Path, tmp_path: Path
) -> None:
    """Here it is of another shape; a short fault of the disk would be the same."""
    qwen, other = save_tiny_qwen_vl(tmp_path / "qwen"), save_tiny_llava(tmp_path / "other", seed=5)
    made: list[HfBackend] = []

    def fallback() -> HfBackend:
        made.append(HfBackend(ModelConfig(path=str(qwen), device="cpu")))
        return made[-1]

    backend = RoutedBackend(HfBackend(ModelConfig(path=str(llava), device="cpu", variant="text")), fallback)
    await backend.start()
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    asked = replace(seen(qwen, "long", 150), report_every=1, report=lambda _: loop.call_soon_threadsafe(begun.set))
    running = asyncio.create_task(backend.decode(asked))
    await asyncio.wait_for(begun.wait(), HANG_S)
    await backend.load_weights(other, 1)
    output = await asyncio.wait_for(running, HANG_S)
    assert (output.finish_reason, set(output.versions), backend.version) == ("length", {0}, 1)
    for _ in range(2):
        with pytest.raises(RequestError, match="nor its fallback"):
            await backend.decode(seen(qwen))
    assert len(made) == 3, "it is tried anew: the weights may be readable the next time"
    await backend.close()
