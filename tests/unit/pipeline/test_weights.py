"""Weight version directories: digests, headers, whole or absent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights.carriers import Directory
from sluice.pipeline.weights.versions import (
    MANIFEST,
    digest_of,
    newest_number,
    numbered_directories,
    read_manifest,
    remove,
    retired,
    same_again,
    tensor_table,
    verify,
    weight_files,
    write_version,
)
from sluice.pipeline.wire.messages import WeightVersion
from tests.deadlines import HANG_S


def model_dir(path: Path, seed: int = 0, files: int = 1) -> Path:
    """A directory of `files` shards with two tensors each, and a config."""
    path.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        values = np.full((3, 4), seed + number, dtype=np.float32)
        name = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({f"a{number}": values, f"b{number}": values[0].astype(np.int64)}, path / name)
    (path / "config.json").write_text("{}")
    return path


def header_file(path: Path, header: bytes, length: int | None = None, data: bytes = b"\0" * 64) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    size = len(header) if length is None else length
    (path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + header + data)
    return path


def manifest(version: int = 1) -> WeightVersion:
    return WeightVersion(version=version, path="", digest="")


def test_the_table_names_every_tensor_of_every_shard(tmp_path: Path) -> None:
    table = tensor_table(model_dir(tmp_path, files=2))
    assert table == {"a0": ("F32", (3, 4)), "b0": ("I64", (4,)), "a1": ("F32", (3, 4)), "b1": ("I64", (4,))}


def test_the_digest_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    first, second, other = (model_dir(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    (second / "config.json").write_text('{"another": 1}')
    assert digest_of(first) == digest_of(second) != digest_of(other)
    (second / "model.safetensors").rename(second / "renamed.safetensors")
    assert digest_of(first) != digest_of(second)


HOSTILE = {
    "empty file": (b"", 0, b""),
    "no json": (b"{nonsense", None, b"\0" * 64),
    "not utf-8": (b'{"a\xff": 1}', None, b"\0" * 64),
    "a list": (b"[1, 2]", None, b"\0" * 64),
    "longer than the file": (b"{}", 1 << 40, b""),
    "entry is a number": (b'{"a": 3}', None, b"\0" * 64),
    "entry without shape": (b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}', None, b"\0" * 64),
    "shape is a number": (b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}', None, b"\0" * 64),
    "shape of strings": (b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}', None, b"\0" * 64),
    "nested for ever": (b'{"a": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", None, b"\0" * 64),
    "data cut short": (b'{"a": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}', None, b"\0" * 16),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_hostile_header_is_a_weights_error_that_names_the_file(tmp_path: Path, case: str) -> None:
    header, length, data = HOSTILE[case]
    header_file(tmp_path, header, length, data)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        tensor_table(tmp_path)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_random_bytes_never_crash_the_header_reader(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, n: int
) -> None:
    directory = header_file(tmp_path_factory.mktemp("raw"), raw, n, b"")
    with contextlib.suppress(WeightsError):
        tensor_table(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    model_dir(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "stale.safetensors")
    with pytest.raises(WeightsError, match="two files"):
        tensor_table(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        digest_of(tmp_path)


@pytest.mark.parametrize("files", [1, 3])
def test_a_version_is_a_model_directory_of_its_own(tmp_path: Path, files: int) -> None:
    source = model_dir(tmp_path / "source", files=files)
    made = write_version(source, tmp_path / "weights", manifest(12))
    directory = tmp_path / "weights" / "v000012"
    assert made.path == str(directory)
    assert made.digest == digest_of(source) == digest_of(directory)
    assert made.tensors == tensor_table(source)
    assert (directory / "config.json").exists()
    assert verify(made) == directory
    assert read_manifest(directory).digest == made.digest


def test_links_into_a_hub_cache_become_files(tmp_path: Path) -> None:
    """A snapshot of the hub's cache holds relative links to blobs."""
    blobs = model_dir(tmp_path / "cache" / "blobs")
    snapshot = tmp_path / "cache" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    made = write_version(snapshot, tmp_path / "weights", manifest())
    assert verify(made)
    assert not any(file.is_symlink() for file in Path(made.path).iterdir())


