"""One GPU per process, as replicas of a compose service share a host: real processes, real devices."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest

from sluice.pipeline.run.role import LOCK_DIR, host_gpus

HOLD = """
import sys
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run.role import use_free_gpus

try:
    with use_free_gpus(wanted=True) as gpu:
        import torch

        held = torch.ones(1 << 20, device="cuda")
        print(gpu, torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid, int(held.sum()), flush=True)
        sys.stdin.read()
except SluiceError as error:
    print(error, flush=True)
"""


@contextlib.contextmanager
def holder(lock_dir: Path, gpus: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that locks one of `gpus`, computes on it and holds it until its input ends."""
    env = {**os.environ, LOCK_DIR: str(lock_dir), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    """What it says once it has its GPU, or why it has none."""
    return cast(IO[str], process.stdout).readline().strip()


def test_the_second_process_is_told_and_gets_the_gpu_once_the_first_is_killed(tmp_path: Path) -> None:
    one = host_gpus()[:1]
    with holder(tmp_path, one) as first:
        gpu, count, _, total = first_line(first).split()
        assert (gpu, count, total) == (one[0], "1", str(1 << 20))
        with holder(tmp_path, one) as second:
            assert first_line(second).startswith("all 1 GPUs of this host are taken")
        first.kill()
        first.wait()
        with holder(tmp_path, one) as third:
            assert first_line(third).split()[0] == one[0]


def test_two_processes_compute_on_two_gpus(tmp_path: Path) -> None:
    gpus = host_gpus()
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    with holder(tmp_path, gpus) as first, holder(tmp_path, gpus) as second:
        one, other = first_line(first).split(), first_line(second).split()
    assert {one[0], other[0]} == set(gpus[:2])
    assert (one[1], other[1]) == ("1", "1")
    assert one[2] != other[2]
