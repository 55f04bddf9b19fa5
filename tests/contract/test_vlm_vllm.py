"""Images through real vLLM and through the hf backend: the same expanded prompts, tokens and logprobs."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions, VlmPreprocessOptions
from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.prompts import Prompts
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.vision import Vision
from tests.contract.engine_fixtures import repeated, run, started
from tests.contract.test_midflight_images import assert_seen_right
from tests.contract.test_vision_families import messages, other_decoder
from tests.contract.versions import Versions, decode_amid
from tests.contract.vllm_fixtures import vlm_options
from tests.contract.vlm_plain import PlainVlm
from tests.tiny_vision_models import save_tiny_idefics3
from tests.tiny_vlms import VLM_CONTEXT, picture, save_tiny_llava, save_tiny_qwen_vl

PICTURES = [picture(20, 20), picture(90, 33, 1), picture(200, 140, 2), picture(30, 64, 3)]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
]
UNRESIZED = VlmPreprocessOptions(do_resize=False)


@dataclass(frozen=True)
class Pair:
    """One tiny LLaVA on both backends, its images cut and not resized."""

    directory: Path
    vllm: VllmBackend
    hf: HfBackend
    prompts: Prompts

    def request(self, image: Any, seed: int = 0, **sampling: Any) -> SequenceRequest:
        """Greedy for 16 tokens unless told otherwise; without an image a prompt of text."""
        options = {"temperature": 0.0, "max_new_tokens": 16, **sampling}
        parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
        prompt = self.prompts.vlm([{"role": "user", "content": parts}]) if image else list(b"the abc of it")
        return SequenceRequest(
            "s", tuple(prompt), SamplingParams(**options), seed, (image,) if image else (), eos_token_ids=()
        )

    def assert_equal(self, *asked: SequenceRequest) -> list[SequenceOutput]:
        """The outputs, the same from both."""
        ours, theirs = run(self.vllm, *asked), run(self.hf, *asked)
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert replace(one, sampled=replace(one.sampled, logprobs=other.logprobs)) == other
        return ours


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = save_tiny_llava(tmp_path_factory.mktemp("llava"))
    config = ModelConfig(path=str(directory), preprocess=UNRESIZED)
    backends = HfBackend(config), VllmBackend(config, max_batch=5, options=vlm_options())
    for backend in backends:
        asyncio.run(backend.start())
    yield Pair(directory, backends[1], backends[0], Prompts(config))
    for backend in backends:
        asyncio.run(backend.close())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_prompts_tokens_and_logprobs_equal_those_of_the_hf_backend(pair: Pair, sampling: dict[str, Any]) -> None:
    facts = pair.vllm.facts
    assert facts.supports_vlm
    assert replace(facts, name="hf", engine_version="", flags=(), hooks=frozenset()) == replace(
        pair.hf.facts, engine_version="", flags=(), hooks=frozenset()
    )
    images = [*PICTURES, None, *PICTURES[:2]]
    asked = [pair.request(image, seed, max_new_tokens=6 + 2 * seed, **sampling) for seed, image in enumerate(images)]
    outputs = pair.assert_equal(*asked)
    assert len(outputs[0].prompt_token_ids) > len(asked[0].prompt_token_ids)
    assert len({tuple(output.token_ids[:6]) for output in outputs[:4]}) == 4  # every image tells its own story


@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_images_in_their_order_equal_those_of_the_hf_backend(pair: Pair, count: int) -> None:
    prompt = tuple(pair.prompts.vlm(messages(count), count))
    there = replace(pair.request(PICTURES[0]), prompt_token_ids=prompt, images=tuple(PICTURES[:count]))
    back = replace(there, images=there.images[::-1])
    first, second = pair.assert_equal(there, back)
    assert (first.token_ids != second.token_ids) is (count > 1)
    expanded = replace(there, prompt_token_ids=first.prompt_token_ids)
    assert run(pair.vllm, expanded) == [first], "what was expanded before is not expanded again"


def test_the_images_of_a_group_are_processed_once(pair: Pair) -> None:
    one = pair.request(picture(50, 50, 9), max_new_tokens=4, temperature=1.0)
    before = pair.vllm.images_processed
    run(pair.vllm, *(replace(one, seed=seed) for seed in range(6)))
    run(pair.vllm, replace(one, seed=7))
    assert pair.vllm.images_processed == before + 1


def test_an_idefics3_takes_several_images(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_tiny_idefics3(tmp_path)))
    backends = HfBackend(config), VllmBackend(config, max_batch=3, options=vlm_options(model_impl="auto"))
    pair = Pair(tmp_path, backends[1], backends[0], Prompts(config))
    try:
        for backend in backends:
            asyncio.run(backend.start())
        for count in (1, 2, 4):
            prompt = tuple(pair.prompts.vlm(messages(count), count))
            asked = replace(pair.request(PICTURES[0]), prompt_token_ids=prompt, images=tuple(PICTURES[:count]))
            ours, theirs = run(pair.vllm, asked)[0], run(pair.hf, asked)[0]
            assert (ours.prompt_token_ids, ours.token_ids) == (theirs.prompt_token_ids, theirs.token_ids)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
    finally:
        for backend in backends:
            asyncio.run(backend.close())


def test_image_options_reach_vllms_processor(pair: Pair) -> None:
    asked = pair.request(PICTURES[2])
    with started(pair.directory) as resizing:
        assert run(resizing, asked)[0].token_ids != run(pair.vllm, asked)[0].token_ids


def test_a_cache_keeps_images_apart_from_one_another_and_from_text(pair: Pair) -> None:
    first, second = (pair.request(image, max_new_tokens=6) for image in PICTURES[:2])
    expanded = run(pair.hf, first)[0].prompt_token_ids
    text = replace(first, images=(), prompt_token_ids=expanded)
    tokens = [pair.assert_equal(asked)[0].token_ids for asked in (text, first, second, text, second, first)]
    assert tokens == [tokens[0], tokens[1], tokens[2], tokens[0], tokens[2], tokens[1]]
    assert len({tuple(one) for one in tokens}) == 3


def test_either_backend_goes_on_where_the_other_was_interrupted(pair: Pair) -> None:
    asked = pair.request(PICTURES[1], 3, temperature=1.0, top_p=0.95, max_new_tokens=18)
    [whole] = run(pair.hf, asked)
    so_far = whole.sampled[:12]
    assert pair.assert_equal(replace(asked, so_far=so_far))[0].token_ids == whole.token_ids
    image_token = Vision.of(ModelConfig(path=str(pair.directory)), VllmEngineOptions(), 1)
    assert image_token is not None
    odd = replace(so_far, token_ids=[*whole.token_ids[:11], image_token.image_token_id])
    pair.assert_equal(replace(asked, so_far=odd))


async def test_an_abort_reaches_a_sequence_whose_image_is_being_processed(pair: Pair) -> None:
    async def attempt() -> SequenceOutput:
        unseen = picture(900, 700)  # another object each time, which nobody has processed
        task = asyncio.create_task(pair.vllm.decode(pair.request(unseen, max_new_tokens=400)))
        await asyncio.sleep(0)
        pair.vllm.abort("s")
        return await task

    output = await repeated(attempt, until=lambda found: found.finish_reason == "cancelled")
    assert output.finish_reason == "cancelled"
    assert len(output.token_ids) < 400


def test_a_bad_request_fails_alone(pair: Pair) -> None:
    good = pair.request(PICTURES[0])
    encoded = BytesIO()
    picture(64, 64).save(encoded, format="PNG")
    cut = replace(good, images=(Image.open(BytesIO(encoded.getvalue()[:-60])),))
    fits = VLM_CONTEXT - len(run(pair.hf, good)[0].prompt_token_ids)
    bad = {
        "2 image placeholders": replace(good, prompt_token_ids=good.prompt_token_ids * 2),
        "0 image placeholders": replace(good, prompt_token_ids=(65, 66)),
        f"use at most {fits}": replace(good, sampling=SamplingParams(temperature=0.0, max_new_tokens=fits + 1)),
        r"64 x 64\) cannot be processed": cut,
    }
    whole, *errors = asyncio.run(_outcomes(pair.vllm, [good, *bad.values()]))
    assert [whole.token_ids] == [output.token_ids for output in run(pair.hf, good)]
    for says, error in zip(bad, errors, strict=True):
        with pytest.raises(RequestError, match=says):
            raise error
    pair.assert_equal(good, pair.request(None))


async def _outcomes(backend: Backend, asked: list[SequenceRequest]) -> list[Any]:
    return await asyncio.gather(*(backend.decode(one) for one in asked), return_exceptions=True)


def test_other_weights_see_other_things(pair: Pair, tmp_path: Path) -> None:
    asked = [pair.request(image, max_new_tokens=8) for image in (*PICTURES[:2], None)]
    before = pair.assert_equal(*asked)
    try:
        _load(pair, save_tiny_llava(tmp_path, seed=2), 1)
        after = pair.assert_equal(*asked)
    finally:
        _load(pair, pair.directory, 0)
    assert all(one.token_ids != other.token_ids for one, other in zip(before, after, strict=True))
    assert [one.token_ids for one in pair.assert_equal(*asked)] == [one.token_ids for one in before]


def test_an_update_amid_a_sequence_shows_the_image_again(pair: Pair, tmp_path: Path) -> None:
    versions = Versions({0: pair.directory, 1: save_tiny_llava(tmp_path, seed=2)}, {})
    asked = pair.request(PICTURES[1], temperature=1.0, max_new_tokens=100)
    try:
        output = decode_amid(pair.vllm, versions, [(2, 1)], [asked])[0]
    finally:
        _load(pair, pair.directory, 0)
    assert set(output.versions) == {0, 1}
    plain = [PlainVlm(directory, do_resize=False) for directory in versions.directories.values()]
    assert_seen_right(output, plain, asked.prompt_token_ids, PICTURES[1])


def test_images_stay_encoded_while_the_vision_part_stays_the_same(pair: Pair, tmp_path: Path) -> None:
    frozen, trained = other_decoder(pair.directory, tmp_path / "frozen"), save_tiny_llava(tmp_path / "trained", seed=2)
    versions = Versions({0: pair.directory, 1: frozen}, {})
    asked = pair.request(PICTURES[3], temperature=1.0, max_new_tokens=100)
    try:
        output = decode_amid(pair.vllm, versions, [(2, 1)], [asked])[0]
        assert set(output.versions) == {0, 1}
        assert pair.vllm.images_kept > 0
        plain = [PlainVlm(directory, do_resize=False) for directory in versions.directories.values()]
        assert_seen_right(output, plain, asked.prompt_token_ids, PICTURES[3])
        _load(pair, trained, 2)
        assert pair.vllm.images_kept == 0
        pair.assert_equal(pair.request(PICTURES[3]))
    finally:
        _load(pair, pair.directory, 0)
        assert pair.vllm.images_kept == 0


def _load(pair: Pair, directory: Path, version: int) -> None:
    for backend in (pair.vllm, pair.hf):
        asyncio.run(backend.load_weights(directory, version))


@pytest.mark.parametrize(
    ("model", "extra", "says"),
    [
        ({"preprocess": VlmPreprocessOptions(max_pixels=1024)}, {}, "knows no max_pixels"),
        (
            {"variant": "vlm"},
            {"limit_mm_per_prompt": {"image": 0}},
            "but worker.vllm.extra.limit_mm_per",
        ),
        (
            {"variant": "vlm"},
            {"language_model_only": True},
            "but worker.vllm.extra.language_model_only",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_vllm_starts(
    pair: Pair, model: dict[str, Any], extra: dict[str, Any], says: str
) -> None:
    config = ModelConfig(path=str(pair.directory), **model)
    with pytest.raises(ModelError, match=says):
        asyncio.run(VllmBackend(config, options=vlm_options(**extra)).start())


def test_a_pixel_budget_goes_to_vllm_as_the_hf_backend_applies_it(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_tiny_qwen_vl(tmp_path)), preprocess=VlmPreprocessOptions(max_pixels=1024))
    vision = Vision.of(config, VllmEngineOptions(), 4)
    assert vision is not None
    assert vision.arguments["mm_processor_kwargs"] == {"size": {"shortest_edge": 256, "longest_edge": 1024}}


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_model_that_needs_torchvision_says_so(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_tiny_qwen_vl(tmp_path)))
    with pytest.raises(ModelError, match=r"(?i)torchvision library.*need the package torchvision: install it"):
        asyncio.run(VllmBackend(config, options=vlm_options()).start())
    vision = Vision.of(config, VllmEngineOptions(), 4)
    assert vision is not None
    assert "model_impl: transformers" in vision.hint(VllmEngineOptions())


def test_a_text_model_is_no_vision_language_model(model_dir: Path) -> None:
    assert Vision.of(ModelConfig(path=str(model_dir)), VllmEngineOptions(), 1) is None
    with pytest.raises(ModelError, match="variant is vlm, and Qwen3Config has no vision part"):
        Vision.of(ModelConfig(path=str(model_dir), variant="vlm"), VllmEngineOptions(), 1)