def test_a_number_never_gets_a_second_digest(tmp_path: Path) -> None:
    first, other = model_dir(tmp_path / "a", 1), model_dir(tmp_path / "b", 2)
    made = write_version(first, tmp_path / "weights", manifest())
    assert write_version(first, tmp_path / "weights", manifest()).digest == made.digest
    with pytest.raises(WeightsError, match="keeps its digest"):
        write_version(other, tmp_path / "weights", manifest())
    assert verify(made)


def test_two_publishers_of_one_number_leave_one_of_the_versions(tmp_path: Path) -> None:
    """Both passed the look at what is there; the second one's rename finds the first one's version."""
    first, other = model_dir(tmp_path / "a", 1), model_dir(tmp_path / "b", 2)
    carrier, made = Directory(tmp_path / "weights"), list[WeightVersion]()

    def meanwhile() -> None:
        made.append(carrier.publish(first, manifest(), lambda: None))

    with pytest.raises(OSError, match="not empty"):
        carrier.publish(other, manifest(), meanwhile)
    assert carrier.fetch(made[0])
    assert made[0].digest == digest_of(first)
    carrier.remove([])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v000001"]


def test_an_interrupted_write_leaves_no_version(tmp_path: Path) -> None:
    """Killed by SIGKILL right before the rename, in a process of its own."""
    source, root = model_dir(tmp_path / "source"), tmp_path / "weights"
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom sluice.pipeline.weights import versions as weights\n"
        "from sluice.pipeline.wire.messages import WeightVersion\n"
        "weights.fsync_tree = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "weights.write_version(Path(sys.argv[1]), Path(sys.argv[2]), WeightVersion(version=1, path='', digest=''))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(source), str(root)], check=False, timeout=HANG_S)
    assert done.returncode == -9
    assert list(root.glob("v??????")) == []
    made = write_version(source, root, manifest())
    assert verify(made)
    remove(root, [])
    assert [path.name for path in root.iterdir()] == ["v000001"], "what a killed writer left is swept"


