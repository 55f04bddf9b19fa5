"""Where a container that is deployed locks a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from sluice.pipeline.config import load_config
from sluice.pipeline.run.role import LOCK_DIR

_IMAGE = re.search(rf"{LOCK_DIR}=(\S+)", (Path(__file__).resolve().parents[1] / "Dockerfile").read_text())
_SECTIONS = {"worker": "worker", "score": "scorer", "train": "trainer"}


def lock_dir(command: Sequence[str], environment: Mapping[str, str]) -> PurePosixPath | None:
    """None if its command keeps it from claiming one, even where the run's configuration says that it should."""
    words = list(command)
    section = _SECTIONS.get(words[words.index("sluice") + 1]) if "sluice" in words else None
    if section is None:
        return None
    said = [value for word, value in itertools.pairwise(words) if word == "--set"]
    config = load_config(None, [f"{section}.claim_gpu=true", *said], environ={})
    if not getattr(config, section).claim_gpu:
        return None
    assert _IMAGE, "the Dockerfile sets it"
    return PurePosixPath(environment.get(LOCK_DIR, _IMAGE[1]))
