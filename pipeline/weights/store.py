"""Versions in an object store, whole or as what changed: `weights.transport` store and delta.

    <store_url>/<run>/v000012-<digest>/model.safetensors.<its digest>         an anchor's file
                                       model.safetensors.<its digest>.delta   or the XOR with the parent's
                                       contents.json                          written last: how each file is made

- The trainer's own directory of versions stays what it is with `directory`; this is what other hosts see of it.
- Folders and objects are named by digests, so two publishers never overwrite each other's, and one that was killed
  uploads nothing twice. The folder of a version follows from its number and digest alone.
- A delta is made against the parent's files, by digest. Every `anchor_every`-th version is whole, and so is one whose
  parent isn't at hand, has other tensors, or differs in most values.
- A fetch starts at the nearest version that this host has, else at the anchor, and applies all deltas in one pass.
- A version stays in the store while a live one needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from xxhash import xxh3_64, xxh3_128

from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights import delta, versions
from sluice.pipeline.weights.host_cache import HostCache
from sluice.pipeline.weights.object_store import ObjectStore
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.messages import Shard, WeightVersion

_CONTENTS = "contents.json"
_FOLDER = re.compile(r"v(\d{6,})-[0-9a-f]{16}")
_NOT_WORTH_IT = 0.9  # deltas of this share of the files: whole ones are faster to load
_LONGEST = 10_000  # versions between a delta and its anchor; more is a circle


class _File(msgspec.Struct, frozen=True, omit_defaults=True):
    size: int  # bytes
    digest: str  # xxh3-128
    kind: Literal["whole", "delta", "same"]  # same: as the base's file
    key: str = ""  # of its object, within the folder
    stored: int = 0  # bytes of the object
    stored_digest: str = ""


class _Ahead(NamedTuple):
    """Deltas that were made before their version is published, in files of these names."""

    directory: Path | None
    made: Mapping[str, delta.Encoded]

    def find(self, name: str, base: str, result: str) -> tuple[Path, delta.Encoded] | None:
        """That of a file, if it is between files of these digests."""
        found = self.made.get(name)
        if self.directory is None or found is None or (found.base, found.result) != (base, result):
            return None
        return self.directory / name, found


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a version consists of."""

    version: int
    digest: str
    files: dict[str, _File]
    base: str = ""  # folder that deltas start from; empty: an anchor
    depth: int = 0  # deltas since the anchor


