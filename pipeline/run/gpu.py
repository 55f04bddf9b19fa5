"""One GPU per process: each locks a free one on its host before torch is imported.

Compose gives every replica of a service the same devices; the lock is a file in a directory that they share.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO

from sluice.pipeline.errors import EngineError

LOCK_DIR = "SLUICE_GPU_LOCK_DIR"


def host_gpus() -> list[str]:
    """Indices of the GPUs that this process may use; CUDA_VISIBLE_DEVICES narrows them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    return [str(i) for i, _ in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*")))]


def claim_gpu(gpus: list[str], lock_dir: Path) -> tuple[str, IO[str]] | None:
    """Lock the first free GPU; None if the host has none. The lock is held until the returned file is closed.

    Raises EngineError if all are taken.
    """
    if not gpus:
        return None
    for gpu in gpus:
        try:
            lock_dir.mkdir(parents=True, exist_ok=True)
            lock = (lock_dir / f"gpu-{gpu}.lock").open("a")
        except OSError as error:
            raise EngineError(
                f"cannot create GPU locks ({error}); set {LOCK_DIR} to a directory that every user can write to"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return gpu, lock
    raise EngineError(f"all {len(gpus)} GPUs of this host are taken; start fewer workers, or free one ({lock_dir})")


@contextlib.contextmanager
def use_free_gpu(*, wanted: bool) -> Generator[str | None]:
    """Hold a GPU inside the block and make it the only visible one; yields its index."""
    claim = claim_gpu(host_gpus(), default_lock_dir()) if wanted else None
    if claim is None:
        yield None
        return
    gpu, lock = claim
    with lock:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        yield gpu


def default_lock_dir() -> Path:
    """The directory of the locks, unless the environment sets another."""
    return Path(os.environ.get(LOCK_DIR, "/tmp/sluice-gpu"))
