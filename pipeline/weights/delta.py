"""What changed between two versions of a safetensors file: the XOR of their bits, compressed.

    file:  magic │ length │ header {base, result, size, data} │ frame │ frame │ …

One frame per segment of at most 8 MiB of the tensors' bytes: XOR with the base, bytes grouped by significance (a sign
or an exponent rarely changes), zstd. Segments are the same on both sides, since the layout (the safetensors header) is:
another layout has no delta. XOR is associative, so any number of deltas is applied in one pass over the base. Memory:
some segments per thread, whatever the file's size.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray
from xxhash import xxh3_128

from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.wire.codec import read_json

_MAGIC = b"SLDELTA1"
_SEGMENT = 8 << 20  # bytes; a multiple of every item size
_MOST_HEADER = 1 << 20
_LEVEL = 1  # of zstd: higher ones save a tenth and take four times as long
_THREADS = min(4, os.cpu_count() or 1)
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_HELP = "the worker keeps its version and takes the next whole one"


class WrongBase(WeightsError):
    """The file that a delta was to be applied to isn't the one that it was made from."""


Bytes = NDArray[np.uint8]
T = TypeVar("T")


class Encoded(NamedTuple):
    """A delta that was written."""

    size: int  # bytes
    base: str  # xxh3-128 of the file that it is applied to, hexadecimal
    result: str  # of what comes out
    digest: str  # of the delta itself


class _Header(msgspec.Struct, frozen=True):
    base: str
    result: str
    size: int  # bytes of base and result
    data: int  # where the tensors begin


