"""Versions in shared memory: shown, linked, refused, removed; whatever else happens, the durable one is taken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights.carriers import Directory, SharedMemory
from sluice.pipeline.weights.host_cache import HostCache
from sluice.pipeline.weights.object_store import ObjectStore
from sluice.pipeline.weights.shared_memory import Segments, sweep
from sluice.pipeline.weights.store import Store
from sluice.pipeline.weights.versions import digest_of
from sluice.pipeline.wire.messages import WeightVersion
from tests.deadlines import HANG_S
from tests.unit.pipeline.test_weights import model_dir

RUN = "r"


class Ends:
    """A trainer and a worker of one host."""

    def __init__(self, root: Path) -> None:
        self.root, self.memory = root, root / "memory"
        self.memory.mkdir()
        self.facts: dict[str, Any] = {}
        self.trainer, self.worker = self.end(), self.end()
        self.published: dict[int, WeightVersion] = {}

    def end(self) -> SharedMemory:
        return SharedMemory(Directory(self.root / "weights"), RUN, tell=self.facts.update, root=self.memory)

    def publish(self, number: int, *, source: Path | None = None) -> WeightVersion:
        source = source or model_dir(self.root / f"source-{number}", seed=number)
        version = WeightVersion(version=number, path="", digest="")
        self.published[number] = self.trainer.publish(source, version, lambda: None)
        return self.published[number]

    def in_memory(self) -> set[str]:
        """Versions that any process shows."""
        return {path.name.partition("-")[0] for path in self.memory.glob("sluice-*/v*")}

    def fetch(self, number: int) -> Path:
        """Right, from wherever it comes."""
        found = self.worker.fetch(self.published[number])
        assert np.array_equal(load_file(found / "model.safetensors")["a0"], np.full((3, 4), number, dtype=np.float32))
        return found

    def is_memory(self, directory: Path) -> bool:
        return self.memory in directory.parents


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_a_version_comes_from_memory_and_is_durable_as_well(ends: Ends) -> None:
    version = ends.publish(1)
    assert ends.is_memory(ends.fetch(1))
    assert Directory(ends.root / "weights").fetch(version) == Path(version.path)
    assert ends.facts == {}


def test_it_rides_on_a_store_for_other_hosts(tmp_path: Path) -> None:
    ends = Ends(tmp_path)

    def store(host: str) -> Store:
        root = tmp_path / ("weights" if host == "trainer" else "nothing-here")
        cache = HostCache(tmp_path / f"cache-{host}", 1 << 30, wait_s=20.0)
        return Store(root, ObjectStore((tmp_path / "store").as_uri(), quiet_s=20.0), cache)

    ends.trainer, ends.worker = (SharedMemory(store(host), RUN, root=ends.memory) for host in ("trainer", "worker"))
    elsewhere = SharedMemory(store("elsewhere"), RUN, root=tmp_path / "memory-elsewhere")
    first, second = ends.publish(1), ends.publish(2)
    for version in (1, 2):
        assert ends.is_memory(ends.fetch(version))
        ends.worker.keep(ends.published[version])
    found = elsewhere.fetch(second)
    elsewhere.keep(second)
    assert found.is_relative_to(tmp_path / "cache-elsewhere")
    ends.trainer.close()
    assert ends.fetch(1).is_relative_to(tmp_path / "cache-worker"), "as a late joiner"
    ends.worker.keep(first)


def test_whoever_has_ended_takes_nothing_into_memory(ends: Ends) -> None:
    ends.publish(1)
    ends.worker.close()
    with pytest.raises(WeightsError, match="has ended meanwhile"):
        ends.worker.fetch(ends.published[1])
    assert len(list(ends.memory.iterdir())) == 1, "the trainer's"


def test_an_adapter_comes_with_its_configuration(ends: Ends) -> None:
    base = model_dir(ends.root / "base")
    source = ends.root / "adapter"
    source.mkdir()
    ends.trainer = SharedMemory(Directory(ends.root / "weights", base), RUN, base, root=ends.memory)
    ends.worker = SharedMemory(Directory(ends.root / "weights", base), RUN, base, root=ends.memory)
    save_file({"a": np.zeros(2)}, source / "adapter_model.safetensors", metadata={"base": digest_of(base)})
    (source / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    version = ends.publish(1, source=source)
    found = ends.worker.fetch(version)
    assert ends.is_memory(found)
    assert (found / "adapter_config.json").read_bytes() == (source / "adapter_config.json").read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_copy_is_never_used(ends: Ends, damage: str) -> None:
    ends.publish(1)
    file = next(ends.memory.glob("sluice-*/v*/model.safetensors"))
    if damage == "flipped":
        whole = bytearray(file.read_bytes())
        whole[-1] ^= 1
        file.write_bytes(whole)
    elif damage == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    found = ends.fetch(1)
    assert not ends.is_memory(found)
    assert ends.facts == ({} if damage == "missing" else {"weight_fallbacks": 1})


def test_what_a_worker_has_loaded_stays_until_it_has_another(ends: Ends) -> None:
    """A load that fails goes back to it, however many versions came in between."""
    ends.publish(1)
    loaded = ends.fetch(1)
    ends.worker.keep(ends.published[1])
    for number in range(2, 6):
        ends.publish(number)
    ends.trainer.remove([1])
    assert ends.in_memory() == {"v000001", "v000004", "v000005"}
    ends.fetch(5)
    assert load_file(loaded / "model.safetensors")["a0"][0, 0] == 1
    ends.worker.keep(ends.published[5])
    assert ends.in_memory() == {"v000004", "v000005"}
    ends.publish(6)
    ends.trainer.remove([1, 2, 3, 4, 5])
    assert ends.is_memory(ends.fetch(6))


def test_versions_are_bounded_and_older_ones_come_the_durable_way(ends: Ends) -> None:
    for number in range(1, 6):
        ends.publish(number)
    assert ends.in_memory() == {"v000004", "v000005"}
    assert not ends.is_memory(ends.fetch(2))
    assert ends.facts == {}, "an old version is no fallback"


def test_without_room_the_durable_way_remains(ends: Ends) -> None:
    source = model_dir(ends.root / "big", seed=7)
    free = shutil.disk_usage(ends.memory).free
    with (source / "model-2.safetensors").open("wb") as file:
        file.write((2).to_bytes(8, "little") + b"{}")
        file.truncate(free + (1 << 30))  # sparse
    with pytest.raises(WeightsError, match=r"a version needs \d+ MiB, and \d+ MiB are free"):
        Segments(ends.memory, RUN).copy(source)
    (source / "model-2.safetensors").unlink()
    shutil.rmtree(ends.memory)
    ends.memory.write_text("no directory")
    ends.publish(7, source=source)
    assert ends.facts == {"weight_fallbacks": 1}
    assert not ends.is_memory(ends.fetch(7))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_full_tmpfs_is_a_fallback(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=66m", "tmpfs", ends.memory], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        ends.publish(1)
        assert ends.is_memory(ends.fetch(1))
        source = model_dir(tmp_path / "big", seed=2)
        save_file({"z": np.zeros(3 << 20, dtype=np.uint8)}, source / "more.safetensors")
        ends.publish(2, source=source)
        assert ends.facts == {"weight_fallbacks": 1}
        assert not ends.is_memory(ends.fetch(2))
        assert ends.in_memory() == {"v000001"}
    finally:
        subprocess.run(["umount", "-l", ends.memory], check=True)


_PUBLISHER = """
import sys, time
from pathlib import Path
from sluice.pipeline.weights.carriers import Directory, SharedMemory
from sluice.pipeline.wire.messages import WeightVersion

