"""Tokenizers by the names callers give; only listed names; the least recently used are evicted first.

- One load at a time in the process, and one per name: concurrent callers wait for it and share it.
- Loads and renderings run off the event loop, so the server keeps answering; a failure or hang there, even a Rust
  panic, affects only one rollout.
- A tokenizer's own code runs only if the operator allows it, and then callers can't choose the revision.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts.chat_template import settle
from sluice.pipeline.thread_pool import ThreadPool
from sluice.producers.http.schemas import RolloutError
from sluice.producers.tokenizer import model_placeholders, turn_terminators

Made = TypeVar("Made")
Key = tuple[str, str | None]
_LOAD_S, _RENDER_S = 300.0, 120.0
_RENDERERS = 4


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with a chat template, the ids that end a turn, and those that stand for an image."""

    tokenizer: Any
    terminators: frozenset[int]
    placeholders: Mapping[int, str]


class Tokenizers:
    """The cache; `names` maps a caller's name to a directory or hub id."""

    def __init__(self, names: Mapping[str, str], *, size: int, trust_remote_code: bool = False) -> None:
        self._names, self._size, self._trust = dict(names), size, trust_remote_code
        self._loaded: OrderedDict[Key, LoadedTokenizer] = OrderedDict()
        self._lock = asyncio.Lock()
        self._loads = ThreadPool("tokenizer-load", 1)
        self._renders = ThreadPool("tokenizer-render", _RENDERERS)
        self.num_loads = 0

    @classmethod
    def of(cls, config: Config) -> Tokenizers:
        """The configured tokenizers, or the policy's own."""
        server = config.rollout_server
        return cls(
            server.tokenizers or {"policy": config.model.path},
            size=server.tokenizer_cache_size,
            trust_remote_code=server.tokenizer_trust_remote_code,
        )

    async def get(self, name: str, revision: str | None = None) -> LoadedTokenizer:
        """The tokenizer of this name. Raises RolloutError tokenizer_error.

        A directory has no revisions but `main`, which some callers always send.
        """
        if revision == "main" and Path(self._names.get(name, "")).is_dir():
            revision = None
        key = (name, revision)
        if found := self._cached(key):
            return found
        async with self._lock:
            if found := self._cached(key):
                return found
            source = self._source(name, revision)
            made = await self._beside(
                self._loads, lambda: self._load(name, source, revision), _LOAD_S, f"loading the tokenizer {name!r}"
            )
            self._loaded[key] = made
            while len(self._loaded) > self._size:
                self._loaded.popitem(last=False)
            return made

    async def warm(self) -> None:
        """Load as many as fit, so the first rollout doesn't wait; failures are logged."""
        for name in list(self._names)[: self._size]:
            try:
                await self.get(name)
            except RolloutError as error:
                get_logger().warning("a listed tokenizer is unusable", why=str(error))

    async def render(self, work: Callable[[], Made]) -> Made:
        """What `work` returns or raises; it may use any of these tokenizers. Raises RolloutError too."""
        return await self._beside(self._renders, work, _RENDER_S, "rendering the prompt")

    async def _beside(self, pool: ThreadPool, work: Callable[[], Made], timeout_s: float, what: str) -> Made:
        try:
            return await pool.run(work, timeout_s=timeout_s, what=what)
        except DeadlineExceeded as error:
            raise RolloutError("tokenizer_error", str(error)) from error

    def close(self) -> None:
        """Start no more work."""
        self._loads.close()
        self._renders.close()

    def _cached(self, key: Key) -> LoadedTokenizer | None:
        if key in self._loaded:
            self._loaded.move_to_end(key)
        return self._loaded.get(key)

    def _source(self, name: str, revision: str | None) -> str:
        if name not in self._names:
            known = ", ".join(sorted(self._names))
            raise RolloutError("tokenizer_error", f"tokenizer_name {name!r} is not listed; known: {known}")
        source = self._names[name]
        if revision is not None and Path(source).is_dir():
            raise RolloutError("tokenizer_error", f"tokenizer {name!r} is a directory; remove tokenizer_revision")
        if revision is not None and self._trust:  # anyone can propose a revision on the hub, and its code would run
            raise RolloutError("tokenizer_error", "this server runs tokenizer code; remove tokenizer_revision")
        return source

    def _load(self, name: str, source: str, revision: str | None) -> LoadedTokenizer:
        from transformers import AutoTokenizer

        self.num_loads += 1
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                source, revision=revision or "main", trust_remote_code=self._trust
            )
            terminators = frozenset(turn_terminators(tokenizer, source, revision=revision or "main"))
            placeholders = model_placeholders(tokenizer, source, revision=revision or "main")
        except Exception as error:  # the library raises all kinds of errors; all mean the same
            reason = f"{type(error).__name__}: {error}"
            raise RolloutError("tokenizer_error", f"tokenizer {name!r} cannot be loaded ({reason[:500]})") from error
        if not tokenizer.chat_template:
            raise RolloutError(
                "tokenizer_error", f"tokenizer {name!r} has no chat template; add chat_template.jinja beside it"
            )
        return LoadedTokenizer(settle(tokenizer), terminators, placeholders)
