"""What the index holds of a history's files: read a portion at a time, as new rows come and old ones are deleted.

    consumer-*.sqlite ─┐
                       ├─▶ Indexer.advance ─▶ entries, prompts, texts, loads, durations, steps
    trainer.sqlite ────┘

- `trained` has what each sequence adds to its step: after a trainer's death sequences are trained again, perhaps in
  another step, and count there alone.
- A sequence that was written again comes with a new number, and replaces what the index has of it.
- A file that was replaced is forgotten and read anew.
- Texts are bounded by MOST_TEXT characters each; a prompt is stored and decoded once, however often it comes.
- KL is k3 of behaviour against proximal: the mean over tokens of r - 1 - log r, r = exp(proximal - behaviour), where
  the proximal logprob is the one of the next version.
"""

from __future__ import annotations

import math
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.history.files import TRAINER
from sluice.consumers.history.reader import Files
from sluice.consumers.history.records import SequenceRow, Trained, unpack
from sluice.pipeline.errors import MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import TrainingSample, decode
from sluice.pipeline.wire.tokens import FloatArray, TokenArray

MOST_TEXT = 20_000
LEAST_S, _BUCKETS = 0.125, 24  # of durations: up to 12 days
_PORTION = 64  # sequences in one transaction
_MOST_RATIO = 20.0
_ENTRY = "insert or replace into entries values (null, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) returning id"
_LOAD = (
    "insert into loads values (?, ?) on conflict (version) do update set behind_s = min(behind_s, excluded.behind_s)"
)
_STEP = (
    "insert into steps select step, sum(kl), sum(kl_tokens), sum(lag), max(lag_max), count(*) from trained"
    " where step = ? group by step"
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

Decoder = Callable[[Sequence[int]], str]


class Said(msgspec.Struct, frozen=True):
    """What is indexed of a SequenceResult."""

    prompt_token_ids: bytes = b""
    images: msgspec.Raw = msgspec.Raw(b"")
    text: str = ""
    raw_text: str = ""
    timings: dict[str, float] = {}
    truth: Any = None


class Indexer:
    """Writes to the index, for the HistoryIndex that holds its lock. `decoder`: makes text of token ids, or fails."""

    def __init__(self, directory: Path, files: Files, decoder: Callable[[], Decoder] | None) -> None:
        self._directory, self._files, self._decoder = directory, files, decoder

    def left(self, db: sqlite3.Connection, name: str) -> int:
        _, done, _, _ = self._progress(db, name)
        for newest, oldest in self._files.ask(name, "select max(num), min(num) from sequences"):
            return 0 if newest is None else max(0, newest - max(done, oldest - 1))
        return 0

    def _progress(self, db: sqlite3.Connection, name: str) -> tuple[int, int, str, int]:
        """Of a file: its inode, the number indexed last, what had it, and how often something of it was indexed."""
        sql = "select inode, num, last, changes from progress where file = ?"
        return next(iter(db.execute(sql, [name])), (0, 0, "", 0))

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

    def advance(self, db: sqlite3.Connection, name: str) -> bool:
        """Index a portion of a file; False if nothing is left of it."""
        try:
            inode = (self._directory / name).stat().st_ino
        except FileNotFoundError:
            return False
        held, done, last, changes = self._progress(db, name)
        if held and (held != inode or self._is_replaced(name, done, last)):
            self._forget(db, name)
            done, changes = 0, changes + 1
        portion = self._trained if name == TRAINER else self._sequences
        db.execute("begin immediate")
        try:
            newest, count = portion(db, name, done)
            _, last = self._end(name, newest)
            progress = [name, inode, newest, last, changes + (count > 0)]
            db.execute("insert or replace into progress values (?, ?, ?, ?, ?)", progress)
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
            db.execute("delete from trained")
            db.execute("delete from steps")
        else:
            db.execute("delete from durations where file = ?", [name])
            self._delete(db, "file = ?", [name])

    def _prune(self, db: sqlite3.Connection, name: str) -> None:
        """What was deleted of the file meanwhile; the sums of steps stay."""
        table = "trained" if name == TRAINER else "sequences"
        for (oldest,) in self._files.ask(name, f"select coalesce(min(num), 0) from {table}"):
            if name == TRAINER:
                db.execute("delete from trained where num < ?", [oldest])
            else:
                self._delete(db, "file = ? and num < ?", [name, oldest])

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
        marks = ",".join("?" * len(rows))  # `+`: SQLite would go through all entries of the file
        self._delete(db, f"seq_id in ({marks}) and +file = ?", [*(row[1] for row in rows), name])
        lasted = Counter[tuple[str, int]]()
        for num, seq_id, job_id, at, *shown, raw_row, raw_result in rows:
            try:
                row = unpack(SequenceRow, raw_row)
            except MessageError:
                continue
            found = None if raw_result is None else read_said(raw_result)
            prompt, said = (0, Said()) if found is None else (self._prompt(db, found), found)
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

    def _prompt(self, db: sqlite3.Connection, said: Said) -> int:
        """The number of its prompt; its text is stored with the first."""
        digest = prompt_digest(said)
        for (known,) in db.execute("select id from prompts where digest = ?", [digest]):
            return known
        number = db.execute("insert into prompts values (null, ?)", [digest]).lastrowid or 0
        if text := self.decoded(said.prompt_token_ids):
            db.execute("insert into prompt_texts (rowid, text) values (?, ?)", (number, text))
        return number

    def decoded(self, raw: bytes) -> str:
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
        steps = set[int]()
        for num, seq_id, step, state, raw in rows:
            steps.update(one for (one,) in db.execute("delete from trained where seq_id = ? returning step", [seq_id]))
            if state == "trained" and (adds := self._adds(seq_id, raw)) is not None:
                db.execute("insert into trained values (?, ?, ?, ?, ?, ?, ?)", [num, seq_id, step, *adds])
                steps.add(step)
        for step in steps:
            db.execute("delete from steps where step = ?", [step])
            db.execute(_STEP, [step])
        return (rows[-1][0] if rows else done), len(rows)

    def _adds(self, seq_id: str, raw: bytes) -> tuple[float, int, float, int] | None:
        """To its step: sum of KL, number of tokens with one, staleness by mean and by oldest token; None: not known."""
        try:
            trained = unpack(Trained, zlib.decompress(raw))
            found = self._versions_and_sample(seq_id, with_sample=len(trained.proximal_logprobs) > 0)
            if found is None:
                return None
            oldest, newest, sample = found
            kl, tokens = k3(trained, sample) if sample is not None else (0.0, 0)
        except (MessageError, zlib.error):
            return None
        lag = max(0.0, trained.version - (oldest + newest) / 2) if newest >= 0 else 0.0
        return kl, tokens, lag, max(0, trained.version - oldest) if newest >= 0 else 0

    def _versions_and_sample(self, seq_id: str, *, with_sample: bool) -> tuple[int, int, TrainingSample | None] | None:
        column = "details.sample" if with_sample else "null"
        sql = (
            f"select version_min, version_max, {column} from sequences cross join details using (num) where seq_id = ?"
        )
        for name in self._files.consumers():
            for oldest, newest, raw in self._files.ask(name, sql, [seq_id]):
                return oldest, newest, None if raw is None else decode(TrainingSample, zlib.decompress(raw))
        return None


_said = msgspec.msgpack.Decoder(Said)


def read_said(raw: bytes) -> Said | None:
    try:
        return _said.decode(zlib.decompress(raw))
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError, RecursionError):
        return None


