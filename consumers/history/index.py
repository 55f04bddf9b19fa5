"""What the sequences of a history can be searched, sorted and compared by: texts, rewards, lengths, prompts, steps.

    consumer-*.sqlite ─┐                                             ┌─▶ find: ordered rows for a page
                       ├─▶ HistoryIndex.catch_up ─▶ index.sqlite ────┼─▶ same_prompt: a prompt over versions
    trainer.sqlite ────┘   (a portion at a time)                     └─▶ endings, steps, durations: for curves

- Only the dashboard writes it, after the fact: recording a sequence costs the consumer nothing more. It can be deleted
  at any time; it's made again.
- One process writes at a time (a file lock); a second dashboard reads what the first one wrote. If the directory can't
  be written, the index is a temporary file. A damaged one is made again.
- Texts are bounded by MOST_TEXT characters each; a prompt is stored and decoded once, however often it comes. Words are
  found as SQLite's FTS5 splits them (unicode61), the last one by its beginning.
- KL is k3 of behaviour against proximal: the mean over tokens of r - 1 - log r, r = exp(proximal - behaviour), where
  the proximal logprob is the one of the next version.
"""

from __future__ import annotations

import fcntl
import math
import sqlite3
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec

from sluice.consumers.history.files import TRAINER
from sluice.consumers.history.reader import Files, conditions
from sluice.consumers.history.records import SequenceFilter, SequenceRow, Trained, unpack
from sluice.pipeline.errors import DataError, MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import TrainingSample, decode
from sluice.pipeline.wire.tokens import FloatArray, TokenArray

NAME, LOCK = "index.sqlite", "index.lock"
MOST_TEXT = 20_000
_SCHEMA = 3
_PORTION = 64  # sequences in one transaction
LEAST_S, _BUCKETS = 0.125, 24  # of durations: up to 12 days
_MOST_RATIO = 20.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
create table progress (file text primary key, inode integer not null, num integer not null, last text not null);
create table entries (
  id integer primary key, file text not null, num integer not null, at real not null, state text not null,
  finish_reason text not null, worker text not null, task text not null, triggered integer not null,
  version_min integer not null, version_max integer not null, seq_id text not null, job_id text not null,
  length integer not null, reward real, prompt integer not null);
create unique index by_num on entries (file, num);
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
create table steps (
  step integer primary key, kl real not null, kl_tokens integer not null, lag real not null, lag_max integer not null,
  samples integer not null);
