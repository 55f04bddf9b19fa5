"""A host hashes a version once, and believes no record of other files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.carriers import Directory
from sluice.pipeline.weights.host_cache import Verified
from sluice.pipeline.wire.messages import WeightVersion
from tests.deadlines import HANG_S
from tests.unit.pipeline.test_weights import cut, flip, manifest, model_dir


@pytest.fixture
def made(tmp_path: Path) -> WeightVersion:
    """A version whose files are old enough for a record."""
    found = Directory(tmp_path / "weights").publish(model_dir(tmp_path / "source", files=1), manifest(), lambda: None)
    age(Path(found.path))
    return found


def age(directory: Path, *, seconds: float = 10.25) -> None:
    at = time.time_ns() - round(seconds * 1e9)
    for file in directory.iterdir():
        os.utime(file, ns=(at, at))


class Counted:
    """One process's view of the host's records; counts how often it had to read the files."""

    def __init__(self, records: Path, wait_s: float = 5.0) -> None:
        self._verified, self.times = Verified(records, wait_s=wait_s), 0

    def fetch(self, version: WeightVersion) -> None:
        directory = Path(version.path)

        def check() -> None:
            self.times += 1
            versions.check_files(version, directory)

        self._verified.once(directory, version.digest, version.shards, check)


def test_a_second_process_believes_the_first(tmp_path: Path, made: WeightVersion) -> None:
    first, second = Counted(tmp_path / "records"), Counted(tmp_path / "records")
    for one in (first, second, first):
        one.fetch(made)
    assert (first.times, second.times) == (1, 0)


def rewrite(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes())


def give_another_time(directory: Path) -> None:
    age(directory, seconds=20)


def copy_over(directory: Path) -> None:
    """Same bytes and times, another file."""
    file = directory / "model.safetensors"
    stamp, raw = file.stat(), file.read_bytes()
    other = directory / "other"
    other.write_bytes(raw)
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    other.rename(file)


@pytest.mark.parametrize("change", [rewrite, give_another_time, copy_over])
def test_a_record_of_other_files_counts_for_nothing(
    tmp_path: Path, made: WeightVersion, change: Callable[[Path], None]
) -> None:
    one = Counted(tmp_path / "records")
    one.fetch(made)
    change(Path(made.path))
    one.fetch(made)
    assert one.times == 2


@pytest.mark.parametrize("damage", [flip, cut])
def test_damage_after_the_record_is_found(tmp_path: Path, made: WeightVersion, damage: Callable[[Path], None]) -> None:
    one = Counted(tmp_path / "records")
    one.fetch(made)
    damage(Path(made.path))
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            one.fetch(made)
    assert one.times == 3, "and what failed is not recorded"


def test_files_that_were_only_just_written_get_no_record(
    tmp_path: Path, made: WeightVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write within the same tick of the clock would not show."""
    one, now = Counted(tmp_path / "records"), time.time_ns() | 1  # no whole second
    monkeypatch.setattr(time, "time_ns", lambda: now)
    for seconds in (-3600.25, 0.02, -3600.25):  # also where the server's clock is an hour ahead of this one
        age(Path(made.path), seconds=seconds)
        one.fetch(made)
        one.fetch(made)
    assert one.times == 6


def test_a_record_ages(tmp_path: Path, made: WeightVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Counted(tmp_path / "records")
    one.fetch(made)
    started = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda _: started + 7200)
    one.fetch(made)
    assert one.times == 2


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"directory": "", "files": [], "at": 0}', b"\xff" * 40])
def test_a_damaged_record_counts_for_nothing(tmp_path: Path, made: WeightVersion, raw: bytes) -> None:
    one = Counted(tmp_path / "records")
    one.fetch(made)
    for record in (tmp_path / "records").iterdir():
        record.write_bytes(raw)
    one.fetch(made)
    one.fetch(made)
    assert one.times == 2


def test_records_of_directories_that_are_gone_go(tmp_path: Path, made: WeightVersion) -> None:
    one = Counted(tmp_path / "records")
    one.fetch(made)
    other = Directory(tmp_path / "weights").publish(Path(made.path), manifest(2), lambda: None)
    Directory(tmp_path / "weights").remove([1])
    age(Path(other.path))
    one.fetch(other)
    assert len(list((tmp_path / "records").iterdir())) == 1


def test_where_no_record_can_be_written_every_fetch_reads(tmp_path: Path, made: WeightVersion) -> None:
    (tmp_path / "records").write_text("a file")
    one = Counted(tmp_path / "records")
    one.fetch(made)
    one.fetch(made)
    assert one.times == 2


_WORKER = """
import sys, time
from pathlib import Path
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.host_cache import Verified
version = versions.read_manifest(Path(sys.argv[1]))
def check():
    print("read", flush=True)
    time.sleep(float(sys.argv[3]))
Verified(Path(sys.argv[2]), wait_s=60).once(Path(sys.argv[1]), version.digest, version.shards, check)
"""


def start(made: WeightVersion, records: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _WORKER, made.path, str(records), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_one_of_a_hosts_processes_reads_and_the_others_wait(tmp_path: Path, made: WeightVersion) -> None:
    running = [start(made, tmp_path / "records", 0.2) for _ in range(4)]
    said = [process.communicate(timeout=HANG_S)[0] for process in running]
    assert sorted(said) == [b"", b"", b"", b"read\n"]
    assert all(process.returncode == 0 for process in running)


def test_one_that_is_killed_while_it_reads_is_replaced(tmp_path: Path, made: WeightVersion) -> None:
    victim = start(made, tmp_path / "records", 60)
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"read\n"
    waiting = Counted(tmp_path / "records", wait_s=0.0)
    with pytest.raises(WeightsError, match=r"verifying it for more than .* Raise weights\.load_timeout_s"):
        waiting.fetch(made)
    victim.kill()
    victim.communicate(timeout=HANG_S)
    heir = Counted(tmp_path / "records")
    heir.fetch(made)
    assert (waiting.times, heir.times) == (0, 1)
