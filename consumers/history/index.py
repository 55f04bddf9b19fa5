"""What the sequences of a history can be searched, sorted and compared by: texts, rewards, lengths, prompts, steps.

    consumer-*.sqlite ─┐                                             ┌─▶ find: ordered rows for a page
                       ├─▶ HistoryIndex.catch_up ─▶ index.sqlite ────┼─▶ same_prompt: a prompt over versions
    trainer.sqlite ────┘   (a portion at a time)                     └─▶ endings, steps, durations: for curves

- Only the dashboard writes it, after the fact: recording a sequence costs the consumer nothing more. It can be deleted
  at any time; it's made again.
- One process writes at a time (a file lock); a second dashboard reads what the first one wrote. If the directory can't
  be written, the index is a temporary file. A damaged one is made again.
- Words are found as SQLite's FTS5 splits them (unicode61), the last one by its beginning.
- What is written: indexing.
"""

from __future__ import annotations

import fcntl
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from sluice.consumers.history.files import TRAINER
from sluice.consumers.history.indexing import Decoder, Indexer, Said, prompt_digest, read_said
from sluice.consumers.history.reader import Files, conditions
from sluice.consumers.history.records import SequenceFilter, SequenceRow, unpack
from sluice.pipeline.errors import DataError, MessageError
from sluice.pipeline.logs import get_logger

NAME, LOCK = "index.sqlite", "index.lock"
_SCHEMA = 5
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
create table progress (
  file text primary key, inode integer not null, num integer not null, last text not null, changes integer not null);
create table entries (
  id integer primary key, file text not null, num integer not null, at real not null, state text not null,
  finish_reason text not null, worker text not null, task text not null, triggered integer not null,
  version_min integer not null, version_max integer not null, seq_id text not null, job_id text not null,
  length integer not null, reward real, prompt integer not null);
create unique index by_num on entries (file, num);
create index by_seq_id on entries (seq_id);
create index by_reward on entries (reward);
create index by_length on entries (length);
create index by_prompt on entries (prompt, version_max);
create index by_ending on entries (version_max, finish_reason, at);
create table prompts (id integer primary key, digest blob not null unique);
create virtual table prompt_texts using fts5 (text, tokenize = 'unicode61 remove_diacritics 2');
create virtual table answers using fts5 (text, tokenize = 'unicode61 remove_diacritics 2');
create table loads (version integer primary key, behind_s real not null);
create table durations (
  file text not null, kind text not null, bucket integer not null, count integer not null,
  primary key (file, kind, bucket)) without rowid;
create table trained (
  num integer primary key, seq_id text not null unique, step integer not null, kl real not null,
  kl_tokens integer not null, lag real not null, lag_max integer not null);
create index by_step on trained (step);
create table steps (
  step integer primary key, kl real not null, kl_tokens integer not null, lag real not null, lag_max integer not null,
  samples integer not null);
