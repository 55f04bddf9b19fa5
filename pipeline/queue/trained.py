"""The ids that a run has trained, on disk, and whether the broker still has the data that belongs to them.

    <run_dir>/<run>/trained.jsonl     the truth: a line per step, cut back to the checkpoint at each start
    <run_dir>/<run>/trained.sqlite    its index, 16 bytes of digest per id; rebuilt from it if missing

Ids are indexed in batches of some thousand; the rest are held in memory until then. So memory stays flat, and a lookup
costs a few microseconds, however many ids there are.

The directory outlives the broker's data (a flush, a lost disk, another server behind the same address). Both hold an
`incarnation` number: if they differ, the trained ids come from the directory, and everything else is done again.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from redis.asyncio import Redis

from sluice.pipeline.errors import MessageError
from sluice.pipeline.files import write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import MOST, read_json, shown
from sluice.pipeline.wire.keys import Keys

LEDGER, INDEX = "trained.jsonl", "trained.sqlite"
_MOST_HELD = 4096  # more makes indexing cheaper, and every look of a producer at what is not indexed dearer
_CACHE_KIB = 8192
_TABLES = """
create table if not exists trained (digest blob primary key, step integer not null) without rowid;
create table if not exists read (bytes integer not null);
create table if not exists durable (step integer not null);
"""


class _Line(msgspec.Struct):
    step: Annotated[int, msgspec.Meta(ge=0, le=MOST)]
    seq_ids: list[str]


class TrainedIds:
    """The trainer's own; single writer."""

    def __init__(self, run_dir: Path, patience_s: float = 5.0) -> None:
        """`patience_s`: how long to wait for others that read or write the index."""
        self._patience_s = patience_s
        self._ledger, self._path = run_dir / LEDGER, run_dir / INDEX
        self._db: sqlite3.Connection | None = None
        self._held: dict[bytes, int] = {}
        self._recent: set[bytes] = set()  # not in the ledger

    def open(self, step: int, recent: Iterable[str] = ()) -> None:
        """After the ledger was cut back to `step`. `recent`: ids that count as trained whatever the ledger says."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._catch_up(step)
        except sqlite3.DatabaseError as error:
            get_logger().warning("rebuilding the index of trained ids", cause=str(error))
            self.close()
            for suffix in ("", "-journal"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._catch_up(step)
        recent = list(recent)
        self._recent = {_digest(each) for each in recent}
        self.add(step, recent)

    def known(self, seq_ids: Iterable[str]) -> set[str]:
        """The trained ones; of an index that can't be read now, from the ledger."""
        wanted = set(seq_ids)
        try:
            return {each for each in wanted if (digest := _digest(each)) in self._held or _is_in(self._db, digest)}
        except sqlite3.DatabaseError as error:  # another trainer took over, and was paused while it wrote
            get_logger().warning("the index of trained ids cannot be read", path=str(self._path), cause=str(error))
        found = {each for each in wanted if (digest := _digest(each)) in self._held or digest in self._recent}
        for _, ids, _ in _lines(self._ledger, 0):
            found |= wanted.intersection(ids)
        return found

    def add(self, step: int, seq_ids: Iterable[str]) -> None:
        """Record ids that are in the ledger."""
        self._held.update((_digest(each), step) for each in seq_ids)
        if len(self._held) >= _MOST_HELD:
            with self._later_if_busy():
                self._store(_size(self._ledger))

    def durable(self, step: int) -> None:
        """Steps up to this one are in a checkpoint: from now on other processes count them as trained."""
        with self._later_if_busy(), self._transaction() as db:
            db.execute("delete from durable")
            db.execute("insert into durable values (?)", (step,))

    def close(self) -> None:
        """The next start reads the ids held in memory from the ledger."""
        if self._db is not None:
            self._db.close()
        self._db, self._held = None, {}

    def _catch_up(self, step: int) -> None:
        db = self._db = sqlite3.connect(
            self._path, timeout=self._patience_s, isolation_level=None, check_same_thread=False
        )
        db.execute("pragma journal_mode=truncate")  # not WAL: hosts may share a run's directory
        db.execute("pragma synchronous=normal")
        db.execute(f"pragma cache_size=-{_CACHE_KIB}")
        db.executescript(_TABLES)
        db.execute("delete from trained where step > ?", (step,))
        for number, ids, end in _lines(self._ledger, _place(db, self._ledger)):
            self._held.update((_digest(each), number) for each in ids)
            if len(self._held) >= _MOST_HELD:
                self._store(end)
        self._store(_size(self._ledger))
        self.durable(step)

    def _store(self, end: int) -> None:
        """Write the ids held in memory: all of the ledger up to `end` that isn't stored."""
        with self._transaction() as db:
            db.executemany("insert or ignore into trained values (?, ?)", sorted(self._held.items()))
            db.execute("delete from read")
            db.execute("insert into read values (?)", (end,))
        self._held = {}

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        db = self._db
        assert db is not None, "open() comes first"
        db.execute("begin immediate")
        try:
            yield db
            db.execute("commit")
        except sqlite3.Error:
            db.execute("rollback")
            raise

    @contextlib.contextmanager
    def _later_if_busy(self) -> Generator[None]:
        """If the index can't be written, ids stay in memory and the ledger, and are written with the next ones."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            get_logger().warning("the index of trained ids cannot be written", path=str(self._path), cause=str(error))


def trained_among(run_dir: Path, seq_ids: Sequence[str]) -> set[str]:
    """The ids that are in a checkpoint, for a process that doesn't train; unreadable ones count as not trained.

    The ledger and the index may be ahead of the newest checkpoint; steps beyond it will be redone.
    """
    wanted = set(seq_ids)
    path = run_dir / INDEX
    if not path.exists():
        return set()
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            row = db.execute("select step from durable").fetchone()
            durable = row[0] if row and type(row[0]) is int else -1
            found = {each for each in wanted if _is_in(db, _digest(each), durable)}
            start = _place(db, run_dir / LEDGER)
    except sqlite3.DatabaseError as error:
        get_logger().warning("the index of trained ids cannot be read", path=str(path), cause=str(error))
        return set()
    for step, ids, _ in _lines(run_dir / LEDGER, start):
        if step <= durable:
            found |= wanted.intersection(ids)
    return found


def _digest(seq_id: str) -> bytes:
    return blake2b(seq_id.encode(errors="surrogatepass"), digest_size=16).digest()


def _is_in(db: sqlite3.Connection | None, digest: bytes, most: int = MOST) -> bool:
    """Whether it is in a step up to `most`."""
    asked = "select 1 from trained where digest = ? and step <= ?"
    return db is not None and db.execute(asked, (digest, most)).fetchone() is not None


def _place(db: sqlite3.Connection, ledger: Path) -> int:
    """How much of the ledger is stored."""
    row = db.execute("select bytes from read").fetchone()
    return min(row[0], _size(ledger)) if row and type(row[0]) is int and row[0] >= 0 else 0


def _size(ledger: Path) -> int:
    return ledger.stat().st_size if ledger.exists() else 0


def _lines(ledger: Path, start: int) -> Iterable[tuple[int, list[str], int]]:
    """Step, ids and end of the lines from an offset on; a torn line is skipped."""
    if not ledger.exists():
        return
    with ledger.open("rb") as stream:
        stream.seek(start)
        for raw in stream:
            start += len(raw)
            with contextlib.suppress(MessageError):
                line = read_json(raw, _Line, "the line")
                yield line.step, line.seq_ids, start


INCARNATION = "incarnation"
_NONCE = re.compile(rb"[0-9a-f]{32}")


async def recognise(client: Redis, keys: Keys, run_dir: Path) -> bool:
    """False if the broker's data isn't what this directory was last used with, until `begin_again`."""
    raw, path = cast(Any, client), run_dir / INCARNATION
    known = _read(path)
    await raw.set(keys.incarnation, secrets.token_hex(16), nx=True)
    held = cast(bytes, await raw.get(keys.incarnation)).decode(errors="replace")
    if not known:
        _write(path, held)
    return known in ("", held)


def _write(path: Path, held: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, held.encode())


def _read(path: Path) -> str:
    """Empty if missing or not written here: then the broker's counts."""
    raw = path.read_bytes().strip() if path.exists() else b""
    if raw and not _NONCE.fullmatch(raw):
        get_logger().warning("a file cannot be read; writing it again", file=str(path), content=shown(raw))
        return ""
    return raw.decode()


async def begin_again(client: Redis, keys: Keys, run_dir: Path, version: int, so_far: str) -> None:
    """Make the directory belong to the new data, and log what that means. Runs before anything is acked."""
    raw = cast(Any, client)
    _write(run_dir / INCARNATION, cast(bytes, await raw.get(keys.incarnation) or b"").decode(errors="replace"))
    get_logger().warning(
        "the broker's data are gone: rows are read again, trained sequences are not trained again, and work in "
        "progress is redone",
        run=keys.run,
        trained_to=so_far,
        version=version,
    )
