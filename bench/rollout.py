"""What agent rollouts cost over the engine alone, and the gateway compared with vLLM's own server.

        ┌▶ added      one call at a time: gateway ─▶ worker            │ the engine in this process ─┐
Plan ───┼▶ rollouts   many at once: rollout server ⇄ gateway ─▶ worker │ their turns on that engine ─┼─▶ fields
        └▶ served     many calls at once: gateway ─▶ worker (vLLM)     │ vLLM's own OpenAI server   ─┘

The two sides of a part alternate, with the same prompts, on the same model; both stay loaded.

- added: pairs of the same prompt and options. The engine alone gets the prompt's tokens, so the added time includes
  rendering and parsing. Streamed: time to the first text, which comes with the first `gateway.stream_tokens` tokens,
  against the engine's report of as many.
- rollouts: several turns with a tool between them, all at once. Through the servers each is one `POST /rollout`, as a
  producer sends it; its clock stops when it is closed at the gateway and its trajectory is in the result stream. The
  engine alone gets each turn's tokens, rendered before the clock starts; between turns it waits as long as the tool
  would. It has no queue, servers, text, masks or durable state.
- served: a round is `requests` chat completions, `concurrency` at a time, greedy, all of the same length,
  without the rollout server. First plain requests, then requests with logprobs: a worker computes those of every token
  in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec

from sluice.bench.broker import in_flight, own_broker, until_serving
from sluice.bench.harness import HOME, at_least_one, in_turns, percentile, play, ratios, say, spread, why_no_vllm
from sluice.bench.http import first_text_s, free_ports, open_session, post, until_healthy
from sluice.bench.models import NUM_TURNS, TURN_TOKENS, agent_model, conversation, prompt_text
from sluice.bench.processes import Fleet, engine_environment, run_settings
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import GatewayConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import Progress, SamplingParams
from sluice.producers.rollout_client.peer import KEY_NAMES
from sluice.producers.tokenizer import load_renderer
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import Backend, SequenceRequest

MODEL_NAME = "policy"
_TOOLS: list[Any] = [{"type": "function", "function": {"name": "multiply"}}]
_EVERY = GatewayConfig().stream_tokens
_WARM_PAIRS, _WARM_ROLLOUTS = 5, 8

Pair = Mapping[str, float]
"""Seconds through the `gateway`, and `direct` on the engine."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, and lengths in tokens."""

    prompt_words: int = 60  # per prompt; the chat template adds a few tokens
    pairs: int = 200  # of `added`: one call on each side
    streamed_pairs: int = 40
    call_tokens: int = 32
    rollouts: int = 200  # at once, and in a round
    rollout_rounds: int = 3
    rollout_batch: int = 64  # worker.max_batch; also of `added`
    tool_latency_ms: tuple[int, int] = (10, 100)
    requests: int = 128  # of a round of `served`
    concurrency: int = 32  # requests at a time, and worker.max_batch
    request_tokens: int = 128
    served_rounds: int = 3


_AIM = 0.95
"""Of `gateway_vs_vllm_serve`."""

_QUICK = Sizes(
    prompt_words=8, pairs=5, streamed_pairs=2, call_tokens=8, rollouts=6, rollout_rounds=1, rollout_batch=8,
    tool_latency_ms=(1, 2), requests=8, concurrency=4, request_tokens=8, served_rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    sizes: Sizes
    why_no_vllm: str | None  # None: the gateway is compared with vLLM's own server

    @classmethod
    def of(cls, *, rounds: int | None, vllm: bool, quick: bool) -> Plan:
        """Checked; `rounds` applies to both parts with rounds. Raises ConfigError."""
        at_least_one(rounds=rounds)
        sizes = _QUICK if quick else Sizes()
        if rounds is not None:
            sizes = msgspec.structs.replace(sizes, rollout_rounds=rounds, served_rounds=rounds)
        return cls(sizes, why_no_vllm(vllm))


@dataclass(frozen=True)
class Bench:
    home: Path
    client: Any  # of the broker
    url: str  # of the broker
    model: Path
    session: aiohttp.ClientSession


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `rollouts_s`: rollouts per second through rollout server, gateway and a worker (`rollouts_s_direct`: their turns on
    the engine alone). `added_ms_p50`, `added_ms_p99`: milliseconds that gateway, queue and worker add to one call, over
    pairs. `gateway_vs_vllm_serve`: completion tokens per second, over vLLM's own server (None: see
    `why_no_vllm`); `with_logprobs`: the same for requests with logprobs.
    """
    model = agent_model(HOME)
    async with own_broker(home / "broker") as (client, url), open_session() as session:
        bench = Bench(home, client, url, model, session)
        parts = await _on_hf(plan.sizes, bench)
        if not plan.why_no_vllm:
            parts |= await _on_vllm(plan.sizes, bench)
    return {
        **fields(parts),
        "sizes": msgspec.to_builtins(plan.sizes),
        "num_rollouts": plan.sizes.rollouts,
        "turns": NUM_TURNS,
        "turn_tokens": TURN_TOKENS,
        "tool_latency_ms": list(plan.sizes.tool_latency_ms),
        "threads": 1,
        "dtype": "float32",
        "model": model.name,
    }


def fields(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of the parts; `parts` by name: `added`, `rollouts` and, with vLLM, `plain` and `logprobs`."""
    ratio = parts["plain"]["gateway_vs_vllm_serve"] if "plain" in parts else None
    return {
        "rollouts_s": parts["rollouts"]["rollouts_s"],
        **{name: parts["added"][name] for name in ("added_ms_p50", "added_ms_p99")},
        "gateway_vs_vllm_serve": ratio,
        "aims": {"gateway_vs_vllm_serve": {"aim": f">= {_AIM}", "met": None if ratio is None else ratio >= _AIM}},
        **parts["rollouts"],
        "call": parts["added"],
        "served": parts.get("plain"),
        "served_with_logprobs": parts.get("logprobs"),
    }


