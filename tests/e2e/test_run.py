"""`sluice run` and `sluice up`: one command from nothing to the end, and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack

ROOT = Path(__file__).resolve().parents[2]


def run_command(stack: Stack, data: Path | None = None) -> Process:
    """`sluice run` on the shipped detection config; everything else by options."""
    wanted = {
        "run": stack.run,
        "run_dir": stack.directory / "runs",
        "sampling.max_new_tokens": 12,
        "producer.samples_per_version": 8,
        "producer.max_in_flight": 24,
        "worker.count": 1,
        "worker.claim_gpu": "false",
        "consumer.row_tokens": 256,
        "model.device": "cpu",
        "broker.embedded_dir": stack.directory / "broker",
        "dashboard.enabled": "false",
    }
    sets = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]
    config = str(ROOT / "configs/detection.yaml")
    model = stack.tree["model"]["path"]
    return stack.sluice("run", "-c", config, "--model", model, "--data", str(data or stack.data), *sets)


def test_run_goes_to_the_end_and_a_second_time_does_nothing(make_stack: MakeStack) -> None:
    """The rows come from a Parquet file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    stack = make_stack(detection_rows(48))
    table = stack.directory / "data.parquet"
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(stack.rows), table)
    first = run_command(stack, table)
    assert first.wait() == 0, first.tail()
    assert f"logs {stack.run_dir / 'logs'}" in first.text()
    stack.assert_exactly_once()
    before = (stack.trained(), stack.digests(), (stack.run_dir / "metrics.jsonl").read_text())
    second = run_command(stack, table)
    assert second.wait() == 0, second.tail()
    assert "complete: enqueued 48, trained 48, dead 0, dropped 0" in second.text()
    assert (stack.trained(), stack.digests(), (stack.run_dir / "metrics.jsonl").read_text()) == before
    wait_gone(stack.mark)
