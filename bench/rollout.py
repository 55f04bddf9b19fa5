"""What agent rollouts cost over the engine alone, and the gateway compared with vLLM's own server.

        ┌▶ added      one call at a time: gateway ─▶ worker            │ the engine in this process ─┐
        ├▶ rollouts   many at once: rollout server ⇄ gateway ─▶ worker │ their turns on that engine ─┤
Plan ───┤                                                              │                             ├─▶ fields
        ├▶ turns      conversations: 2 gateways ─▶ 4 workers           │ the same without affinity  ─┤
        └▶ served     many calls at once: gateway ─▶ worker (vLLM)     │ vLLM's own OpenAI server   ─┘

The two sides of a part alternate, with the same prompts, on the same model; both stay loaded.

- added: pairs of the same prompt and options, without logprobs. The engine alone gets the prompt's tokens, so the added
  time includes rendering and parsing. Streamed: time to the first text, which comes with the first
  `gateway.stream_tokens` tokens.
- rollouts: several turns with a tool between them, all at once. Through the servers each is one `POST /rollout`; its
  clock stops when its trajectory is in the result stream. The engine alone gets each turn's tokens, rendered before the
  clock starts; between turns it waits as long as the tool would.
- turns: a conversation's turns come one after another, each through the next gateway. All have one system prompt, and a
  question of their own. Without: no turn is left to the worker that has the turns before, and no worker keeps prefixes.
- served: a round is `requests` chat completions, `concurrency` at a time, greedy, all of the same length. First plain
  requests, then requests with logprobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp

from sluice.bench.broker import Broker, in_flight, own_broker
from sluice.bench.engines import greedy, loaded
from sluice.bench.harness import HOME, BenchPlan, aim, in_turns, median_of, percentile, play, ratios, say, spread
from sluice.bench.http import first_text_s, free_ports, open_session, post, until_healthy
from sluice.bench.models import NUM_TURNS, TURN_TOKENS, agent_model, conversation, prompt_text
from sluice.bench.processes import Fleet, engine_environment, run_settings
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import GatewayConfig, WorkerConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.rollout_client.peer import KEY_NAMES
from sluice.producers.tokenizer import load_renderer
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import Backend

MODEL_NAME = "policy"
_TOOLS: list[Any] = [{"type": "function", "function": {"name": "multiply"}}]
_EVERY = GatewayConfig().stream_tokens
_WARM_PAIRS, _WARM_TURNS = 5, 2
_LEASE_S = 60.0  # of `turns`: a worker that was still for a while has room for its conversations all the same
_AIMS = {
    "added_ms_p50": ("<=", 5.0), "rollouts_vs_direct": (">=", 0.95), "prefix_reused_share": (">=", 0.9),
    "turn_latency_vs_none": ("<=", 0.5), "gateway_vs_vllm_serve": (">=", 1.0),
}  # fmt: skip

Pair = Mapping[str, float]
"""Seconds through the `gateway`, and `direct` on the engine."""


class Plan(BenchPlan, frozen=True, kw_only=True):
    """Counts, and lengths in tokens."""

    prompt_words: int = 60  # per prompt; the chat template adds a few tokens
    pairs: int = 200  # of `added`: one call on each side
    streamed_pairs: int = 40
    call_tokens: int = 32
    large: bool = True  # the model of `rollouts` and `turns`
    rollouts: int = 100  # at once, and in a round
    warm_rollouts: int = 8
    rounds: int = 3
    rollout_batch: int = 64  # worker.max_batch; also of `added`
    tool_latency_ms: tuple[int, int] = (10, 100)
    workers: int = 4  # of `turns`
    gateways: int = 2
    conversations: int = 4  # at once
    conversation_turns: int = 10
    conversation_batch: int = 2  # worker.max_batch of `turns`
    prefix_wait_s: float = WorkerConfig().prefix_wait_s  # of `turns`, with affinity
    system_words: int = 400  # of the prompt that all conversations begin with
    reply_words: int = 30  # of what follows each answer
    turn_tokens: int = 32
    requests: int = 128  # of a round of `served`
    concurrency: int = 32  # requests at a time, and worker.max_batch
    request_tokens: int = 128
    vllm: bool = True
    only: tuple[str, ...] = ("added", "rollouts", "turns", "served")

    QUICK = {
        "prompt_words": 8, "pairs": 5, "streamed_pairs": 2, "call_tokens": 8, "large": False, "rollouts": 6,
        "warm_rollouts": 2, "rounds": 1, "rollout_batch": 8, "tool_latency_ms": (1, 2), "workers": 2, "gateways": 1,
        "conversations": 2, "conversation_turns": 3, "conversation_batch": 4, "prefix_wait_s": 600.0,
        "system_words": 40, "reply_words": 4, "turn_tokens": 8, "requests": 8, "concurrency": 4, "request_tokens": 8,
    }  # fmt: skip


class Bench(NamedTuple):
    home: Path
    broker: Broker
    model: Path
    session: aiohttp.ClientSession


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`rollouts_s`: rollouts per second through rollout server, gateway and a worker (`rollouts_s_direct`: their turns
    on the engine alone, which keeps prefixes as the worker does). `added_ms_p50`, `added_ms_p99`: milliseconds that
    gateway, queue and worker add to one call, over pairs. `prefix_reused_share`: of all prompt tokens, those that no
    worker prefilled anew. `turn_latency_vs_none`: median latency of a conversation's turns, over that without affinity.
    `gateway_vs_vllm_serve`: completion tokens per second, over vLLM's own server (None: see `why_no_vllm`); in
    `served.with_logprobs` the same for requests with logprobs. `took_s`: seconds by part, starts of processes included.
    """
    small, large = agent_model(HOME), agent_model(HOME, large=plan.large)
    measured: dict[str, tuple[Path, Callable[[Plan, Bench], Awaitable[dict[str, Any]]]]] = {
        "added": (small, _added), "rollouts": (large, _rollouts), "turns": (large, _turns), "served": (small, _served),
    }  # fmt: skip
    parts, took_s = dict[str, dict[str, Any]](), dict[str, float]()
    async with own_broker(home / "broker") as broker, open_session() as session:
        for name, (model, one) in measured.items():
            if name in plan.only and not (name == "served" and plan.why_no_vllm):
                began = time.perf_counter()
                parts[name] = await one(plan, Bench(home, broker, model, session))
                took_s[name] = time.perf_counter() - began
                say(f"{name}: {took_s[name]:.0f} s")
    conditions = {
        "num_rollouts": plan.rollouts,
        "turns": NUM_TURNS,
        "turn_tokens": TURN_TOKENS,
        "model": small.name,
        "large_model": large.name,
        "took_s": took_s,
    }
    return {**fields(parts), **conditions, "threads": 1, "dtype": "float32"}


