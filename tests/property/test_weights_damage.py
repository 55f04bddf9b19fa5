"""Whatever happens to the files of a version, a fetch gives the published bytes or an error.

Two readers of one host share its records; damage comes between their fetches, as do repairs and other versions' files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights.carriers import Directory
from sluice.pipeline.weights.host_cache import Verified
from sluice.pipeline.weights.versions import weight_files
from sluice.pipeline.wire.messages import WeightVersion
from tests.unit.pipeline.test_weights import manifest, model_dir

FILES = 2


class Host:
    """A version with another beside it, and two readers."""

    def __init__(self, home: Path) -> None:
        carrier = Directory(home / "weights")
        self.version, self.other = (
            carrier.publish(model_dir(home / f"source{number}", number, FILES), manifest(number), lambda: None)
            for number in (1, 2)
        )
        self.directory = Path(self.version.path)
        for file in weight_files(self.directory):  # files of its own, not links to the source's
            self.put(file, file.read_bytes())
        self._age()
        self.published = self.bytes_of(self.version)
        self.readers = [Directory(home / "weights", verified=Verified(home / "records", wait_s=5)) for _ in range(2)]

    @staticmethod
    def bytes_of(version: WeightVersion) -> dict[str, bytes]:
        """Of the files that are there, if any."""
        return {file.name: file.read_bytes() for file in sorted(Path(version.path).glob("*.safetensors"))}

    @staticmethod
    def put(file: Path, raw: bytes) -> None:
        """As another file under its name."""
        aside = file.with_name("aside")
        aside.write_bytes(raw)
        aside.rename(file)

    def _age(self) -> None:
        """So that a record of them counts."""
        for file in weight_files(self.directory):
            os.utime(file, (time.time() - 9.25, time.time() - 9.25))

    def repair(self) -> None:
        for name in self.bytes_of(self.version).keys() - self.published.keys():
            (self.directory / name).unlink()
        for name, raw in self.published.items():
            self.put(self.directory / name, raw)
        self._age()


def _file(host: Host, number: int) -> Path:
    return host.directory / sorted(host.published)[number % FILES]


def flip(host: Host, number: int, at: int) -> None:
    """In place, one bit."""
    file = _file(host, number)
    if file.is_file() and (size := file.stat().st_size):
        with file.open("r+b") as stream:
            stream.seek(at % size)
            byte = stream.read(1)[0]
            stream.seek(at % size)
            stream.write(bytes([byte ^ (1 << at % 8)]))


def truncate(host: Host, number: int, at: int) -> None:
    if (file := _file(host, number)).is_file():
        os.truncate(file, at % (file.stat().st_size + 1))


def grow(host: Host, number: int, at: int) -> None:
    if (file := _file(host, number)).is_file():
        with file.open("ab") as stream:
            stream.write(bytes(at % 9 + 1))


def remove(host: Host, number: int, at: int) -> None:
    _file(host, number).unlink(missing_ok=True)


def swap(host: Host, number: int, at: int) -> None:
    """The other version's file of that name: same size, names and shapes."""
    file = _file(host, number)
    host.put(file, (Path(host.other.path) / file.name).read_bytes())


def rename(host: Host, number: int, at: int) -> None:
    """The two files' contents under each other's names."""
    first, second = (_file(host, each) for each in (0, 1))
    if first.is_file() and second.is_file():
        raw = first.read_bytes()
        host.put(first, second.read_bytes())
        host.put(second, raw)


def add(host: Host, number: int, at: int) -> None:
    shutil.copy(Path(host.other.path) / sorted(host.published)[0], host.directory / "more.safetensors")


def repair(host: Host, number: int, at: int) -> None:
    host.repair()


def nothing(host: Host, number: int, at: int) -> None:
    """Two fetches of the same files."""


EVENTS: tuple[Callable[[Host, int, int], None], ...] = (
    flip, truncate, grow, remove, swap, rename, add, repair, repair, nothing,
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1), st.integers(0, 2000)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_fetch_gives_the_published_bytes_or_an_error(events: list[tuple[Callable[..., None], int, int]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        host = Host(Path(home))
        for number, (event, which, at) in enumerate([(nothing, 0, 0), *events, (repair, 0, 0)]):
            event(host, which, at)
            reader = host.readers[number % 2]
            try:
                assert reader.fetch(host.version) == host.directory
            except WeightsError:
                assert host.bytes_of(host.version) != host.published, "refused, and nothing is wrong with it"
            else:
                assert host.bytes_of(host.version) == host.published, event.__name__


@pytest.mark.parametrize("place", [0, 4, 8, 20, -1])
@pytest.mark.parametrize("number", range(FILES))
def test_every_file_is_covered_from_its_first_byte_to_its_last(tmp_path: Path, number: int, place: int) -> None:
    host = Host(tmp_path)
    flip(host, number, place % _file(host, number).stat().st_size)
    with pytest.raises(WeightsError):
        host.readers[0].fetch(host.version)