root, source = Path(sys.argv[1]), Path(sys.argv[2])
trainer = SharedMemory(Directory(root / "weights"), "r", root=root / "memory")
trainer.publish(source, WeightVersion(version=1, path="", digest=""), lambda: None)
print("published", flush=True)
time.sleep(120 if sys.argv[3] == "waits" else 0)
"""


def publisher(ends: Ends, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PUBLISHER, str(ends.root), str(model_dir(ends.root / "source", seed=1)), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"
    return process


def test_the_end_of_a_publisher_frees_its_memory(ends: Ends) -> None:
    publisher(ends, "ends").wait(HANG_S)
    assert not list(ends.memory.iterdir())


def test_what_a_killed_publisher_left_is_removed_by_the_next(ends: Ends) -> None:
    process = publisher(ends, "waits")
    sweep(ends.memory)
    assert ends.in_memory() == {"v000001"}, "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.wait(HANG_S)
    (left,) = ends.memory.iterdir()
    ends.publish(2)
    assert not left.exists()
    assert ends.in_memory() == {"v000002"}


def test_a_directory_of_a_process_that_just_starts_is_left_alone(ends: Ends) -> None:
    young, old = ends.memory / "sluice-a-1", ends.memory / "sluice-b-2"
    for directory in (young, old):
        directory.mkdir()
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    sweep(ends.memory)
    assert [path.name for path in ends.memory.iterdir()] == ["sluice-a-1"]


def test_a_publisher_that_loses_its_claim_shows_nothing(ends: Ends) -> None:
    def fenced() -> None:
        raise WeightsError("another trainer owns the run")

    source = model_dir(ends.root / "source", seed=1)
    with pytest.raises(WeightsError, match="another trainer"):
        ends.trainer.publish(source, WeightVersion(version=1, path="", digest=""), fenced)
    assert ends.in_memory() == set()
    (own,) = ends.memory.iterdir()
    assert [path.name for path in own.iterdir()] == ["owner"]


def test_a_redone_step_of_equal_weights_is_shown_once(ends: Ends) -> None:
    first = ends.publish(1)
    again = ends.publish(1, source=model_dir(ends.root / "again", seed=1))
    assert again.digest == first.digest
    assert ends.in_memory() == {"v000001"}
    assert ends.is_memory(ends.fetch(1))
