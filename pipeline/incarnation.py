"""Whether the broker still has the data that a run's directory belongs to: a number that both hold.

The directory outlives the broker's data (a flush, a lost disk, another server behind the same address). Then what was
trained is known from the directory, and all else is done again.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from pipeline.config.types import Config
from pipeline.files import write_atomic
from pipeline.logs import get_logger
from pipeline.wire.codec import shown
from pipeline.wire.keys import Keys

FILE = "incarnation"
_NONCE = re.compile(rb"[0-9a-f]{32}")


async def recognise(client: Redis, keys: Keys, run_dir: Path) -> bool:
    """False when the broker's data are not those that this directory was last used with, until `begin_again`."""
    raw, path = cast(Any, client), run_dir / FILE
    known = _read(path)
    await raw.set(keys.incarnation, secrets.token_hex(16), nx=True)
    held = cast(bytes, await raw.get(keys.incarnation)).decode(errors="replace")
    if not known:
        _write(path, held)
    return known in ("", held)


def _write(path: Path, held: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, held.encode())


def _read(path: Path) -> str:
    """Empty where there is none, or none that was written here: then the broker's counts."""
    raw = path.read_bytes().strip() if path.exists() else b""
    if raw and not _NONCE.fullmatch(raw):
        get_logger().warning("a file cannot be read and is written again", file=str(path), content=shown(raw))
        return ""
    return raw.decode()


async def begin_again(client: Redis, config: Config, run_dir: Path, version: int, so_far: str) -> None:
    """Say what follows, and let credit count from here: what was trained before is no part of the new data.

    Before anything is acked. The directory belongs to the new data only then: a kill on the way changes nothing.
    """
    samples = version * config.producer.samples_per_version * config.trainer.checkpoint_every
    raw, keys = cast(Any, client), Keys(config.run)
    if not int(await raw.hget(keys.counts, "trained") or 0):
        await raw.hset(keys.counts, "thinned", samples)
    _write(run_dir / FILE, cast(bytes, await raw.get(keys.incarnation) or b"").decode(errors="replace"))
    get_logger().warning(
        "the broker's data are gone: rows are read again, what was trained is not trained again, and what was under "
        "way is done again",
        run=config.run,
        trained_to=so_far,
        version=version,
    )
