"""Training samples that show images: real files, expanded by the model's own processor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from msgspec.structs import replace

from sluice.consumers.samples import image_token_of
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training.images import SampleImages
from sluice.pipeline.config.types import Config, ImagesConfig, ModelConfig
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.wire.messages import ImageRef, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import training_sample
from tests.tiny_vision_models import pictures

RESPONSE = b"a small red box, and <another> at the left"


def seeing_config(model: Path, root: Path, **more: Any) -> Config:
    """A run of a model that may read the images of a directory."""
    return Config(model=ModelConfig(path=str(model), device="cpu"), images=ImagesConfig(roots=(str(root),)), **more)


def image_files(root: Path, count: int, seed: int = 0) -> list[ImageRef]:
    """PNG files of different pictures; references as a worker stamps them."""
    refs: list[ImageRef] = []
    root.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(pictures(count, seed)):
        file = root / f"{seed}-{number}.png"
        image.save(file)
        refs.append(ImageRef(path=file.name, sha256=sha256(file.read_bytes()).hexdigest()))
    return refs


def processor_of(config: Config) -> VisionProcessor:
    return VisionProcessor.load(config.model, transformers)


def prompt_ids(processor: VisionProcessor, images: int) -> list[int]:
    """Text, and a placeholder for each image within it."""
    ids = [*b"see "]
    for number in range(images):
        ids += [processor.image_token_id, *b" is %d" % number]
    return [*ids, *b" what?"]


def seen_sample(
    name: str,
    config: Config,
    processor: VisionProcessor,
    refs: Sequence[ImageRef],
    seed: int = 0,
    response: Sequence[int] = tuple(RESPONSE),
    **changes: Any,
) -> TrainingSample:
    """A sample as a consumer makes it: the response is trained, the prompt isn't."""
    prompt = list(processor.prepare(prompt_ids(processor, len(refs)), pictures(len(refs), seed)).token_ids)
    ids = [*prompt, *response]
    weights = [0.0] * len(prompt) + [0.5 + 0.1 * (at % 7) for at in range(len(response))]
    sample = training_sample(
        f"{name}:0",
        len(ids),
        token_ids=TokenArray(ids),
        labels=TokenArray(ids),
        weights=FloatArray(weights),
        segments=Runs.of([0] * len(ids)),
        versions=Runs.of([-1] * len(prompt) + [0] * len(response)),
        response_mask=Runs.of([0] * len(prompt) + [1] * len(response)),
        logprobs=FloatArray([0.0] * len(prompt) + [-1.0] * len(response)),
        prompt_len=len(prompt),
        images=list(refs),
    )
    return replace(sample, **changes)


def taught_sample(name: str, config: Config, processor: VisionProcessor, refs: Sequence[ImageRef]) -> TrainingSample:
    """Its tokens are those of a text, the answer's all with weight 1; no token was sampled."""
    codec, mark = HFTextCodec(config.model.path), processor.image_token
    asked = codec.encode("see " + "".join(f"{mark} is {number}" for number in range(len(refs))) + " what?")
    answer = [*codec.encode(f"a small <{name}> box"), codec.eos_token_ids[0]]
    prompt = list(processor.prepare(asked, pictures(len(refs))).token_ids) if refs else asked
    ids = TokenArray([*prompt, *answer])
    return training_sample(
        f"{name}:0",
        len(ids),
        token_ids=ids,
        labels=ids,
        weights=FloatArray([0.0] * len(prompt) + [1.0] * len(answer)),
        segments=Runs.of([0] * len(ids)),
        prompt_len=len(prompt),
        images=list(refs),
    )


def written_placeholder(config: Config) -> int:
    """The token that images expand to."""
    token = image_token_of(config.model)
    assert token is not None
    return token


def taken(config: Config, directory: Path, samples: Sequence[TrainingSample]) -> SampleImages:
    """Their images, all of them there."""
    images = SampleImages.of(config, directory)
    assert images is not None

    async def take() -> dict[str, str]:
        try:
            return await images.take(samples, 60)
        finally:
            await images.stop_fetching()

    assert asyncio.run(take()) == {}
    return images


def types_of(images: SampleImages, sample: TrainingSample) -> np.ndarray:
    inputs = images.inputs(sample)
    assert inputs is not None
    return inputs.token_types
