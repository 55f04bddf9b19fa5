"""Weight versions: one directory each, with a manifest.

A version directory holds model.safetensors, manifest.json and the model's config and tokenizer files, so it is a
complete model directory; or an adapter's two files and a manifest that names the base they belong to (adapter.py).
Safetensors headers are read here without torch.

Each live version of a run was published from the one before it (`Line`):

    published     0 ─▶ 1 ─▶ 2 ─▶ 3 ─▶ 4          a trainer killed here had its last checkpoint at version 2
    goes on                └───────────▶ 5 ─▶ 6    so 3 and 4 are lost
    live          0    1    2            5    6

A token's proximal logprob is the one under the live version whose parent sampled it; tokens of a lost version have
none.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.files import (
    fsync_directory,
    fsync_tree,
    link_files,
    remove_directory,
    remove_unfinished,
    write_atomic,
)
from sluice.pipeline.wire.codec import numbered, read_json
from sluice.pipeline.wire.messages import MOST_VERSION, Shard, WeightVersion

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"  # peft's name
BASE = "base"  # key in the header of an adapter's file: the digest of the weights that it was trained on
_BLOCK = 4 << 20
_READERS = 8  # files at a time
_SHA256 = 64  # characters: a digest of an older release
_MOST_HEADER = 100 << 20  # the format's own limit

Watch = Callable[[str, Sequence[memoryview]], None]
"""Told the name of a safetensors file that is about to be written, and all of its bytes, first those before the
tensors. They must stay as they are until the block ends that gave it."""

Ahead = AbstractContextManager[Watch | None]
"""The time in which a version's files are written. None: nothing is made of them before they are published."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, sorted; raises WeightsError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{directory}: no *.safetensors file; give a model directory with weights")
    return files


def deciding_files(directory: Path) -> list[Path]:
    """Those that the digest covers: the safetensors files, and an adapter's configuration, which has its scale."""
    adapter = directory / ADAPTER_CONFIG
    return [*weight_files(directory), *([adapter] if adapter.is_file() else [])]


def shards_of(directory: Path) -> dict[str, Shard]:
    """Size and digest of each file that decides the weights, several read at a time."""
    files = deciding_files(directory)
    with ThreadPoolExecutor(min(len(files), _READERS), thread_name_prefix="digest") as pool:
        return dict(zip([file.name for file in files], pool.map(_shard, files), strict=True))


def _shard(file: Path) -> Shard:
    digest, size, block = xxh3_128(), 0, memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
            size += count
    return Shard(size, digest.hexdigest())


def digest_over(shards: Mapping[str, Shard]) -> str:
    """A version's digest; it finds damage, not a forger."""
    lines = (f"{name}\0{shard.size}\0{shard.digest}\n" for name, shard in sorted(shards.items()))
    return xxh3_128("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def digest_of(directory: Path, like: str = "") -> str:
    """Over names and contents of the files that decide the weights; `like`: a digest of the kind that is wanted."""
    return _old_digest(directory) if len(like) == _SHA256 else digest_over(shards_of(directory))


def _old_digest(directory: Path) -> str:
    """As older releases computed it."""
    digest = sha256()
    for file in deciding_files(directory):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def base_digest(directory: Path, like: str = "") -> str:
    """The same of a base model, whose files don't change; read again only if their sizes or times did."""
    stamps = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(directory))
    return _base_digest(directory, "" if len(like) != _SHA256 else like, stamps)


@lru_cache(maxsize=4)
def _base_digest(directory: Path, like: str, _stamps: tuple[tuple[str, int, int], ...]) -> str:
    return digest_of(directory, like)


def base_of(directory: Path) -> str:
    """The digest of the base that the adapter of this directory was trained on; empty for a whole model."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return ""
    if not (found := named_base(directory)):
        raise WeightsError(f"{directory}: an adapter whose files don't name the weights that it was trained on")
    return found


def named_base(directory: Path) -> str:
    """The base that the headers of an adapter's files name; empty if they name none, as those of other tools."""
    found = {_read_header(file)[0].get(BASE, "") for file in weight_files(directory)}
    return found.pop() if len(found) == 1 else ""


