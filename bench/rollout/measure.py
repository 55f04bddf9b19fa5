"""What one run does, the processes it needs, and the fields of the JSON object."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sluice.bench.broker import own_broker, until_serving
from sluice.bench.harness import HOME, at_least_one, own_directory, run_interruptible, say, why_no_vllm
from sluice.bench.http import free_ports, open_session, until_healthy
from sluice.bench.processes import Fleet, engine_environment, set_options
from sluice.bench.rollout.agent_model import NUM_TURNS, TURN_TOKENS, agent_model
from sluice.bench.rollout.sides import MODEL_NAME, Sizes, added, direct_engine, rollouts, served
from sluice.pipeline.run.supervisor import sluice_command
from sluice.pipeline.wire.keys import Keys
from sluice.producers.rollout_client.peer import KEY_NAMES
from sluice.producers.tokenizer import load_renderer

_AIM = 0.95
"""Of `gateway_vs_vllm_serve`."""

_QUICK = Sizes(
    prompt_words=8, pairs=5, streamed_pairs=2, call_tokens=8, rollouts=6, rollout_rounds=1, rollout_batch=8,
    tool_latency_ms=(1, 2), requests=8, concurrency=4, request_tokens=8, served_rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sizes: Sizes
    why_no_vllm: str | None  # None: the gateway is measured beside vLLM's own server

    @classmethod
    def of(cls, *, rounds: int | None, vllm: bool, quick: bool) -> Plan:
        """`rounds` of either part that has rounds. Checked. Raises ConfigError."""
        at_least_one(rounds=rounds)
        sizes = _QUICK if quick else Sizes()
        if rounds is not None:
            sizes = msgspec.structs.replace(sizes, rollout_rounds=rounds, served_rounds=rounds)
        return cls(sizes, why_no_vllm(vllm))


@dataclass(frozen=True)
class Bench:
    """Where a run of the bench finds its things."""

    home: Path
    client: Any  # of the broker
    url: str  # of the broker
    model: Path
    session: aiohttp.ClientSession


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `rollouts_s`: rollouts a second through rollout server, gateway and a worker (`rollouts_s_direct`: their turns on
    the engine alone). `added_ms_p50`, `added_ms_p99`: milliseconds that gateway, queue and worker add to one call, over
    pairs. `gateway_vs_vllm_serve`: completion tokens a second, over those of vLLM's own server (None: see
    `why_no_vllm`); `with_logprobs`: the same, of requests that want them.
    """
    with own_directory() as home:
        model = agent_model(HOME)
        parts = run_interruptible(_run(plan, home, model))
    found = {
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
    return {**found, "why_no_vllm": plan.why_no_vllm} if plan.why_no_vllm else found


def fields(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts come to; `parts` by name: `added`, `rollouts` and, where there is vLLM, `plain` and `logprobs`."""
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


async def _run(plan: Plan, home: Path, model: Path) -> dict[str, dict[str, Any]]:
    async with own_broker(home / "broker") as (client, url), open_session() as session:
        bench = Bench(home, client, url, model, session)
        parts = await _on_hf(plan.sizes, bench)
        return parts if plan.why_no_vllm else {**parts, **await _on_vllm(plan.sizes, bench)}


async def _on_hf(sizes: Sizes, bench: Bench) -> dict[str, dict[str, Any]]:
    renderer = load_renderer(str(bench.model))
    chosen = settings(bench.home, bench.model, "hf", sizes.rollout_batch, sizes)
    async with direct_engine(chosen) as direct, _running(bench, chosen, "rollout-server") as (gateway, server):
        one = await added(bench.session, gateway, direct, renderer, sizes)
        say(f"one call: {one['added_ms_p50']:.1f} ms added at the median, {one['added_ms_p99']:.1f} ms at p99")
        many = await rollouts(bench.session, server, gateway, direct, renderer, sizes)
        return {"added": one, "rollouts": many}


async def _on_vllm(sizes: Sizes, bench: Bench) -> dict[str, dict[str, Any]]:
    """The gateway with a vLLM worker beside vLLM's own server, with the options that a worker gives its engine."""
    chosen = settings(bench.home, bench.model, "vllm", sizes.concurrency, sizes)
    (port,) = free_ports(1)
    stock_url = f"http://127.0.0.1:{port}"
    # `vllm serve` of the CPU build asks for the metadata of a package that is named otherwise; this is its server.
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
    """Of a run's configuration, for its processes and for the engine that is called directly."""
    low, high = sizes.tool_latency_ms
    return [
        f"run=bench-{backend}",
        f"run_dir={home}",
        f"model.path={model}",
        "model.dtype=float32",
        f"worker.backend={backend}",
        f"worker.max_batch={max_batch}",
        "worker.claim_gpu=false",
        "worker.torch_threads=1",
        "worker.drain_s=0",
        "worker.vllm.enforce_eager=true",
        f"gateway.model_name={MODEL_NAME}",
        f"rollout_server.max_concurrent_rollouts={sizes.rollouts}",
        f"rollout_server.tool_latency_ms=[{low},{high}]",
        "rollout_matching.task=exact_answer",
    ]


@contextlib.asynccontextmanager
async def _running(bench: Bench, chosen: Sequence[str], *more: str) -> AsyncIterator[tuple[str, str]]:
    """A worker, a gateway and `more` roles, all ready; the addresses of gateway and rollout server."""
    run = chosen[0].partition("=")[2]
    ports = free_ports(2)
    options = set_options([*chosen, f"gateway.port={ports[0]}", f"rollout_server.port={ports[1]}"])
    env = {**engine_environment(), "REDIS_URL": bench.url, **dict.fromkeys(KEY_NAMES, "")}  # no key is asked for
    async with Fleet(run, bench.home) as fleet:
        for role in ("worker", "gateway", *more):
            await fleet.start(sluice_command(role, *options), env)
        gateway, server = (f"http://127.0.0.1:{port}" for port in ports)
        for url in (gateway, server)[: 1 + len(more)]:
            await until_healthy(bench.session, url, fleet)
        await until_serving(bench.client, Keys(run), fleet)
        yield gateway, server
