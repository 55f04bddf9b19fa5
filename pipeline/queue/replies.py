"""Answers to jobs with a mailbox (`reply_to`): the caller waits here for its results.

    enqueue(reply_to) ──▶ worker ──commit.lua, bury.lua──▶ stored replies ──────────────────┐
                            └──────checkpoint.lua──▶ mailbox: deltas, ids of ended ones, answers ──▶ Expected

| waits for                         | unblocked by                                                |
|-----------------------------------|-------------------------------------------------------------|
| an answer (Expected)              | it; ResultsLost; the end of `run`; the caller's own deadline |
| mailbox messages, in `run`        | the next one, or the next poll                              |

- The stored reply is authoritative, and for deltas the stored progress. Both are polled every second, to recover
  messages that the mailbox lost or that went to another process that asked for the same job.
- A job unknown to the broker was lost with its newest writes: ResultsLost, and it can be enqueued again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from sluice.pipeline.errors import BrokerError, MessageError, ResultsChanged, ResultsLost, SluiceError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.queue import JobQueue, joined
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, TokenDelta, decode
from sluice.pipeline.wire.sampled_tokens import Place, Ranked
from sluice.pipeline.wire.tokens import FloatArray, TokenArray

_BLOCK_S, _LOOK_S = 0.5, 1.0
_ASIDE_S = 0.02  # an answer goes out before the mailbox is read again
_MOST_WORDS, _MOST_JOBS = 512, 256  # per call
_MOST_DIGITS = 8
_WHOLE = b"\xc1"  # before an answer in the mailbox: neither UTF-8 nor msgpack


class Replies:
    """One per process that asks; jobs name it as `reply_to=replies.name`. The owner runs `run` alongside its waits."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self.name = secrets.token_hex(8)
        self._client, self._keys, self._queue = cast(Any, client), keys, JobQueue(client, keys)
        self._mailbox = f"{keys.replies}mailbox:{self.name}"
        self._open: dict[str, list[Expected]] = {}  # by job
        self._is_some = asyncio.Event()  # somebody waits
        self._taking = asyncio.Lock()  # words are heard in the order in which they are taken out of the mailbox
        timeout_s = self._client.connection_pool.connection_kwargs.get("socket_timeout")
        self._block_s = min(_BLOCK_S, timeout_s / 2) if timeout_s else _BLOCK_S

    async def run(self) -> None:
        """Deliver answers until cancelled; then, or if the broker is away for too long, every wait fails."""
        due = time.monotonic()
        try:
            while True:
                await self._read()
                if time.monotonic() >= due:
                    await self._look([one for some in self._open.values() for one in some if one.is_asked])
                    due = time.monotonic() + _LOOK_S
                await self._let_answers_out()
        finally:
            for one in [one for some in self._open.values() for one in some]:
                one.fail(BrokerError("this process no longer reads replies: it is stopping, or the broker is down"))

    @contextlib.contextmanager
    def expect(self, job_id: str, n: int = 1) -> Generator[Expected]:
        """Collect the answer to a job of `n` sequences inside the block; enter it before the job is enqueued."""
        expected = Expected(job_id, n, self._look)
        self._open.setdefault(job_id, []).append(expected)
        self._is_some.set()
        try:
            yield expected
        finally:
            self._open[job_id].remove(expected)
            if not self._open[job_id]:
                del self._open[job_id]

    async def is_asked_by(self, job_id: str, request: str, kept_s: float) -> bool:
        """Whether the job of this id is of this request (a digest): the first one names it, for `kept_s` from now."""
        key, kept_ms = self._keys.asked + job_id, int(1000 * kept_s)
        pipe = self._client.pipeline(transaction=False)
        pipe.set(key, request, px=kept_ms, nx=True)
        pipe.get(key)
        pipe.pexpire(key, kept_ms)
        found = cast("bytes | None", (await pipe.execute())[1])
        return found == request.encode()

    async def forget(self, job_id: str, n: int = 1) -> None:
        """Remove an answer that was read; the id of the job, which has ended, is free again.

        An answer may be read before its words in the mailbox: they are heard here, or they'd be taken for the next one.
        """
        async with self._taking:
            await self._hear(await self._queue.forget(job_id, n, self.name))

    async def _let_answers_out(self) -> None:
        """Where nobody waits any more: asking for the next word would delay the caller who has just got an answer."""
        if any(one.missing() for some in self._open.values() for one in some):
            return
        self._is_some.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ASIDE_S):
                await self._is_some.wait()

    async def _read(self) -> None:
        first = await self._client.blpop([self._mailbox], timeout=self._block_s)
        if first is None:
            return
        over = self._told(first[1])
        if not over and len(self._open) < 2:  # an idle process's only answer: more words would be for nobody
            return
        async with self._taking:
            pipe = self._client.pipeline(transaction=False)
            pipe.lpop(self._mailbox, _MOST_WORDS)
            if over:
                pipe.mget([self._keys.replies + one.seq_id for _, one in over])
            more, *stored = cast("list[Any]", await pipe.execute())
            self._take(over, stored[0] if over else ())
            await self._hear(more or ())

    async def _hear(self, words: Sequence[bytes]) -> None:
        if over := [found for word in words for found in self._told(word)]:
            self._take(over, await self._client.mget([self._keys.replies + one.seq_id for _, one in over]))

    def _told(self, word: bytes) -> list[tuple[Expected, Awaited]]:
        """Take a delta or an answer; the callers that wait for an answer that is yet to be fetched."""
        if word[:1] == _WHOLE:
            return self._take_whole(word)
        if word[:1] and word[0] & 0xF0 == 0x80:  # a msgpack map; no id starts like this, as ids are UTF-8
            self._add(word)
            return []
        return self._find(word.decode(errors="replace"))

    def _take_whole(self, word: bytes) -> list[tuple[Expected, Awaited]]:
        """Finish with an answer from the mailbox; if that can't be read, the stored one decides."""
        size, _, rest = word[1:].partition(b":")
        length = int(size) if size.isdigit() and len(size) < _MOST_DIGITS else 0
        over = self._find(rest[:length].decode(errors="replace"))
        try:
            end = read_end(rest[length:]) if over else None
        except MessageError:
            return over
        for expected, one in over:
            one.finish(cast("End", end))
            expected.changed()
        return []

    def _take(self, over: Sequence[tuple[Expected, Awaited]], stored: Sequence[bytes | None]) -> None:
        for (expected, one), raw in zip(over, stored, strict=True):
            _finish(expected, one, raw)

    def _find(self, seq_id: str) -> list[tuple[Expected, Awaited]]:
        """The callers waiting for it."""
        found = [(expected, expected.of(seq_id)) for expected in self._open.get(seq_id.rpartition(":")[0], [])]
        return [(expected, one) for expected, one in found if one is not None and one.end is None]

    def _add(self, word: bytes) -> None:
        try:
            delta = decode(TokenDelta, word)
        except MessageError as error:
            get_logger().warning("unreadable delta discarded", error=str(error))
            return
        for expected, one in self._find(delta.seq_id):
            one.add(delta.offset, delta.token_ids, delta.logprobs, delta.ranked)
            expected.changed()

    async def _look(self, asked: Sequence[Expected]) -> None:
        waiting = [expected for expected in asked if expected.missing()]
        for start in range(0, len(waiting), _MOST_JOBS):
            page = waiting[start : start + _MOST_JOBS]
            await self._look_at_replies(page)
            await self._look_at_progress([expected for expected in page if expected.is_streamed])

    async def _look_at_replies(self, page: Sequence[Expected]) -> None:
        pipe: Any = self._client.pipeline(transaction=False)
        looks = [(expected, expected.missing()) for expected in page]
        for expected, missing in looks:  # the job first: if it ends in between, its replies exist
            pipe.exists(ARQ_JOB + expected.job_id, self._keys.job_state + expected.job_id)
            pipe.mget([self._keys.replies + one.seq_id for one in missing])
        answers = cast("list[Any]", await pipe.execute())
        for (expected, missing), alive, stored in zip(looks, answers[::2], answers[1::2], strict=True):
            for one, raw in zip(missing, stored, strict=True):
                _finish(expected, one, raw)
            if not alive and expected.missing():  # its remains would keep it from being enqueued again
                await self.forget(expected.job_id, len(expected.sequences))
                expected.fail(ResultsLost(f"job {expected.job_id}: the broker has neither the job nor all its replies"))

    async def _look_at_progress(self, page: Sequence[Expected]) -> None:
        """For streams without news since the last poll."""
        missing = [(expected, one) for expected in page for one in expected.missing()]
        quiet = [(expected, one) for expected, one in missing if one.is_quiet]
        for _, one in missing:
            one.is_quiet = True
        if quiet:
            stored = await self._client.mget([self._keys.progress + one.seq_id for _, one in quiet])
            for (expected, one), raw in zip(quiet, stored, strict=True):
                _catch_up(expected, one, raw)


