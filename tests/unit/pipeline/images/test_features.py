"""Features of images: computed once, kept within a bound, and given up where a model can't take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.images.features import ImageFeatures
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor
from tests.tiny_vision_models import pictures, save_tiny_qwen3_vl


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3_vl(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(qwen: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForImageTextToText.from_pretrained(qwen).eval()


@pytest.fixture
def vision(qwen: Path) -> VisionProcessor:
    return VisionProcessor.load(ModelConfig(path=str(qwen)), transformers)


def shown(vision: VisionProcessor, *images: Image.Image) -> VisionInputs:
    return vision.prepare([65, *[vision.image_token_id, 66] * len(images)], images)


def stored(count: int) -> list[Image.Image]:
    """As the image store gives them: with a digest."""
    images = pictures(count)
    for number, image in enumerate(images):
        image.info["sha256"] = f"{number:064x}"
    return images


def logits(model: Any, inputs: VisionInputs, images: dict[str, Any]) -> torch.Tensor:
    types = torch.from_numpy(inputs.token_types)
    with torch.no_grad():
        return model(input_ids=torch.tensor([inputs.token_ids]), mm_token_type_ids=types, **images).logits


def test_a_picture_is_computed_once_for_all_prompts_and_the_model_takes_it_as_its_pixels(
    model: Any, vision: VisionProcessor
) -> None:
    one, two, three = stored(3)
    features = ImageFeatures(model, torch, max_bytes=1 << 20)
    for images in ([one], [one, two], [two, one], [three, one, one]):
        inputs = shown(vision, *images)
        again = logits(model, inputs, features.arguments([inputs]))
        torch.testing.assert_close(again, logits(model, inputs, features.pixels([inputs])), atol=1e-4, rtol=0)
    assert (features.computed, features.reused) == (3 + 8, 5), "8 of them as pixels"
    features.forget()
    features.arguments([shown(vision, one)])
    assert (features.computed, features.reused) == (12, 5)


def test_beyond_the_bound_only_those_of_living_prompts_are_kept(model: Any, vision: VisionProcessor) -> None:
    images = stored(4)
    free = ImageFeatures(model, torch, max_bytes=1 << 20)
    prompts = [shown(vision, image) for image in images]
    sizes = [free.num_bytes, *(free.arguments([one]) and free.num_bytes for one in prompts)]
    features = ImageFeatures(model, torch, max_bytes=sizes[2])
    for prompt in prompts:
        features.arguments([prompt])
        assert features.num_bytes <= sizes[2]
    features.arguments(prompts)
    assert (features.computed, features.reused) == (4, 4), "their prompts are alive"
    del prompt, prompts
    features.arguments([shown(vision, images[0])])
    assert features.computed == 5, "the least recently used one is computed again"
    features.arguments([shown(vision, images[0])])
    assert features.computed == 5


def test_pictures_without_a_digest_live_with_their_prompts(model: Any, vision: VisionProcessor) -> None:
    features, prompt = ImageFeatures(model, torch, max_bytes=1 << 20), shown(vision, pictures(1)[0])
    for _ in range(3):
        features.arguments([prompt])
    assert (features.computed, features.reused, features.num_bytes) == (1, 2, 0)


def test_a_model_whose_proof_failed_gets_the_pixels(model: Any, vision: VisionProcessor) -> None:
    features, prompt = ImageFeatures(model, torch), shown(vision, *pictures(2))
    assert "mm_encoder_outputs" in features.arguments([prompt])
    features.give_up("a test")
    for _ in range(2):
        assert set(features.arguments([prompt])) == {"pixel_values", "image_grid_thw"}
    assert (features.reuses, features.computed, features.reused) == (False, 6, 0)
