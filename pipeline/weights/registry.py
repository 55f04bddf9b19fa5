"""Published versions in Redis: one digest per number; the newest is an older one again if a kill undid later steps."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Publish, PublishKeys
from sluice.pipeline.broker.streams import why_fenced
from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.weights.versions import newest_number
from sluice.pipeline.wire.codec import Unreadable, integer
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import MOST_VERSION, WeightVersion, decode, encode

_unreadable = Unreadable()  # reported by this process
HIGHEST = "highest"  # field of the table of versions: the highest number ever registered
_REFUSED = {
    "conflict": "that number is already registered with other weights; is this an older copy of the "
    "run's directory? Restore the newer one, or start a run of another name (--set run=NAME)",
}


class WeightsRegistry:
    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client, self._keys, self._scripts = client, keys, Scripts(client)

    async def latest(self) -> int | None:
        """The newest version number; None before the first, or if the stored value is invalid."""
        try:
            value = await cast("Awaitable[bytes | None]", self._client.get(self._keys.latest))
            return None if value is None else integer(value, "it", most=MOST_VERSION)
        except (MessageError, ResponseError) as error:  # ResponseError: the key has another type
            _unreadable.skip(self._keys.latest, "", f"{error}; the next published version repairs it")
            return None

    async def next_number(self, after: int, root: Path) -> int:
        """A number above `after` that is unused both here and in the registry.

        They differ if a kill undid published steps, the newest checkpoint was damaged and deleted, or the broker lost
        its last seconds.
        """
        return max(after, await self.latest() or 0, await self._highest(), newest_number(root)) + 1

    async def _highest(self) -> int:
        raw = await cast("Awaitable[bytes | None]", self._client.hget(self._keys.versions, HIGHEST))
        try:
            return -1 if raw is None else integer(raw, "it", most=MOST_VERSION)
        except MessageError as error:
            _unreadable.skip(self._keys.versions, HIGHEST, f"{error}; the next published version repairs it")
            return -1

    async def get(self, version: int) -> WeightVersion | None:
        """One registered version."""
        raw = await cast("Awaitable[bytes | None]", self._client.hget(self._keys.versions, str(version)))
        try:
            return None if raw is None else decode(WeightVersion, raw)
        except MessageError as error:
            raise WeightsError(f"version {version}: unreadable registry entry ({error})") from error

    async def register(
        self, manifest: WeightVersion, owner_key: str, nonce: str, forgotten: Iterable[int] = ()
    ) -> None:
        """Make a version the one that workers load, and forget others; idempotent.

        Raises WeightsError, or as `why_fenced`.
        """
        await self._publish(manifest, owner_key, nonce, forgotten=list(forgotten))

    async def put_back(self, manifest: WeightVersion, owner_key: str, nonce: str) -> None:
        """Make a version known to scorers that the broker has lost; workers keep theirs. Raises as `register`."""
        await self._publish(manifest, owner_key, nonce, serves=False)

    async def _publish(self, manifest: WeightVersion, owner_key: str, nonce: str, **rest: Any) -> None:
        names = PublishKeys(versions=self._keys.versions, latest=self._keys.latest, owner=owner_key)
        version, digest = manifest.version, manifest.digest
        request = Publish(nonce=nonce, version=version, digest=digest, manifest=encode(manifest), **rest)
        answer = await self._scripts.ask(names, request)
        if answer == "fenced":
            raise await why_fenced(self._scripts, owner_key)
        if answer != "ok":
            raise WeightsError(f"version {manifest.version} refused ({answer}): {_REFUSED[answer]}")