def _finish(expected: Expected, one: Awaited, raw: bytes | None) -> None:
    if raw is None or one.end is not None:
        return
    try:
        one.finish(read_end(raw))
        expected.changed()
    except MessageError as error:
        expected.fail(error)


def _catch_up(expected: Expected, one: Awaited, pieces: bytes | None) -> None:
    if not pieces:
        return
    try:
        so_far = joined(pieces)
    except MessageError as error:
        get_logger().warning("stored progress is unusable", sequence=one.seq_id, error=str(error))
        return
    one.add(0, so_far.token_ids, so_far.logprobs, so_far.ranked)
    expected.changed()


End = SequenceResult | DeadLetter


class Awaited:
    """One sequence: the data received, and how much of it was delivered."""

    def __init__(self, seq_id: str) -> None:
        self.seq_id = seq_id
        self.end: End | None = None
        self.is_over = False  # its end was delivered
        self.is_quiet = True  # nothing arrived since the last poll
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._places: list[Place] = []  # as many, or none
        self._num_shown = 0
        self._is_torn = False

    def add(self, offset: int, tokens: Sequence[int], logprobs: Sequence[float], ranked: Ranked | None = None) -> None:
        """Tokens from `offset` on; known ones are skipped, those after a gap are sent again later."""
        have = len(self._tokens)
        if offset > have or self._is_torn or self.end is not None:
            return
        known = min(have - offset, len(tokens))
        if list(tokens[:known]) != self._tokens[offset : offset + known]:
            self._is_torn = True
            return
        self._tokens.extend(tokens[known:])
        self._logprobs.extend(logprobs[known:])
        self._places.extend([] if ranked is None else ranked.places()[known:])
        self.is_quiet = False

    def finish(self, end: End) -> None:
        """Mark as ended; the first end counts. Its tokens replace those that nobody has seen."""
        if self.end is not None:
            return
        self.end = end
        if isinstance(end, SequenceResult):
            shown = self._tokens[: self._num_shown]
            self._is_torn = list(end.token_ids[: self._num_shown]) != shown
            self._tokens, self._logprobs = list(end.token_ids), list(end.logprobs)
            self._places = [] if end.ranked is None else end.ranked.places()

    def unseen(self) -> Iterator[TokenDelta | End]:
        """Undelivered deltas, and the end. Raises ResultsChanged if that doesn't go on from what was delivered."""
        at = self._num_shown
        if at < len(self._tokens) and not self._is_torn:
            self._num_shown = len(self._tokens)
            tokens, logprobs = TokenArray(self._tokens[at:]), FloatArray(self._logprobs[at:])
            ranked = Ranked.of(self._places[at:]) if self._places else None
            yield TokenDelta(seq_id=self.seq_id, offset=at, token_ids=tokens, logprobs=logprobs, ranked=ranked)
        if self.end is not None and not self.is_over:
            self.is_over = True
            if isinstance(self.end, SequenceResult) and self._is_torn:
                raise ResultsChanged(f"{self.seq_id}: its first tokens were delivered, then lost and decoded anew")
            yield self.end


