"""What the gateway, the queue and a worker add to one call of the engine, when nothing else runs.

- Pairs: the same prompt and options on both sides, one after the other; every other pair begins with the other side.
- The engine alone is given the prompt's tokens; rendering and parsing are part of what is added.
- Streamed: to the first text, which comes with the first `gateway.stream_tokens` tokens, against the engine's report
  of as many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import aiohttp

from sluice.bench.percentile import percentile
from sluice.bench.rollout.direct import Direct
from sluice.bench.rollout.http import first_text_s, post
from sluice.bench.rollout.model import prompt_text
from sluice.bench.rollout.plan import Sizes
from sluice.pipeline.config.types import GatewayConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.prompts.turn_tokens import Renderer

Pair = tuple[float, float]
"""Seconds through the gateway, and directly."""

_EVERY = GatewayConfig().stream_tokens
_WARM = 5


async def added(
    session: aiohttp.ClientSession, gateway: str, direct: Direct, renderer: Renderer, sizes: Sizes
) -> dict[str, Any]:
    """The fields of this part."""
    calls = _Calls(session, f"{gateway}/v1/chat/completions", direct, renderer, sizes)
    pairs = [await calls.pair(number) for number in range(-_WARM, sizes.pairs)][_WARM:]
    streamed = [await calls.streamed(number) for number in range(sizes.streamed_pairs)]
    return {**fields(pairs), "first_text": fields(streamed), "stream_tokens": _EVERY}


def fields(pairs: Sequence[Pair]) -> dict[str, float]:
    """What the pairs come to; milliseconds."""
    differences = [1000 * (through - direct) for through, direct in pairs]
    return {
        "added_ms_p50": percentile(differences, 0.5),
        "added_ms_p99": percentile(differences, 0.99),
        "gateway_ms_p50": 1000 * median(through for through, _ in pairs),
        "direct_ms_p50": 1000 * median(direct for _, direct in pairs),
        "pairs": len(pairs),
    }


class _Calls:
    def __init__(
        self, session: aiohttp.ClientSession, url: str, direct: Direct, renderer: Renderer, sizes: Sizes
    ) -> None:
        self._session, self._url, self._direct, self._renderer, self._sizes = session, url, direct, renderer, sizes

    async def pair(self, number: int) -> Pair:
        """Raises SluiceError where the two sides give different tokens."""
        body, prompt = self._ask(number)
        seconds, tokens = [0.0, 0.0], [list[int](), list[int]()]
        for side in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            if side:
                tokens[side] = await self._direct.decode(prompt, self._sizes.call_tokens)
            else:
                tokens[side] = (await post(self._session, self._url, body))["token_ids"]
            seconds[side] = time.perf_counter() - began
        if tokens[0] != tokens[1]:
            raise SluiceError("the gateway gave other tokens than the engine alone; no comparison is fair")
        return seconds[0], seconds[1]

    async def streamed(self, number: int) -> Pair:
        body, prompt = self._ask(number)
        direct = await self._direct.first_tokens_s(prompt, self._sizes.call_tokens, _EVERY)
        return await first_text_s(self._session, self._url, body), direct

    def _ask(self, number: int) -> tuple[dict[str, Any], list[int]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt_text(number, self._sizes.prompt_words)}]
        return {
            "messages": messages, "temperature": 0.0, "max_tokens": self._sizes.call_tokens
        }, self._renderer.prompt(messages)  # fmt: skip
