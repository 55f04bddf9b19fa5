"""Tokenizer and processor made alike: padding, pixel budgets, placeholders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import AutoImageProcessor

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.images.processor import VisionProcessor, load_processor
from sluice.pipeline.prompts.chat_template import normalise_tokenizer
from sluice.workers.engine.requests import VlmPreprocessOptions
from tests.tiny_models import build_tokenizer
from tests.tiny_vlms import QWEN_TOKEN_EDGE, picture, save_tiny_llava, save_tiny_qwen_vl

SIZES = [(20, 20), (90, 33), (640, 480), (33, 200)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llava(tmp_path_factory.mktemp("llava"))


def _vision(directory: Path, **options: Any) -> VisionProcessor:
    return VisionProcessor.load(
        ModelConfig(path=str(directory), preprocess=VlmPreprocessOptions(**options)), transformers
    )


def test_pad_token_fallback_is_applied_consistently(llava: Path) -> None:
    tokenizer: Any = build_tokenizer()
    normalise_tokenizer(tokenizer)
    assert (tokenizer.pad_token, tokenizer.padding_side, tokenizer.truncation_side) == ("<|endoftext|>", "left", "left")
    tokenizer.pad_token = None
    normalise_tokenizer(tokenizer)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", tokenizer.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token = None
    normalise_tokenizer(tokenizer)
    assert tokenizer.pad_token is None
    assert load_processor(str(llava), transformers).tokenizer.padding_side == "left"


@pytest.mark.parametrize(
    "budget",
    [{}, {"max_pixels": 1024}, {"min_pixels": 1024}, {"min_pixels": 400, "max_pixels": 16384}, {"max_pixels": 786432}],
)
def test_images_follow_the_pixel_budget_as_in_transformers(qwen: Path, budget: dict[str, int]) -> None:
    vision = _vision(qwen, **budget)
    theirs: Any = AutoImageProcessor.from_pretrained(qwen, **budget)
    for width, height in SIZES:
        image = picture(width, height)
        inputs = vision.prepare((65, vision.image_token_id, 66), [image])
        plain = theirs(images=[image], return_tensors="np")
        assert np.array_equal(inputs.tensors["image_grid_thw"], plain["image_grid_thw"])
        assert np.array_equal(inputs.tensors["pixel_values"], plain["pixel_values"])
        num_tokens = int(plain["image_grid_thw"].prod()) // 4
        assert inputs.token_ids == (65, *[vision.image_token_id] * num_tokens, 66)
        assert inputs.token_types.tolist() == [[0, *[1] * num_tokens, 0]]
        limits = theirs.size["shortest_edge"], theirs.size["longest_edge"]
        assert limits[0] <= num_tokens * QWEN_TOKEN_EDGE**2 <= limits[1]
    assert num_tokens > 4


def test_do_resize_false_takes_images_as_they_are(qwen: Path) -> None:
    vision = _vision(qwen, do_resize=False)
    inputs = vision.prepare([vision.image_token_id], [picture(80, 64)])
    assert inputs.tensors["image_grid_thw"].tolist() == [[1, 16, 20]]
    with pytest.raises(RequestError, match=r"image \(81 x 64\) cannot be processed"):
        vision.prepare([vision.image_token_id], [picture(81, 64)])


def test_a_budget_that_would_be_ignored_is_refused(qwen: Path, llava: Path) -> None:
    for options in ({"max_pixels": 1024}, {"min_pixels": 1024}):
        with pytest.raises(ModelError, match="LlavaImageProcessorPil knows no max_pixels"):
            _vision(llava, **options)
    with pytest.raises(ModelError, match="do_resize false would ignore"):
        _vision(qwen, do_resize=False, max_pixels=1024)
    for options in ({"max_pixels": 100}, {"min_pixels": 3000}, {"min_pixels": 2000, "max_pixels": 1000}):
        with pytest.raises(ModelError, match="leave no valid size"):
            _vision(qwen, **options)
    assert _vision(llava, do_resize=True).image_token_id == 263


def test_a_prompt_has_one_placeholder(qwen: Path) -> None:
    vision = _vision(qwen)
    token = vision.image_token_id
    for prompt, says in (([65], "0 image placeholders"), ([token, 65, token], "2 image placeholders")):
        with pytest.raises(RequestError, match=says):
            vision.prepare(prompt, [picture(20, 20)])
    video = token + 1
    inputs = vision.prepare([video, token], [picture(20, 20)])  # without a video, its placeholder is text
    assert (inputs.token_ids[0], inputs.token_types.tolist()) == (video, [[0, 1, 1, 1, 1]])
    with pytest.raises(RequestError, match="aspect ratio"):
        vision.prepare([token], [picture(1, 300)])


def test_a_directory_without_processor_says_what_to_do(qwen: Path, tmp_path: Path) -> None:
    for path in qwen.iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ModelError, match=r"no usable processor.*variant: text"):
        load_processor(str(tmp_path), transformers)


def test_an_image_is_processed_once_for_all_threads_and_kept_within_the_bound(qwen: Path) -> None:
    config = ModelConfig(path=str(qwen))
    vision = _vision(qwen)
    one, other = picture(40, 24), picture(24, 40, 1)
    prompt = [vision.image_token_id]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: vision.prepare(prompt, [one]), range(24)))
    assert (vision.processed, vision.hits) == (1, 23)
    assert all(inputs.tensors is made[0].tensors for inputs in made)
    again = picture(40, 24)
    one.info["sha256"] = again.info["sha256"] = "a" * 64
    vision.prepare(prompt, [one])
    vision.prepare(prompt, [again])
    assert vision.processed == 2, "equal digests are one image"
    tight = VisionProcessor(load_processor(str(qwen), transformers), config.preprocess, cache_bytes=30_000)
    for image in (one, other, one):
        tight.prepare(prompt, [image])
    assert tight.processed == 3, "the first one had to go"


def test_a_prompt_may_have_images_that_were_expanded_before(qwen: Path) -> None:
    vision = _vision(qwen)
    image, images = vision.image_token_id, [picture(40, 24), picture(24, 40, 1)]
    plain = [65, image, 66, image, 67]
    whole = vision.prepare(plain, images)
    half = [*whole.token_ids[: whole.spans[0][1]], 66, image, 67]
    assert vision.prepare(half, images).token_ids == whole.token_ids
    assert vision.collapse(half, images) == vision.collapse(whole.token_ids, images) == plain
    with pytest.raises(RequestError, match="left in the prompt after its 2 images"):
        vision.match(vision.prepare(plain, [picture(64, 64), images[1]]).token_ids, images[::-1])
    with pytest.raises(RequestError, match=r"image 1 of 2 \(64 x 64\) becomes \d+ tokens here"):
        vision.match(whole.token_ids, [picture(64, 64), images[1]])
