"""All parts, one after the other, and the fields of the JSON object.

Logs and the broker are in a directory of their own, which is removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.interruptible import run_interruptible
from sluice.bench.processes import Fleet
from sluice.bench.report import say
from sluice.bench.rollout.added import added
from sluice.bench.rollout.direct import direct_engine
from sluice.bench.rollout.http import open_session
from sluice.bench.rollout.model import NUM_TURNS, TURN_TOKENS, ensure_model
from sluice.bench.rollout.plan import HOME, Plan
from sluice.bench.rollout.rollouts import rollouts
from sluice.bench.rollout.served import served, start_stock
from sluice.bench.rollout.stack import Place, free_ports, running, settings, until_healthy
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig

_AIM = 0.95
"""Of `gateway_vs_vllm_serve`."""


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `rollouts_s`: rollouts a second through rollout server, gateway and a worker (`rollouts_s_direct`: their turns on
    the engine alone). `added_ms_p50`, `added_ms_p99`: milliseconds that gateway, queue and worker add to one call, over
    pairs. `gateway_vs_vllm_serve`: completion tokens a second, over those of vLLM's own server (None: see
    `why_no_vllm`); `with_logprobs`: the same, of requests that want them.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    model = ensure_model(HOME).resolve()
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    try:
        with embedded_broker(BrokerConfig(embedded_dir=str(home / "broker"))) as url:
            parts = run_interruptible(_run(plan, Place(home, url, model)))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {**fields(parts), **_conditions(plan, model)}


def fields(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts come to; `parts` by name: `added`, `rollouts` and, where there is vLLM, `plain` and `logprobs`."""
    first = {name: parts["added"][name] for name in ("added_ms_p50", "added_ms_p99")}
    ratio = parts["plain"]["gateway_vs_vllm_serve"] if "plain" in parts else None
    return {
        "rollouts_s": parts["rollouts"]["rollouts_s"],
        **first,
        "gateway_vs_vllm_serve": ratio,
        "aims": {"gateway_vs_vllm_serve": {"aim": f">= {_AIM}", "met": None if ratio is None else ratio >= _AIM}},
        **parts["rollouts"],
        "call": parts["added"],
        "served": parts.get("plain"),
        "served_with_logprobs": parts.get("logprobs"),
    }


async def _run(plan: Plan, place: Place) -> dict[str, dict[str, Any]]:
    async with open_session() as session:
        parts = await _on_hf(plan, place, session)
        return parts if plan.why_no_vllm else {**parts, **await _on_vllm(plan, place, session)}


async def _on_hf(plan: Plan, place: Place, session: Any) -> dict[str, dict[str, Any]]:
    from sluice.producers.tokenizer import load_renderer

    sizes, renderer = plan.sizes, load_renderer(str(place.model))
    chosen = settings(place, "hf", sizes.rollout_batch, sizes)
    async with direct_engine(chosen) as direct, running(place, chosen, session, with_server=True) as stack:
        one = await added(session, stack.gateway, direct, renderer, sizes)
        say(f"one call: {one['added_ms_p50']:.1f} ms added at the median, {one['added_ms_p99']:.1f} ms at p99")
        return {"added": one, "rollouts": await rollouts(session, stack, direct, renderer, sizes)}


async def _on_vllm(plan: Plan, place: Place, session: Any) -> dict[str, dict[str, Any]]:
    sizes = plan.sizes
    chosen = settings(place, "vllm", sizes.concurrency, sizes)
    (port,) = free_ports(1)
    stock_url = f"http://127.0.0.1:{port}"
    async with Fleet("vllm-serve", place.home) as stock, running(place, chosen, session, with_server=False) as stack:
        await start_stock(stock, place.model, port, sizes)
        await until_healthy(session, stock_url, stock)
        both = {"plain": False, "logprobs": True}
        return {
            name: await served(session, stack.gateway, stock_url, sizes, logprobs=wanted)
            for name, wanted in both.items()
        }


def _conditions(plan: Plan, model: Path) -> dict[str, Any]:
    found = {
        "sizes": msgspec.to_builtins(plan.sizes),
        "num_rollouts": plan.sizes.rollouts,
        "turns": NUM_TURNS,
        "turn_tokens": TURN_TOKENS,
        "tool_latency_ms": list(plan.sizes.tool_latency_ms),
        "threads": 1,
        "dtype": "float32",
        "model": model.name,
    }
    return found if plan.why_no_vllm is None else {**found, "why_no_vllm": plan.why_no_vllm}
