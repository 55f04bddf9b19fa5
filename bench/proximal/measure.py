"""What one run does, all parts one after the other, and the fields of the JSON object with their aims."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.broker import own_broker
from sluice.bench.harness import HOME, at_least_one, own_directory, run_interruptible, say, why_no_vllm
from sluice.bench.models import ENDLESS_CONTEXT, endless_model
from sluice.bench.processes import Fleet, engine_environment, set_options
from sluice.bench.proximal.engine import THREADS, CostWork, Engine, ShareWork, ThroughputWork, engine
from sluice.bench.proximal.updates import Sizes
from sluice.bench.proximal.versions import Variants, ensure_variants
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.run.supervisor import sluice_command

BACKENDS = ("hf", "vllm")
COST = {"hf": 1.15, "vllm": 1.5}
"""Most that an update which scores may cost, over one which only re-prefills."""

VALID = 1.0
"""Share of the older tokens, however many versions the queue holds."""

_SCORE_WAIT_S = 600  # a busy machine must not decide what is valid
_QUICK = Sizes(
    rows=4, prompt=16, generated=32, rounds=2, step_count=4, longest=64, intervals=(5, 20, 40), segment=20,
    publishes=1, wave=4, wave_longest=24,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """`backends` are measured, in this order."""

    backends: tuple[str, ...]
    sizes: Sizes
    why_no_vllm: str | None  # None: it is measured

    @classmethod
    def of(cls, *, backends: str, rounds: int | None, quick: bool) -> Plan:
        """`backends`: names with commas between them. Checked. Raises ConfigError."""
        names = tuple(dict.fromkeys(name.strip() for name in backends.split(",") if name.strip()))
        if not names or not set(names) <= set(BACKENDS):
            raise ConfigError(f"--backends {backends!r}: give some of {','.join(BACKENDS)}")
        at_least_one(rounds=rounds)
        sizes = _QUICK if quick else Sizes()
        sizes = sizes if rounds is None else msgspec.structs.replace(sizes, rounds=rounds)
        why = why_no_vllm("vllm" in names)
        names = names if why is None else tuple(name for name in names if name != "vllm")
        if not names:
            raise ConfigError("--backends vllm: vllm is not installed (`make setup`, or the extra `vllm`)")
        return cls(names, sizes, why)


@dataclass(frozen=True)
class Bench:
    """Where a run of the bench finds its things."""

    sizes: Sizes
    home: Path
    client: Any  # of the broker
    url: str  # of the broker
    model: Path
    variants: Path

    def settings(self, run: str, *more: str) -> list[str]:
        """Of a run's configuration."""
        return [
            f"run={run}",
            f"run_dir={self.home}",
            f"model.path={self.model}",
            "model.dtype=float32",
            "worker.claim_gpu=false",
            f"worker.torch_threads={THREADS}",
            "rollout_matching.task=exact_answer",
            *more,
        ]


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `publish_to_first_token_s`: see `sluice.bench.proximal.engine`. `score_cost_ratio`: an update that re-prefills and
    scores, over one that only re-prefills (`vs_kv_recompute`) and over one decode step (`vs_no_update`).
    `tok_s_by_interval`: tokens a second by steps between updates. `valid_share`: by versions that the queue holds.
    `aims`: what each is held against, and whether it was met; `measured`: over what, in words.
    """
    with own_directory() as home:
        model = endless_model(HOME)
        parts = run_interruptible(_run(plan, home, model, ensure_variants(HOME, model)))
    found = {
        **fields(parts),
        "measured": measured(plan.sizes),
        "sizes": msgspec.to_builtins(plan.sizes),
        "threads": THREADS,
        "dtype": "float32",
        "model": model.name,
    }
    return {**found, "why_no_vllm": plan.why_no_vllm} if plan.why_no_vllm else found


def fields(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts come to; `parts` by part, then by backend (`share` has no backend)."""
    rates, share = parts["throughput"], parts["share"]
    found: dict[str, Any] = {
        "publish_to_first_token_s": parts["published"],
        "score_cost_ratio": parts["cost"],
        "tok_s_by_interval": {name: each["tok_s"] for name, each in rates.items()},
        "valid_share": share["valid_share"],
    }
    return {
        **found,
        "aims": aims(found),
        "tok_s_spread": {name: each["spread"] for name, each in rates.items()},
        "updates_by_interval": {name: each["updates"] for name, each in rates.items()},
        "valid_share_tokens": share["measured"],
    }


