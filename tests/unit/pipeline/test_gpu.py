"""One GPU per process, without a GPU: the locks are files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.pipeline.errors import EngineError
from sluice.pipeline.run.role import LOCK_DIR, claim_gpu, host_gpus, use_free_gpu

HOLD = """
import sys
from pathlib import Path
from sluice.pipeline.run.role import claim_gpu
claim = claim_gpu(["0", "1"], Path(sys.argv[1]))
print(claim[0], flush=True)
sys.stdin.read()
"""


def holder(lock_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(lock_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_never_get_the_same_gpu_and_the_third_is_told(tmp_path: Path) -> None:
    with holder(tmp_path) as first, holder(tmp_path) as second:
        assert first.stdout
        assert second.stdout
        taken = [first.stdout.readline().strip(), second.stdout.readline().strip()]
        assert sorted(taken) == ["0", "1"]
        with pytest.raises(EngineError, match=r"all 2 GPUs .* taken"):
            claim_gpu(["0", "1"], tmp_path)
        first.kill()  # a killed holder frees its GPU
        first.wait()
        claim = claim_gpu(["0", "1"], tmp_path)
        assert claim is not None
        assert claim[0] == taken[0]
        claim[1].close()
        second.kill()


def test_a_host_without_gpus_gives_none(tmp_path: Path) -> None:
    assert claim_gpu([], tmp_path) is None


@pytest.mark.parametrize(("visible", "gpus"), [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("GPU-ab", ["GPU-ab"])])
def test_the_environment_narrows_the_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host_gpus() == gpus


def test_a_claimed_gpu_is_the_only_visible_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv(LOCK_DIR, str(tmp_path))
    with use_free_gpu(wanted=False) as none:
        assert none is None
    with use_free_gpu(wanted=True) as gpu:
        assert gpu == "4"
        assert host_gpus() == ["4"]


def test_locks_that_cannot_be_made_are_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=LOCK_DIR):
        claim_gpu(["0"], tmp_path / "file")
