"""`sluice rollout try`: the real loop, the real tools, and a real (tiny) model in this process."""

from __future__ import annotations

import io
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sluice.pipeline.config.types import ModelConfig, WorkerConfig
from sluice.pipeline.errors import ConfigError, ModelError, RequestError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.producers.agents.trial import GROUP
from sluice.producers.cli import try_
from sluice.producers.gateway.tool_calls import Call, Parsed
from sluice.workers.engine.local import open_engine
from tests.tiny_models import CONTEXT, save_tiny_model

SETTINGS = ("rollout_server.tool_latency_ms=[0, 0]",)
CALLS = f"gateway.tool_parser={__name__}:always_calls"


def always_calls(text: str) -> Parsed:
    """Whatever a random model writes asks for two sums, one of them impossible."""
    return Parsed("", [Call("add", '{"a": 15, "b": 23}'), Call("divide", '{"a": 1, "b": 0}')])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


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