class Expected:
    """The answer to one job, made by `Replies.expect`. Enqueue the job before you wait here."""

    def __init__(self, job_id: str, n: int, look: Callable[[Sequence[Expected]], Awaitable[None]]) -> None:
        self.job_id = job_id
        self.sequences = [Awaited(f"{job_id}:{index}") for index in range(n)]
        self._by_id = {one.seq_id: one for one in self.sequences}
        self.is_asked = self.is_streamed = False
        self._look, self._error = look, cast("SluiceError | None", None)
        self._num_changes, self._change = 0, asyncio.Event()

    async def ended(self) -> list[End]:
        """Every sequence's end, by index. Raises ResultsLost (enqueue again, then wait again) and BrokerError."""
        while self.missing():
            seen = self._num_changes
            await self._ask()
            await self._changed(seen)
        return [cast("End", one.end) for one in self.sequences]

    async def events(self) -> AsyncGenerator[TokenDelta | End]:
        """Deltas without gaps or repeats, and each sequence's end after its last delta.

        Raises the same as `ended`, and ResultsChanged in place of an end that isn't that of the deltas.

        After ResultsLost a new call continues where this one stopped.
        """
        self.is_streamed = True
        while not all(one.is_over for one in self.sequences):
            seen = self._num_changes
            if self.missing():
                await self._ask()
            for one in self.sequences:
                for event in one.unseen():
                    yield event
            if self.missing():
                await self._changed(seen)

    def missing(self) -> list[Awaited]:
        """Those that have not ended."""
        return [one for one in self.sequences if one.end is None]

    def of(self, seq_id: str) -> Awaited | None:
        """One of the sequences, by its id."""
        return self._by_id.get(seq_id)

    def fail(self, error: SluiceError) -> None:
        """Make every wait raise the error."""
        self._error = error
        self.changed()

    def changed(self) -> None:
        """Wake the waiters."""
        self._num_changes += 1
        done, self._change = self._change, asyncio.Event()
        done.set()

    async def _ask(self) -> None:
        """On the first wait: the answer may already exist."""
        if not self.is_asked:
            self.is_asked = True
            await self._look([self])
        if (error := self._error) is not None:
            if isinstance(error, ResultsLost):  # the caller may enqueue it again
                self.is_asked, self._error = False, None
            raise error

    async def _changed(self, seen: int) -> None:
        if self._num_changes == seen:
            await self._change.wait()


def read_end(raw: bytes) -> End:
    """A stored reply. Raises MessageError."""
    try:
        return decode(SequenceResult, raw)
    except MessageError as error:
        with contextlib.suppress(MessageError):
            return decode(DeadLetter, raw)
        raise error
