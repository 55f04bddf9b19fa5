"""`sluice rollout try`: the real loop, the real tools, and a real (tiny) model in this process."""

from __future__ import annotations

import io
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import ImagesConfig, ModelConfig, WorkerConfig
from sluice.pipeline.errors import ConfigError, ModelError, RequestError
from sluice.pipeline.wire.messages import ImageRef, SamplingParams
from sluice.producers.agents.tools import tool
from sluice.producers.agents.tools.image import ToolImage
from sluice.producers.agents.trial import GROUP
from sluice.producers.cli import try_
from sluice.producers.gateway.parsers import Call, Parsed
from sluice.workers.engine.local import open_engine
from sluice.workers.engine.prompts import Prompts
from tests.contract.vlm_plain import PlainVlm
from tests.pictures import png
from tests.tiny_models import CONTEXT, save_tiny_model
from tests.tiny_vision_models import save_tiny_qwen3_vl
from tests.tiny_vlms import VLM_CONTEXT, picture

SETTINGS = ("rollout_server.tool_latency_ms=[0, 0]",)
CALLS = f"gateway.tool_parser={__name__}:always_calls"


def always_calls(text: str) -> Parsed:
    """Whatever a random model writes asks for two sums, one of them impossible."""
    return Parsed("", [Call("add", '{"a": 15, "b": 23}'), Call("divide", '{"a": 1, "b": 0}')])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_qwen3_vl(tmp_path_factory.mktemp("vlm")))


def test_every_turn_is_shown_with_calls_results_and_masks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert try_(model=model, prompt="hi", max_tokens=8, max_turns=2, overrides=(*SETTINGS, CALLS)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "the chat template does not include the tools",
        "turn 1",
        '→ add({"a": 15, "b": 23})',
        "8 sampled tokens",
        "add → 38",
        "divide → Error: cannot divide by zero",
        "response_mask",
        "turn 2",
        "COMPLETED: max_turns; 2 turns, 2 tool calls, 16 tokens sampled",
    ):
        assert part in shown


def sees(text: str) -> Parsed:
    """Asks for a picture once."""
    return Parsed("", [Call("show", "{}")])


@tool
def show() -> ToolImage:
    """A picture of one colour."""
    return ToolImage(data=png("blue", 33, 20))


