"""How a vLLM engine ends: closed, its core killed, its owner killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.errors import EngineError
from sluice.pipeline.wire.messages import Progress
from sluice.workers.engine.contracts import SequenceOutput
from sluice.workers.engine.vllm import VllmBackend
from tests.contract.engine_fixtures import request
from tests.contract.vllm_fixtures import cores, make_vllm
from tests.deadlines import HANG_S

ROOT = Path(__file__).parents[2]
CONTEXT = 1 << 14
OWNER = """
import asyncio, sys
from pathlib import Path
from tests.contract.vllm_fixtures import cores, make_vllm

assert "vllm" not in sys.modules, "importing the backend must not import vLLM"
backend = make_vllm(Path(sys.argv[1]))
asyncio.run(backend.start())
print("core", *(core.pid for core in cores()), flush=True)
sys.stdin.read()
"""


async def _running(backend: VllmBackend) -> asyncio.Task[SequenceOutput]:
    """A decode that has begun and would go on for a minute."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def report(piece: Progress) -> None:
        loop.call_soon_threadsafe(begun.set)

    asked = request([5, 6, 7], 1, temperature=1.0, max_new_tokens=CONTEXT - 3)
    task = asyncio.create_task(backend.decode(replace(asked, report_every=1, report=report, eos_token_ids=())))
    await asyncio.wait_for(begun.wait(), HANG_S)
    return task


async def _start(model_dir: Path) -> tuple[VllmBackend, Any]:
    before = cores()
    backend = make_vllm(model_dir, kv_cache_gb=0.05)
    await backend.start()
    [core] = cores() - before
    return backend, core


@pytest.fixture(scope="module")
def long_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with room for long answers."""
    directory = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(model_dir, directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    return directory


async def test_close_ends_what_runs_and_leaves_no_process(long_model_dir: Path) -> None:
    backend, core = await _start(long_model_dir)
    task = await _running(backend)
    await backend.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(task, HANG_S)
    core.join(HANG_S)  # one that did not end in time was killed a moment ago
    assert not core.is_alive()
    await backend.close()
    with pytest.raises(EngineError, match="closed"):
        await backend.decode(request([1]))


async def test_a_killed_core_fails_what_runs_with_its_cause(long_model_dir: Path) -> None:
    backend, core = await _start(long_model_dir)
    task = await _running(backend)
    os.kill(core.pid, signal.SIGINT)  # Ctrl-C is for its owner
    assert (await backend.decode(request([1], max_new_tokens=3))).finish_reason == "length"
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"core died \(signal 9\)"):
        await asyncio.wait_for(task, HANG_S)
    for late in (backend.decode(request([1])), backend.score([1, 2])):
        with pytest.raises(EngineError, match="core died"):
            await asyncio.wait_for(late, HANG_S)
    await backend.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """vLLM's sockets lie in TMPDIR, and the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="sl") as folder:
        yield Path(folder)


def test_the_core_of_a_killed_owner_ends_too_and_leaves_no_log(model_dir: Path, short_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(short_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        core = next(int(line.split()[1]) for line in owner.stdout if line.startswith("core "))
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + HANG_S
    while _alive(core):
        assert time.monotonic() < deadline, f"the core {core} outlives its owner"
        time.sleep(0.1)
    assert list(short_path.glob("sluice-vllm-*")) == []


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # whoever adopted it has yet to read its exit code