async def _on_hf(sizes: Sizes, bench: Bench) -> dict[str, dict[str, Any]]:
    renderer = load_renderer(str(bench.model))
    chosen = settings(bench.home, bench.model, "hf", sizes.rollout_batch, sizes)
    async with direct_engine(chosen) as direct, _running(bench, chosen, "rollout-server") as (gateway, server):
        one = await added(bench.session, gateway, direct, renderer, sizes)
        say(f"one call: {one['added_ms_p50']:.1f} ms added at the median, {one['added_ms_p99']:.1f} ms at p99")
        many = await rollouts(bench.session, server, gateway, direct, renderer, sizes)
        return {"added": one, "rollouts": many}


async def _on_vllm(sizes: Sizes, bench: Bench) -> dict[str, dict[str, Any]]:
    """The gateway with a vLLM worker against vLLM's own server, with the options a worker gives its engine."""
    chosen = settings(bench.home, bench.model, "vllm", sizes.concurrency, sizes)
    (port,) = free_ports(1)
    stock_url = f"http://127.0.0.1:{port}"
    # `vllm serve` of the CPU build reads the metadata of a package with another name; this is its server.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bench.model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", str(sizes.concurrency), "--generation-config", "vllm"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    async with Fleet("vllm-serve", bench.home) as stock, _running(bench, chosen) as (gateway, _):
        await stock.start(command, {**engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"})
        await until_healthy(bench.session, stock_url, stock)
        return {
            name: await served(bench.session, gateway, stock_url, sizes, logprobs=name == "logprobs")
            for name in ("plain", "logprobs")
        }


def settings(home: Path, model: Path, backend: str, max_batch: int, sizes: Sizes) -> list[str]:
    """Settings of a run, for its processes and for the engine called directly."""
    low, high = sizes.tool_latency_ms
    return run_settings(
        f"bench-{backend}",
        model,
        f"run_dir={home}",
        "model.dtype=float32",
        f"worker.backend={backend}",
        f"worker.max_batch={max_batch}",
        "worker.drain_s=0",
        "worker.vllm.enforce_eager=true",
        f"gateway.model_name={MODEL_NAME}",
        f"rollout_server.max_concurrent_rollouts={sizes.rollouts}",
        f"rollout_server.tool_latency_ms=[{low},{high}]",
    )


@contextlib.asynccontextmanager
async def _running(bench: Bench, chosen: Sequence[str], *more: str) -> AsyncIterator[tuple[str, str]]:
    """A worker, a gateway and `more` roles, all ready; the addresses of gateway and rollout server."""
    run = chosen[0].partition("=")[2]
    ports = free_ports(2)
    options = [*chosen, f"gateway.port={ports[0]}", f"rollout_server.port={ports[1]}"]
    env = {**engine_environment(), **dict.fromkeys(KEY_NAMES, "")}  # no key needed
    async with Fleet(run, bench.home) as fleet:
        for role in ("worker", "gateway", *more):
            await fleet.start_role(role, options, bench.url, env)
        gateway, server = (f"http://127.0.0.1:{port}" for port in ports)
        for url in (gateway, server)[: 1 + len(more)]:
            await until_healthy(bench.session, url, fleet)
        await until_serving(bench.client, Keys(run), fleet)
        yield gateway, server


class Direct:
    """Greedy sequences of a worker's engine, called directly in this process: no queue, no server, no text."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._calls = backend, 0

    async def decode(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` new tokens. Raises SluiceError if the model ends earlier."""
        found = (await self._backend.decode(self._request(prompt, num_tokens))).token_ids
        if len(found) != num_tokens:
            raise SluiceError(f"the engine returned {len(found)} tokens, but {num_tokens} were requested")
        return found

    async def first_tokens_s(self, prompt: Sequence[int], num_tokens: int, every: int) -> float:
        """Seconds to its first `every` tokens; it is decoded to its end."""
        began, reports = time.perf_counter(), list[float]()

        def report(_: Progress) -> None:
            reports.append(time.perf_counter() - began)

        request = self._request(prompt, num_tokens)
        await self._backend.decode(replace(request, report_every=every, report=report))
        return reports[0]

    def _request(self, prompt: Sequence[int], num_tokens: int) -> SequenceRequest:
        self._calls += 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens)
        return SequenceRequest(f"direct-{self._calls}:0", tuple(prompt), sampling)


@contextlib.asynccontextmanager
async def direct_engine(settings: Sequence[str]) -> AsyncIterator[Direct]:
    """Loaded with the settings of a run; closed after the block."""
    config = load_config(None, list(settings), {})
    backend = make_backend(config.model, config.worker)
    await backend.start()
    try:
        yield Direct(backend)
    finally:
        await backend.close()


async def added(
    session: aiohttp.ClientSession, gateway: str, direct: Direct, renderer: Renderer, sizes: Sizes
) -> dict[str, Any]:
    """What gateway, queue and worker add to one engine call. Raises SluiceError if tokens differ."""
    url, count = f"{gateway}/v1/chat/completions", sizes.call_tokens

    def ask(number: int) -> tuple[dict[str, Any], list[int]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt_text(number, sizes.prompt_words)}]
        return {"messages": messages, "temperature": 0.0, "max_tokens": count}, renderer.prompt(messages)

    async def pair(number: int) -> Pair:
        body, prompt = ask(number)
        seconds, tokens = dict[str, float](), dict[str, list[int]]()
        for side in in_turns(number, ("direct", "gateway")):
            began = time.perf_counter()
            if side == "direct":
                tokens[side] = await direct.decode(prompt, count)
            else:
                tokens[side] = (await post(session, url, body))["token_ids"]
            seconds[side] = time.perf_counter() - began
        if tokens["gateway"] != tokens["direct"]:
            raise SluiceError("gateway and bare engine returned different tokens; a comparison would be unfair")
        return seconds

    async def streamed(number: int) -> Pair:
        body, prompt = ask(number)
        first_s = await direct.first_tokens_s(prompt, count, _EVERY)
        return {"direct": first_s, "gateway": await first_text_s(session, url, body)}

    pairs = [await pair(number) for number in range(-_WARM_PAIRS, sizes.pairs)][_WARM_PAIRS:]
    first = [await streamed(number) for number in range(sizes.streamed_pairs)]
    return {**added_fields(pairs), "first_text": added_fields(first), "stream_tokens": _EVERY}


