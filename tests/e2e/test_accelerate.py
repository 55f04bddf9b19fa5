"""`sluice train` under a real `accelerate launch` with the FSDP configuration that ships, beside the plain trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from sluice.consumers.training.model import load_policy, probe_score
from sluice.consumers.training.step_log import read_steps
from sluice.consumers.training.trainer import train
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.weights.versions import verify
from sluice.pipeline.wire.messages import TrainingSample
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import BIN, Process
from tests.e2e.ready_batches import LENGTH, STEPS, TOLERANCE, apart, manifest, ready_run, tensors
from tests.e2e.stack import Stack
from tests.seen_samples import image_files, processor_of, seeing_config, seen_sample
from tests.tiny_vision_models import save_tiny_qwen3_vl

FSDP = Path(__file__).parents[2] / "configs/accelerate/fsdp.yaml"


@pytest.fixture
def make_run(make_stack: MakeStack) -> Callable[..., Stack]:
    """A run with a policy loss whose batches are all there; it needs nobody but a trainer."""
    return partial(ready_run, make_stack)


def launch(stack: Stack, *overrides: str) -> Process:
    """Start one trainer under accelerate; the short form of `accelerate launch`, which imports less."""
    start = [str(BIN / "accelerate-launch"), "--config_file", str(FSDP), "--no_python", str(BIN / "sluice"), "train"]
    return stack.spawn([*start, "-c", str(stack.config_file), *overrides], name="launched")


def log_of(process: Process) -> str:
    """Once it has ended, and well."""
    assert process.wait() == 0, process.tail()
    return process.text()


def recomputed(stack: Stack) -> list[float]:
    """Tokens per step that the trainer scored itself."""
    return [line["policy/recomputed_tokens"] for line in read_steps(stack.run_dir / "metrics.jsonl")]


def test_fsdp_trains_the_same_weights_and_goes_on_after_a_stop(make_run: Callable[..., Stack]) -> None:
    plain, sharded = make_run(), make_run()
    first = launch(sharded, "--set", "trainer.max_versions=2")
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    assert "event=sharded by=FSDP2 backend=gloo" in log_of(first)
    assert "event=resumed step=2" in log_of(launch(sharded))
    assert recomputed(sharded) == recomputed(plain) == [0.0] + [2.0 * (LENGTH - 2)] * (STEPS - 1)
    for step in range(1, STEPS + 1):
        assert apart(tensors(plain, step), tensors(sharded, step)) < TOLERANCE
    ours, theirs = manifest(sharded), manifest(plain)
    assert (ours.version, ours.tensors) == (STEPS, theirs.tensors)
    assert ours.probe_score == pytest.approx(theirs.probe_score, abs=1e-4)
    published = load_policy(verify(ours), ModelConfig(device="cpu"))
    assert probe_score(published, list(ours.probe_token_ids)) == pytest.approx(ours.probe_score, abs=1e-4)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen vision tower", "trained vision tower"])
def test_fsdp_trains_the_same_weights_on_images(make_run: Callable[..., Stack], tmp_path: Path, frozen: bool) -> None:
    model, root = save_tiny_qwen3_vl(tmp_path / "model"), tmp_path / "scans"
    config = seeing_config(model, root)
    processor = processor_of(config)

    def samples_of(step: int) -> list[TrainingSample]:
        refs = image_files(root, 2, seed=10 * step)
        return [
            replace(sample, advantage=1.0 - 2 * member)
            for member in range(2)
            for sample in [seen_sample(f"{step}-{member}", config, processor, refs[: 1 + member], seed=10 * step)]
        ]

    sections: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu"},
        "images": {"roots": [str(root)]},
        "trainer": {"keep_checkpoints": 10, "freeze_vision": frozen},
    }
    plain, sharded = make_run(samples_of, **sections), make_run(samples_of, **sections)
    launched = launch(sharded)
    asyncio.run(train(load_config(plain.config_file, environ={"REDIS_URL": str(plain.broker_url)})))
    assert "event=sharded by=FSDP2 backend=gloo" in log_of(launched)
    first, last = tensors(plain, 1), tensors(plain, STEPS)
    tower = [name for name in first if "visual" in name and not name.startswith("optimizer")]
    assert tower
    assert all(torch.equal(first[name], last[name]) for name in tower) == frozen
    for step in range(1, STEPS + 1):
        assert apart(tensors(plain, step), tensors(sharded, step)) < TOLERANCE
