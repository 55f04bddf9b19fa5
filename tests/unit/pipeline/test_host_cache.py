"""The versions that a host has fetched: bounded, shared, and never taken from a process that uses one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights import host_cache
from sluice.pipeline.weights.host_cache import HostCache
from tests.deadlines import HANG_S

SIZE = 100  # bytes of a version


def key(number: int) -> str:
    return f"v{number:06d}-0123456789abcdef"


def cache(root: Path, most: int = 3 * SIZE, wait_s: float = 20.0) -> HostCache:
    return HostCache(root, most, wait_s=wait_s)


def filled(letter: str, size: int = SIZE) -> Callable[[Path], None]:
    def fill(aside: Path) -> None:
        (aside / "file").write_bytes(letter.encode() * size)

    return fill


def make(one: HostCache, number: int) -> Path:
    return one.make(key(number), lambda: SIZE, filled(str(number)))


def aged(root: Path, *numbers: int) -> None:
    """The first one was used longest ago."""
    for at, number in enumerate(numbers):
        os.utime(root / f".{key(number)}.lock", (at, at))


def present(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_the_least_recently_used_version_makes_room(tmp_path: Path) -> None:
    one = cache(tmp_path)
    for number in range(3):
        make(one, number)
    one.release()
    aged(tmp_path, 1, 0, 2)
    assert (make(one, 3) / "file").read_bytes() == b"3" * SIZE
    assert present(tmp_path) == [key(0), key(2), key(3)]
    assert not (tmp_path / f".{key(1)}.lock").exists()


def test_a_version_in_use_stays_whoever_uses_it(tmp_path: Path) -> None:
    one, another = cache(tmp_path), cache(tmp_path)
    for number in range(3):
        make(one, number)
    one.release(but=[key(0)])
    assert another.get(key(1)) is not None
    aged(tmp_path, 0, 1, 2)
    make(one, 3)
    assert present(tmp_path) == [key(0), key(1), key(3)]
    with pytest.raises(WeightsError, match=r"no room beside .* in use; raise weights\.cache_gb"):
        make(one, 4)
    another.release()
    make(one, 4)
    assert present(tmp_path) == [key(0), key(3), key(4)]


def test_a_version_that_comes_after_the_end_is_held_by_nobody(tmp_path: Path) -> None:
    """A thread can't be stopped while it fetches."""
    one = cache(tmp_path)

    def fill(aside: Path) -> None:
        one.close()
        filled("0")(aside)

    with pytest.raises(WeightsError, match="has ended meanwhile"):
        one.make(key(0), lambda: SIZE, fill)
    assert present(tmp_path) == [key(0)]
    another = cache(tmp_path, most=SIZE)
    make(another, 1)
    assert present(tmp_path) == [key(1)]


def test_a_version_that_is_there_is_not_filled_again(tmp_path: Path) -> None:
    make(cache(tmp_path), 0)

    def never(_: Path) -> None:
        pytest.fail("filled twice")

    assert cache(tmp_path).make(key(0), lambda: SIZE, never) == tmp_path / key(0)
    assert cache(tmp_path).get(key(1)) is None


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    def fails(aside: Path) -> None:
        (aside / "file").write_bytes(b"half")
        raise WeightsError("damaged in the store")

    with pytest.raises(WeightsError, match="damaged in the store"):
        cache(tmp_path).make(key(0), lambda: SIZE, fails)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    make(cache(tmp_path), 0)


def test_others_wait_for_the_one_that_fills(tmp_path: Path) -> None:
    """Threads stand for processes: each cache has descriptors, and so locks, of its own."""
    begun, go_on, fills = threading.Event(), threading.Event(), list[int]()

    def slow(aside: Path) -> None:
        fills.append(1)
        begun.set()
        assert go_on.wait(HANG_S)
        (aside / "file").write_bytes(b"x")

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache(tmp_path).make(key(0), lambda: SIZE, slow)))
        for _ in range(3)
    ]
    threads[0].start()
    assert begun.wait(HANG_S)
    for thread in threads[1:]:
        thread.start()
    with pytest.raises(WeightsError, match="another process of this host fetches it"):
        cache(tmp_path, wait_s=0.1).make(key(0), lambda: SIZE, slow)
    go_on.set()
    for thread in threads:
        thread.join(HANG_S)
    assert (found, fills) == ([tmp_path / key(0)] * 3, [1])


def _die_filling(root: Path) -> None:
    def die(aside: Path) -> None:
        (aside / "file").write_bytes(b"half")
        os._exit(9)

    cache(root).make(key(0), lambda: 2 * SIZE, die)


def test_what_a_killed_process_left_makes_room(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_filling, args=(tmp_path,))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 9
    assert present(tmp_path) == []
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    one = cache(tmp_path, most=2 * SIZE)
    make(one, 1)
    make(one, 0)
    assert present(tmp_path) == [key(0), key(1)]
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"the disk is full .* free some"):
        cache(tmp_path, most=1 << 62).make(key(0), lambda: 1 << 60, filled("x"))
    assert present(tmp_path) == []


@pytest.mark.parametrize("name", ["", "../../../../etc", "v0/../../x-0123", ".room.lock"])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match="is no name of a cached version"):
        cache(tmp_path).get(name)


def test_what_was_not_synced_counts_for_nothing_after_another_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may leave a name without its bytes; what a process goes on using is synced."""
    first = cache(tmp_path)
    for number in (1, 2):
        make(first, number)
    neighbour = cache(tmp_path)
    assert all(neighbour.get(key(number)) for number in (1, 2)), "of this boot"
    neighbour.release()
    first.release(but=[key(1)])
    first.release()
    monkeypatch.setattr(host_cache, "boot_id", lambda: "another boot")
    second = cache(tmp_path)
    assert second.get(key(1)) is not None
    assert second.get(key(2)) is None
    assert present(tmp_path) == [key(1)]
    assert (second.make(key(2), lambda: SIZE, filled("x")) / "file").read_bytes() == b"x" * SIZE, "fetched again"
