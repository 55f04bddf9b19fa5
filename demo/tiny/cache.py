"""A directory that is either complete or absent, and a key that covers everything it was made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_KEY_LENGTH = 16


def content_key(parameters: Any, modules: Sequence[ModuleType], versions: dict[str, str]) -> str:
    """Hex key over JSON-able parameters, the source text of modules, and library versions."""
    digest = hashlib.sha256()
    digest.update(json.dumps([parameters, versions], sort_keys=True).encode())
    for module in modules:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:_KEY_LENGTH]


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `target` on success and is removed on any interruption.

    If another process finishes the same target first, its directory stays and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield aside
        aside.chmod(0o755)
        with contextlib.suppress(OSError):
            os.rename(aside, target)
        if not target.is_dir():
            raise OSError(f"cannot move {aside} to {target}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
