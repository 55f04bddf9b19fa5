"""Agents with prompts of their own, coding agents of the command line among them: each sampled token is trained once.

The model says one thing to whatever it is asked, so that prompts of any length and kind are right.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AddedToken, AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.clients.environments import node_with, python_with
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.integration.gateway.agents import agents_config
from tests.integration.gateway.harness import published, serving
from tests.loop_models import save_loop_model
from tests.tiny_models import build_tokenizer

TALKS = Path(__file__).parent / "talks"
SAID = "Done"
PROMPT = "List the files here."
Command = tuple[list[str], dict[str, str]]


def claude_code(url: str, home: Path) -> Command:
    """Of the Messages API. Its thinking, effort and experiments are off: the gateway refuses them by name."""
    program = node_with("@anthropic-ai/claude-code@2.1.197") / ".bin" / "claude"
    environ = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "MAX_THINKING_TOKENS": "0",
        "CLAUDE_CODE_EFFORT_LEVEL": "unset", "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    }  # fmt: skip
    return [str(program), "-p", PROMPT, "--model", "policy", "--system-prompt", "Be terse.", "--tools", "Bash"], environ


def codex(url: str, home: Path) -> Command:
    """Of the Responses API. Hosted tools and groups of tools are off: the gateway refuses them by name."""
    program = node_with("@openai/codex@0.169.0") / ".bin" / "codex"
    (home / "instructions.md").write_text("Be terse.")
    provider = f'{{name="sluice",base_url="{url}/v1",wire_api="responses",env_key="SLUICE_KEY"}}'
    settings = {
        "model_provider": '"sluice"', "model_providers.sluice": provider, "web_search": '"disabled"',
        "model_reasoning_summary": '"none"', "model_instructions_file": f'"{home}/instructions.md"',
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    asked = ["exec", "--skip-git-repo-check", "--disable", "multi_agent", *options, "-m", "policy", PROMPT]
    return [str(program), *asked], {"SLUICE_KEY": "none"}


def qwen_code(url: str, home: Path) -> Command:
    """Of chat completions."""
    program = node_with("@qwen-code/qwen-code@0.15.10") / ".bin" / "qwen"
    (home / "system.md").write_text("Be terse.")
    environ = {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "policy",
        "QWEN_SYSTEM_MD": str(home / "system.md"),
    }  # fmt: skip
    return [str(program), "-p", PROMPT, "--auth-type", "openai"], environ


def smolagents(url: str, home: Path, kind: str = "code") -> Command:
    """Of chat completions; it writes errors and results as texts of its own."""
    python = python_with("smolagents[openai]==1.26.0")
    return [str(python), "-I", str(TALKS / "smolagents_talk.py"), f"{url}/v1", kind, PROMPT], {}


AGENTS: dict[str, Callable[[str, Path], Command]] = {
    one.__name__: one for one in (claude_code, codex, qwen_code, smolagents)
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer: Any = build_tokenizer()
    [newline, *letters] = tokenizer.encode("\n" + SAID)
    chain = ([newline, *letters], [tokenizer.eos_token_id])
    return save_loop_model(
        tmp_path_factory.mktemp("model"), context=65_536, chains=[chain], tokenizer=tokenizer
    ).directory


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    return agents_config(broker_config, keys, run_dir, source)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_with_a_base_url(
    name: str, config: Config, backend: HfBackend, client: Any, keys: Keys, source: Path, tmp_path: Path
) -> None:
    async with serving(config, backend) as gateway:
        arguments, more = await asyncio.to_thread(AGENTS[name], f"{gateway.url}/rollouts/black-box", tmp_path)
        answer = await said(arguments, {**os.environ, **more, "HOME": str(tmp_path)}, tmp_path)
        [_, finished] = await gateway.finish("black-box", reward=1.0)
    assert SAID in answer
    results = await published(client, keys)
    assert len(results) == finished["parts"] > 0
    eos = AutoTokenizer.from_pretrained(source)
    expected = [*eos.encode(SAID), eos.eos_token_id]
    sampled = [
        token
        for result in results
        for token, mask in zip(result.token_ids, result.response_mask.expand(), strict=True)
        if mask
    ]
    assert sampled == expected * finished["num_turns"], "every turn's tokens, once"
    assert {result.reward for result in results} == {1.0}


class Calling(NamedTuple):
    """A model that says one call to whatever it is asked."""

    source: Path
    backend: HfBackend
    token_ids: list[int]  # of the call, with the end of sequence


@pytest.fixture
def calling(tmp_path: Path) -> Iterator[Calling]:
    tokenizer: Any = build_tokenizer()
    call = ['<tool_call>\n{"name": "final_answer", "arguments": {', '"answer": "', SAID, '"}', "}\n</tool_call>"]
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in call])
    tokens = [*tokenizer.convert_tokens_to_ids(call), tokenizer.eos_token_id]
    chain = ([*tokenizer.encode("\n"), *tokens[:-1]], tokens[-1:])
    source = save_loop_model(tmp_path / "model", context=65_536, chains=[chain], tokenizer=tokenizer).directory
    with started(source, max_batch=4) as backend:
        yield Calling(source, backend, tokens)


async def test_an_agent_whose_every_answer_is_a_call(
    calling: Calling, broker_config: BrokerConfig, keys: Keys, run_dir: Path, client: Any, tmp_path: Path
) -> None:
    """smolagents' ToolCallingAgent asks for `tool_choice: "required"`; what ends it is a call too."""
    async with serving(agents_config(broker_config, keys, run_dir, calling.source), calling.backend) as gateway:
        arguments, _ = await asyncio.to_thread(smolagents, f"{gateway.url}/rollouts/calls", tmp_path, "calls")
        answer = await said(arguments, {**os.environ, "HOME": str(tmp_path)}, tmp_path)
        await gateway.finish("calls", reward=1.0)
    assert json.loads(answer.splitlines()[-1]) == {"answer": SAID}
    [result] = await published(client, keys)
    assert list(result.token_ids) == calling.token_ids
    assert [one.sampling.grammar is not None for one in result.reshaped] == [True], "marked: the form was asked for"


async def test_an_evaluation_by_completions(config: Config, backend: HfBackend, source: Path, tmp_path: Path) -> None:
    """Generated answers, and log-likelihoods of given ones: `echo` with `logprobs`."""
    python = await asyncio.to_thread(python_with, "lm_eval[api]==0.4.13", "transformers==5.19.0")
    async with serving(config, backend) as gateway:
        talk = [str(python), "-I", str(TALKS / "lm_eval_talk.py"), f"{gateway.url}/v1", SAID, str(source)]
        scores = json.loads((await said(talk, {**os.environ, "HOME": str(tmp_path)}, tmp_path)).splitlines()[-1])
    assert scores["said"]["exact_match,none"] == pytest.approx(2 / 3)
    assert scores["chosen"]["acc,none"] == pytest.approx(2 / 3)


async def said(arguments: list[str], environ: dict[str, str], home: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *arguments, env=environ, cwd=home, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(HANG_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + err).decode()[-3000:]
    return out.decode()
