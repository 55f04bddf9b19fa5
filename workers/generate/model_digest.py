"""Which model a run was begun with, without reading all of it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from pipeline.errors import ModelError
from workers.generation.model_files import check_directory

_SAMPLES = 256  # places in a file
_SAMPLE_BYTES = 4096
_SKIPPED = (".md", ".lock")


def model_digest(path: str) -> str:
    """A digest of the names, sizes and sampled contents of a model directory's files.

    Samples are spread evenly over a file, so weights that were trained further differ. Raises ModelError.
    """
    if not Path(path).is_dir():
        what = "not a directory" if Path(path).exists() else "no such directory"
        raise ModelError(f"{path}: {what}; --model must be a directory (save_pretrained writes one), not a hub's name")
    check_directory(path)
    digest = sha256()
    for file in sorted(Path(path).iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.suffix not in _SKIPPED:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            step = max(_SAMPLE_BYTES, size // _SAMPLES)
            with file.open("rb") as stream:
                for offset in range(0, size, step):
                    stream.seek(offset)
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
