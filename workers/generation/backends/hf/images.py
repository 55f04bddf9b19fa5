"""Prompts with an image made ready beside the decode thread, once for all sequences that share them.

- Decode steps do not wait for an image; an image does not wait for decode steps.
- One (prompt, image) is prepared once while any of its sequences is decoded: the same image object, not an equal one.
- A sequence that is aborted meanwhile ends as soon as it gets to the decode thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipeline.errors import EngineError, RequestError, SluiceError
from workers.generation.contracts import SequenceRequest
from workers.generation.preprocess import VisionInputs, VisionProcessor

_THREADS = 2
_Key = tuple[tuple[int, ...], int]  # prompt, identity of the image


@dataclass(slots=True, eq=False)
class _Shared:
    future: Future[VisionInputs]
    users: list[PreparedImage] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PreparedImage:
    """One sequence's inputs; `aborted` becomes True if `abort` was called for its key."""

    seq_key: str
    inputs: VisionInputs | None = None
    aborted: bool = False


class PreparedImages:
    """Calls may come from any event loop."""

    def __init__(self, processor: VisionProcessor) -> None:
        self._processor = processor
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sluice-hf-images")
        self._lock = threading.Lock()
        self._shared: dict[_Key, _Shared] = {}

    @asynccontextmanager
    async def of(self, request: SequenceRequest) -> AsyncIterator[PreparedImage]:
        """The inputs of this request, kept until the block ends. Raises RequestError, EngineError."""
        key = (request.prompt_token_ids, id(request.image))
        mine = PreparedImage(request.seq_key)
        shared = self._join(key, request, mine)
        try:
            # Shielded: one sequence that is cancelled leaves the work to the others.
            mine.inputs = await self._made(shared, request)
            yield mine
        finally:
            with self._lock:
                shared.users.remove(mine)
                if not shared.users:
                    del self._shared[key]
                    shared.future.cancel()

    async def _made(self, shared: _Shared, request: SequenceRequest) -> VisionInputs:
        """Shielded: one sequence that is cancelled leaves the work to the others."""
        try:
            return await asyncio.shield(asyncio.wrap_future(shared.future))
        except SluiceError:
            raise
        except Exception as error:  # of a processor that somebody wrote for this model
            raise RequestError(f"{request.seq_key}: the image cannot be processed: {error!r}") from error

    def abort(self, seq_key: str) -> None:
        """Mark the sequences of this key."""
        with self._lock:
            for shared in self._shared.values():
                for user in shared.users:
                    user.aborted = user.aborted or user.seq_key == seq_key

    def close(self) -> None:
        """Take no more; what has begun is finished."""
        self._pool.shutdown(wait=False)

    def _join(self, key: _Key, request: SequenceRequest, mine: PreparedImage) -> _Shared:
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                try:
                    future = self._pool.submit(self._processor.prepare, request.prompt_token_ids, request.image)
                except RuntimeError as error:
                    raise EngineError("the hf engine is closed") from error
                shared = self._shared[key] = _Shared(future)
            shared.users.append(mine)
            return shared
