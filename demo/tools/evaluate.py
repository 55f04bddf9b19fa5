"""Greedy whole conversations of a model with the calculator, and how many end with the right answer.

- As in a rollout: the pipeline's engine decodes, calls are parsed as in the gateway, the same tools answer, and
  the same rule finds the tokens that a turn adds; sampled tokens are never re-tokenised from text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.consumers.tasks.exact_answer import extract, read_answer
from sluice.demo.tiny.tokenizer import TURN_END, TURN_START
from sluice.demo.tools.data import messages_of, truth_of
from sluice.demo.tools.problems import Problem
from sluice.pipeline.config.types import RolloutServerConfig
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.agents.tools import ToolBox, load_tools
from sluice.producers.gateway.parsers import Hermes, assistant_message
from sluice.workers.engine.generation_engine import GenerationEngine
from sluice.workers.engine.requests import GenerationOptions, ModelLoadConfig, TextGenerationRequest
from sluice.workers.model_files import load_tokenizer

MAX_TURNS = 4
MAX_NEW_TOKENS = 24  # per turn


@dataclass
class Conversation:
    """`messages` so far, and their token ids as the model saw them."""

    messages: list[dict[str, Any]]
    token_ids: list[int] = field(default_factory=list)
    num_turns: int = 0
    ended: bool = False

    @property
    def answer(self) -> str:
        """The model's final answer; empty while it still calls tools."""
        last = self.messages[-1]
        return str(last["content"]) if self.ended and last["role"] == "assistant" else ""


def converse(model_dir: Path, problems: Sequence[Problem]) -> list[Conversation]:
    """One conversation per problem, all of them advancing a turn at a time."""
    box = load_tools(RolloutServerConfig(tool_latency_ms=(0, 0)))
    tokenizer = load_tokenizer(str(model_dir))
    renderer = Renderer(tokenizer, {tokenizer.eos_token_id}, ChatTemplateOptions(tools=box.schemas()))
    conversations = [Conversation(list(messages_of(problem))) for problem in problems]
    model = ModelLoadConfig(model_name_or_path=str(model_dir))
    with GenerationEngine(model, max_batch=64) as engine:
        for turn in range(MAX_TURNS):
            going = [one for one in conversations if not one.ended]
            _speak(engine, renderer, going)
            if turn < MAX_TURNS - 1:
                asyncio.run(_use_tools(box, going))
    return conversations


def _speak(engine: GenerationEngine, renderer: Renderer, going: Sequence[Conversation]) -> None:
    """One turn of the model in each conversation."""
    for one in going:
        known = one.token_ids
        at = max((place for place, message in enumerate(one.messages) if message["role"] == "assistant"), default=-1)
        one.token_ids = (
            [*known, *renderer.added(one.messages, at=at, known=known).token_ids]
            if known
            else renderer.prompt(one.messages)
        )
    requests = [TextGenerationRequest(prompt_token_ids=tuple(one.token_ids)) for one in going]
    results = engine.generate_text_batch(requests, GenerationOptions(max_new_tokens=MAX_NEW_TOKENS))
    for one, result in zip(going, results, strict=True):
        one.token_ids += result.token_ids
        one.messages.append(assistant_message(Hermes()(result.text), str(one.num_turns)))
        one.num_turns += 1
        one.ended = not one.messages[-1].get("tool_calls")


async def _use_tools(box: ToolBox, going: Sequence[Conversation]) -> None:
    for one in going:
        if not one.ended:
            one.messages += await box.run(one.messages[-1]["tool_calls"])


def conversation_of(transcript: str) -> Conversation:
    """What the run's evaluator stored of a rollout: all turns after the problem; of a failed one nothing."""
    found = Conversation([{"role": "assistant", "content": ""}])
    if not transcript:
        return found
    found.messages, waiting = [], list[str]()
    for turn in f"assistant\n{transcript}".split(TURN_START):
        role, _, said = turn.partition("\n")
        said = said.partition(TURN_END)[0]
        if role == "assistant":
            found.messages.append(assistant_message(Hermes()(said), str(found.num_turns)))
            waiting = [call["id"] for call in found.messages[-1].get("tool_calls") or ()]
            found.num_turns, found.ended = found.num_turns + 1, not waiting
        elif waiting:
            found.messages.append({"role": "tool", "tool_call_id": waiting.pop(0), "content": said})
    return found


def is_right(answer: str, problem: Problem) -> bool:
    """The same rule as for the reward."""
    truth = read_answer(truth_of(problem), problem.text)
    return extract(answer, truth.pattern) == truth.text


def accuracy(conversations: Sequence[Conversation], problems: Sequence[Problem]) -> float:
    """Share of right answers, 0..1; raises ValueError if the two lists differ in length."""
    right = [is_right(one.answer, problem) for one, problem in zip(conversations, problems, strict=True)]
    return sum(right) / len(right) if right else 0.0