class Store:
    """Both ends; a process uses one of them."""

    def __init__(
        self,
        root: Path,
        store: ObjectStore,
        cache: HostCache,
        *,
        base: Path | None = None,
        anchor_every: int = 1,
    ) -> None:
        """`root`: the trainer's directory of versions; `base`: the model that adapters are put on; `anchor_every`: 1 =
        all versions are whole."""
        self._root, self._store, self._cache = root, store, cache
        self._base, self._anchor_every = base, anchor_every
        self._known: dict[str, _Contents] = {}  # by folder; they never change
        self._ahead = _Ahead(None, {})

    @contextlib.contextmanager
    def ahead(self, parent: int) -> Generator[versions.Watch | None]:
        """As `Carrier.ahead`: deltas are made of the bytes in memory, beside the write."""
        base = None
        self._forget_ahead()  # of a version that was never published
        with contextlib.suppress(WeightsError):  # `publish` meets it as well, and says so
            base = self._delta_base(parent)
        if base is None:
            yield None
            return
        aside, making = self._root / f".v-ahead.{secrets.token_hex(8)}.tmp", dict[str, Future[delta.Encoded]]()
        aside.mkdir(parents=True)
        pool = ThreadPoolExecutor(1, thread_name_prefix="delta")

        def watch(name: str, pieces: Sequence[memoryview]) -> None:
            making[name] = pool.submit(delta.encode, base[0] / name, pieces, aside / name)

        try:
            yield watch
        except BaseException:
            pool.shutdown(cancel_futures=True)
            shutil.rmtree(aside, ignore_errors=True)
            raise
        pool.shutdown()
        made = {name: future.result() for name, future in making.items() if future.exception() is None}
        self._ahead = _Ahead(aside, made)

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        """As `Carrier.publish`; the files are in the trainer's directory and in the store.

        What has changed and wasn't made `ahead` is found out while the files are synced.
        """
        wanted = versions.described(source, self._root, manifest)
        is_complete = self._is_complete(wanted)
        aside = self._root / f".v{wanted.version:06d}.{secrets.token_hex(8)}.tmp"
        aside.mkdir(parents=True)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="delta") as pool:
                changing = None if is_complete else pool.submit(self._contents_of, source, wanted, aside)
                full = versions.write_version(source, self._root, wanted, fence)
            if full.digest != wanted.digest:  # an older release's, of the same weights
                is_complete, changing = self._is_complete(full), None
            if not is_complete:
                folder = _folder(full)
                contents = self._contents_of(source, full, aside) if changing is None else changing.result()
                self._upload(contents, Path(full.path), folder, aside)
                fence()
                self._store.put_bytes(f"{folder}/{_CONTENTS}", _packed(contents))
                self._known[folder] = contents
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            self._forget_ahead()
        return msgspec.structs.replace(full, path=f"{self._store.url}/{_folder(full)}")

    def fetch(self, manifest: WeightVersion) -> Path:
        """As `Carrier.fetch`: a directory of this host's cache, which stays until `keep`."""
        recipe = _Recipe(self, manifest)
        try:
            found = self._cache.make(self._cache_key(_folder(manifest)), recipe.need, recipe.fill)
            if manifest.base:  # this process's model may be another than the one's that filled it
                self.check(manifest, found)
            return found
        except WeightsError:
            self._known.clear()  # a restarted trainer may have uploaded it in another way since
            raise

    def keep(self, manifest: WeightVersion | None) -> None:
        """This process needs no other version any more."""
        self._cache.release(but=[self._cache_key(_folder(manifest))] if manifest else [])

    def close(self) -> None:
        """This process needs no version any more."""
        self._cache.close()

    def remove(self, numbers: Collection[int]) -> None:
        """Delete these versions here and, unless a newer one is made from them, in the store.

        A store that doesn't answer is no reason to stop training: the next call finds what is left.
        """
        versions.remove(self._root, numbers)
        try:
            self._sweep()
        except WeightsError as error:
            get_logger().warning("retired versions stay in the store for now", error=str(error))

    # -- publishing

    def _is_complete(self, full: WeightVersion) -> bool:
        """Whether a trainer that was killed since had uploaded all of it."""
        folder = _folder(full)
        contents = self._find(folder)
        return (
            contents is not None
            and _shards(contents, full) == full.shards
            and all(
                self._store.size(f"{folder}/{file.key}") == file.stored
                for file in contents.files.values()
                if file.kind != "same"
            )
        )

    def _contents_of(self, directory: Path, full: WeightVersion, aside: Path) -> _Contents:
        """What the version consists of; deltas are in `aside`."""
        files = {
            file.name: full.shards.get(file.name) or Shard(file.stat().st_size, delta.digest_of_file(file))
            for file in sorted(directory.iterdir())
            if file.is_file() and file.name != versions.MANIFEST
        }
        return self._changed(directory, full, files, aside) or _Contents(
            version=full.version,
            digest=full.digest,
            files={name: _whole(name, shard) for name, shard in files.items()},
        )

    def _upload(self, contents: _Contents, directory: Path, folder: str, aside: Path) -> None:
        for name, file in contents.files.items():
            if file.kind != "same":
                self._store.put(aside / file.key if file.kind == "delta" else directory / name, f"{folder}/{file.key}")

    def _changed(self, directory: Path, full: WeightVersion, files: dict[str, Shard], aside: Path) -> _Contents | None:
        """It as deltas, which are written to `aside`; None: it has to be whole."""
        found = None if full.base else self._delta_base(full.version - 1 if full.parent is None else full.parent)
        if found is None:
            return None
        there, manifest, base = found
        if not _same_layout(there, directory, manifest, full):
            return None
        made = {name: _part(name, shard, base.files.get(name)) for name, shard in files.items()}
        for name in [name for name in full.shards if made[name].kind != "same"]:
            ready = self._ahead.find(name, base.files[name].digest, files[name].digest)
            out = aside / "delta" if ready is None else ready[0]
            encoded = delta.encode(there / name, directory / name, out) if ready is None else ready[1]
            if encoded.base != base.files[name].digest:
                get_logger().error("the parent's files are damaged; publishing whole ones", file=str(there / name))
                return None
            if encoded.result != files[name].digest:
                raise WeightsError(f"{directory / name}: changed since it was published; is the disk faulty?")
            key = f"{name}.{encoded.digest[:16]}.delta"
            out.rename(aside / key)
            made[name] = _File(files[name].size, files[name].digest, "delta", key, encoded.size, encoded.digest)
        if sum(made[name].stored for name in full.shards) > _NOT_WORTH_IT * sum(
            one.size for one in full.shards.values()
        ):
            return None
        return _Contents(
            version=full.version, digest=full.digest, files=made, base=_folder(manifest), depth=base.depth + 1
        )

    def _forget_ahead(self) -> None:
        if self._ahead.directory is not None:
            shutil.rmtree(self._ahead.directory, ignore_errors=True)
        self._ahead = _Ahead(None, {})

    def _delta_base(self, parent: int) -> tuple[Path, WeightVersion, _Contents] | None:
        """This version's directory here, manifest and contents in the store; None: what follows it is whole."""
        if self._anchor_every <= 1 or parent < 0:
            return None
        there = self._root / f"v{parent:06d}"
        try:
            manifest = versions.read_manifest(there)
        except WeightsError:
            return None  # this trainer's host never had it
        base = self._find(_folder(manifest))
        if base is None or base.depth + 1 >= self._anchor_every or _shards(base, manifest) != manifest.shards:
            return None
        return there, manifest, base

    def _sweep(self) -> None:
        """Delete what no version of the trainer's directory is or needs."""
        local: dict[int, str] = {}
        for number, directory in versions.numbered_directories(self._root):
            local[number] = ""
            with contextlib.suppress(WeightsError):
                local[number] = _folder(versions.read_manifest(directory))
        found = {name: int(match[1]) for name in self._store.names() if (match := _FOLDER.fullmatch(name))}
        needed = {name for name, number in found.items() if local.get(number) in (name, "")}
        for folder in list(needed):
            contents = self._find(folder)
            while contents is not None and contents.base and contents.base not in needed:
                needed.add(contents.base)
                contents = self._find(contents.base)
        for folder, number in found.items():
            if folder not in needed and number <= max(local, default=-1):
                self._delete(folder)

    def _delete(self, folder: str) -> None:
        contents = f"{folder}/{_CONTENTS}"
        self._store.remove(contents)  # first: nobody starts to fetch what is half gone
        for key in self._store.names(folder):
            self._store.remove(key)
        self._store.remove_folder(folder)
        self._known.pop(folder, None)

    # -- fetching

    def chain(self, manifest: WeightVersion, *, from_cache: bool) -> tuple[list[_Contents], Path | None]:
        """From the version down to the one before the nearest that this host has, and that one's directory.

        None: the last of them is an anchor. Raises WeightsError.
        """
        found = [self._contents(_folder(manifest))]
        if found[0].digest != manifest.digest or _shards(found[0], manifest) != manifest.shards:
            raise WeightsError(
                f"{self._store.url}/{_folder(manifest)}: {_CONTENTS} isn't of the registered version {manifest.version}"
            )
        while folder := found[-1].base:
            cached = self._cache.get(self._cache_key(folder)) if from_cache else None
            if cached is not None:
                return found, cached
            if len(found) > _LONGEST:
                raise WeightsError(f"{self._store.url}: version {manifest.version} has no anchor")
            found.append(self._contents(folder))
        return found, None

    def forget(self, folder: str) -> None:
        self._cache.forget(self._cache_key(folder))

    def download(self, contents: _Contents, file: _File, target: Path) -> None:
        key = f"{_folder(contents)}/{file.key}"
        self._store.get(key, target, file.stored, file.stored_digest)

    def check(self, manifest: WeightVersion, directory: Path) -> None:
        """Everything but the digests, which were checked as the files were written."""
        versions.verify(msgspec.structs.replace(manifest, path=str(directory)), self._base, check=_checked_before)

    def _find(self, folder: str) -> _Contents | None:
        """None if it isn't there, or was damaged."""
        try:
            return self._contents(folder)
        except _Missing:
            return None

    def _contents(self, folder: str) -> _Contents:
        if folder not in self._known:
            try:
                raw = self._store.get_bytes(f"{folder}/{_CONTENTS}")
            except FileNotFoundError as error:
                raise _Missing(
                    f"{self._store.url}/{folder}: not in the store; the version is retired, or was lost there"
                ) from error
            self._known[folder] = _unpacked(raw, f"{self._store.url}/{folder}/{_CONTENTS}")
        return self._known[folder]

    def _cache_key(self, folder: str) -> str:
        return f"{folder}-{xxh3_64(f'{self._store.url}/{folder}'.encode()).hexdigest()}"