"""
_ENTRY = "insert or replace into entries values (null, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) returning id"
_LOAD = (
    "insert into loads values (?, ?) on conflict (version) do update set behind_s = min(behind_s, excluded.behind_s)"
)
_STEP = (
    "insert into steps values (?, ?, ?, ?, ?, 1) on conflict (step) do update set kl = kl + excluded.kl,"
    " kl_tokens = kl_tokens + excluded.kl_tokens, lag = lag + excluded.lag, lag_max = max(lag_max, excluded.lag_max),"
    " samples = samples + 1"
)
_DURATION = (
    "insert into durations values (?, ?, ?, ?) on conflict (file, kind, bucket) do update set"
    " count = count + excluded.count"
)
_NEXT = (
    "select sequences.num, seq_id, job_id, sequences.at, state, finish_reason, worker, task, triggered, version_min,"
    " version_max, details.row, details.result from sequences cross join details using (num)"
    " where sequences.num > ? order by sequences.num limit ?"
)
SORTS = {
    "newest": "id desc",
    "best": "reward desc, id desc",
    "worst": "reward asc, id desc",
    "longest": "length desc, id desc",
    "shortest": "length asc, id desc",
}

Decoder = Callable[[Sequence[int]], str]


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


class _Said(msgspec.Struct, frozen=True):
    """What is indexed of a SequenceResult."""

    prompt_token_ids: bytes = b""
    images: msgspec.Raw = msgspec.Raw(b"")
    text: str = ""
    raw_text: str = ""
    timings: dict[str, float] = {}
    truth: Any = None


class HistoryIndex:
    """The index of one run's history; thread-safe. `decoder`: makes text of a prompt's token ids, or fails.

    Every method raises DataError if the index or the history can't be read.
    """

    def __init__(self, directory: Path, decoder: Callable[[], Decoder] | None = None) -> None:
        self._directory, self._decoder = directory, decoder
        self._files, self._lock = Files(directory), threading.RLock()
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
            while self._is_writer and [name for name in names if self._advance(db, name)]:
                if time.monotonic() >= until:
                    break
            self.behind = sum(self._left(db, name) for name in names[:-1])
            return self.behind

    def stamp(self) -> int:
        """Changes with every indexed portion."""
        with self._asking() as db:
            (newest,) = db.execute("select coalesce(max(id), 0) from entries").fetchone()
            return newest

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
                    if raw is not None and (said := _read(raw)) is not None:
                        found[seq_id] = Context(self._text_of(said), said.truth)
        return found

    def _text_of(self, said: _Said) -> str:
        """The prompt's text, as stored or decoded."""
        with self._asking() as db:
            for (number,) in db.execute("select id from prompts where digest = ?", [_digest(said)]):
                return self.prompt_text(number)
        return self._decoded(said.prompt_token_ids)

    def endings(self) -> list[Endings]:
        """By version; counted anew every few seconds at most."""
        with self._asking() as db:
            newest, now = self.stamp(), time.monotonic()
            if newest != self._endings[1] and now - self._endings[0] > 3.0:
                self._endings = (now, newest, self._count_endings(db))
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

        Of all that were ever indexed: those that were pruned still count.
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
        if self._holds is not None:
            return True
        holds = (self._directory / LOCK).open("ab")
        try:
            fcntl.flock(holds, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holds.close()
            return False
        self._holds = holds
        return True

    def _left(self, db: sqlite3.Connection, name: str) -> int:
        _, done, _ = self._progress(db, name)
        for newest, oldest in self._files.ask(name, "select max(num), min(num) from sequences"):
            return 0 if newest is None else max(0, newest - max(done, oldest - 1))
        return 0

    def _progress(self, db: sqlite3.Connection, name: str) -> tuple[int, int, str]:
        """Of a file: its inode, the number indexed last, and what had it."""
        return next(iter(db.execute("select inode, num, last from progress where file = ?", [name])), (0, 0, ""))

    def _is_replaced(self, name: str, done: int, last: str) -> bool:
        """Whether this is another file: a new one often gets the inode of the one that was deleted."""
        newest, now = self._end(name, done)
        return newest is not None and (newest < done or (bool(last and now) and now != last))

    def _end(self, name: str, num: int) -> tuple[int | None, str]:
        """Of a file: its newest number, and what has this one, "" if nothing; None until it has tables."""
        table, more = ("trained", "step") if name == TRAINER else ("sequences", "at")
        identity = f"select seq_id || ' ' || {more} from {table} where num = ?"
        sql = f"select coalesce(max(num), 0), coalesce(({identity}), '') from {table}"
        return next(iter(self._files.ask(name, sql, [num])), (None, ""))

    def _advance(self, db: sqlite3.Connection, name: str) -> bool:
        """Index a portion of a file; False if nothing is left of it."""
        try:
            inode = (self._directory / name).stat().st_ino
        except FileNotFoundError:
            return False
        held, done, last = self._progress(db, name)
        if held and (held != inode or self._is_replaced(name, done, last)):
            self._forget(db, name)
            done = 0
        portion = self._trained if name == TRAINER else self._sequences
        db.execute("begin immediate")
        try:
            newest, count = portion(db, name, done)
            _, last = self._end(name, newest)
            db.execute("insert or replace into progress values (?, ?, ?, ?)", [name, inode, newest, last])
            if count:
                self._prune(db, name)
            db.execute("commit")
        except BaseException:
            if db.in_transaction:  # a full disk ends it
                db.execute("rollback")
            raise
        return count == _PORTION

    def _forget(self, db: sqlite3.Connection, name: str) -> None:
        """A file that was replaced."""
        if name == TRAINER:
            db.execute("delete from steps")
        else:
            db.execute("delete from durations where file = ?", [name])
            self._delete(db, "file = ?", [name])

    def _prune(self, db: sqlite3.Connection, name: str) -> None:
        """What the consumer has deleted meanwhile."""
        if name == TRAINER:
            return
        for (oldest,) in self._files.ask(name, "select min(num) from sequences"):
            self._delete(db, "file = ? and num < ?", [name, oldest or 0])

    def _delete(self, db: sqlite3.Connection, where: str, args: Sequence[Any]) -> None:
        """Entries, and the prompts that nothing answers any more."""
        prompts = db.execute(f"select distinct prompt from entries where {where}", args).fetchall()
        db.execute(f"delete from answers where rowid in (select id from entries where {where})", args)
        db.execute(f"delete from entries where {where}", args)
        for (prompt,) in prompts:
            unused = "delete from prompts where id = ? and not exists (select 1 from entries where prompt = ?)"
            if db.execute(unused, [prompt, prompt]).rowcount:
                db.execute("delete from prompt_texts where rowid = ?", [prompt])

    def _sequences(self, db: sqlite3.Connection, name: str, done: int) -> tuple[int, int]:
        rows = self._files.ask(name, _NEXT, [done, _PORTION])
        lasted = Counter[tuple[str, int]]()
        for num, seq_id, job_id, at, *shown, raw_row, raw_result in rows:
            try:
                row = unpack(SequenceRow, raw_row)
            except MessageError:
                continue
            found = None if raw_result is None else _read(raw_result)
            prompt, said = (0, _Said()) if found is None else (self._prompt(db, found), found)
            facts = (name, num, at, *shown, seq_id, job_id, row.new_tokens, row.reward, prompt)
            ((id,),) = db.execute(_ENTRY, facts).fetchall()
            behind_s = said.timings.get("behind_s", math.nan)
            if row.version_max >= 0 and math.isfinite(behind_s):  # SQLite takes NaN for null
                db.execute(_LOAD, (row.version_max, behind_s))
            if text := (said.text or said.raw_text)[:MOST_TEXT]:
                db.execute("insert into answers (rowid, text) values (?, ?)", (id, text))
            if row.decode_s > 0:
                lasted.update((("waited", bucket(row.queue_s)), ("took", bucket(row.decode_s))))
        db.executemany(_DURATION, [(name, kind, number, count) for (kind, number), count in lasted.items()])
        return (rows[-1][0] if rows else done), len(rows)

    def _prompt(self, db: sqlite3.Connection, said: _Said) -> int:
        """The number of its prompt; its text is stored with the first."""
        digest = _digest(said)
        for (known,) in db.execute("select id from prompts where digest = ?", [digest]):
            return known
        number = db.execute("insert into prompts values (null, ?)", [digest]).lastrowid or 0
        if text := self._decoded(said.prompt_token_ids):
            db.execute("insert into prompt_texts (rowid, text) values (?, ?)", (number, text))
        return number

    def _decoded(self, raw: bytes) -> str:
        ids = TokenArray()
        ids.frombytes(raw[: 4 * MOST_TEXT])
        try:
            return self._decoder()(ids)[:MOST_TEXT] if self._decoder else ""
        except Exception as error:  # no tokenizer here, or one that can't: prompts are then not searchable
            if self._decoder is not None:
                get_logger().warning("prompts are not searchable: they cannot be decoded", why=str(error))
            self._decoder = None
            return ""

    def _trained(self, db: sqlite3.Connection, name: str, done: int) -> tuple[int, int]:
        sql = "select num, seq_id, step, state, trained from trained where num > ? order by num limit ?"
        rows = self._files.ask(name, sql, [done, _PORTION])
        for _, seq_id, step, state, raw in rows:
            if state != "trained":
                continue
            try:
                trained = unpack(Trained, zlib.decompress(raw))
                found = self._versions_and_sample(seq_id, with_sample=len(trained.proximal_logprobs) > 0)
                if found is None:
                    continue
                oldest, newest, sample = found
                kl, tokens = k3(trained, sample) if sample is not None else (0.0, 0)
            except (MessageError, zlib.error):
                continue
            lag = max(0.0, trained.version - (oldest + newest) / 2) if newest >= 0 else 0.0
            most = max(0, trained.version - oldest) if newest >= 0 else 0
            db.execute(_STEP, (step, kl, tokens, lag, most))
        return (rows[-1][0] if rows else done), len(rows)

    def _versions_and_sample(self, seq_id: str, *, with_sample: bool) -> tuple[int, int, TrainingSample | None] | None:
        column = "details.sample" if with_sample else "null"
        sql = (
            f"select version_min, version_max, {column} from sequences cross join details using (num) where seq_id = ?"
        )
        for name in self._files.consumers():
            for oldest, newest, raw in self._files.ask(name, sql, [seq_id]):
                return oldest, newest, None if raw is None else decode(TrainingSample, zlib.decompress(raw))
        return None


_said = msgspec.msgpack.Decoder(_Said)


def _read(raw: bytes) -> _Said | None:
    try:
        return _said.decode(zlib.decompress(raw))
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError, RecursionError):
        return None


