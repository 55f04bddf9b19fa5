"""Virtual environments for packages that aren't ours: each of its own, so that no pin of theirs meets one of ours."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(sys.prefix) / "clients"  # `make clean` deletes it with .venv
_INSTALL_S = 600


def python_with(*requirements: str) -> Path:
    """The interpreter of an environment with these packages; installed once, and anew when the list changes."""
    directory = ROOT / requirements[0].partition("=")[0].partition("[")[0]
    stamp, python = directory / "requirements.txt", directory / "bin" / "python"
    wanted = "\n".join(requirements) + "\n"
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(directory, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
        assert done.returncode == 0, f"{' '.join(requirements)} cannot be installed:\n{done.stderr[-2000:]}"
        stamp.write_text(wanted)
    return python
