"""The answer to one job while its caller waits for it: what came so far, and how much of that was shown.

- A delta is durable before it is told, so a worker's death changes nothing that was seen. Should an attempt start anew
  nevertheless, with other tokens, deltas end and the result is what counts.
- What got lost on the way is made good, at the latest by the result: deltas have no gaps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import cast

from pipeline.errors import MessageError, ResultsLost, SluiceError
from pipeline.wire.messages import DeadLetter, SequenceResult, TokenDelta, decode
from pipeline.wire.tokens import FloatArray, TokenArray

End = SequenceResult | DeadLetter


class Awaited:
    """What is known of one sequence, and how much of it was shown."""

    def __init__(self, seq_id: str) -> None:
        self.seq_id = seq_id
        self.end: End | None = None
        self.is_over = False  # its end was shown
        self.is_quiet = True  # nothing came since the last look
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._num_shown = 0
        self._is_torn = False

    def add(self, offset: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens from `offset` on; those that are known already are left out, those after a gap come again."""
        have = len(self._tokens)
        if offset > have or self._is_torn or self.end is not None:
            return
        known = min(have - offset, len(tokens))
        if list(tokens[:known]) != self._tokens[offset : offset + known]:
            self._is_torn = True
            return
        self._tokens.extend(tokens[known:])
        self._logprobs.extend(logprobs[known:])
        self.is_quiet = False

    def finish(self, end: End) -> None:
        """It has ended; the first end counts."""
        if self.end is None:
            if isinstance(end, SequenceResult):
                self.add(0, end.token_ids, end.logprobs)
            self.end = end

    def unseen(self) -> Iterator[TokenDelta | End]:
        """What was not shown yet."""
        at = self._num_shown
        if at < len(self._tokens) and not self._is_torn:
            self._num_shown = len(self._tokens)
            tokens, logprobs = TokenArray(self._tokens[at:]), FloatArray(self._logprobs[at:])
            yield TokenDelta(seq_id=self.seq_id, offset=at, token_ids=tokens, logprobs=logprobs)
        if self.end is not None and not self.is_over:
            self.is_over = True
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
        """Every sequence's end, by index. Raises ResultsLost (enqueue again, and wait anew) and BrokerError."""
        while self.missing():
            seen = self._num_changes
            await self._ask()
            await self._changed(seen)
        return [cast("End", one.end) for one in self.sequences]

    async def events(self) -> AsyncGenerator[TokenDelta | End]:
        """Deltas without gaps or repeats, and after its last one each sequence's end. Raises as `ended`.

        After ResultsLost a new call goes on where this one was.
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
        """Whoever waits is told."""
        self._error = error
        self.changed()

    def changed(self) -> None:
        """Something came."""
        self._num_changes += 1
        done, self._change = self._change, asyncio.Event()
        done.set()

    async def _ask(self) -> None:
        """At first: the answer may have been there for long."""
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
