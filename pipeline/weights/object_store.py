"""Objects under an fsspec URL: whole or absent, transfers tried again until nothing has moved for a while.

- An upload is visible when it is complete: stores do so, local files are renamed.
- A download is made of ranges, so a cut costs one of them. Size and digest are checked as the bytes arrive.
- Credentials come from the environment, as each store's own tools read them; no error of ours repeats one.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from xxhash import xxh3_128

from sluice.pipeline.errors import ConfigError, WeightsError
from sluice.pipeline.files import fsync_directory
from sluice.pipeline.weights.delta import in_order

_PART = 8 << 20  # bytes of a range
_PARTS = 4  # ranges at a time
_SLOWEST = 1 << 20  # bytes/s: an upload that is slower is cut and begun again
_CONNECT_S = 10.0
_PAUSES_S = (0.1, 0.3, 1.0, 3.0, 5.0)  # between attempts; the last one again and again
_NO_USE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET")
_SIGNED = re.compile(r"(?i)((?:x-amz-[a-z-]+|signature|awsaccesskeyid|token|key|sig)=)[^&\s\"']+")


class ObjectStore:
    """One URL; keys are relative to it. Methods block, and may be called from several threads."""

    def __init__(self, url: str, *, quiet_s: float) -> None:
        """`quiet_s`: a transfer that makes no progress for so long fails, and says why. Raises ConfigError."""
        self.url, self._quiet_s = url.rstrip("/"), quiet_s
        self._fs, self._root = _open(self.url, quiet_s)
        self._is_local = "file" in _protocols(self._fs)

    def size(self, key: str) -> int | None:
        """Bytes of an object; None if there is none."""
        try:
            return int(self._try(f"looking at {key}", "info", self._path(key))["size"])
        except FileNotFoundError:
            return None

    def put(self, source: Path, key: str) -> bool:
        """Upload a file; False if an object of its size is there already, so give keys that name contents."""
        size = source.stat().st_size
        if self.size(key) == size:
            return False
        if self._is_local:
            with source.open("rb") as stream:
                self._write_local(key, iter(lambda: stream.read(_PART), b""))
        else:
            limit_s = self._quiet_s + size / _SLOWEST
            self._upload(f"uploading {key}", "put_file", str(source), self._path(key), limit_s=limit_s)
        return True

    def put_bytes(self, key: str, data: bytes) -> None:
        """Write or replace a small object."""
        if self._is_local:
            self._write_local(key, iter([data]))
        else:
            self._upload(f"writing {key}", "pipe_file", self._path(key), data)

    def get_bytes(self, key: str) -> bytes:
        """A small object. Raises FileNotFoundError."""
        return cast(bytes, self._try(f"reading {key}", "cat_file", self._path(key)))

    def get(self, key: str, target: Path, size: int, digest: str) -> None:
        """Download an object of this size and xxh3-128. Raises WeightsError; OSError if `target` can't be written."""
        found, seen = self.size(key), xxh3_128()
        if found != size:
            is_gone = found is None
            why = "is not in the store: retired, or lost" if is_gone else f"has {found} bytes, published with {size}"
            raise WeightsError(f"{self.url}/{key}: {why}")
        starts = range(0, size, _PART)
        with target.open("wb") as stream, ThreadPoolExecutor(_PARTS, thread_name_prefix="download") as pool:
            for part in in_order(pool, (_Range(self, key, start, min(size, start + _PART)) for start in starts)):
                seen.update(part)
                stream.write(part)
        if seen.hexdigest() != digest:
            found = seen.hexdigest()[:12]
            raise WeightsError(f"{self.url}/{key}: changed in the store: digest {found}, published {digest[:12]}")

    def range(self, key: str, start: int, end: int) -> bytes:
        """Bytes of an object. Raises WeightsError."""

        what, path = f"downloading {key} from byte {start}", self._path(key)
        try:
            return cast(bytes, self._try(what, "cat_file", path, length=end - start, start=start, end=end))
        except FileNotFoundError as error:
            raise WeightsError(f"{self.url}/{key}: is not in the store: retired, or lost") from error

    def names(self, prefix: str = "") -> list[str]:
        """What lies directly under `prefix`, as keys."""
        try:
            found = self._try(f"listing {prefix or 'the store'}", "ls", self._path(prefix), detail=False)
        except FileNotFoundError:
            return []
        names = sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in found})
        return [f"{prefix}/{name}" if prefix else name for name in names]

    def remove(self, key: str) -> None:
        """An object that is gone already is fine."""
        try:
            self._try(f"removing {key}", "rm_file", self._path(key))
        except FileNotFoundError:
            return

    def remove_folder(self, key: str) -> None:
        """What local files leave behind; stores have none."""
        if self._is_local:
            path = Path(self._path(key))
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _write_local(self, key: str, blocks: Iterator[bytes]) -> None:
        path = Path(self._path(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with aside.open("xb") as stream:
                for block in blocks:
                    stream.write(block)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(path)
            fsync_directory(path.parent)
        finally:
            aside.unlink(missing_ok=True)

    def _upload(self, what: str, method: str, *args: Any, **options: Any) -> None:
        try:
            self._try(what, method, *args, **options)
        except FileNotFoundError as error:
            raise WeightsError(f"{self.url}: {what}: {said(error)}; create the bucket, and check its name") from error

    def _try(
        self, what: str, method: str, *args: Any, limit_s: float = 0.0, length: int | None = None, **options: Any
    ) -> Any:
        """Until it works, or has failed for `quiet_s`; an answer that isn't `length` long was cut off.

        Raises WeightsError, FileNotFoundError.
        """
        deadline, attempts = time.monotonic() + max(self._quiet_s, limit_s), 0
        while True:
            try:
                found = self._call(method, args, options, max(0.1, deadline - time.monotonic()))
                if length is None or len(found) == length:
                    return found
                why: BaseException = EOFError(f"{len(found)} bytes came where {length} belong")
            except FileNotFoundError:
                raise
            except Exception as error:
                why = error
            if isinstance(why, _NO_USE) or type(why).__name__ in _NO_CREDENTIALS:
                told = f"{self.url}: refused {what} ({said(why)})"
                raise WeightsError(f"{told}; check the credentials in this process's environment") from why
            pause = _PAUSES_S[min(attempts, len(_PAUSES_S) - 1)]
            attempts += 1
            if time.monotonic() + pause > deadline:
                raise WeightsError(
                    f"{self.url}: {what} failed {attempts} times over {self._quiet_s:.0f} s, last {said(why)}; is the "
                    "store reachable? It is tried for weights.store_timeout_s"
                ) from why
            time.sleep(pause)

    def _call(self, method: str, args: tuple[Any, ...], options: dict[str, Any], limit_s: float) -> Any:
        if not getattr(self._fs, "async_impl", False):
            return getattr(self._fs, method)(*args, **options)
        asyn: Any = importlib.import_module("fsspec.asyn")
        return asyn.sync(self._fs.loop, getattr(self._fs, f"_{method}"), *args, timeout=limit_s, **options)


class _Range:
    def __init__(self, store: ObjectStore, key: str, start: int, end: int) -> None:
        self._store, self._key, self._start, self._end = store, key, start, end

    def __call__(self) -> bytes:
        return self._store.range(self._key, self._start, self._end)


def said(error: BaseException) -> str:
    """What an error of a store says, without credentials and on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name in _SECRETS:
        if (value := os.environ.get(name)) and len(value) > 3:
            text = text.replace(value, "***")
    return _SIGNED.sub(r"\1***", text)[:300]


def _open(url: str, quiet_s: float) -> tuple[Any, str]:
    fsspec: Any = importlib.import_module("fsspec")
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        # One silent connection leaves time for another.
        options["config_kwargs"] = {"connect_timeout": min(_CONNECT_S, quiet_s), "read_timeout": quiet_s / 2}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(
            f"weights.store_url {url}: needs `pip install {_PACKAGES.get(scheme, scheme)}` ({error})"
        ) from error
    except ValueError as error:
        raise ConfigError(f"weights.store_url {url}: no store for {scheme}:// ({error}); use s3, gs or file") from error
    return fs, path.rstrip("/")


def _protocols(fs: Any) -> tuple[str, ...]:
    found = fs.protocol
    return (found,) if isinstance(found, str) else tuple(found)
