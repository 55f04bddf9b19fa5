"""Messages with an image to prompt token ids, by the processor's template."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.producers.tokenizer import load_renderer
from sluice.workers.engine.prompts import Prompts
from tests.tiny_models import save_tiny_model
from tests.tiny_vlms import save_tiny_llava, save_tiny_qwen_vl

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
    with pytest.raises(RequestError, match="contains the image placeholder"):
        prompts.vlm(_ask(IMAGE_PARTS[0], f"and {token}"))
    with pytest.raises(RequestError, match="contains the image placeholder"):
        prompts.vlm([{"role": "system", "content": token}, *_ask(IMAGE_PARTS[0])])
    halves = [{"type": "text", "text": token[:4]}, {"type": "text", "text": token[4:]}]
    with pytest.raises(RequestError, match="2 image placeholders"):
        prompts.vlm([{"role": "user", "content": [IMAGE_PARTS[0], *halves]}])


def _placeholder(directory: Path) -> str:
    return "<|image_pad|>" if directory.name == "qwen" else "<image>"


@pytest.mark.parametrize("image", [*IMAGE_PARTS, {"type": "input_image"}, {"type": "x", "image": "a.png"}])
def test_an_image_part_without_an_image_is_refused(prompts: Prompts, image: dict[str, Any]) -> None:
    says = r"^messages\[1\]\.content\[0\] is a part of type '\w+', but no image was sent"
    with pytest.raises(RequestError, match=says):
        prompts.text(_ask(image))
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[0\] is a part"):
        prompts.text([{"role": "user", "content": image}])


def test_a_part_that_no_prompt_takes_is_refused(prompts: Prompts) -> None:
    with pytest.raises(RequestError, match=r"content\[0\] is a part of type 'video'; a prompt can have only text"):
        prompts.text(_ask({"type": "video"}))


def test_a_placeholder_without_an_image_is_refused_however_it_came_there(prompts: Prompts, directory: Path) -> None:
    token = _placeholder(directory)
    halves = [{"type": "text", "text": token[:4]}, {"type": "text", "text": token[4:]}]
    spelled: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [{"type": "text", "text": f"what is {token} there?"}]}],
        [{"role": "user", "content": halves}],
        [{"role": token, "content": [{"type": "text", "text": "hi"}]}],
    ]
    for messages in spelled:
        with pytest.raises(RequestError, match=r"has 1 image placeholders .*, but no image was sent"):
            prompts.text(messages)
    token_id = prompts.tokenizer.convert_tokens_to_ids(token)
    with pytest.raises(RequestError, match="has 2 image placeholders"):
        prompts.without_image([5, token_id, token_id])
    assert prompts.without_image([5, 6]) == [5, 6]


def test_a_text_alone_is_shown_whether_it_is_a_string_or_a_part(prompts: Prompts, directory: Path) -> None:
    for make in (prompts.text, load_renderer(str(directory)).prompt):
        as_string = make([{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}])
        assert "be brief<|im_end|>\n<|im_start|>user\nwhat?<|im_end|>" in prompts.tokenizer.decode(as_string)


def test_a_table_s_empty_columns_are_no_images(prompts: Prompts) -> None:
    part = {"type": "text", "text": "what?", "image": None, "image_url": None}
    assert prompts.text([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endfor %}",
    ],
    ids=["drops it", "prints it", "spells it"],
)
def test_a_text_model_whose_template_makes_something_of_an_image_refuses_it(tmp_path: Path, template: str) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    prompts = Prompts(ModelConfig(path=str(tmp_path)))
    with pytest.raises(RequestError, match="no image was sent"):
        prompts.text(_ask({"type": "image"}))
    spelled = prompts.text([{"role": "user", "content": [{"type": "text", "text": "<image>"}]}])
    assert "<image>" in prompts.tokenizer.decode(spelled), "text like any other for a model without vision"


def test_the_texts_of_a_model_without_its_processor_are_looked_at_as_well(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        if "processor" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    prompts = Prompts(ModelConfig(path=str(tmp_path), variant="text"))
    with pytest.raises(RequestError, match="has 1 image placeholders"):
        prompts.text([{"role": "user", "content": [{"type": "text", "text": _placeholder(directory)}]}])


def test_the_gateway_s_prompts_have_the_same_check(tmp_path: Path) -> None:
    renderer, token = load_renderer(str(save_tiny_qwen_vl(tmp_path))), "<|image_pad|>"
    first: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "what?"}]}
    with pytest.raises(RequestError, match="no image was sent"):
        renderer.prompt([{"role": "user", "content": [{"type": "text", "text": token}]}])
    sampled = renderer.tokenizer.encode(f"a {token}<|im_end|>", add_special_tokens=False)
    said = {"role": "assistant", "content": [{"type": "text", "text": f"a {token}"}]}
    known = [*renderer.prompt([first]), *sampled]
    with pytest.raises(RequestError, match="the model itself wrote an image placeholder"):
        renderer.added([first, said, first], at=1, known=known)
    asked = {"role": "user", "content": [{"type": "text", "text": f"and {token}?"}]}
    with pytest.raises(RequestError, match="no image was sent"):
        renderer.prompt([first, asked])


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
