"""A run whose workers don't see the trainer's directory: versions travel as deltas through an S3 server (moto's, an
emulator)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import s3fs
import yaml

from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.stack import Stack
from tests.object_stores import BUCKET, s3_server, use


def on_another_host(stack: Stack) -> tuple[Path, Path]:
    """(configuration, host's directory) of workers that have the model and the broker, and nothing else."""
    host = stack.directory / "another-host"
    host.mkdir()
    weights = {**stack.tree["weights"], "cache_dir": str(host / "cache")}
    tree = {**stack.tree, "run_dir": str(host / "runs"), "weights": weights}
    config = host / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config, host


def newest_on(workers: int) -> Any:
    return lambda now: [row.facts.get("version") for row in now.alive("worker")] == [now.latest_version] * workers


def test_workers_on_another_host_follow_by_deltas(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as address:
        use(monkeypatch, address)
        store = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        store.makedirs(BUCKET, exist_ok=True)
        weights = {"transport": "delta", "store_url": f"s3://{BUCKET}/runs", "anchor_every": 4, "cache_gb": 1}
        stack = make_stack(text_rows(48), "exact_answer", weights=weights, trainer={"learning_rate": 1e-6})
        config, host = on_another_host(stack)
        for role in ("produce", "consume", "train"):
            stack.start(role)
        stack.sluice("worker", "-c", str(config))
        stack.wait(lambda now: (now.latest_version or 0) >= 2, "two versions")
        late = stack.sluice("worker", "-c", str(config))
        stack.wait(lambda now: now.complete, "the end of the run")
        end = stack.wait(newest_on(2), "both workers to load the newest version")
        stack.finish()
        stack.assert_exactly_once()
        objects = store.find(f"{BUCKET}/runs/{stack.run}")
        assert sum(name.endswith(".delta") for name in objects) >= 3
        assert not list((host / "runs").rglob("*.safetensors"))
        folder = next(name.split("/")[-2] for name in objects if f"v{end.latest_version:06d}-" in name)
        cached = next((host / "cache" / "weights").glob(f"{folder}-*"))
        published = stack.run_dir / "weights" / f"v{end.latest_version:06d}"
        for file in published.glob("*.safetensors"):
            assert (cached / file.name).read_bytes() == file.read_bytes()
        shown = "".join(process.text() for process in stack.processes)
        assert "loopback-secret-key" not in shown
        assert "refused" not in late.text()