class _Tensor(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


class _Segment(NamedTuple):
    start: int  # in the file
    end: int
    item: int  # bytes of one value


def same_layout(base: Path, new: Path) -> bool:
    """Whether there can be a delta: the same tensors at the same places of two files of one size."""
    with _File(base) as old, _File(new) as later:
        return (old.head, old.size) == (later.head, later.size)


def encode(base: Path, new: Path | Sequence[memoryview], out: Path) -> Encoded:
    """Write what turns `base` into `new`: a file, or all of its bytes in order, of which the first piece is its header.

    Raises WeightsError for another layout, OSError if `out` can't be written.
    """
    with ExitStack() as stack:
        old = stack.enter_context(_File(base))
        later = stack.enter_context(_File(new)) if isinstance(new, Path) else _Pieces(new)
        head, size = old.head, old.size
        if (later.head, later.size) != (head, size):
            raise WeightsError(
                f"{later.name}: has other tensors than {base}, so there is no delta; publish the whole file"
            )
        digests = xxh3_128(head), xxh3_128(head)
        target, pool = stack.enter_context(out.open("wb")), stack.enter_context(_pool())
        start = len(_MAGIC) + 4 + _HEADER_BYTES
        target.seek(start)  # the digests are known at the end
        written = start

        def read() -> Iterator[Callable[[], bytes]]:
            for segment in _segments(head, size, str(base)):
                olds, news = (source.read(segment.start, segment.end) for source in (old, later))
                for digest, found in zip(digests, (olds, news), strict=True):
                    digest.update(found.data)
                yield _Compress(olds, news, segment.item)

        for frame in in_order(pool, read()):
            framed = len(frame).to_bytes(4, "little") + frame
            target.write(framed)
            written += len(framed)
        header = _Header(digests[0].hexdigest(), digests[1].hexdigest(), size, len(head))
        packed = msgspec.json.encode(header).ljust(_HEADER_BYTES)
        begin = _MAGIC + len(packed).to_bytes(4, "little") + packed
        target.seek(0)
        target.write(begin)
    return Encoded(written, header.base, header.result, digest_of_file(out))


def apply(base: Path, deltas: Sequence[Path], out: Path) -> str:
    """Write `base` changed by `deltas`, oldest first; returns the digest of `out`, which is what the last one promises.

    Raises WeightsError for a damaged delta, WrongBase for a file that isn't the first one's; OSError if `out` can't be
    written.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(_Delta(path)) for path in deltas]
        source = stack.enter_context(_File(base))
        _check_chain(base, sources, source.size, len(source.head))
        digest = xxh3_128(source.head)
        target, pool = stack.enter_context(out.open("wb", buffering=0)), stack.enter_context(_pool())
        _write(target, source.head)
        segments = _segments(source.head, source.size, str(base))
        work = (_Expand(source, [each.frame(one) for each in sources], one, deltas) for one in segments)
        for made in in_order(pool, work):  # this thread hashes and writes, the others do the rest
            digest.update(made.data)
            _write(target, made.data)
        for each in sources:
            each.check_end()
    found = digest.hexdigest()
    if sources and found != sources[-1].header.result:
        wanted = sources[0].header.base
        if (was := digest_of_file(base)) != wanted:
            raise WrongBase(f"{base}: has the digest {was[:12]}, and {deltas[0].name} is of {wanted[:12]}; {_HELP}")
        raise WeightsError(f"{deltas[-1]}: damaged, it doesn't give the weights that it names; {_HELP}")
    return found


def digest_of_file(path: Path) -> str:
    """xxh3-128, hexadecimal."""
    digest, block = xxh3_128(), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


_HEADER_BYTES = len(msgspec.json.encode(_Header("0" * 32, "0" * 32, 10**18, 10**12)))


class _Opened:
    """A file, open inside a `with` unless `_begin` refuses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("rb")
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _begin(self) -> None:
        raise NotImplementedError


class _Delta(_Opened):
    """Read from its first frame to its last."""

    def _begin(self) -> None:
        self.header = self._read_header()

    def frame(self, segment: _Segment) -> bytes:
        """The next one, compressed."""
        length = int.from_bytes(self._exactly(4), "little")
        if length > 2 * (segment.end - segment.start) + 1024:  # zstd never needs that much
            raise self._damaged("a frame is longer than what it stands for")
        return self._exactly(length)

    def check_end(self) -> None:
        if self._file.read(1):
            raise self._damaged("it goes on after its last frame")

    def _read_header(self) -> _Header:
        if self._exactly(len(_MAGIC)) != _MAGIC:
            raise self._damaged("it doesn't begin as a delta does")
        length = int.from_bytes(self._exactly(4), "little")
        if length > _MOST_HEADER:
            raise self._damaged("its header is too long")
        try:
            return msgspec.convert(read_json(self._exactly(length), dict[str, Any], "its header"), _Header)
        except (MessageError, msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(f"its header can't be read ({error})") from error

    def _exactly(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) != count:
            raise self._damaged("it is truncated")
        return found

    def _damaged(self, why: str) -> WeightsError:
        return WeightsError(f"{self._path}: not a whole delta, {why}; {_HELP}")


def _check_chain(base: Path, sources: Sequence[_Delta], size: int, data: int) -> None:
    for older, newer in pairwise(sources):
        if older.header.result != newer.header.base:
            raise WeightsError(
                f"{base}: a delta to {older.header.result[:12]} is followed by one of {newer.header.base[:12]}; {_HELP}"
            )
    for each in sources:
        if (each.header.size, each.header.data) != (size, data):
            raise WeightsError(f"{base}: {size} bytes, and a delta is for a file of {each.header.size}; {_HELP}")


class _Compress(NamedTuple):
    old: Bytes
    new: Bytes
    item: int

    def __call__(self) -> bytes:
        changed = np.bitwise_xor(self.old, self.new)
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(_grouped(changed, self.item).data)


class _Expand(NamedTuple):
    base: _File
    frames: Sequence[bytes]
    segment: _Segment
    names: Sequence[Path]

    def __call__(self) -> Bytes:
        made = self.base.read(self.segment.start, self.segment.end)
        count = len(made)
        for name, frame in zip(self.names, self.frames, strict=True):
            try:
                raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=count, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise WeightsError(f"{name}: damaged at byte {self.segment.start} ({error}); {_HELP}") from error
            if len(raw) != count:
                raise WeightsError(f"{name}: damaged, {len(raw)} bytes where {count} belong; {_HELP}")
            np.bitwise_xor(made, _ungrouped(np.frombuffer(raw, dtype=np.uint8), self.segment.item), out=made)
        return made


def _grouped(values: Bytes, item: int) -> Bytes:
    """The lowest bytes of all values, then the next ones; same length."""
    made = np.empty((item, len(values) // item), dtype=np.uint8)
    if item == 2:  # whole values are twice as fast as every second byte, and that five times as a transposed copy
        whole = values.view("<u2")
        np.copyto(made[0], whole, casting="unsafe")
        np.right_shift(whole, 8, out=made[1], casting="unsafe")
    else:
        for place in range(item):
            made[place] = values[place::item]
    return made.reshape(-1)


def _ungrouped(grouped: Bytes, item: int) -> Bytes:
    places = grouped.reshape(item, -1)
    if item == 2:
        whole = np.left_shift(places[1], 8, dtype="<u2")
        return np.bitwise_or(whole, places[0], out=whole).view(np.uint8)
    made = np.empty_like(grouped)
    for place in range(item):
        made[place::item] = places[place]
    return made


class _File(_Opened):
    """A safetensors file. Raises WeightsError for another one."""

    @property
    def name(self) -> str:
        return str(self._path)

    def _begin(self) -> None:
        self.head, self.size = _head(self._file, self.name), os.fstat(self._file.fileno()).st_size

    def read(self, start: int, end: int) -> Bytes:
        """The caller's own bytes; any thread may ask."""
        found = np.empty(end - start, dtype=np.uint8)
        view, at = found.data, 0
        while at < len(found):
            count = os.preadv(self._file.fileno(), [view[at:]], start + at)
            if count == 0:
                raise WeightsError(f"{self.name}: became shorter while it was read; is something else writing it?")
            at += count
        return found


class _Pieces:
    """The same of bytes that are in memory; the first piece is the head."""

    name = "the new file"

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces if len(piece)]
        self._ends = list(accumulate(len(piece) for piece in self._pieces))
        self.head, self.size = self._pieces[0].tobytes(), self._ends[-1]

    def read(self, start: int, end: int) -> Bytes:
        """Not to be changed: it may be the memory itself."""
        found, number = list[Bytes](), bisect_right(self._ends, start)
        while start < end:
            upto, begin = min(end, self._ends[number]), self._ends[number] - len(self._pieces[number])
            found.append(self._pieces[number][start - begin : upto - begin])
            start, number = upto, number + 1
        return found[0] if len(found) == 1 else np.concatenate(found)


def _head(stream: IO[bytes], name: str) -> bytes:
    """Everything before the tensors. Raises WeightsError for what is no safetensors file."""
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 0 < length <= min(os.fstat(stream.fileno()).st_size - 8, 100 << 20):
        raise WeightsError(f"{name}: truncated or not a safetensors file; copy it again")
    return first + stream.read(length)


def _segments(head: bytes, size: int, name: str) -> Iterator[_Segment]:
    """All bytes after `head`, in pieces of one item size."""
    try:
        tree = read_json(head[8:], dict[str, Any], "its header")
        tree.pop("__metadata__", None)
        tensors = msgspec.convert(tree, dict[str, _Tensor])
    except (MessageError, msgspec.MsgspecError, ValueError) as error:
        raise WeightsError(f"{name}: not a safetensors file ({error}); copy it again") from error
    at, runs = len(head), list[tuple[int, int]]()  # (end, item size)
    for tensor in sorted(tensors.values(), key=lambda one: one.data_offsets):
        start, end = (offset + len(head) for offset in tensor.data_offsets)
        if start != at or not start <= end <= size:
            raise WeightsError(f"{name}: its tensors have gaps or overlap; save it again")
        item = _ITEM_BYTES.get(tensor.dtype, 1)
        item = item if (end - start) % item == 0 else 1
        if runs and runs[-1][1] == item:
            runs[-1] = (end, item)
        elif end > start:
            runs.append((end, item))
        at = end
    if at < size:
        runs.append((size, 1))
    at = len(head)
    for end, item in runs:
        while at < end:
            yield _Segment(at, min(end, at + _SEGMENT), item)
            at = min(end, at + _SEGMENT)


def _write(target: IO[bytes], data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:  # a write may be short
        left = left[target.write(left) :]


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="delta")


def in_order(pool: ThreadPoolExecutor, work: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results in the order of `work`, of which only a few are read ahead."""
    running: deque[Future[T]] = deque()
    for each in work:
        running.append(pool.submit(each))
        if len(running) > _THREADS + 1:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