def test_images_of_the_prompt_and_of_tools_are_shown_to_the_model(
    vlm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In later turns and messages as well."""
    files = (tmp_path / "a.png", tmp_path / "b.png")
    for file, color in zip(files, ("red", "green"), strict=True):
        file.write_bytes(png(color, 40, 24))
    tools = (*SETTINGS, f"gateway.tool_parser={__name__}:sees", f"rollout_server.tools=[{__name__}:show]")
    monkeypatch.setattr("sys.stdin", io.StringIO("again\n"))
    options: dict[str, Any] = {"max_tokens": 4, "max_turns": 2, "temperature": 0, "interactive": True}
    code = try_(model=vlm, prompt="what?", image=files, overrides=tools, **options)
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 0, shown
    assert "1 messages, 2 images (one token for each here)" in shown
    assert "show → [image]" in shown
    assert "base64" not in shown
    assert ", 3 images (one token for each here)" in shown, "the tool's as well"
    assert shown.count("COMPLETED: max_turns; 2 turns, 1 tool calls, 8 tokens sampled") == 2


def test_an_image_that_cannot_be_shown_is_an_error_that_names_it(
    model: str, vlm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(b"text")
    assert try_(model=model, prompt="what?", image=(tmp_path / "a.png",), overrides=SETTINGS) == 1
    assert "the messages have 1 images, and this model takes none" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RequestError, match=r"--image .*b\.png: is data that starts with b'text', accepted are"):
        try_(model=vlm, prompt="what?", image=(tmp_path / "b.png",), overrides=SETTINGS)
    with pytest.raises(RequestError, match=r"--image .*none\.png: cannot be read"):
        try_(model=vlm, prompt="what?", image=(tmp_path / "none.png",), overrides=SETTINGS)
    with pytest.raises(ConfigError, match="--image is shown with a message; pass --prompt too"):
        try_(model=vlm, interactive=True, image=(tmp_path / "a.png",), overrides=SETTINGS)


def test_one_can_talk_and_look_at_tools_and_tokens(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "/tools\n/tokens\nhi\n\nyes\n/tokens\n/reset\n/tokens\nagain\n/what\n"  # and Ctrl-D
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert try_(model=model, interactive=True, system="be brief", max_tokens=4, overrides=SETTINGS) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "multiply(a, b)" in shown
    assert shown.count("no tokens yet; send a message first") == 2
    assert "prompt: " in shown
    assert shown.count("COMPLETED: max_tokens; 1 turns") == 3
    assert ", 4 messages" in shown  # system, hi, the reply, yes
    assert shown.count(", 2 messages") == 2  # /reset keeps the system message alone
    assert "[sampled, mask 1, 4 tokens]" in shown
    assert "/reset forget the conversation" in shown


def test_a_rollout_that_fails_is_shown_and_is_the_exit_code(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert try_(model=model, prompt="x" * CONTEXT, overrides=SETTINGS) == 1
    shown = capsys.readouterr().out
    assert "trainer_client_error" in shown
    assert "the context is 256" in " ".join(shown.split())


def test_what_is_missing_is_named(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="pass its directory with --model"):
        try_(prompt="hi")
    with pytest.raises(ModelError, match="no such directory"):
        try_(model=str(tmp_path / "nowhere"), prompt="hi")
    with pytest.raises(ConfigError, match="no message"):
        try_(model=model)
    with pytest.raises(ConfigError, match=r"sampling_params.temperature: .*correct the option"):
        try_(model=model, prompt="hi", temperature=9, overrides=SETTINGS)
    with pytest.raises(ModelError, match="no usable tokenizer"):
        try_(model=str(tmp_path), prompt="hi")


async def test_an_engine_is_found_by_name_and_decodes_by_seed(model: str) -> None:
    (entry,) = entry_points(group=GROUP, name="local")
    assert entry.load() is open_engine
    sampling = SamplingParams(max_new_tokens=10)
    async with open_engine(ModelConfig(path=model), WorkerConfig()) as engine:
        first, again, other = [await engine.decode([65, 66, 67], sampling, seed) for seed in (1, 1, 2)]
        assert list(first.token_ids) == list(again.token_ids) != list(other.token_ids)
        assert len(first.logprobs) == len(first.token_ids)
        assert first.prompt_token_ids.tolist() == [65, 66, 67]
        capped = await engine.decode([65] * (CONTEXT - 3), sampling, 1)
        assert len(capped.token_ids) <= 3
        with pytest.raises(RequestError, match=f"the context is {CONTEXT}"):
            await engine.decode([65] * CONTEXT, sampling, 1)


async def test_a_prompt_with_an_image_decodes_up_to_the_context(vlm: str, tmp_path: Path) -> None:
    """The image takes its room as the tokens that it becomes."""
    shown, model = picture(40, 24), ModelConfig(path=vlm)
    shown.save(tmp_path / "a.png")
    message = {"role": "user", "content": [{"type": "text", "text": "a" * 440}, {"type": "image"}]}
    prompt, sampling = Prompts(model).vlm([message]), SamplingParams(temperature=0, max_new_tokens=VLM_CONTEXT)
    async with open_engine(model, WorkerConfig(), ImagesConfig(roots=(str(tmp_path),))) as engine:
        found = await engine.decode(prompt, sampling, 1, [ImageRef(path=str(tmp_path / "a.png"))])
    room = VLM_CONTEXT - len(found.prompt_token_ids)
    assert room < VLM_CONTEXT - len(prompt)
    assert (found.prompt_token_ids.tolist(), list(found.token_ids)) == PlainVlm(Path(vlm)).greedy(prompt, shown, room)
    assert (found.finish_reason, found.sampling.max_new_tokens) == ("length", room)