def added_fields(pairs: Sequence[Pair]) -> dict[str, float]:
    """The results of the pairs, in milliseconds."""
    differences = [1000 * (each["gateway"] - each["direct"]) for each in pairs]
    return {
        "added_ms_p50": percentile(differences, 0.5),
        "added_ms_p99": percentile(differences, 0.99),
        "gateway_ms_p50": 1000 * median(each["gateway"] for each in pairs),
        "direct_ms_p50": 1000 * median(each["direct"] for each in pairs),
        "pairs": len(pairs),
    }


async def rollouts(
    session: aiohttp.ClientSession, server: str, gateway: str, direct: Direct, renderer: Renderer, sizes: Sizes
) -> dict[str, Any]:
    """Rollouts per second through the servers at `server` and `gateway`, and on the engine alone."""
    shown = replace(renderer, options=ChatTemplateOptions(tools=_TOOLS))
    latencies: list[float] = []

    async def one(side: str, number: int) -> float:
        count = _WARM_ROLLOUTS if number < 0 else sizes.rollouts
        name = secrets.token_hex(4)
        texts = [prompt_text(at, sizes.prompt_words) for at in range(count)]
        prompts = [[shown.prompt(conversation(text, turn)) for turn in range(NUM_TURNS)] for text in texts]

        async def through_servers(at: int) -> float:
            began = time.perf_counter()
            body = {
                "rollout_id": f"{name}-{at}",
                "server_url": gateway,
                "messages": conversation(texts[at], 0),
                "tokenizer_name": "policy",
                "sampling_params": {"temperature": 0.0, "max_tokens": 2 * TURN_TOKENS},
            }
            check(await post(session, f"{server}/rollout", body))
            return time.perf_counter() - began

        async def directly(at: int) -> float:
            began = time.perf_counter()
            for turn, prompt in enumerate(prompts[at]):
                if turn:
                    await asyncio.sleep(random.uniform(*sizes.tool_latency_ms) / 1000)
                await direct.decode(prompt, TURN_TOKENS)
            return time.perf_counter() - began

        began = time.perf_counter()
        taken = await asyncio.gather(*map(through_servers if side == "servers" else directly, range(count)))
        seconds = time.perf_counter() - began
        if side == "servers" and number >= 0:
            latencies.extend(taken)
        return count / seconds

    def ended(number: int, rates: Mapping[str, float]) -> None:
        if number >= 0:
            say(
                f"rollouts {number + 1}/{sizes.rollout_rounds}: {rates['servers']:.1f}/s, on the engine alone "
                f"{rates['direct']:.1f}/s"
            )

    rounds = await play(sizes.rollout_rounds, ("servers", "direct"), one, ended, first=-1)
    return rollout_fields(rounds[1:], latencies)