def fields(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The results of the parts by name; figures of a part that wasn't measured are None."""
    figures = {
        "rollouts": ("rollouts_s", "rollouts_vs_direct"), "added": ("added_ms_p50", "added_ms_p99"),
        "turns": ("prefix_reused_share", "turn_latency_vs_none"), "served": ("gateway_vs_vllm_serve",),
    }  # fmt: skip
    found = {name: parts.get(part, {}).get(name) for part, names in figures.items() for name in names}
    return {
        **found,
        **parts.get("rollouts", {}),
        "aims": {name: aim(sign, value, found[name]) for name, (sign, value) in _AIMS.items()},
        "conversations": parts.get("turns"),
        "call": parts.get("added"),
        "served": parts.get("served"),
    }


async def _added(plan: Plan, bench: Bench) -> dict[str, Any]:
    chosen = settings(bench.home, bench.model, "hf", plan.rollout_batch, plan)
    async with direct_engine(chosen) as direct, _running(bench, chosen) as (gateway, _):
        one = await added(bench.session, gateway, direct, load_renderer(str(bench.model)), plan)
        say(f"one call: {one['added_ms_p50']:.1f} ms added at the median, {one['added_ms_p99']:.1f} ms at p99")
        return one


async def _rollouts(plan: Plan, bench: Bench) -> dict[str, Any]:
    renderer = load_renderer(str(bench.model))
    chosen = settings(bench.home, bench.model, "hf", plan.rollout_batch, plan, run="bench-large")
    async with direct_engine(chosen) as direct, _running(bench, chosen, "rollout-server") as (gateway, server):
        return await rollouts(bench.session, server, gateway, direct, renderer, plan)


async def _turns(plan: Plan, bench: Bench) -> dict[str, Any]:
    batch = plan.conversation_batch
    run = {side: settings(bench.home, bench.model, "hf", batch, plan, run=f"bench-{side}") for side in ("with", "none")}
    run["with"] += [f"worker.prefix_wait_s={plan.prefix_wait_s}", f"worker.lease_s={_LEASE_S}"]
    run["none"] += ["worker.prefix_cache_mb=0", "worker.prefix_wait_s=0", f"worker.lease_s={_LEASE_S}"]
    async with _conversing(bench, run["with"], plan) as kept, _conversing(bench, run["none"], plan) as none:
        return await turns(bench.session, {"with": kept, "none": none}, plan)


@contextlib.asynccontextmanager
async def _conversing(bench: Bench, chosen: Sequence[str], plan: Plan) -> AsyncIterator[list[str]]:
    """Workers and gateways, all ready; the addresses of the gateways."""
    run, env = chosen[0].partition("=")[2], {**engine_environment(), **dict.fromkeys(KEY_NAMES, "")}
    ports = free_ports(plan.gateways)
    async with Fleet(run, bench.home) as fleet:
        for _ in range(plan.workers):
            await fleet.start_role("worker", chosen, bench.broker.url, env)
        for port in ports:
            await fleet.start_role("gateway", [*chosen, f"gateway.port={port}"], bench.broker.url, env)
        gateways = [f"http://127.0.0.1:{port}" for port in ports]
        for url in gateways:
            await until_healthy(bench.session, url, fleet)
        await bench.broker.until_serving(run, fleet, plan.workers)
        yield gateways


async def _served(plan: Plan, bench: Bench) -> dict[str, Any]:
    """The gateway with a vLLM worker against vLLM's own server, with the options a worker gives its engine."""
    chosen = settings(bench.home, bench.model, "vllm", plan.concurrency, plan)
    (port,) = free_ports(1)
    stock_url = f"http://127.0.0.1:{port}"
    # `vllm serve` of the CPU build reads the metadata of a package with another name; this is its server.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bench.model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", str(plan.concurrency), "--generation-config", "vllm"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    async with Fleet("vllm-serve", bench.home) as stock:
        await stock.start(command, {**engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"})  # beside ours
        async with _running(bench, chosen) as (gateway, _):
            await until_healthy(bench.session, stock_url, stock)
            plain = await served(bench.session, gateway, stock_url, plan, logprobs=False)
            return {**plain, "with_logprobs": await served(bench.session, gateway, stock_url, plan, logprobs=True)}


def settings(home: Path, model: Path, backend: str, max_batch: int, plan: Plan, *, run: str | None = None) -> list[str]:
    """Settings of a run, for its processes and for the engine called directly."""
    low, high = plan.tool_latency_ms
    return run_settings(
        run or f"bench-{backend}", model, f"run_dir={home}", "model.dtype=float32", f"worker.backend={backend}",
        f"worker.max_batch={max_batch}", "worker.drain_s=0", "worker.vllm.enforce_eager=true",
        f"gateway.model_name={MODEL_NAME}", f"rollout_server.max_concurrent_rollouts={plan.rollouts}",
        f"rollout_server.tool_latency_ms=[{low},{high}]",
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _running(bench: Bench, chosen: Sequence[str], *more: str) -> AsyncIterator[tuple[str, str]]:
    """A worker, a gateway and `more` roles, all ready; the addresses of gateway and rollout server."""
    run = chosen[0].partition("=")[2]
    ports = free_ports(2)
    options = [*chosen, f"gateway.port={ports[0]}", f"rollout_server.port={ports[1]}"]
    env = {**engine_environment(), **dict.fromkeys(KEY_NAMES, "")}  # no key needed
    async with Fleet(run, bench.home) as fleet:
        for role in ("worker", "gateway", *more):
            await fleet.start_role(role, options, bench.broker.url, env)
        gateway, server = (f"http://127.0.0.1:{port}" for port in ports)
        for url in (gateway, server)[: 1 + len(more)]:
            await until_healthy(bench.session, url, fleet)
        await bench.broker.until_serving(run, fleet)
        yield gateway, server


class Direct:
    """Greedy sequences of a worker's engine, called directly in this process: no queue, no server, no text."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._calls = backend, 0

    async def decode(self, prompt: Sequence[int], num_tokens: int, **more: Any) -> list[int]:
        """Exactly `num_tokens` new tokens. Raises SluiceError if the model ends earlier."""
        self._calls += 1
        found = (await self._backend.decode(greedy(f"direct-{self._calls}:0", prompt, num_tokens, **more))).token_ids
        if len(found) != num_tokens:
            raise SluiceError(f"the engine returned {len(found)} tokens, but {num_tokens} were requested")
        return found

    async def first_tokens_s(self, prompt: Sequence[int], num_tokens: int, every: int) -> float:
        """Seconds to its first `every` tokens; it is decoded to its end."""
        began, reports = time.perf_counter(), list[float]()
        told = {"report_every": every, "report": lambda _: reports.append(time.perf_counter())}
        await self.decode(prompt, num_tokens, logprobs=False, **told)
        return reports[0] - began


@contextlib.asynccontextmanager
async def direct_engine(settings: Sequence[str]) -> AsyncIterator[Direct]:
    """Loaded with the settings of a run; closed after the block."""
    config = load_config(None, list(settings), {})
    async with loaded(make_backend(config.model, config.worker)) as backend:
        yield Direct(backend)


async def added(
    session: aiohttp.ClientSession, gateway: str, direct: Direct, renderer: Renderer, plan: Plan
) -> dict[str, Any]:
    """What gateway, queue and worker add to one engine call. Raises SluiceError if tokens differ."""
    url, count = f"{gateway}/v1/chat/completions", plan.call_tokens

    def ask(number: int) -> tuple[dict[str, Any], list[int]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt_text(number, plan.prompt_words)}]
        return {"messages": messages, "temperature": 0.0, "max_tokens": count}, renderer.prompt(messages)

    async def pair(number: int) -> Pair:
        body, prompt = ask(number)
        seconds, tokens = dict[str, float](), dict[str, list[int]]()
        for side in in_turns(number, ("direct", "gateway")):
            began = time.perf_counter()
            if side == "direct":
                tokens[side] = await direct.decode(prompt, count, logprobs=False)
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

    pairs = [await pair(number) for number in range(-_WARM_PAIRS, plan.pairs)][_WARM_PAIRS:]
    first = [await streamed(number) for number in range(plan.streamed_pairs)]
    return {**added_fields(pairs), "first_text": added_fields(first), "stream_tokens": _EVERY}


def added_fields(pairs: Sequence[Pair]) -> dict[str, float]:
    """The results of the pairs, in milliseconds."""
    differences = [1000 * (each["gateway"] - each["direct"]) for each in pairs]
    return {
        "added_ms_p50": percentile(differences, 0.5),
        "added_ms_p99": percentile(differences, 0.99),
        **{f"{side}_ms_p50": 1000 * median_of(pairs, side, float) for side in ("gateway", "direct")},
        "pairs": len(pairs),
    }


async def rollouts(
    session: aiohttp.ClientSession, server: str, gateway: str, direct: Direct, renderer: Renderer, plan: Plan
) -> dict[str, Any]:
    """Rollouts per second through the servers at `server` and `gateway`, and on the engine alone."""
    shown, latencies = replace(renderer, options=ChatTemplateOptions(tools=_TOOLS)), list[float]()

    async def one(side: str, number: int) -> float:
        count = plan.warm_rollouts if number < 0 else plan.rollouts
        name = secrets.token_hex(4)
        first = plan.rollouts * (number + 1)  # new ones: workers keep prefixes by their tokens, and from round to round
        texts = [prompt_text(first + at, plan.prompt_words) for at in range(count)]
        prompts = [[shown.prompt(conversation(text, turn)) for turn in range(NUM_TURNS)] for text in texts]

        async def through_servers(at: int) -> float:
            began = time.perf_counter()
            sampling = {"temperature": 0.0, "max_tokens": 2 * TURN_TOKENS}
            body = {"rollout_id": f"{name}-{at}", "server_url": gateway, "messages": conversation(texts[at], 0)}
            body |= {"tokenizer_name": "policy", "sampling_params": sampling}
            check(await post(session, f"{server}/rollout", body))
            return time.perf_counter() - began

        async def directly(at: int) -> float:
            began = time.perf_counter()
            for turn, prompt in enumerate(prompts[at]):
                if turn:
                    await asyncio.sleep(random.uniform(*plan.tool_latency_ms) / 1000)
                await direct.decode(prompt, TURN_TOKENS, goes_on=True)
            return time.perf_counter() - began

        began = time.perf_counter()
        taken = await asyncio.gather(*map(through_servers if side == "servers" else directly, range(count)))
        seconds = time.perf_counter() - began
        if side == "servers" and number >= 0:
            latencies.extend(taken)
        return count / seconds

    rounds = await play(plan.rounds, ("servers", "direct"), one, warm=1, show="{:.1f}/s".format, what="rollouts")
    return rollout_fields(rounds, latencies)


def rollout_fields(rounds: Sequence[Mapping[str, float]], latencies_s: Sequence[float]) -> dict[str, Any]:
    """The results of the rounds: rollouts per second by side, and each one's seconds through the servers."""
    found = ratios(rounds, "servers", "direct", float)
    return {
        "rollouts_s": median_of(rounds, "servers", float),
        "rollouts_s_direct": median_of(rounds, "direct", float),
        "rollouts_vs_direct": median(found),
        "rollouts_vs_direct_range": spread(found),
        "rollout_p50_s": percentile(latencies_s, 0.5),
        "rollout_p99_s": percentile(latencies_s, 0.99),
    }


async def turns(session: aiohttp.ClientSession, gateways: Mapping[str, Sequence[str]], plan: Plan) -> dict[str, Any]:
    """Conversations through the gateways of each side, `with` affinity and with `none`."""
    system, answers = prompt_text(-1, plan.system_words), dict[str, list[Answered]]()

    async def one(side: str, number: int) -> float:
        name, found = secrets.token_hex(4), list[Answered]()

        async def converse(at: int) -> None:
            asked = prompt_text(1 + at + plan.conversations * number, plan.prompt_words)
            messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
            for turn in range(plan.conversation_turns if number >= 0 else _WARM_TURNS):
                url = gateways[side][(at + turn) % plan.gateways]
                body = {"rollout_id": f"{name}-{at}", "messages": messages, "temperature": 0.0}
                began = time.perf_counter()
                answer = await post(session, f"{url}/v1/chat/completions", {**body, "max_tokens": plan.turn_tokens})
                found.append(Answered.of(turn, time.perf_counter() - began, answer, plan.turn_tokens))
                said = answer["choices"][0]["message"]
                messages += [said, {"role": "user", "content": prompt_text(at + turn, plan.reply_words)}]
                await asyncio.sleep(random.uniform(*plan.tool_latency_ms) / 1000)
            await post(session, f"{url}/v1/rollout/{name}-{at}/finish", {"final_status": "CANCELLED"})

        await asyncio.gather(*map(converse, range(plan.conversations)))
        if number >= 0:
            answers.setdefault(side, []).extend(found)
        return median(one.seconds for one in found)

    rounds = await play(plan.rounds, ("with", "none"), one, warm=1, show="{:.3f} s".format, what="turns")
    return turn_fields(rounds, answers)


class Answered(NamedTuple):
    """One turn of a conversation."""

    turn: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, turn: int, seconds: float, answer: Mapping[str, Any], num_tokens: int) -> Answered:
        """Raises SluiceError if it's shorter than requested."""
        usage = answer["usage"]
        if usage["completion_tokens"] != num_tokens:
            raise SluiceError(f"{usage['completion_tokens']} tokens, but {num_tokens} were requested")
        return cls(turn, seconds, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def turn_fields(rounds: Sequence[Mapping[str, float]], answers: Mapping[str, Sequence[Answered]]) -> dict[str, Any]:
    """The results of the rounds; first turns included, unless said otherwise."""
    found = ratios(rounds, "with", "none", float)

    def share(side: str, first: int) -> float:
        chosen = [one for one in answers[side] if one.turn >= first]
        return sum(one.cached_tokens for one in chosen) / sum(one.prompt_tokens for one in chosen)

    return {
        "prefix_reused_share": share("with", 0),
        "prefix_reused_share_none": share("none", 0),
        "prefix_reused_share_later_turns": share("with", 1),
        "turn_latency_vs_none": median(found),
        "turn_latency_vs_none_range": spread(found),
        **{f"turn_{side}_p50_s": percentile([one.seconds for one in answers[side]], 0.5) for side in answers},
        **{f"turn_{side}_p99_s": percentile([one.seconds for one in answers[side]], 0.99) for side in answers},
        "longest_prompt_tokens": max(one.prompt_tokens for one in answers["with"]),
    }


def check(answer: Mapping[str, Any]) -> None:
    """Raise SluiceError unless the rollout has all its turns and tokens, and reported its end to the gateway."""
    metrics, extra = answer["metrics"], answer["extra_fields"]
    counts = (metrics["num_llm_calls"], metrics["num_tool_calls"], metrics["response_tokens"])
    wanted = (NUM_TURNS, NUM_TURNS - 1, NUM_TURNS * TURN_TOKENS)
    if (answer["status"], answer["finish_reason"], counts, extra) != ("COMPLETED", "stop", wanted, {}):
        raise SluiceError(f"a rollout has {counts} calls, tool calls and tokens, not {wanted}: {answer}")


async def served(
    session: aiohttp.ClientSession, gateway: str, stock: str, plan: Plan, *, logprobs: bool
) -> dict[str, Any]:
    """Completion tokens per second through the gateway and on vLLM's own server, for one kind of request."""
    urls = {"stock": stock, "gateway": gateway}
    texts, more = dict[str, list[str]](), {"logprobs": True} if logprobs else {}

    async def one(side: str, number: int) -> float:
        """Raises SluiceError if a completion is shorter than requested."""
        url, texts[side] = urls[side], [""] * plan.requests

        async def ask(at: int) -> None:
            text = prompt_text(1 + number * plan.requests + at, plan.prompt_words)
            body: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}]}
            body |= {"temperature": 0.0, "max_tokens": plan.request_tokens}
            answer = await post(session, f"{url}/v1/chat/completions", {**body, **more})
            if (found := answer["usage"]["completion_tokens"]) != plan.request_tokens:
                raise SluiceError(f"{url} returned {found} tokens, but {plan.request_tokens} were requested")
            texts[side][at] = answer["choices"][0]["message"]["content"]

        began = time.perf_counter()
        await in_flight(map(ask, range(plan.requests)), plan.concurrency)
        return plan.requests * plan.request_tokens / (time.perf_counter() - began)

    def same(number: int, _: Mapping[str, float]) -> None:
        if number < 0 and texts["gateway"] != texts["stock"]:
            raise SluiceError("gateway and vLLM's own server returned different texts; a comparison would be unfair")

    what = f"requests{' with logprobs' if logprobs else ''}"
    sides = ("stock", "gateway")
    return served_fields(await play(plan.rounds, sides, one, same, warm=1, show="{:.0f} tok/s".format, what=what))


def served_fields(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The results of the rounds; the ratio is the median of the rounds' ratios."""
    found = ratios(rounds, "gateway", "stock", float)
    return {
        "gateway_vs_vllm_serve": median(found),
        "range": spread(found),
        "gateway_tok_s": median_of(rounds, "gateway", float),
        "vllm_serve_tok_s": median_of(rounds, "stock", float),
        "rounds": len(rounds),
    }
