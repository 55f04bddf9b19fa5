"""Pictures that arrive as bytes: written once, by digest, for nobody else to read, within both bounds."""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path
from threading import Barrier, Event, Thread

import pytest

from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.paths import Roots
from sluice.pipeline.images.store import ImageWriter, StoreError, images_directory, images_of_run
from tests.deadlines import HANG_S
from tests.pictures import huge_png, png


def test_a_picture_is_written_once_by_digest_with_no_rights_for_others(tmp_path: Path) -> None:
    writer, data = ImageWriter(tmp_path / "store", ImagesConfig()), png()
    digest = writer.put(data, "here")
    path = tmp_path / "store" / "sha256" / digest
    assert digest == sha256(data).hexdigest()
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.stat().st_mtime_ns
    assert writer.put(data, "here") == digest
    assert path.stat().st_mtime_ns == before
    assert writer.has(digest)
    assert not writer.has("0" * 64)


def test_a_torn_file_is_written_anew(tmp_path: Path) -> None:
    writer, data = ImageWriter(tmp_path, ImagesConfig()), png()
    path = tmp_path / "sha256" / writer.put(data, "here")
    path.write_bytes(data[:10])
    writer.put(data, "here")
    assert path.read_bytes() == data


def test_several_threads_write_the_same_and_other_pictures(tmp_path: Path) -> None:
    writer, pictures = ImageWriter(tmp_path, ImagesConfig()), [png(width=side) for side in range(1, 9)]
    threads = [Thread(target=writer.put, args=(data, "here")) for data in pictures * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in (tmp_path / "sha256").iterdir()} == {sha256(one).hexdigest() for one in pictures}


def test_writers_that_know_nothing_of_each_other_write_the_same_picture(tmp_path: Path) -> None:
    """As in two containers, whose pids are equal."""
    pictures, errors, everybody = [png(width=side) for side in range(1, 21)], list[Exception](), Barrier(3)

    def write() -> None:
        writer = ImageWriter(tmp_path, ImagesConfig())
        for data in pictures:
            everybody.wait(timeout=HANG_S)
            try:
                writer.put(data, "here")
            except StoreError as error:
                errors.append(error)

    threads = [Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {path.name for path in (tmp_path / "sha256").iterdir()} == {sha256(one).hexdigest() for one in pictures}


def test_files_that_come_and_go_while_they_are_counted_fail_nothing(tmp_path: Path) -> None:
    folder, stop = tmp_path / "sha256", Event()
    folder.mkdir()

    def churn() -> None:
        while not stop.is_set():
            for number in range(50):
                (folder / f"{number:064x}").touch()
            for number in range(50):
                (folder / f"{number:064x}").unlink()

    other = Thread(target=churn)
    other.start()
    try:
        for side in range(1, 101):
            ImageWriter(tmp_path, ImagesConfig()).put(png(width=side), "here")
    finally:
        stop.set()
        other.join()


def test_what_a_killed_writer_left_is_no_picture_and_is_removed_when_stale(tmp_path: Path) -> None:
    folder = tmp_path / "sha256"
    folder.mkdir()
    young, old = folder / f".{'ab' * 32}.1.tmp", folder / f".{'cd' * 32}.2.tmp"
    for leftover in (young, old):
        leftover.write_bytes(bytes(1 << 20))
    os.utime(old, (0, 0))
    digest = ImageWriter(tmp_path, ImagesConfig(store_mb=1)).put(png(), "here")
    assert {path.name for path in folder.iterdir()} == {young.name, digest}


def test_writing_one_more_picture_does_not_list_the_others(tmp_path: Path) -> None:
    """Seen by a stale leftover, which whoever lists the directory removes."""
    writer, data = ImageWriter(tmp_path, ImagesConfig()), png(width=2)
    writer.put(png(), "here")
    leftover = tmp_path / "sha256" / f".{sha256(data).hexdigest()}.1.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    writer.put(data, "here")
    assert leftover.exists()


def test_what_is_no_accepted_picture_is_not_written(tmp_path: Path) -> None:
    writer = ImageWriter(tmp_path, ImagesConfig(max_mb=0.0001, formats=("JPEG",)))
    for data, words in ((b"", "accepted are"), (b"<html>", "accepted are"), (png(), "PNG, accepted are JPEG")):
        with pytest.raises(RequestError, match=words):
            writer.put(data, "here")
    with pytest.raises(RequestError, match=r"^here: has .* images\.max_mb"):
        writer.put(bytes(200), "here")
    assert not list(tmp_path.iterdir())


def test_the_directory_has_a_bound_that_counts_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "sha256").mkdir()
    (tmp_path / "sha256" / ("ab" * 32)).write_bytes(bytes((1 << 20) - 100))
    writer = ImageWriter(tmp_path, ImagesConfig(store_mb=1))
    writer.put(huge_png(), "here")
    with pytest.raises(StoreError, match=r"images\.store_mb \(1\)"):
        writer.put(png(), "here")
    assert len(writer.put(huge_png(), "here")) == 64  # what is there needs no room


def test_a_directory_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "sha256").write_text("a file")
    with pytest.raises(StoreError, match=r"images\.store"):
        ImageWriter(tmp_path, ImagesConfig()).put(png(), "here")


def test_every_role_of_a_run_reads_what_was_written(tmp_path: Path) -> None:
    for images in (ImagesConfig(), ImagesConfig(store=str(tmp_path / "other"), roots=("scans",))):
        config = Config(run="r", run_dir=str(tmp_path / "runs"), images=images)
        digest = ImageWriter.of(config).put(png(), "here")
        read = images_of_run(config)
        assert read.roots == (*images.roots, str(images_directory(config)))
        roots = Roots(read.roots)
        assert roots.read(roots.find("here", digest, f"sha256/{digest}"), 1 << 20, "here") == png()
    assert images_directory(Config(run="r", run_dir="runs")) == Path("runs/r/images")
