"""Rollouts of several turns with a tool between them, all at once, and the same turns on the engine alone.

- Through the servers each is one `POST /rollout`, as a producer asks for it. Its clock ends when it is closed at the
  gateway, and its trajectory is in the result stream.
- The engine alone is given each turn's tokens, which were rendered before the clock starts; between two turns it
  waits as long as the tool would. What it lacks is the queue, the servers, text, masks and state that outlives it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import aiohttp

from sluice.bench.percentile import percentile
from sluice.bench.report import say
from sluice.bench.rollout.direct import Direct
from sluice.bench.rollout.http import post
from sluice.bench.rollout.model import NUM_TURNS, TURN_TOKENS, conversation, prompt_text
from sluice.bench.rollout.plan import Sizes
from sluice.bench.rollout.stack import Stack
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer

SHOWN: list[Any] = [{"type": "function", "function": {"name": "multiply"}}]
_WARM = 8


@dataclass(frozen=True)
class Round:
    """Rollouts a second on either side, and the seconds of each rollout through the servers."""

    servers: float
    direct: float
    latencies_s: Sequence[float]


async def rollouts(
    session: aiohttp.ClientSession, stack: Stack, direct: Direct, renderer: Renderer, sizes: Sizes
) -> dict[str, Any]:
    """The fields of this part."""
    sides = _Sides(session, stack, direct, renderer, sizes)
    await sides.through_servers(_WARM)
    await sides.directly(_WARM)
    rounds = list[Round]()
    for number in range(sizes.rollout_rounds):
        if number % 2:
            alone = await sides.directly(sizes.rollouts)
            servers, latencies = await sides.through_servers(sizes.rollouts)
        else:
            servers, latencies = await sides.through_servers(sizes.rollouts)
            alone = await sides.directly(sizes.rollouts)
        rounds.append(Round(servers, alone, latencies))
        say(f"rollouts {number + 1}/{sizes.rollout_rounds}: {servers:.1f}/s, on the engine alone {alone:.1f}/s")
    return fields(rounds)


def fields(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds come to; a ratio is the median of the rounds' ratios."""
    ratios = [each.servers / each.direct for each in rounds]
    latencies = [latency for each in rounds for latency in each.latencies_s]
    return {
        "rollouts_s": median(each.servers for each in rounds),
        "rollouts_s_direct": median(each.direct for each in rounds),
        "rollouts_vs_direct": median(ratios),
        "rollouts_vs_direct_range": [min(ratios), max(ratios)],
        "rollout_p50_s": percentile(latencies, 0.5),
        "rollout_p99_s": percentile(latencies, 0.99),
    }


class _Sides:
    def __init__(
        self, session: aiohttp.ClientSession, stack: Stack, direct: Direct, renderer: Renderer, sizes: Sizes
    ) -> None:
        self._session, self._stack, self._direct, self._sizes = session, stack, direct, sizes
        self._renderer = replace(renderer, options=ChatTemplateOptions(tools=SHOWN))

    async def through_servers(self, count: int) -> tuple[float, list[float]]:
        """Rollouts a second, and the seconds of each."""
        name = secrets.token_hex(4)
        began = time.perf_counter()
        latencies = await asyncio.gather(*(self._rollout(f"{name}-{number}", number) for number in range(count)))
        return count / (time.perf_counter() - began), latencies

    async def directly(self, count: int) -> float:
        """Rollouts a second."""
        low, high = self._sizes.tool_latency_ms
        prompts = [self._prompts(number) for number in range(count)]
        began = time.perf_counter()

        async def turns(number: int) -> None:
            for turn, prompt in enumerate(prompts[number]):
                if turn:
                    await asyncio.sleep(random.uniform(low, high) / 1000)
                await self._direct.decode(prompt, TURN_TOKENS)

        await asyncio.gather(*map(turns, range(count)))
        return count / (time.perf_counter() - began)

    async def _rollout(self, rollout_id: str, number: int) -> float:
        began = time.perf_counter()
        body = {
            "rollout_id": rollout_id,
            "server_url": self._stack.gateway,
            "messages": conversation(self._text(number), 0),
            "tokenizer_name": "policy",
            "sampling_params": {"temperature": 0.0, "max_tokens": 2 * TURN_TOKENS},
        }
        answer = await post(self._session, f"{self._stack.server}/rollout", body)
        check(answer)
        return time.perf_counter() - began

    def _prompts(self, number: int) -> list[list[int]]:
        return [self._renderer.prompt(conversation(self._text(number), turn)) for turn in range(NUM_TURNS)]

    def _text(self, number: int) -> str:
        return prompt_text(number, self._sizes.prompt_words)


def check(answer: dict[str, Any]) -> None:
    """Raise SluiceError unless the rollout had all its turns and tokens, and told its end to the gateway."""
    metrics, extra = answer["metrics"], answer["extra_fields"]
    counts = (metrics["num_llm_calls"], metrics["num_tool_calls"], metrics["response_tokens"])
    wanted = (NUM_TURNS, NUM_TURNS - 1, NUM_TURNS * TURN_TOKENS)
    if (answer["status"], answer["finish_reason"], counts, extra) != ("COMPLETED", "stop", wanted, {}):
        raise SluiceError(f"a rollout has {counts} calls, tool calls and tokens, and not {wanted}: {answer}")
