"""History files: paths, schema, opening.

- `num` grows with every new sequence of a file, so sorting by it sorts by time and needs no index. A job has the one of
  its first sequence: what is older than a job is what has a smaller number.
- `sequences` is narrow for fast scans; `details` holds what pages show, with whole messages compressed.
- The sequences of a job are found by the unique `seq_id`: "<job_id>:…", or for a rollout that no producer announced
  "<job_id>" and "<job_id>/…". Ids are hashes: an index over them is the dearest to write, for each new entry rewrites a
  page.
- A file with another schema is refused with DataError; one that is still being created counts as empty.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError

SCHEMA = 1
TRAINER = "trainer.sqlite"
_CACHE_KIB, _LOG_PAGES = 16 << 10, 8000
FILTERED = ("state", "finish_reason", "worker", "task", "triggered")
_CONSUMER_TABLES = """
create table sequences (
  num integer primary key, seq_id text not null unique, job_id text not null, at real not null, state text not null,
  finish_reason text not null, worker text not null, task text not null, triggered integer not null,
  version_min integer not null, version_max integer not null);
create table details (num integer primary key, row blob not null, result blob, sample blob, letter blob);
create table jobs (
  num integer primary key, job_id text not null unique, task text not null, group_size integer not null,
  enqueued_at real not null, at real not null, attempts integer not null,
  handed_on integer not null, dropped integer not null, dead integer not null, log blob not null);
""" + "".join(f"create index by_{name} on sequences ({name});\n" for name in FILTERED)
_TRAINER_TABLES = """
create table trained (
  num integer primary key, seq_id text not null unique, step integer not null, state text not null,
  trained blob not null);
"""
_IS_NUMBERED = (
    "select job_id is (select job_id from sequences where num = jobs.num) from jobs order by num desc limit 1"
)
_NUMBER = """
begin immediate;
create temp table firsts (job_id text primary key, num integer not null) without rowid;
insert into firsts select job_id, min(num) from sequences group by job_id;
delete from jobs where job_id not in (select job_id from firsts);
update jobs set num = -(select num from firsts where firsts.job_id = jobs.job_id);
update jobs set num = -num;
drop table firsts;
commit;
"""


def history_directory(config: Config) -> Path:
    return Path(config.run_dir) / config.run / "history"


def consumer_file(partition: int) -> str:
    return f"consumer-{partition}.sqlite"


def consumer_files(directory: Path) -> list[str]:
    """Names of the consumer files that exist now."""
    return sorted(path.name for path in directory.glob("consumer-*.sqlite"))


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the file, creating it if needed. Raises DataError for another schema; OSError and sqlite3.Error pass
    through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
    try:
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=normal")
        db.execute("pragma journal_size_limit=67108864")
        # By default a transaction rewrites index pages that fell out of the cache, and so does every fourth MB of log.
        db.execute(f"pragma cache_size=-{_CACHE_KIB}")
        db.execute(f"pragma wal_autocheckpoint={_LOG_PAGES}")
        if not is_made(db, path):
            tables = _TRAINER_TABLES if path.name == TRAINER else _CONSUMER_TABLES
            db.executescript(f"begin immediate;{tables}pragma user_version={SCHEMA};commit;")
        db.execute("drop index if exists by_job_id")  # earlier releases created it
        # They also numbered jobs from 1, so that the newest job has the number of another one's sequence.
        if path.name != TRAINER and db.execute(_IS_NUMBERED).fetchone() == (0,):
            db.executescript(_NUMBER)
    except BaseException:
        db.close()
        raise
    return db


def open_for_reading(path: Path) -> sqlite3.Connection | None:
    """None until it has tables. Raises DataError if it isn't a history with this schema."""
    # Without its writer there is no shared memory to read through, and a read-only disk can't create any.
    settled = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
    uri = f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if settled else "")
    db = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None, check_same_thread=False)
    try:
        db.execute("pragma query_only=on")
        db.execute("pragma cache_size=-32000")
        if is_made(db, path):
            return db
    except sqlite3.DatabaseError as error:
        db.close()
        raise DataError(
            f"{path}: cannot be read as a history ({error}); try again if it is busy, delete it if it is damaged"
        ) from error
    except BaseException:
        db.close()
        raise
    db.close()
    return None


def is_made(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the tables exist; raises DataError for another schema."""
    (version,) = db.execute("pragma user_version").fetchone()
    if version not in (0, SCHEMA):
        raise DataError(
            f"{path}: history of schema {version}; this release reads and writes {SCHEMA}: "
            "use the release that wrote it, or delete the file to start a new one"
        )
    return version == SCHEMA