def prompt_digest(said: Said) -> bytes:
    """Of a prompt: its tokens and its images."""
    return blake2b(said.prompt_token_ids + b"|" + bytes(said.images), digest_size=16).digest()


def bucket(seconds: float) -> int:
    """The number of the span of time that has it: from LEAST_S * 2 ** (number - 1) on, 0 for anything shorter."""
    return 0 if seconds < LEAST_S else min(_BUCKETS, math.floor(math.log2(seconds / LEAST_S)) + 1)


def k3(trained: Trained, sample: TrainingSample) -> tuple[float, int]:
    """(sum over tokens, number of tokens) of the estimate of KL(behaviour ‖ proximal); see the module."""
    proximal: FloatArray = trained.proximal_logprobs
    if not len(proximal) == len(trained.proximal_versions) == len(sample.logprobs) == len(sample.versions):
        return 0.0, 0
    total, tokens = 0.0, 0
    columns = zip(proximal, sample.logprobs, trained.proximal_versions, sample.versions, strict=True)
    for new, old, scored, version in columns:
        if 0 <= version < scored:
            log_ratio = max(-_MOST_RATIO, min(_MOST_RATIO, new - old))
            total, tokens = total + math.expm1(log_ratio) - log_ratio, tokens + 1
    return total, tokens
