"""The contract of decoding with an image, over the real HF backend and two tiny real models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.wire.messages import SamplingParams
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.hf.decoder import Decoder
from sluice.workers.engine.hf.model import load_model
from sluice.workers.engine.hf.rows import Row
from sluice.workers.engine.hf.vision import PreparedImages
from sluice.workers.engine.prompts import Prompts
from tests.contract.engine_fixtures import decode_all, run, started
from tests.contract.vlm_plain import PlainVlm
from tests.tiny_vlms import VLM_CONTEXT, picture, save_tiny_llava, save_tiny_qwen_vl

MAKERS = {"llava": save_tiny_llava, "qwen": save_tiny_qwen_vl}
PICTURES = [picture(20, 20), picture(90, 33, 1), picture(200, 140, 2), picture(30, 64, 3)]


def shown(image: Image.Image | None) -> tuple[Image.Image, ...]:
    return () if image is None else (image,)


@dataclass(frozen=True)
class Vlm:
    """One tiny model, as a running backend and as transformers has it."""

    directory: Path
    backend: HfBackend
    plain: PlainVlm
    prompts: Prompts

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(path=str(self.directory), device="cpu")

    def prompt(self, text: str = "what is it?") -> tuple[int, ...]:
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        return tuple(self.prompts.vlm([{"role": "user", "content": parts}]))

    def request(self, image: Image.Image | None, seed: int = 0, **sampling: Any) -> SequenceRequest:
        """Greedy for 16 tokens unless told otherwise; without an image a prompt of text."""
        options = {"temperature": 0.0, "max_new_tokens": 16, **sampling}
        prompt = tuple(b"the abc of it") if image is None else self.prompt()
        return SequenceRequest("s", prompt, SamplingParams(**options), seed, shown(image), eos_token_ids=())


@pytest.fixture(scope="module", params=list(MAKERS))
def vlm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vlm]:
    directory = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    with started(directory, max_batch=5) as backend:
        yield Vlm(directory, backend, PlainVlm(directory), Prompts(ModelConfig(path=str(directory))))


def test_greedy_tokens_equal_generate_for_images_beside_text(vlm: Vlm) -> None:
    assert vlm.backend.facts.supports_vlm
    asked = [vlm.request(image, max_new_tokens=6 + 5 * at) for at, image in enumerate([*PICTURES, None, PICTURES[0]])]
    outputs = run(vlm.backend, *asked)
    for one, output in zip(asked, outputs, strict=True):
        prompt, tokens = vlm.plain.greedy(one.prompt_token_ids, one.images, len(output.token_ids))
        assert len(tokens) == one.sampling.max_new_tokens
        assert (list(output.prompt_token_ids), output.token_ids) == (prompt, tokens)


def test_logprobs_equal_plain_forward_passes(vlm: Vlm) -> None:
    asked = [vlm.request(image, seed, temperature=0.8) for seed, image in enumerate([*PICTURES, None])]
    for one, output in zip(asked, run(vlm.backend, *asked), strict=True):
        expected = vlm.plain.logprobs(one.prompt_token_ids, one.images, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_the_image_decides_what_is_decoded(vlm: Vlm) -> None:
    outputs = run(vlm.backend, *(vlm.request(image) for image in PICTURES))
    assert len({tuple(output.token_ids) for output in outputs}) == len(PICTURES)


def test_neighbours_do_not_change_a_sequence_with_an_image(vlm: Vlm) -> None:
    one = vlm.request(PICTURES[1], 7, temperature=1.0, top_p=0.9, max_new_tokens=40)
    alone = run(vlm.backend, one)[0].token_ids
    others = [
        vlm.request(image, at, temperature=0.5, max_new_tokens=5 * at + 1) for at, image in enumerate([None, *PICTURES])
    ]
    assert run(vlm.backend, *others[:3], one, *others[3:], *others)[3].token_ids == alone
    assert run(vlm.backend, replace(one, images=(PICTURES[2],)))[0].token_ids != alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_goes_on_as_if_it_had_never_stopped(vlm: Vlm, temperature: float) -> None:
    whole = vlm.request(PICTURES[2], 3, temperature=temperature, max_new_tokens=24)
    output = run(vlm.backend, whole)[0]
    cuts = [1, 9, 23]
    pieces = [output.sampled[:at] for at in cuts]
    *again, _ = run(vlm.backend, *(replace(whole, so_far=piece) for piece in pieces), vlm.request(None))
    for one in again:
        assert one.token_ids == output.token_ids
        assert one.prompt_token_ids == output.prompt_token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(output.logprobs), atol=1e-4, rtol=0)


def test_a_generated_image_token_is_text_when_the_sequence_goes_on(vlm: Vlm) -> None:
    image_token = VisionProcessor.load(vlm.config, transformers).image_token_id
    so_far = SampledTokens([65, image_token, image_token], [-1.0] * 3, [0] * 3)
    output = run(vlm.backend, replace(vlm.request(PICTURES[0]), so_far=so_far))[0]
    assert output.token_ids[:3] == so_far.token_ids
    expected = vlm.plain.logprobs(vlm.prompt(), [PICTURES[0]], output.token_ids)[3:]
    torch.testing.assert_close(torch.tensor(output.logprobs[3:]), expected, atol=1e-4, rtol=0)


def test_samples_of_one_image_share_preparation_and_prefill(vlm: Vlm) -> None:
    model = load_model(vlm.config)
    assert model.vision is not None
    asked = [vlm.request(PICTURES[0], seed, temperature=1.0) for seed in range(3)]
    first, second, other = asyncio.run(_prepared(model.vision, [*asked[:2], vlm.request(PICTURES[1])]))
    assert first is second
    assert first is not other
    prefills: list[str] = []
    hook = register_module_forward_pre_hook(lambda module, _: prefills.append(type(module).__name__))
    try:
        with torch.inference_mode():
            rows = [Row(one, model.tokenizer, model.facts, first) for one in asked]
            text = Row(vlm.request(None), model.tokenizer, model.facts)
            Decoder(model, 0).join([rows[0], text, *rows[1:], Row(asked[0], model.tokenizer, model.facts, other)])
    finally:
        hook.remove()
    assert sum(name in ("CLIPVisionModel", "Qwen2_5_VisionTransformerPretrainedModel") for name in prefills) == 2
    assert len({row.tokens[0] for row in rows}) > 1
    assert [row.tokens for row in rows] == [run(vlm.backend, one)[0].token_ids[:1] for one in asked]


async def _prepared(processor: VisionProcessor, asked: list[SequenceRequest]) -> list[Any]:
    images = PreparedImages(processor)
    everybody = asyncio.Barrier(len(asked))

    async def one(request: SequenceRequest) -> Any:
        async with images.of(request) as prepared:
            await everybody.wait()
            return prepared

    try:
        return await asyncio.gather(*(one(request) for request in asked))
    finally:
        images.close()


async def test_an_abort_reaches_a_sequence_whose_image_is_being_prepared(vlm: Vlm) -> None:
    task = asyncio.create_task(vlm.backend.decode(vlm.request(PICTURES[2], max_new_tokens=400)))
    await asyncio.sleep(0)
    vlm.backend.abort("s")
    output = await task
    assert output.finish_reason == "cancelled"
    assert len(output.token_ids) < 400


async def test_a_cancelled_sequence_leaves_its_image_to_the_others(vlm: Vlm) -> None:
    one = vlm.request(PICTURES[2])
    gone = asyncio.create_task(vlm.backend.decode(one))
    stays = asyncio.create_task(vlm.backend.decode(one))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await stays).token_ids == (await vlm.backend.decode(one)).token_ids


def test_a_bad_request_fails_alone(vlm: Vlm) -> None:
    good = vlm.request(PICTURES[0])
    twice = replace(good, prompt_token_ids=good.prompt_token_ids * 2)
    none = replace(good, prompt_token_ids=(65, 66))
    expanded = len(run(vlm.backend, good)[0].prompt_token_ids)
    assert expanded > len(good.prompt_token_ids)
    fits = VLM_CONTEXT - expanded
    long = replace(good, sampling=SamplingParams(temperature=0.0, max_new_tokens=fits + 1))
    outcomes = asyncio.run(_outcomes(vlm.backend, [twice, good, none, long]))
    assert [type(outcome) for outcome in outcomes] == [RequestError, list, RequestError, RequestError]
    for outcome, says in ((0, "2 image placeholders"), (2, "0 image placeholders"), (3, f"use at most {fits}")):
        assert says in str(outcomes[outcome])
    assert outcomes[1] == run(vlm.backend, good)


async def _outcomes(backend: HfBackend, asked: list[SequenceRequest]) -> list[Any]:
    return await asyncio.gather(*(decode_all(backend, [one]) for one in asked), return_exceptions=True)