def tensor_table(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype, shape) from the safetensors headers; raises WeightsError for a damaged file."""
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in weight_files(directory):
        for name, entry in _header(file).items():
            if name in table:
                raise WeightsError(f"{directory}: {name} is in two files; remove the stale one")
            table[name] = (entry.dtype, entry.shape)
    return table


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _header(file: Path) -> dict[str, _Entry]:
    return _read_header(file)[1]


def _read_header(file: Path) -> tuple[dict[str, str], dict[str, _Entry]]:
    """(metadata, tensors)."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, _MOST_HEADER):
                raise WeightsError(f"{file}: truncated or not a safetensors file")
            tree = read_json(stream.read(length), dict[str, Any], "its header")
        metadata = msgspec.convert(tree.pop("__metadata__", None) or {}, dict[str, str])
        header = msgspec.convert(tree, dict[str, _Entry])
    except (OSError, msgspec.MsgspecError, MessageError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: not a safetensors file ({error})") from error
    if 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0) > size:
        raise WeightsError(f"{file}: truncated; copy or download it again")
    return metadata, header


def write_version(
    source: Path, root: Path, manifest: WeightVersion, fence: Callable[[], None] = lambda: None
) -> WeightVersion:
    """Create `root/v000012` from a durable model directory: hard links if possible, written elsewhere, then renamed.

    Returns the manifest with path, digest, shards (if it has none), tensors and base filled in; an existing directory
    with the same weights is kept, and so is its digest. `fence` is called right before the rename, and may raise to
    prevent it.
    """
    full = described(source, root, manifest)
    target = Path(full.path)
    if target.exists():
        there = read_manifest(target)
        if there.digest != full.digest and there.digest != digest_of(source, there.digest):
            raise WeightsError(
                f"{target}: already holds other weights, and a version number keeps its digest; delete that directory "
                "if it is a leftover, or start a run of another name (--set run=NAME)"
            )
        return msgspec.structs.replace(full, digest=there.digest, shards=there.shards, base=there.base)
    aside = root / f".{target.name}.{secrets.token_hex(8)}.tmp"  # pids repeat across containers
    aside.mkdir(parents=True)
    link_files(source, aside)
    write_atomic(aside / MANIFEST, msgspec.json.encode(full, enc_hook=_json_arrays))
    fsync_tree(aside)
    fence()
    aside.rename(target)
    fsync_directory(root)
    return full


def described(source: Path, root: Path, manifest: WeightVersion) -> WeightVersion:
    """The manifest of the version that `write_version` makes of `source`, unless the number is taken already."""
    shards = manifest.shards or shards_of(source)
    return msgspec.structs.replace(
        manifest,
        path=str(root / f"v{manifest.version:06d}"),
        digest=digest_over(shards),
        shards=shards,
        tensors=tensor_table(source),
        base=base_of(source),
    )


def read_manifest(directory: Path) -> WeightVersion:
    """The manifest of a version directory; raises WeightsError."""
    try:
        tree = read_json((directory / MANIFEST).read_bytes(), dict[str, Any], "it")
        tree.pop("probe_token_ids", None)
        return msgspec.convert(tree, WeightVersion)
    except (OSError, MessageError, msgspec.MsgspecError, ValueError) as error:
        raise WeightsError(f"{directory}: no readable {MANIFEST} ({error})") from error


def check_files(version: WeightVersion, directory: Path) -> None:
    """Read every byte that the digest covers. Raises WeightsError, or OSError for a file that can't be read."""
    sizes = {name: shard.size for name, shard in version.shards.items()}
    for name, size in sizes.items():  # before anything is read
        if (found := (directory / name).stat().st_size) != size:
            raise WeightsError(f"version {version.version}: {name} has {found} bytes, published with {size}")
    shards = shards_of(directory) if sizes else {}
    for name in sizes.keys() & shards.keys():
        if shards[name] != version.shards[name]:
            found, wanted = shards[name].digest, version.shards[name].digest
            raise WeightsError(f"version {version.version}: {name}: digest {found[:12]}, published {wanted[:12]}")
    found = digest_over(shards) if sizes else digest_of(directory, version.digest)
    if found != version.digest:
        raise WeightsError(f"version {version.version}: digest {found[:12]}, registered {version.digest[:12]}")


def verify(
    version: WeightVersion,
    base: Path | None = None,
    directory: Path | None = None,
    check: Callable[[WeightVersion, Path], None] = check_files,
) -> Path:
    """Check that a version's files are intact; returns their directory. Raises WeightsError.

    `base`: the model directory that an adapter is put on; its weights must be those that it was trained on.
    `directory`: where this host has the files; by default the manifest's path. `check`: its digest, or who did so.
    """
    directory = directory or Path(version.path)
    if not directory.is_dir():
        raise WeightsError(f"version {version.version}: {directory} is not there; share the run's directory")
    try:
        check(version, directory)
    except OSError as error:  # retired during the read, or an unreadable file
        raise WeightsError(f"version {version.version}: {error}") from error
    if tensor_table(directory) != version.tensors:
        raise WeightsError(f"version {version.version}: tensors differ from its manifest")
    if version.base != base_of(directory):
        raise WeightsError(f"version {version.version}: its manifest names another base than its files")
    if version.base:
        _check_base(version, base)
    return directory