"""
SORTS = {
    "newest": "id desc",
    "best": "reward desc, id desc",
    "worst": "reward asc, id desc",
    "longest": "length desc, id desc",
    "shortest": "length asc, id desc",
}


class Found(msgspec.Struct, frozen=True):
    """Where a sequence is stored, and the number of its prompt."""

    file: str
    num: int
    prompt: int


class Endings(msgspec.Struct, frozen=True):
    """Finish reasons of the sequences whose newest token is of one version; `at` is their mean time."""

    version: int
    at: float
    counts: dict[str, int]


class TrainedStep(msgspec.Struct, frozen=True):
    """Of the stored samples of a step; `kl` None where no proximal logprob is stored."""

    step: int
    kl: float | None
    lag_mean: float
    lag_max: int


class Context(msgspec.Struct, frozen=True):
    """What a sequence answers."""

    prompt: str
    truth: Any = None


class HistoryIndex:
    """The index of one run's history; thread-safe. `decoder`: makes text of a prompt's token ids, or fails.

    `may_write`: False only reads what another dashboard has indexed, or will: a run that isn't this process's own.
    Every method raises DataError if the index or the history can't be read.
    """

    def __init__(
        self, directory: Path, decoder: Callable[[], Decoder] | None = None, *, may_write: bool = True
    ) -> None:
        self._directory, self._files, self._lock = directory, Files(directory), threading.RLock()
        self._may_write = may_write
        self._indexer = Indexer(directory, self._files, decoder)
        self._db: sqlite3.Connection | None = None
        self._holds: IO[bytes] | None = None
        self._is_writer = self._reported = self._is_early = False
        self._endings: tuple[float, int, list[Endings]] = (0.0, -1, [])
        self.behind = 0  # sequences that are not indexed yet

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
            if self._holds is not None:
                self._holds.close()
            self._db = self._holds = None
            self._files.close()

    @property
    def is_writer(self) -> bool:
        """Whether this process, of several that look at the run, writes beside its history."""
        return self._holds is not None

    def catch_up(self, for_s: float = 0.05) -> int:
        """Index what is new, for about that long; how many sequences are left.

        Only the process that holds the lock writes; others just count.
        """
        until = time.monotonic() + for_s
        with self._asking() as db:
            names = [*self._files.consumers(), TRAINER]
            while self._is_writer and [name for name in names if self._indexer.advance(db, name)]:
                if time.monotonic() >= until:
                    break
            self.behind = sum(self._indexer.left(db, name) for name in names[:-1])
            return self.behind

    def stamp(self) -> int:
        """Changes with every indexed portion."""
        with self._asking() as db:
            (changes,) = db.execute("select coalesce(sum(changes), 0) from progress").fetchone()
            return changes

    def find(
        self, wanted: SequenceFilter, text: str = "", sort: str = "newest", limit: int = 50, skip: int = 0,
        ranges: Mapping[str, tuple[float | None, float | None]] = {}, prompt: int | None = None,
    ) -> list[Found]:  # fmt: skip
        """Matches in this order; `ranges` bound `reward` and `length`. Raises DataError for a text without a word."""
        where, args = conditions(wanted)
        where = where.replace("sequences.num in (select num from sequences", "id in (select id from entries")
        for name, (least, most) in ranges.items():
            for bound, sign in ((least, ">="), (most, "<=")):
                if bound is not None:
                    where, args = f"{where} and {name} {sign} ?", [*args, bound]
        if text:
            asked = match_text(text)
            where += (
                " and (id in (select rowid from answers where answers match ?)"
                " or prompt in (select rowid from prompt_texts where prompt_texts match ?))"
            )
            args += [asked, asked]
        if prompt is not None:
            where, args = f"{where} and prompt = ?", [*args, prompt]
        if sort in ("best", "worst"):
            where += " and reward is not null"
        sql = f"select file, num, prompt from entries where 1{where} order by {SORTS[sort]} limit ? offset ?"
        with self._asking() as db:
            return [Found(*row) for row in db.execute(sql, [*args, limit, skip])]

    def entry(self, seq_id: str) -> Found | None:
        """One sequence, if it is indexed."""
        for name in self._files.consumers():
            for (num,) in self._files.ask(name, "select num from sequences where seq_id = ?", [seq_id]):
                with self._asking() as db:
                    sql = "select file, num, prompt from entries where file = ? and num = ?"
                    for row in db.execute(sql, [name, num]):
                        return Found(*row)
        return None

    def same_prompt(self, prompt: int, most: int = 24) -> tuple[list[Found], int]:
        """Sequences of one prompt by version, evenly chosen, and how many there are."""
        with self._asking() as db:
            rows = db.execute(
                "select file, num, prompt from entries where prompt = ? order by version_max, id", [prompt]
            ).fetchall()
        step = max(1.0, (len(rows) - 1) / max(1, most - 1)) if rows else 1.0
        chosen = sorted({min(len(rows) - 1, round(at * step)) for at in range(most)} if rows else ())
        return [Found(*rows[at]) for at in chosen], len(rows)

    def rewards(self, prompt: int) -> list[tuple[int, float, float]]:
        """(version, time, reward) of every answer to a prompt, by version."""
        sql = "select version_max, at, reward from entries where prompt = ? and reward is not null order by version_max"
        with self._asking() as db:
            return db.execute(sql, [prompt]).fetchall()

    def prompt_text(self, prompt: int) -> str:
        """As decoded, without padding; "" if it couldn't be."""
        with self._asking() as db:
            sql = "select text from prompt_texts where rowid = ?"
            return next((text for (text,) in db.execute(sql, [prompt])), "")

    def contexts(self, seq_ids: Sequence[str]) -> dict[str, Context]:
        """Prompt and truth of those that have a result, indexed or not."""
        found: dict[str, Context] = {}
        sql = "select details.result from sequences cross join details using (num) where seq_id = ?"
        for seq_id in seq_ids:
            for name in self._files.consumers():
                for (raw,) in self._files.ask(name, sql, [seq_id]):
                    if raw is not None and (said := read_said(raw)) is not None:
                        found[seq_id] = Context(self._text_of(said), said.truth)
        return found

    def _text_of(self, said: Said) -> str:
        """The prompt's text, as stored or decoded."""
        with self._asking() as db:
            for (number,) in db.execute("select id from prompts where digest = ?", [prompt_digest(said)]):
                return self.prompt_text(number)
        return self._indexer.decoded(said.prompt_token_ids)

    def endings(self) -> list[Endings]:
        """By version; counted anew every few seconds at most."""
        with self._asking() as db:
            stamp, now = self.stamp(), time.monotonic()
            if stamp != self._endings[1] and now - self._endings[0] > 3.0:
                self._endings = (now, stamp, self._count_endings(db))
            return self._endings[2]

    def _count_endings(self, db: sqlite3.Connection) -> list[Endings]:
        sql = (
            "select version_max, finish_reason, count(*), sum(at) from entries where version_max >= 0"
            " group by version_max, finish_reason"
        )
        found: dict[int, tuple[dict[str, int], list[float]]] = {}
        for version, reason, count, at in db.execute(sql):
            counts, times = found.setdefault(version, ({}, []))
            counts[reason or "unknown"] = count
            times.append(at)
        return [
            Endings(version, math.fsum(times) / sum(counts.values()), counts)
            for version, (counts, times) in sorted(found.items())
        ]

    def steps(self) -> list[TrainedStep]:
        """By number."""
        with self._asking() as db:
            rows = db.execute("select * from steps order by step").fetchall()
        return [
            TrainedStep(step, kl / tokens if tokens else None, lag / samples, most)
            for step, kl, tokens, lag, most, samples in rows
        ]

    def loads(self) -> dict[int, float]:
        """Seconds from the publication of a version to its first token, on the fastest worker."""
        with self._asking() as db:
            return dict(db.execute("select version, behind_s from loads order by version").fetchall())

    def durations(self) -> dict[str, dict[int, int]]:
        """How many sequences `waited` in the queue and `took` on a worker for how long: by number of `bucket`.

        Of all that were ever indexed: those that were pruned, or finished again, still count.
        """
        with self._asking() as db:
            found = db.execute("select kind, bucket, sum(count) from durations group by kind, bucket").fetchall()
        counted: dict[str, dict[int, int]] = {}
        for kind, number, count in found:
            counted.setdefault(kind, {})[number] = count
        return counted

    def rows(self, found: Sequence[Found]) -> list[tuple[Found, SequenceRow]]:
        """The rows of what was found, in its order; those pruned since are left out."""
        rows: list[tuple[Found, SequenceRow]] = []
        for one in found:
            for (raw,) in self._files.ask(one.file, "select row from details where num = ?", [one.num]):
                try:
                    rows.append((one, unpack(SequenceRow, raw)))
                except MessageError:
                    continue
        with_steps = self._files.with_trained([row for _, row in rows])
        return [(one, row) for (one, _), row in zip(rows, with_steps, strict=True)]

    @contextmanager
    def _asking(self) -> Iterator[sqlite3.Connection]:
        """The index, locked."""
        with self._lock:
            try:
                yield self._opened()
            except (sqlite3.Error, OSError) as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED and self._db is not None:
                    self._db.close()
                    self._db = None
                    if self._holds is not None:
                        _remove(str(self._directory / NAME))
                raise DataError(
                    f"{self._directory / NAME}: the index of the history cannot be used ({error}); make room on its "
                    "disk, or delete it: it is made again"
                ) from error

    def _opened(self) -> sqlite3.Connection:
        if self._db is not None and (
            self._directory.is_dir() if self._is_early else not self._is_writer and self._try_lock()
        ):
            self._db.close()
            self._db = None
        if self._db is None:
            self._db = self._open()
        return self._db

    def _open(self) -> sqlite3.Connection:
        path = self._directory / NAME
        self._is_early = not self._directory.is_dir()
        if self._is_early:  # nothing has been recorded yet
            return _connect(None, write=True)
        try:
            self._is_writer = self._try_lock()
            db = _connect(path, write=self._is_writer)
        except (OSError, sqlite3.Error) as error:
            if not self._reported:
                get_logger().info("the index is a temporary file", directory=str(self._directory), why=str(error))
            self._reported = self._is_writer = True
            return _connect(None, write=True)
        return db

    def _try_lock(self) -> bool:
        """Whether this process writes. Raises OSError if none can, here."""
        if self._holds is not None or not self._may_write:
            return self._may_write
        holds = (self._directory / LOCK).open("ab")
        try:
            fcntl.flock(holds, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holds.close()
            return False
        self._holds = holds
        return True


def _connect(path: Path | None, *, write: bool) -> sqlite3.Connection:
    """Made anew if it is of another schema, or damaged."""
    if not write and path is not None:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5, check_same_thread=False)
        if db.execute("pragma user_version").fetchone() != (_SCHEMA,):
            db.close()
            raise sqlite3.DatabaseError("another process is making the index")
        return db
    name = "" if path is None else str(path)  # "": SQLite's own temporary file
    for last in (False, True):
        db = sqlite3.connect(name, timeout=5, isolation_level=None, check_same_thread=False)
        try:
            db.execute("pragma journal_mode=wal")
            db.execute("pragma synchronous=off")  # it can be made again
            db.execute("pragma cache_size=-16384")
            version = db.execute("pragma user_version").fetchone()[0]
            if version == _SCHEMA:
                return db
            if version == 0 and db.execute("select count(*) from sqlite_master").fetchone() == (0,):
                db.executescript(f"begin immediate;{_TABLES}pragma user_version={_SCHEMA};commit;")
                return db
        except sqlite3.DatabaseError:
            if last or path is None:
                db.close()
                raise
        db.close()
        _remove(name)
    raise sqlite3.DatabaseError("the index could not be made")


def _remove(name: str) -> None:
    for end in ("", "-wal", "-shm"):
        Path(name + end).unlink(missing_ok=True)


def match_text(text: str) -> str:
    """An FTS5 query for all these words, in this order if quoted; the last one may be a beginning."""
    is_phrase = len(text) > 2 and text[0] == text[-1] == '"'
    words = [word.replace('"', "") for word in ([text[1:-1]] if is_phrase else text.split())]
    words = [word for word in words if any(letter.isalnum() for letter in word)]
    if not words:
        raise DataError(f"{text[:80]!r} has no word to search for; give letters or digits")
    return " ".join(f'"{word}"' for word in words) + ("" if is_phrase else "*")
