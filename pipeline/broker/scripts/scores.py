"""Requests of score jobs; each script is documented in its file."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, cast

from sluice.pipeline.broker.scripts.library import IntRequest, Names, Request


class ScoreKeys(Names, frozen=True, kw_only=True):
    """KEYS of the score job scripts; for an answer, also the list of each."""

    stream: str
    lists: list[str] = []


class PutScores(Request[list[bytes]], frozen=True, kw_only=True):
    """Enqueue score jobs; returns their entry ids."""

    script: ClassVar[str] = "score_put"
    jobs: list[bytes]

    def answer(self, raw: Any) -> list[bytes]:
        return cast("list[bytes]", raw)


class GivenJob(NamedTuple):
    """One entry; `given`: how many times it was handed out before."""

    entry_id: str
    given: int
    raw: bytes


class Taken(NamedTuple):
    """`now_ms`: the server's time."""

    now_ms: int
    jobs: list[GivenJob]


class TakeScores(Request[Taken], frozen=True, kw_only=True):
    """Score jobs for one scorer, starting with those of silent scorers."""

    script: ClassVar[str] = "score_take"
    group: str
    scorer: str
    count: int
    lease_ms: int

    def answer(self, raw: Any) -> Taken:
        now_ms, *rows = raw
        jobs = [
            GivenJob(entry.decode(), int(given), dict(zip(flat[::2], flat[1::2], strict=True)).get(b"s", b""))
            for entry, given, flat in rows
        ]
        return Taken(int(now_ms), jobs)


class RenewScores(IntRequest, frozen=True, kw_only=True):
    """Set how long a scorer has been silent about its jobs; returns how many it still holds."""

    script: ClassVar[str] = "score_renew"
    group: str
    scorer: str
    idle_ms: int
    entry_ids: list[str]


class ScoreReply(NamedTuple):
    """A row of score_answer.lua."""

    entry_id: str
    message: bytes  # '' = nobody is waiting


class AnswerScores(IntRequest, frozen=True, kw_only=True):
    """Answers to score jobs; returns how many were delivered."""

    script: ClassVar[str] = "score_answer"
    group: str
    keep_ms: int
    answers: list[ScoreReply]