def _digest(said: _Said) -> bytes:
    """Of a prompt: its tokens and its images."""
    return blake2b(said.prompt_token_ids + b"|" + bytes(said.images), digest_size=16).digest()


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


def bucket(seconds: float) -> int:
    """The number of the span of time that has it: from LEAST_S * 2 ** (number - 1) on, 0 for anything shorter."""
    return 0 if seconds < LEAST_S else min(_BUCKETS, math.floor(math.log2(seconds / LEAST_S)) + 1)


def match_text(text: str) -> str:
    """An FTS5 query for all these words, in this order if quoted; the last one may be a beginning."""
    is_phrase = len(text) > 2 and text[0] == text[-1] == '"'
    words = [word.replace('"', "") for word in ([text[1:-1]] if is_phrase else text.split())]
    words = [word for word in words if any(letter.isalnum() for letter in word)]
    if not words:
        raise DataError(f"{text[:80]!r} has no word to search for; give letters or digits")
    return " ".join(f'"{word}"' for word in words) + ("" if is_phrase else "*")


def k3(trained: Trained, sample: TrainingSample) -> tuple[float, int]:
    """(sum over tokens, number of tokens) of the estimate of KL(behaviour ‖ proximal); see the module."""
    proximal: FloatArray = trained.proximal_logprobs
    if not len(proximal) == len(trained.proximal_versions) == len(sample.logprobs) == len(sample.versions):
        return 0.0, 0
    total, tokens = 0.0, 0
    columns = zip(proximal, sample.logprobs, trained.proximal_versions, sample.versions, strict=True)
    for new, old, scored, version in columns:
        if version >= 0 and scored == version + 1:
            log_ratio = max(-_MOST_RATIO, min(_MOST_RATIO, new - old))
            total, tokens = total + math.expm1(log_ratio) - log_ratio, tokens + 1
    return total, tokens