def _check_base(version: WeightVersion, base: Path | None) -> None:
    if base is None:
        raise WeightsError(f"version {version.version} is an adapter, and nothing says which model it belongs to")
    try:
        found = base_digest(base, version.base)
    except OSError as error:
        raise WeightsError(f"version {version.version}: its base {base} can't be read: {error}") from error
    if found != version.base:
        raise WeightsError(
            f"version {version.version} is an adapter of the weights {version.base[:12]}, and {base} has {found[:12]}; "
            "give every role the model that the trainer started from (model.path)"
        )


def base_in(root: Path, version: WeightVersion, model: str) -> Path:
    """The directory of an adapter's base: version 0 of its run if that is still there, else `model`."""
    first = root / "v000000"
    with contextlib.suppress(WeightsError, OSError):
        if base_digest(first, version.base) == version.base:
            return first
    return Path(model)


def newest_number(root: Path) -> int:
    """The highest version number of a directory in `root`; -1 if there is none."""
    return max((number for number, _ in numbered_directories(root)), default=-1)


def numbered_directories(root: Path) -> list[tuple[int, Path]]:
    """The version directories, oldest first; anything else in `root` is ignored."""
    found = ((numbered(path.name, "v"), path) for path in root.glob("v[0-9]*") if path.is_dir())
    return sorted((number, path) for number, path in found if number is not None and number <= MOST_VERSION)


def same_again(root: Path, source: Path, *, step: int, parent: int) -> int | None:
    """The version in `root` that a kill undid and that has the weights of `source`; None if there is none."""
    found = twins(root, step=step, parent=parent)
    ours = {digest_of(source, its) for its in found.values()}
    return next((number for number, its in found.items() if its in ours), None)


def twins(root: Path, *, step: int, parent: int) -> dict[int, str]:
    """The versions in `root` that were published from this step and parent before a kill undid them: their digests."""
    found: dict[int, str] = {}
    for number, directory in numbered_directories(root):
        with contextlib.suppress(WeightsError):  # a damaged one is nobody's twin
            manifest = read_manifest(directory)
            if number > parent and (manifest.step, manifest.parent) == (step, parent):
                found[number] = manifest.digest
    return found


def retired(root: Path, kept: Collection[int], newest: int) -> list[int]:
    """The versions of `root` below `newest` that aren't in `kept`.

    Those above are lost ones: the step that is redone may have their weights again.
    """
    return [number for number, _ in numbered_directories(root) if number < newest and number not in kept]


def remove(root: Path, numbers: Collection[int]) -> None:
    """Delete these versions, and leftovers of a killed writer."""
    remove_unfinished(root, ".v*.tmp")
    for number, directory in numbered_directories(root):
        if number in numbers:
            remove_directory(directory)


def _json_arrays(value: Any) -> Any:
    return list(value)


Versions = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Line:
    """The newest live versions, rising, without gaps between parent and child; at least one."""

    numbers: Sequence[int]

    @classmethod
    def consecutive(cls, newest: int) -> Line:
        """A run that never went back, up to this version."""
        return cls(range(newest + 1))

    @property
    def newest(self) -> int:
        return self.numbers[-1]

    @property
    def parent(self) -> int:
        """Of the newest; -1 if unknown, or if there is none."""
        return self.numbers[-2] if len(self.numbers) > 1 else -1

    def holds(self, versions: Versions) -> NDArray[np.bool_]:
        """Which of these are live; same shape."""
        return np.isin(versions, self.numbers)

    def successors(self, versions: Versions) -> NDArray[np.int64]:
        """The live version published from each; -1 for the newest, lost and forgotten ones. Same shape."""
        numbers = np.asarray(self.numbers, dtype=np.int64)
        after = np.append(numbers[1:], -1)
        return np.where(self.holds(versions), after[np.searchsorted(numbers[:-1], versions)], -1)

    def lags(self, versions: Versions) -> NDArray[np.int64]:
        """How many live versions are newer than each; same shape."""
        numbers = np.asarray(self.numbers, dtype=np.int64)
        forgotten = np.maximum(numbers[0] - versions, 0)
        return len(numbers) - np.searchsorted(numbers, versions, side="right") + np.maximum(forgotten - 1, 0)

    def up_to(self, version: int) -> Line:
        """As it was when `version` was the newest."""
        return Line([number for number in self.numbers if number <= version] or [version])

    def newest_few(self, count: int) -> Sequence[int]:
        """The newest `count`, or all."""
        return self.numbers[-count:]
