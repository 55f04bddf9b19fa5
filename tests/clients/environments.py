"""Virtual environments for packages that aren't ours: each of its own, so that no pin of theirs meets one of ours."""

from __future__ import annotations

import shutil
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
        _install(python, *requirements)
        stamp.write_text(wanted)
    return python


def folder_with(*requirements: str) -> Path:
    """A folder for PYTHONPATH with these packages and none that they require: for formulas without their framework."""
    directory = ROOT / f"{requirements[0].partition('=')[0]}-alone"
    stamp = directory / "requirements.txt"
    wanted = "\n".join(requirements) + "\n"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        _install(Path(sys.executable), "--no-deps", "--target", str(directory), *requirements)
        stamp.write_text(wanted)
    return directory


def _install(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    assert done.returncode == 0, f"{' '.join(arguments)} cannot be installed:\n{done.stderr[-2000:]}"
