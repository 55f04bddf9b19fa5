"""All parts, one after the other, and the fields of the JSON object.

Logs, versions and the broker are in a directory of their own, which is removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.engine.model import ensure_model
from sluice.bench.interruptible import run_interruptible
from sluice.bench.processes import Fleet
from sluice.bench.proximal.aims import aims, measured
from sluice.bench.proximal.engines import THREADS, Engine, engine, environment
from sluice.bench.proximal.plan import HOME, Plan
from sluice.bench.proximal.published import published
from sluice.bench.proximal.versions import Variants, ensure_variants
from sluice.bench.proximal.work import CostWork, ShareWork, ThroughputWork
from sluice.bench.report import say
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.run.supervisor import sluice_command

_SCORE_WAIT_S = 600  # a busy machine must not decide what is valid


@dataclass(frozen=True)
class Place:
    """Where a run of the bench finds its things."""

    home: Path
    url: str
    model: Path
    variants: Path


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `publish_to_first_token_s`: see `sluice.bench.proximal.published`. `score_cost_ratio`: an update that re-prefills
    and scores, over one that only re-prefills (`vs_kv_recompute`) and over one decode step (`vs_no_update`).
    `tok_s_by_interval`: tokens a second by steps between updates. `valid_share`: by versions that the queue holds.
    `aims`: what each is held against, and whether it was met; `measured`: over what, in words.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    model = ensure_model(HOME).resolve()
    variants = ensure_variants(HOME, model).resolve()
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    try:
        with embedded_broker(BrokerConfig(embedded_dir=str(home / "broker"))) as url:
            parts = run_interruptible(_run(plan, Place(home, url, model, variants)))
        return {**fields(parts), **_conditions(plan, model)}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def fields(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts come to; `parts` by part, then by backend (`share` has no backend)."""
    share = parts["share"]
    found: dict[str, Any] = {
        "publish_to_first_token_s": parts["published"],
        "score_cost_ratio": parts["cost"],
        "tok_s_by_interval": {name: each["tok_s"] for name, each in parts["throughput"].items()},
        "valid_share": share["valid_share"],
    }
    details = {
        "tok_s_spread": {name: each["spread"] for name, each in parts["throughput"].items()},
        "updates_by_interval": {name: each["updates"] for name, each in parts["throughput"].items()},
        "valid_share_tokens": share["measured"],
    }
    return {**found, "aims": aims(found), **details}


async def _run(plan: Plan, place: Place) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {"published": {}, "cost": {}, "throughput": {}}
    for name in dict.fromkeys((*plan.backends, "hf")):  # the share is measured with hf, whatever else is
        async with contextlib.AsyncExitStack() as scope:
            scorer = await scope.enter_async_context(_scorer(plan, place)) if name == "hf" else None
            opened = engine(name, place.model, place.variants, plan.sizes.rows, place.home)
            running = await scope.enter_async_context(opened)
            if scorer is not None:
                parts["share"] = await _share(running, scorer, plan, place)
                await scorer.end()  # nothing runs beside the engine while it is timed
            if name in plan.backends:
                for part, found in (await _of_backend(running, name, plan, place)).items():
                    parts[part][name] = found
    return parts


async def _of_backend(running: Engine, name: str, plan: Plan, place: Place) -> dict[str, Any]:
    sizes, run = plan.sizes, f"published-{name}"
    variants = Variants.read(place.variants)
    settings = [*_settings(place, run), f"worker.max_batch={sizes.rows}", "worker.checkpoint_tokens=0"]
    settings += ["worker.drain_s=0", f"broker.url={place.url}"]
    first = await published(running, place.url, run, settings, variants, sizes, place.home)
    say(f"{name}: {first['median']:.2f} s from publish to the first token, at worst {first['worst']:.2f} s")
    cost = await running.measure(CostWork(sizes))
    say(f"{name}: an update with scores costs {cost['vs_kv_recompute']:.3f} of one without")
    rates = await running.measure(ThroughputWork(sizes, str(place.home / f"versions-{name}")))
    say(f"{name}: tok/s by interval " + ", ".join(f"{key} {rate:.0f}" for key, rate in rates["tok_s"].items()))
    return {"published": first, "cost": cost, "throughput": rates}


@contextlib.asynccontextmanager
async def _scorer(plan: Plan, place: Place) -> AsyncIterator[Fleet]:
    """A scorer process of the run `share`; it loads while the engine does."""
    command = sluice_command("score", *(part for value in _share_settings(plan, place) for part in ("--set", value)))
    async with Fleet("scorer", place.home) as fleet:
        await fleet.start(command, {**environment(), "REDIS_URL": place.url})
        yield fleet


async def _share(running: Engine, scorer: Fleet, plan: Plan, place: Place) -> dict[str, Any]:
    found = await running.measure(ShareWork(plan.sizes, [*_share_settings(plan, place), f"broker.url={place.url}"]))
    scorer.check()
    say("valid share by versions in the queue: " + ", ".join(f"{k} {v:.4f}" for k, v in found["valid_share"].items()))
    return found


def _share_settings(plan: Plan, place: Place) -> list[str]:
    retention = plan.sizes.retention
    policy = ["policy.enabled=true", "policy.advantage=reward", f"policy.max_token_staleness={retention}"]
    policy.append(f"policy.score_wait_s={_SCORE_WAIT_S}")
    return [*_settings(place, "share"), *policy, "scorer.claim_gpu=false", f"weights.retention={retention}"]


def _settings(place: Place, run: str) -> list[str]:
    """`--set` values of a run's configuration."""
    return [
        f"run={run}",
        f"run_dir={place.home}",
        f"model.path={place.model}",
        "model.dtype=float32",
        "worker.claim_gpu=false",
        f"worker.torch_threads={THREADS}",
        "rollout_matching.task=exact_answer",
    ]


def _conditions(plan: Plan, model: Path) -> dict[str, Any]:
    found = {
        "measured": measured(plan.sizes),
        "sizes": msgspec.to_builtins(plan.sizes),
        "threads": THREADS,
        "dtype": "float32",
        "model": model.name,
    }
    return found if plan.why_no_vllm is None else {**found, "why_no_vllm": plan.why_no_vllm}
