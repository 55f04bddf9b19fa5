"""Environments for packages that aren't ours: each of its own, so that no pin of theirs meets one of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import RUN_S

ROOT = Path(sys.prefix) / "clients"  # `make clean` deletes it with .venv
VERIFIERS = ("verifiers==0.4.0", "renderers==0.1.12")
"""Several tests share it, so all ask for the same list."""


def python_with(*requirements: str, at_least: tuple[int, int] = (3, 11)) -> Path:
    """The interpreter of an environment with these packages; installed once, and anew when the list changes.

    `at_least`: the Python that they need; a machine without it skips the test.
    """
    directory = ROOT / requirements[0].partition("=")[0].partition("[")[0]
    stamp, python = directory / "requirements.txt", directory / "bin" / "python"
    wanted = "\n".join(requirements) + "\n"
    if not python.is_file() or not stamp.is_file() or stamp.read_text() != wanted:
        _run(_interpreter(at_least), "-m", "venv", "--clear", str(directory))
        _install(python, *requirements)
        stamp.write_text(wanted)
    return python


def node_with(*packages: str) -> Path:
    """The folder `node_modules` with these packages of npm; a machine without npm skips the test."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"not run: {packages[0]} needs node and npm")
    directory = ROOT / "npm" / packages[0].removeprefix("@").rpartition("@")[0].replace("/", "-")
    stamp, wanted = directory / "requirements.txt", "\n".join(packages) + "\n"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        _run(Path(npm), "install", "--silent", "--no-save", "--prefix", str(directory), *packages)
        stamp.write_text(wanted)
    return directory / "node_modules"


def _interpreter(at_least: tuple[int, int]) -> Path:
    """This one, else another of the machine."""
    if sys.version_info[:2] >= at_least:
        return Path(sys.executable)
    names = [f"python3.{minor}" for minor in range(at_least[1], at_least[1] + 3)]
    paths = [Path(found) for name in names if (found := shutil.which(name))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths += [found for name in names for found in sorted(pyenv.glob(f"*/bin/{name}"))]
    for path in paths:
        if subprocess.run([str(path), "-c", ""], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"not run: needs Python {'.'.join(map(str, at_least))}")


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
    _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments)


def _run(program: Path, *arguments: str) -> None:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, f"{program.name} {' '.join(arguments)}:\n{done.stderr[-2000:]}"
