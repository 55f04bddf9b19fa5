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
from pipeline.decoding import shown
from pipeline.files import write_atomic
from pipeline.keys import Keys
from pipeline.logs import get_logger

FILE = "incarnation"
_NONCE = re.compile(rb"[0-9a-f]{32}")


async def recognise(client: Redis, keys: Keys, run_dir: Path) -> bool:
    """False when the broker's data are not those that this directory was last used with; both agree afterwards."""
    raw, path = cast(Any, client), run_dir / FILE
    known = _read(path)
    await raw.set(keys.incarnation, secrets.token_hex(16), nx=True)
    held = cast(bytes, await raw.get(keys.incarnation)).decode(errors="replace")
    if held != known:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(path, held.encode())
    return known in ("", held)


def _read(path: Path) -> str:
    """Empty where there is none, or none that was written here: then the broker's counts."""
    raw = path.read_bytes().strip() if path.exists() else b""
    if raw and not _NONCE.fullmatch(raw):
        get_logger().warning("a file cannot be read and is written again", file=str(path), content=shown(raw))
        return ""
    return raw.decode()


async def begin_again(client: Redis, config: Config, version: int, so_far: str) -> None:
    """Say what follows, and let credit count from here: what was trained before is no part of the new data."""
    samples = version * config.producer.samples_per_version * config.trainer.checkpoint_every
    raw, counts = cast(Any, client), Keys(config.run).counts
    if not await raw.hexists(counts, "trained"):
        await raw.hset(counts, "thinned", samples)
    get_logger().warning(
        "the broker's data are gone: rows are read again, what was trained is not trained again, and what was under "
        "way is done again",
        run=config.run,
        trained_to=so_far,
        version=version,
    )