def test_a_version_whose_removal_was_killed_is_not_there_any_more(tmp_path: Path) -> None:
    """Half of it, a trainer that went back a step would have read, and refused, at each start."""
    source, root = model_dir(tmp_path / "source"), tmp_path / "weights"
    for version in (1, 2):
        write_version(source, root, manifest(version))
    script = (
        "import os, shutil, signal, sys\nfrom pathlib import Path\n"
        "from sluice.pipeline.weights import versions\n"
        "real = os.unlink\n"
        "def unlink(*args, **options):\n"
        "    real(*args, **options)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.unlink = unlink\n"
        "versions.remove(Path(sys.argv[1]), [1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], check=False, timeout=HANG_S)
    assert done.returncode == -9
    assert len(list(root.iterdir())) == 2, "killed amid the removal"
    assert [number for number, _ in numbered_directories(root)] == [2]
    remove(root, [])
    assert [path.name for path in root.iterdir()] == ["v000002"]


@pytest.mark.parametrize("retention", [1, 3])
def test_retire_keeps_exactly_retention(tmp_path: Path, retention: int) -> None:
    source = model_dir(tmp_path / "source")
    for version in range(6):
        write_version(source, tmp_path / "weights", manifest(version))
        root = tmp_path / "weights"
        remove(root, retired(root, range(version - retention + 1, version + 1), version))
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == [f"v{version:06d}" for version in range(6 - retention, 6)]


def test_a_disk_that_deletes_no_directory_yet_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As NFS while a worker has a file of it open."""
    source, root = model_dir(tmp_path / "source"), tmp_path / "weights"
    for version in range(2):
        write_version(source, root, manifest(version))

    def is_busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", is_busy)
        remove(root, [0])
    assert "not deleted for now" in capsys.readouterr().err
    assert [number for number, _ in numbered_directories(root)] == [1]
    remove(root, [])
    assert [path.name for path in root.iterdir()] == ["v000001"]


def test_what_is_above_the_newest_may_come_back_and_all_else_is_retired(tmp_path: Path) -> None:
    source, root = model_dir(tmp_path / "source"), tmp_path / "weights"
    for version in range(7):
        write_version(source, root, manifest(version))
    gone = retired(root, {1, 4}, 4)
    assert gone == [0, 2, 3]
    remove(root, gone)
    assert sorted(path.name for path in root.iterdir()) == ["v000001", "v000004", "v000005", "v000006"]


def flip(directory: Path) -> None:
    flip_last(directory / "model.safetensors")


def flip_last(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.unlink()  # it may be a link to the source's
    file.write_bytes(raw)


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    raw = file.read_bytes()[:-8]
    file.unlink()
    file.write_bytes(raw)


def unreadable(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.symlink("nowhere", directory / "model.safetensors")


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        cut,
        unreadable,
        shutil.rmtree,
        lambda directory: (directory / "model.safetensors").unlink(),
        lambda directory: (
            model_dir(directory / "x", 5).joinpath("model.safetensors").rename(directory / "z.safetensors")
        ),
    ],
    ids=["flipped bit", "cut", "dangling link", "gone", "no file", "one file more"],
)
def test_verify_finds_every_damage(tmp_path: Path, damage) -> None:
    made = write_version(model_dir(tmp_path / "source"), tmp_path / "weights", manifest())
    damage(Path(made.path))
    with pytest.raises(WeightsError):
        verify(made)


def test_verify_names_the_file_that_is_damaged(tmp_path: Path) -> None:
    made = write_version(model_dir(tmp_path / "source", files=3), tmp_path / "weights", manifest())
    assert {name: shard.size for name, shard in made.shards.items()} == {
        file.name: file.stat().st_size for file in weight_files(Path(made.path))
    }
    file = Path(made.path) / "model-00002-of-00003.safetensors"
    raw = file.read_bytes()
    flip_last(file)
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors: digest "):
        verify(made)
    file.write_bytes(raw[:-8])
    with pytest.raises(WeightsError, match=f"has {len(raw) - 8} bytes, published with {len(raw)}"):
        verify(made)


def test_a_version_of_an_older_release_is_read_and_keeps_its_digest(tmp_path: Path) -> None:
    """It has one sha256 over all files, and no table of them."""
    source, root = model_dir(tmp_path / "source", files=2), tmp_path / "weights"
    digest = sha256()
    for file in weight_files(source):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    made = write_version(source, root, manifest())
    old = msgspec.structs.replace(made, digest=digest.hexdigest(), shards={}, step=7, parent=0)
    (Path(made.path) / MANIFEST).write_bytes(msgspec.json.encode(old, enc_hook=list))
    assert verify(old)
    again = write_version(source, root, manifest())
    assert (again.digest, again.shards) == (old.digest, {})
    assert same_again(root, source, step=7, parent=0) == 1
    flip_last(Path(made.path) / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match=r"digest .*, registered"):
        verify(old)
    with pytest.raises(WeightsError, match="keeps its digest"):
        write_version(model_dir(tmp_path / "other", 3), root, manifest())


def test_verify_compares_the_tensors_of_the_manifest(tmp_path: Path) -> None:
    made = write_version(model_dir(tmp_path / "source"), tmp_path / "weights", manifest())
    with pytest.raises(WeightsError, match="tensors differ"):
        verify(msgspec.structs.replace(made, tensors={"other": ("F32", (1,))}))


@pytest.mark.parametrize("text", ["", "[]", "3", json.dumps({"kind": "weight_version"}), "{"])
def test_a_damaged_manifest_is_a_weights_error(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_what_is_no_version_in_the_directory_of_versions_is_nobodys(tmp_path: Path) -> None:
    source, root = model_dir(tmp_path / "source"), tmp_path / "weights"
    for version in (1, 2):
        write_version(source, root, manifest(version))
    for name in ("vxxxxxx", "v00001²", "v٠٠٠٠٠٩", "v-00003", "v99999999999999999999", "v000003.bak", "vendor"):
        (root / name).mkdir()
    (root / "v000009").write_text("a file")
    assert newest_number(root) == 2
    remove(root, retired(root, [2], 2))
    assert not (root / "v000001").exists()
    assert len(list(root.iterdir())) == 9


NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff", NESTED, b'{"version": ' + b"9" * 40 + b"}", b'{"path": "\\ud800"}', b'{"a": 1}'],
    ids=["empty", "cut", "list", "not UTF-8", "deep", "huge", "surrogate", "other"],
)  # fmt: skip
def test_a_damaged_manifest_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(WeightsError, match="no readable manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("header", [
    NESTED, b'{"a": ' + NESTED + b"}", b'{"a": {"dtype": "F32", "shape": [-1]}}', b'{"\\ud800": 1}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, ' + b"9" * 30 + b"]}}"])  # fmt: skip
def test_a_damaged_header_is_named(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match=r"model\.safetensors: "):
        tensor_table(tmp_path)
