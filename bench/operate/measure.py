"""All parts, one after the other, and the fields of the JSON object.

Everything runs on brokers and in a directory of its own, which are removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.interruptible import run_interruptible
from sluice.bench.operate.help import help_s
from sluice.bench.operate.overhead import overhead
from sluice.bench.operate.pages import pages
from sluice.bench.operate.past import fill_broker, fill_history
from sluice.bench.operate.plan import HOME, RUN, Plan
from sluice.bench.pipeline.model import ensure_model
from sluice.bench.report import say
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.run import provenance

_AIMS = {"dashboard_p95_ms_max": 150.0, "help_s": 0.3, "metrics_overhead": 0.01}


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `dashboard_p95_ms`: milliseconds by page, with `finished` sequences in the history (`dashboard_p95_ms_max`: of the
    slowest page). `help_s`: seconds of `sluice --help`, median. `metrics_overhead`: 1 - tokens a second with metrics
    that are scraped every second, over those without, the median of the rounds.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    try:
        found: dict[str, Any] = {"help_s": help_s(plan.helps)}
        say(f"help: {found['help_s']:.3f} s")
        with embedded_broker(BrokerConfig(embedded_dir=str(home / "one"))) as one:
            found |= run_interruptible(_shown(plan, home, one))
            with embedded_broker(BrokerConfig(embedded_dir=str(home / "two"))) as two:
                found |= run_interruptible(overhead(plan, home, (one, two)))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {**found, "aims": aims(found), "sizes": msgspec.to_builtins(plan)}


def aims(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was wanted, and whether it was reached."""
    return {name: {"aim": f"<= {most}", "met": found[name] <= most} for name, most in _AIMS.items()}


async def _shown(plan: Plan, home: Path, url: str) -> dict[str, Any]:
    config = _config(home, url)
    client = connect(config.broker)
    try:
        started = time.monotonic()
        await fill_history(config, plan.finished)
        seconds = time.monotonic() - started
        say(f"history: {plan.finished} sequences recorded in {seconds:.1f} s")
        await fill_broker(client, config, plan)
        resolved = provenance.store(config, home / RUN)
        shown = await pages(plan, config, client, resolved, home)
        stored = sum(path.stat().st_size for path in (home / RUN / "history").iterdir())
        return {**shown, "finished": plan.finished, "history_bytes_per_sequence": stored / plan.finished}
    finally:
        await client.aclose()


def _config(home: Path, url: str) -> Config:
    settings = [f"run={RUN}", f"run_dir={home}", f"broker.url={url}", f"model.path={ensure_model(HOME).resolve()}"]
    return load_config(None, settings, environ={})
