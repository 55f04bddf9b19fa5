"""Files that are whole or absent."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sluice.pipeline.files import fsync_tree, synced_meanwhile, tail, write_atomic
from sluice.pipeline.run.supervisor import last_line
from tests.deadlines import HANG_S


def test_it_replaces_the_old_file_and_makes_directories(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.txt"
    write_atomic(target, "old")
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]
    fsync_tree(target.parent)


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    target, seen = tmp_path / "f", set()
    write_atomic(target, b"a" * 50_000)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(target.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for letter in (b"b", b"c", b"d") * 5:
        write_atomic(target, letter * 50_000)
    done.set()
    reader.join()
    assert {len(raw) for raw in seen} == {50_000}
    assert all(len(set(raw)) == 1 for raw in seen)


def test_a_write_that_dies_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "f"
    write_atomic(target, "old")
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom sluice.pipeline import files\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_atomic(Path(sys.argv[1]), 'new')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(target)], check=False, timeout=HANG_S)
    assert done.returncode == -9
    assert target.read_text() == "old"


def test_an_error_leaves_nothing_aside(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(OSError, match="d"):
        write_atomic(tmp_path / "d", "a directory is in the way")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_write_for_which_there_is_no_room_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*state.json'"):
            write_atomic(tmp_path / "state.json", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    write_atomic(tmp_path / "s", "password", mode=0o600)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_what_a_killed_process_left_long_ago_is_swept(tmp_path: Path) -> None:
    old, young = tmp_path / ".s.123.tmp", tmp_path / ".s.124.tmp"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (0, 0))
    write_atomic(tmp_path / "s", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.124.tmp", "s"]


def test_two_writers_of_one_file_with_the_same_pid_do_not_meet(tmp_path: Path) -> None:
    """Containers that share a directory have equal pids; threads have too."""
    target, errors = tmp_path / "f", list[OSError]()
    everybody = threading.Barrier(4)

    def write() -> None:
        for _ in range(20):
            everybody.wait(timeout=HANG_S)
            try:
                write_atomic(target, b"a" * 50_000)
            except OSError as error:
                errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors == []
    assert target.read_bytes() == b"a" * 50_000
    assert list(tmp_path.iterdir()) == [target]


def test_a_disk_that_fails_a_sync_fails_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports it once, to whichever sync comes next; a pipe takes no sync at all."""
    monkeypatch.setattr("sluice.pipeline.files._SYNC_BYTES", 4)
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"), synced_meanwhile(writing) as wrote:
        wrote(os.write(writing, b"early"))
    for one in (reading, writing):
        os.close(one)
    with (tmp_path / "f").open("wb", buffering=0) as stream, synced_meanwhile(stream.fileno()) as wrote:
        for _ in range(9):
            wrote(stream.write(b"abc"))
    assert (tmp_path / "f").read_bytes() == b"abc" * 9


def test_the_end_of_a_long_log_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    with log.open("wb") as file:
        file.truncate(1 << 36)  # a hole: it takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nhalf of a character: \xff\nits last line\n")
    assert tail(log, 16) == "\ufffd\nits last line\n"
    assert last_line(log) == "its last line"
    log.write_text("short")
    assert tail(log, 4000) == last_line(log) == "short"