def rollout_fields(rounds: Sequence[Mapping[str, float]], latencies_s: Sequence[float]) -> dict[str, Any]:
    """The results of the rounds: rollouts per second by side, and each one's seconds through the servers."""
    found = ratios(rounds, "servers", "direct", float)
    return {
        "rollouts_s": median(each["servers"] for each in rounds),
        "rollouts_s_direct": median(each["direct"] for each in rounds),
        "rollouts_vs_direct": median(found),
        "rollouts_vs_direct_range": spread(found),
        "rollout_p50_s": percentile(latencies_s, 0.5),
        "rollout_p99_s": percentile(latencies_s, 0.99),
    }


def check(answer: Mapping[str, Any]) -> None:
    """Raise SluiceError unless the rollout has all its turns and tokens, and reported its end to the gateway."""
    metrics, extra = answer["metrics"], answer["extra_fields"]
    counts = (metrics["num_llm_calls"], metrics["num_tool_calls"], metrics["response_tokens"])
    wanted = (NUM_TURNS, NUM_TURNS - 1, NUM_TURNS * TURN_TOKENS)
    if (answer["status"], answer["finish_reason"], counts, extra) != ("COMPLETED", "stop", wanted, {}):
        raise SluiceError(f"a rollout has {counts} calls, tool calls and tokens, not {wanted}: {answer}")


async def served(
    session: aiohttp.ClientSession, gateway: str, stock: str, sizes: Sizes, *, logprobs: bool
) -> dict[str, Any]:
    """Completion tokens per second through the gateway and on vLLM's own server, for one kind of request."""
    urls = {"stock": stock, "gateway": gateway}
    texts: dict[str, list[str]] = {}

    async def one(side: str, number: int) -> float:
        """Raises SluiceError if a completion is shorter than requested."""
        url, texts[side] = urls[side], [""] * sizes.requests

        async def ask(at: int) -> None:
            text = prompt_text(1 + number * sizes.requests + at, sizes.prompt_words)
            body: dict[str, Any] = {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0.0,
                "max_tokens": sizes.request_tokens,
                **({"logprobs": True} if logprobs else {}),
            }
            answer = await post(session, f"{url}/v1/chat/completions", body)
            if (found := answer["usage"]["completion_tokens"]) != sizes.request_tokens:
                raise SluiceError(f"{url} returned {found} tokens, but {sizes.request_tokens} were requested")
            texts[side][at] = answer["choices"][0]["message"]["content"]

        began = time.perf_counter()
        await in_flight(map(ask, range(sizes.requests)), sizes.concurrency)
        return sizes.requests * sizes.request_tokens / (time.perf_counter() - began)

    def ended(number: int, rates: Mapping[str, float]) -> None:
        if number < 0:
            if texts["gateway"] != texts["stock"]:
                raise SluiceError(
                    "the gateway and vLLM's own server returned different texts; a comparison would be unfair"
                )
            return
        say(
            f"requests{' with logprobs' if logprobs else ''} {number + 1}/{sizes.served_rounds}: "
            f"gateway {rates['gateway']:.0f} tok/s, vLLM's own server {rates['stock']:.0f} tok/s"
        )

    return served_fields((await play(sizes.served_rounds, ("stock", "gateway"), one, ended, first=-1))[1:])


def served_fields(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The results of the rounds; the ratio is the median of the rounds' ratios."""
    found = ratios(rounds, "gateway", "stock", float)
    return {
        "gateway_vs_vllm_serve": median(found),
        "range": spread(found),
        "gateway_tok_s": median(each["gateway"] for each in rounds),
        "vllm_serve_tok_s": median(each["stock"] for each in rounds),
        "rounds": len(rounds),
    }
