"""Every family of vision-language models with 1, 2 and 4 images: plain transformers passes are the oracle."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.prompts import Prompts
from tests.contract.engine_fixtures import run, started
from tests.contract.test_midflight_images import assert_seen_right
from tests.contract.versions import Updates, Versions
from tests.contract.vlm_plain import PlainVlm
from tests.tiny_vision_models import FAMILIES, pictures


@dataclass(frozen=True)
class Family:
    """One tiny model, as a running backend and as transformers has it."""

    name: str
    directory: Path
    backend: HfBackend
    plain: PlainVlm
    prompts: Prompts

    def request(self, images: Sequence[Any], key: str = "s", **sampling: Any) -> SequenceRequest:
        """In two turns, with line breaks around the images; greedy for 16 tokens unless told otherwise."""
        options = {"temperature": 0.0, "max_new_tokens": 16, **sampling}
        prompt = tuple(self.prompts.vlm(messages(len(images)), len(images)))
        return SequenceRequest(key, prompt, SamplingParams(**options), 3, tuple(images), eos_token_ids=())


def messages(num_images: int) -> list[dict[str, Any]]:
    """The first image ends a text with line breaks, the others are in a later turn, side by side and between texts."""
    image, text = {"type": "image"}, {"type": "text", "text": "\nand\n\n"}
    first = [{"type": "text", "text": "what is it?\n"}, image]
    asked = [{"role": "user", "content": first}, {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}]
    second = [image, image, text, image][: num_images - 1 + (num_images > 3)]
    return [*asked, {"role": "user", "content": [*second, {"type": "text", "text": "\nwhich?"}]}]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    directory = FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "v0")
    with started(directory, max_batch=5) as backend:
        yield Family(request.param, directory, backend, PlainVlm(directory), Prompts(ModelConfig(path=str(directory))))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_prompt_ids_are_the_processor_s_own_and_logprobs_a_plain_pass_s(family: Family, count: int) -> None:
    images = pictures(count)
    asked = [family.request(images), family.request(images[::-1]), family.request(images, temperature=0.9)]
    outputs = run(family.backend, *asked)
    for one, output in zip(asked, outputs, strict=True):
        ids = family.plain.inputs(one.prompt_token_ids, one.images)["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids
        expected = family.plain.logprobs(one.prompt_token_ids, one.images, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
    if count > 1:
        other = pytest.approx(outputs[1].logprobs, abs=1e-3)
        assert outputs[0].logprobs != other, "the order of the images matters"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_the_engine_reports_is_found_again_for_the_same_images_alone(family: Family, count: int) -> None:
    vision = VisionProcessor.load(ModelConfig(path=str(family.directory)), transformers)
    images = pictures(count)
    prepared = vision.prepare(family.request(images).prompt_token_ids, images)
    assert vision.processed == count
    found = vision.match(prepared.token_ids, images)
    assert vision.processed == count, "each picture is processed once"
    assert (found.token_ids, found.spans) == (prepared.token_ids, prepared.spans)
    assert found.token_types.tolist() == prepared.token_types.tolist()
    assert vision.prepare(prepared.token_ids, images).token_ids == prepared.token_ids, "expanded ones stay as they are"
    for others in (images[:-1], [*images, images[0]]):
        with pytest.raises(RequestError, match=r"left in the prompt|becomes \d+ tokens here|image placeholders"):
            vision.match(prepared.token_ids, others)


def test_features_are_computed_once_per_version_and_not_again_for_a_frozen_tower(
    family: Family, tmp_path: Path
) -> None:
    directories = [family.directory, other_decoder(family.directory, tmp_path / "v1"), _other(family, tmp_path / "v2")]
    plain = [family.plain, *(PlainVlm(directory) for directory in directories[1:])]
    images, features = pictures(2, seed=7), family.backend.features
    assert features is not None
    before, group = features.computed, [family.request(images, f"s{n}", max_new_tokens=24) for n in range(3)]
    versions = Versions(dict(enumerate(directories)), {})
    outputs = asyncio.run(Updates(family.backend, versions, [(4, 1), (9, 2)]).decode(group))
    asyncio.run(family.backend.load_weights(family.directory, 0))
    assert set(outputs[0].versions) == {0, 1, 2}
    for one, output in zip(group, outputs, strict=True):
        assert_seen_right(output, plain, one.prompt_token_ids, one.images)
    assert features.computed - before == 4, "both pictures for version 0, none for version 1, both for version 2"


def other_decoder(source: Path, directory: Path) -> Path:
    """Another language model behind the same vision tower."""
    shutil.copytree(source, directory)
    model = PlainVlm(directory).model
    with torch.no_grad():
        for parameter in model.get_decoder().parameters():
            parameter.mul_(1.02)
    model.save_pretrained(directory)
    return directory


def _other(family: Family, directory: Path) -> Path:
    """All weights are others."""
    return FAMILIES[family.name](directory, seed=5)
