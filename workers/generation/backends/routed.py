"""A backend with a second one for what it cannot decode; only where the configuration names one.

- The second backend is loaded with the first request that needs it, and with the weights of the moment.
- Every output that it decodes says so (`fallback`), and the first one is a line in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import EngineError, RequestError
from pipeline.logs import get_logger
from workers.generation.contracts import Backend, EngineFacts, SequenceOutput, SequenceRequest


class RoutedBackend:
    """`primary`, and the backend that `make_fallback` makes for requests with an image where primary takes none."""

    def __init__(self, primary: Backend, make_fallback: Callable[[], Backend] | None = None) -> None:
        self._primary, self._make = primary, make_fallback
        self._fallback: Backend | None = None
        self._starting = asyncio.Lock()
        self._weights: tuple[Path, int] | None = None

    @property
    def facts(self) -> EngineFacts:
        """Of the primary backend."""
        return self._primary.facts

    @property
    def version(self) -> int:
        """Weight version that is loaded now."""
        return self._primary.version

    async def start(self) -> None:
        """Load the primary backend's model."""
        await self._primary.start()

    async def for_images(self) -> Backend:
        """The backend that decodes prompts with an image. Raises EngineError if there is none."""
        facts = self._primary.facts
        if facts.supports_vlm:
            return self._primary
        if self._make is None:
            raise EngineError(
                f"the {facts.name} backend does not support images with the model {facts.model}; use a "
                "vision-language model that it can load, choose the hf backend, or set fallback_backend: hf"
            )
        async with self._starting:
            if self._fallback is None:
                self._fallback = await self._start(self._make(), facts)
        return self._fallback

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence; one with an image where images can be decoded."""
        if request.image is None:
            return await self._primary.decode(request)
        try:
            chosen = await self.for_images()
        except EngineError as error:
            raise RequestError(f"{request.seq_key}: {error}") from error
        output = await chosen.decode(request)
        if chosen is self._primary:
            return output
        used, wanted = chosen.facts.name, self._primary.facts.name
        return replace(output, fallback={"wanted": wanted, "used": used, "reason": f"{wanted} takes no images here"})

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key on both."""
        for backend in self._both():
            backend.abort(seq_key)

    async def load_weights(self, directory: Path, version: int) -> None:
        """Replace the weights of both."""
        async with self._starting:
            for backend in self._both():
                await backend.load_weights(directory, version)
            self._weights = (directory, version)

    async def score(self, token_ids: Sequence[int]) -> float:
        """By the primary backend."""
        return await self._primary.score(token_ids)

    async def close(self) -> None:
        """End both."""
        for backend in reversed(self._both()):
            await backend.close()

    def progress(self) -> float:
        """The older of the two."""
        return min(backend.progress() for backend in self._both())

    def _both(self) -> list[Backend]:
        return [self._primary] if self._fallback is None else [self._primary, self._fallback]

    async def _start(self, fallback: Backend, facts: EngineFacts) -> Backend:
        await fallback.start()
        try:
            if not fallback.facts.supports_vlm:
                raise EngineError(
                    f"neither {facts.name} nor the fallback {fallback.facts.name} supports images with {facts.model}; "
                    "use a vision-language model"
                )
            if self._weights is not None:
                await fallback.load_weights(*self._weights)
        except BaseException:
            await fallback.close()
            raise
        get_logger().warning("fallback backend loaded", wanted=facts.name, used=fallback.facts.name, model=facts.model)
        return fallback