class _Missing(WeightsError):
    """Nothing, or nothing readable, is under this name."""


class _Recipe:
    """How this host makes one version; read from the store when somebody needs it."""

    def __init__(self, store: Store, manifest: WeightVersion) -> None:
        self._store, self._manifest = store, manifest

    def need(self) -> int:
        """Bytes on disk, at most."""
        self._chain, self._start = self._store.chain(self._manifest, from_cache=True)
        newest = self._chain[0].files
        deltas = [file.stored for one in self._chain for file in one.files.values() if file.kind == "delta"]
        anchor = max((file.size for file in newest.values()), default=0) if deltas and self._start is None else 0
        return sum(file.size for file in newest.values()) + sum(deltas) + anchor

    def fill(self, aside: Path) -> None:
        try:
            self._build(aside)
        except delta.WrongBase as error:
            if self._start is None:
                raise
            get_logger().error("a cached version is damaged; fetching the anchor", error=str(error))
            self._store.forget(self._chain[-1].base)
            self._chain, self._start = self._store.chain(self._manifest, from_cache=False)
            for left in aside.iterdir():
                left.unlink()
            self._build(aside)
        self._store.check(self._manifest, aside)

    def _build(self, aside: Path) -> None:
        for name, file in self._chain[0].files.items():
            if Path(name).name != name:
                raise WeightsError(f"version {self._manifest.version}: {name!r} is no name of a file")
            found = self._made(name, aside)
            if found != file.digest:
                raise delta.WrongBase(
                    f"version {self._manifest.version}: {name}: digest {found[:12]}, published {file.digest[:12]}"
                )

    def _made(self, name: str, aside: Path) -> str:
        """Write a file; returns its digest."""
        out, changes = aside / name, list[Path]()
        for contents in self._chain:
            file = contents.files.get(name)
            if file is None:
                raise WeightsError(f"version {contents.version}: the store has no {name} for it")
            if file.kind == "whole" and not changes:
                self._store.download(contents, file, out)
                return file.digest
            if file.kind == "whole":
                source = aside / ".whole"
                self._store.download(contents, file, source)
                break
            if file.kind == "delta":
                changes.append(aside / f".{len(changes)}.delta")
                self._store.download(contents, file, changes[-1])
        else:
            if self._start is None:
                raise WeightsError(f"version {self._manifest.version}: the store has no whole {name}")
            source = self._start / name
            if not source.is_file():
                raise delta.WrongBase(f"{source}: is missing")
        if not changes:
            _link(source, out)
            return delta.digest_of_file(out)
        found = delta.apply(source, changes[::-1], out)
        for path in [*changes, aside / ".whole"]:
            path.unlink(missing_ok=True)
        return found


