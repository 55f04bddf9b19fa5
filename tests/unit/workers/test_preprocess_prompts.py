"""Messages with an image to prompt token ids, by the processor's template."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from pipeline.chat_template import ChatTemplateOptions
from pipeline.config.types import ModelConfig
from pipeline.errors import RequestError
from tests.tiny_vlms import save_tiny_llava, save_tiny_qwen_vl
from workers.generation.prompts import Prompts

IMAGE_PARTS: list[dict[str, Any]] = [
    {"type": "image"},
    {"type": "image", "image": "file:///nowhere.png"},
    {"type": "image_url", "image_url": {"url": "https://nowhere.invalid/a.png"}},
]


@pytest.fixture(scope="module", params=["llava", "qwen"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = {"llava": save_tiny_llava, "qwen": save_tiny_qwen_vl}[request.param]
    return save(tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> Prompts:
    return Prompts(ModelConfig(path=str(directory)))


def _ask(image: dict[str, Any], text: str = "what?") -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image, {"type": "text", "text": text}]},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("image", IMAGE_PARTS)
def test_a_prompt_has_one_placeholder_and_every_text(prompts: Prompts, directory: Path, image: dict[str, Any]) -> None:
    messages = _ask(image)
    before = copy.deepcopy(messages)
    text = prompts.tokenizer.decode(prompts.vlm(messages))
    assert messages == before
    qwen = directory.name == "qwen"
    shown = "<|vision_start|><|image_pad|><|vision_end|>" if qwen else "<image>\n"
    thinking = "<think>\n\n</think>\n\n" if qwen else ""
    assert text == (
        f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n{shown}what?<|im_end|>\n"
        f"<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n{thinking}"
    )


def test_the_number_of_image_parts_is_checked(prompts: Prompts) -> None:
    image = IMAGE_PARTS[0]
    for messages, says in (
        ([{"role": "user", "content": "no image"}], "0 image parts"),
        ([{"role": "user", "content": [image, image]}], "2 image parts"),
        ([*_ask(image), *_ask(image)], "2 image parts"),
        ([{"role": "user", "content": [image, {"type": "video"}]}], "type 'video'"),
        ([{"role": "user", "content": [image, "text"]}], "type None"),
        ([], "0 image parts"),
    ):
        with pytest.raises(RequestError, match=says):
            prompts.vlm(messages)


def test_a_text_cannot_place_an_image(prompts: Prompts, directory: Path) -> None:
    token = "<|image_pad|>" if directory.name == "qwen" else "<image>"
    with pytest.raises(RequestError, match="holds the image placeholder"):
        prompts.vlm(_ask(IMAGE_PARTS[0], f"and {token}"))
    with pytest.raises(RequestError, match="holds the image placeholder"):
        prompts.vlm([{"role": "system", "content": token}, *_ask(IMAGE_PARTS[0])])
    halves = [{"type": "text", "text": token[:4]}, {"type": "text", "text": token[4:]}]
    with pytest.raises(RequestError, match="2 image placeholders"):
        prompts.vlm([{"role": "user", "content": [IMAGE_PARTS[0], *halves]}])


def test_templates_that_refuse_thinking_or_strings_are_asked_again(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    token = "<|image_pad|>" if directory.name == "qwen" else "<image>"
    (tmp_path / "chat_template.jinja").write_text(
        "{% if enable_thinking is defined %}{{ raise_exception('no enable_thinking') }}{% endif %}"
        "{% for message in messages %}{% if message.content is string %}{{ raise_exception('parts only') }}{% endif %}"
        "{% for part in message.content %}{{ part.text if part.type == 'text' else '" + token + "' }}{% endfor %}"
        "{% endfor %}"
    )
    prompts = Prompts(ModelConfig(path=str(tmp_path)), ChatTemplateOptions())
    assert prompts.tokenizer.decode(prompts.vlm(_ask(IMAGE_PARTS[0]))) == f"be brief{token}what?"