def aims(found: Mapping[str, Any]) -> dict[str, Any]:
    """By field: the aim, what is held against it, and whether it was met; an aim of None: measured, held to nothing."""
    cost = {name: each["vs_kv_recompute"] for name, each in found["score_cost_ratio"].items()}
    least = min(found["valid_share"].values())
    return {
        "publish_to_first_token_s": {"aim": None},
        "score_cost_ratio": {
            name: {"aim": f"vs_kv_recompute <= {COST[name]}", "found": value, "met": value <= COST[name]}
            for name, value in cost.items()
        },
        "tok_s_by_interval": {"aim": None},
        "valid_share": {"aim": f">= {VALID}", "found": least, "met": least >= VALID},
    }


def measured(sizes: Sizes) -> dict[str, str]:
    """By field, in words: rows, lengths in tokens, and what a ratio is of."""
    rows, prompt = f"{sizes.rows} rows", f"prompts of {sizes.prompt} tokens"
    return {
        "publish_to_first_token_s": f"{rows} and a queue, {prompt}, up to {ENDLESS_CONTEXT - sizes.prompt} generated: "
        "from published_at (from_register: from the registration) to the first token under the new version",
        "score_cost_ratio": f"{rows}, {prompt}, {sizes.generated} generated: from the last token before an update that "
        "scores to the first after it of the last row, over the same without scores, and over one decode step",
        "tok_s_by_interval": f"{rows}, {prompt}, 0 to {sizes.longest} generated at the begin of a segment of "
        f"{sizes.segment} steps, {sizes.segments} segments; steps between updates",
        "valid_share": f"{sizes.wave} sequences of up to {sizes.wave_longest} tokens begun under each of "
        f"{sizes.retention + 1} versions; weights.retention and policy.max_token_staleness {sizes.retention}",
    }


async def _run(plan: Plan, home: Path, model: Path, variants: Path) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {"published": {}, "cost": {}, "throughput": {}}
    async with own_broker(home / "broker") as (client, url):
        bench = Bench(plan.sizes, home, client, url, model, variants)
        for name in dict.fromkeys((*plan.backends, "hf")):  # the share is measured with hf, whatever else is
            async with contextlib.AsyncExitStack() as scope:
                scorer = await scope.enter_async_context(_scorer(bench)) if name == "hf" else None
                opened = engine(name, model, variants, plan.sizes.rows, home)
                running = await scope.enter_async_context(opened)
                if scorer is not None:
                    parts["share"] = await _share(running, scorer, bench)
                    await scorer.end()  # nothing runs beside the engine while it is timed
                if name in plan.backends:
                    for part, found in (await _of_backend(running, name, bench)).items():
                        parts[part][name] = found
    return parts


async def _of_backend(running: Engine, name: str, bench: Bench) -> dict[str, Any]:
    sizes, run = bench.sizes, f"published-{name}"
    more = [f"worker.max_batch={sizes.rows}", "worker.checkpoint_tokens=0", "worker.drain_s=0"]
    settings = bench.settings(run, *more, f"broker.url={bench.url}")
    variants = Variants.read(bench.variants)
    first = await running.published(bench.client, run, settings, variants, sizes, bench.home)
    say(f"{name}: {first['median']:.2f} s from publish to the first token, at worst {first['worst']:.2f} s")
    cost = await running.measure(CostWork(sizes))
    say(f"{name}: an update with scores costs {cost['vs_kv_recompute']:.3f} of one without")
    rates = await running.measure(ThroughputWork(sizes, str(bench.home / f"versions-{name}")))
    say(f"{name}: tok/s by interval " + ", ".join(f"{key} {rate:.0f}" for key, rate in rates["tok_s"].items()))
    return {"published": first, "cost": cost, "throughput": rates}


def _share_settings(bench: Bench, *more: str) -> list[str]:
    retention = bench.sizes.retention
    policy = ["policy.enabled=true", "policy.advantage=reward", f"policy.max_token_staleness={retention}"]
    policy += [f"policy.score_wait_s={_SCORE_WAIT_S}", "scorer.claim_gpu=false", f"weights.retention={retention}"]
    return bench.settings("share", *policy, *more)


@contextlib.asynccontextmanager
async def _scorer(bench: Bench) -> AsyncIterator[Fleet]:
    """A scorer process of the run `share`; it loads while the engine does."""
    async with Fleet("scorer", bench.home) as fleet:
        command = sluice_command("score", *set_options(_share_settings(bench)))
        await fleet.start(command, {**engine_environment(THREADS), "REDIS_URL": bench.url})
        yield fleet


async def _share(running: Engine, scorer: Fleet, bench: Bench) -> dict[str, Any]:
    found = await running.measure(ShareWork(bench.sizes, _share_settings(bench, f"broker.url={bench.url}")))
    scorer.check()
    say("valid share by versions in the queue: " + ", ".join(f"{k} {v:.4f}" for k, v in found["valid_share"].items()))
    return found