def _checked_before(_version: WeightVersion, _directory: Path) -> None:
    """For `versions.verify`."""


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _folder(version: WeightVersion | _Contents) -> str:
    return f"v{version.version:06d}-{version.digest[:16]}"


def _whole(name: str, shard: Shard) -> _File:
    return _File(shard.size, shard.digest, "whole", f"{name}.{shard.digest[:16]}", shard.size, shard.digest)


def _part(name: str, shard: Shard, base: _File | None) -> _File:
    """As the base's file if that is equal."""
    if base is not None and (base.size, base.digest) == (shard.size, shard.digest):
        return _File(shard.size, shard.digest, "same")
    return _whole(name, shard)


def _shards(contents: _Contents, version: WeightVersion) -> dict[str, Shard]:
    """Those files that decide the weights."""
    return {name: Shard(file.size, file.digest) for name, file in contents.files.items() if name in version.shards}


def _same_layout(old: Path, new: Path, before: WeightVersion, after: WeightVersion) -> bool:
    return before.shards.keys() == after.shards.keys() and all(
        delta.same_layout(old / name, new / name) for name in after.shards
    )


def _packed(contents: _Contents) -> bytes:
    """JSON and, on a second line, its digest."""
    text = msgspec.json.encode(contents)
    return text + b"\n" + xxh3_128(text).hexdigest().encode()


def _unpacked(raw: bytes, where: str) -> _Contents:
    text, _, digest = raw.partition(b"\n")
    if xxh3_128(text).hexdigest().encode() != digest:
        raise _Missing(f"{where}: damaged in the store; the next version that doesn't need it is taken")
    try:
        return msgspec.convert(read_json(text, dict[str, Any], "it"), _Contents)
    except (MessageError, msgspec.MsgspecError) as error:
        raise _Missing(f"{where}: can't be read ({error}); was it written by a newer release?") from error
