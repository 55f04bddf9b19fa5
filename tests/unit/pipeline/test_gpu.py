"""One GPU per process, without a GPU: the locks are files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, EngineError
from sluice.pipeline.run import role
from sluice.pipeline.run.role import LOCK_DIR, claim_gpus, host_gpus, use_free_gpus

HOLD = """
import sys
from pathlib import Path
from sluice.pipeline.run.role import claim_gpus
claim = claim_gpus(["0", "1"], Path(sys.argv[1]))
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
            claim_gpus(["0", "1"], tmp_path)
        first.kill()  # a killed holder frees its GPU
        first.wait()
        claim = claim_gpus(["0", "1"], tmp_path)
        assert claim is not None
        assert claim[0] == taken[0]
        claim[1].close()
        second.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_locks_are_those_of_every_user_of_the_host(tmp_path: Path, umask: int) -> None:
    for directory in (tmp_path, *tmp_path.parents):  # pytest's are its user's alone, as many as there are
        if not directory.stat().st_mode & 0o001:
            directory.chmod(0o755)
    before = os.umask(0)
    (tmp_path / "open").mkdir(mode=0o1777)
    os.umask(umask)
    try:
        claim = claim_gpus(["0", "1", "2"], tmp_path / "open" / "locks")
    finally:
        os.umask(before)
    assert claim is not None
    child = os.fork()
    if child == 0:  # without an import: the other user may not read this directory's files
        os.setegid(65534)
        os.seteuid(65534)
        try:
            second = claim_gpus(["0", "1", "2"], tmp_path / "open" / "locks")
            os._exit(0 if second is not None and second[0] == "1" else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    claim[1].close()


def test_a_claim_that_never_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "_CLAIM_S", 0.0)
    (tmp_path / "claim.lock").touch()
    with (tmp_path / "claim.lock").open() as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match=rf"another process has been claiming GPUs .* {LOCK_DIR}"):
            claim_gpus(["0"], tmp_path)


def test_a_host_without_gpus_gives_none(tmp_path: Path) -> None:
    assert claim_gpus([], tmp_path) is None


@pytest.mark.parametrize(("visible", "gpus"), [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("GPU-ab", ["GPU-ab"])])
def test_the_environment_narrows_the_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host_gpus() == gpus


def test_a_claimed_gpu_is_the_only_visible_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv(LOCK_DIR, str(tmp_path))
    with use_free_gpus(wanted=False) as none:
        assert none is None
    with use_free_gpus(wanted=True) as gpu:
        assert gpu == "4"
        assert host_gpus() == ["4"]


def test_locks_that_cannot_be_made_are_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=LOCK_DIR):
        claim_gpus(["0"], tmp_path / "file")


HOLD_TWO = """
import sys
from pathlib import Path
from sluice.pipeline.errors import EngineError
from sluice.pipeline.run.role import claim_gpus
try:
    claim = claim_gpus(["0", "1", "2"], Path(sys.argv[1]), 2)
    print(claim[0], flush=True)
except EngineError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def test_an_engine_of_several_gpus_gets_all_of_them_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv(LOCK_DIR, str(tmp_path))
    with use_free_gpus(wanted=True, count=2) as gpus:
        assert gpus == "4,5"
        assert host_gpus() == ["4", "5"], "all of them are visible"
        with pytest.raises(EngineError, match=r"1 of 3 GPUs of this host is free, and 2 are needed"):
            claim_gpus(["4", "5", "6"], tmp_path, 2)
        claim = claim_gpus(["4", "5", "6"], tmp_path)
        assert claim is not None
        assert claim[0] == "6", "who gets too few keeps none of them"
        claim[1].close()
    with pytest.raises(EngineError, match=r"3 GPUs of this host are free, and 4 are needed"):
        claim_gpus(["4", "5", "6"], tmp_path, 4)


def test_of_two_that_ask_at_once_for_most_of_the_gpus_one_gets_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_TWO, str(tmp_path)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = sorted(process.stdout.readline().strip() for process in both if process.stdout)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert said == ["0,1", said[1]]
    assert said[1].startswith("1 of 3 GPUs")


def test_an_engine_of_several_gpus_says_how_many() -> None:
    tensor_parallel = ["worker.vllm.tensor_parallel_size=4"]
    assert load_config(None, ["worker.backend=vllm", *tensor_parallel], {}).worker.gpus == 4
    assert load_config(None, tensor_parallel, {}).worker.gpus == 1, "hf has no tensor parallelism"


@pytest.mark.parametrize("section", ["worker", "scorer"])
def test_a_model_on_all_visible_gpus_is_refused_with_a_claim_that_leaves_one(section: str) -> None:
    wanted = ["model.device_map=auto", "worker.claim_gpu=false"]
    load_config(None, wanted, {})
    with pytest.raises(ConfigError, match=rf"model\.device_map auto with {section}\.claim_gpu true"):
        load_config(None, [*wanted, f"{section}.claim_gpu=true"], {})
    load_config(None, ["model.device_map=cuda:0", f"{section}.claim_gpu=true"], {})
