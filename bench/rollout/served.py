"""The gateway with a vLLM worker beside vLLM's own OpenAI server: the same requests, the same engine options.

- Rounds alternate; a round is `requests` chat completions, `concurrency` at a time, greedy, all of the same length.
- Both sides are loaded and idle in the other's turn: gateway, worker and broker on one side, server and engine core on
  the other. The rollout server is not there.
- Plain requests, and then requests that want logprobs: a worker computes those of every token, whoever asks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from sluice.bench.processes import Fleet
from sluice.bench.proximal.engines import environment
from sluice.bench.queue.in_flight import in_flight
from sluice.bench.report import say
from sluice.bench.rollout.http import post
from sluice.bench.rollout.model import prompt_text
from sluice.bench.rollout.plan import Sizes
from sluice.bench.rollout.stack import MODEL_NAME
from sluice.pipeline.errors import SluiceError

Rates = tuple[float, float]
"""Completion tokens a second: through the gateway, and of vLLM's own server."""


async def served(
    session: aiohttp.ClientSession, gateway: str, stock: str, sizes: Sizes, *, logprobs: bool
) -> dict[str, Any]:
    """The fields of one kind of request."""
    load = _Load(session, sizes, logprobs)
    warm = [await load.round(url, -1) for url in (gateway, stock)]
    if warm[0][1] != warm[1][1]:
        raise SluiceError("the gateway and vLLM's own server gave different texts; no comparison is fair")
    rounds: list[Rates] = []
    for number in range(sizes.served_rounds):
        urls = (gateway, stock) if number % 2 else (stock, gateway)
        rates = {url: (await load.round(url, number))[0] for url in urls}
        rounds.append((rates[gateway], rates[stock]))
        say(
            f"requests{' with logprobs' if logprobs else ''} {number + 1}/{sizes.served_rounds}: "
            f"gateway {rates[gateway]:.0f} tok/s, vLLM's own server {rates[stock]:.0f} tok/s"
        )
    return fields(rounds)


def fields(rounds: Sequence[Rates]) -> dict[str, Any]:
    """What the rounds come to; the ratio is the median of the rounds' ratios."""
    ratios = [gateway / stock for gateway, stock in rounds]
    return {
        "gateway_vs_vllm_serve": median(ratios),
        "range": [min(ratios), max(ratios)],
        "gateway_tok_s": median(gateway for gateway, _ in rounds),
        "vllm_serve_tok_s": median(stock for _, stock in rounds),
        "rounds": len(rounds),
    }


async def start_stock(fleet: Fleet, model: Path, port: int, sizes: Sizes) -> None:
    """vLLM's own server, with the options that a worker gives its engine."""
    # `vllm serve` of the CPU build asks for the metadata of a package that is named otherwise; this is its server.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", str(sizes.concurrency), "--generation-config", "vllm"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    await fleet.start(command, {**environment(), "VLLM_LOGGING_LEVEL": "WARNING"})


class _Load:
    def __init__(self, session: aiohttp.ClientSession, sizes: Sizes, logprobs: bool) -> None:
        self._session, self._sizes, self._logprobs = session, sizes, logprobs

    async def round(self, url: str, number: int) -> tuple[float, list[str]]:
        """Tokens a second, and the texts. Raises SluiceError where a completion is shorter than asked for."""
        sizes, texts = self._sizes, [""] * self._sizes.requests

        async def ask(place: int) -> None:
            answer = await post(self._session, f"{url}/v1/chat/completions", self._body(number, place))
            if (found := answer["usage"]["completion_tokens"]) != sizes.request_tokens:
                raise SluiceError(f"{url} gave {found} tokens, and {sizes.request_tokens} were asked for")
            texts[place] = answer["choices"][0]["message"]["content"]

        began = time.perf_counter()
        await in_flight(map(ask, range(sizes.requests)), sizes.concurrency)
        return sizes.requests * sizes.request_tokens / (time.perf_counter() - began), texts

    def _body(self, number: int, place: int) -> dict[str, Any]:
        text = prompt_text(1 + number * self._sizes.requests + place, self._sizes.prompt_words)
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self._sizes.request_tokens,
        }
        return {**body, "logprobs": True} if self._logprobs else body
