"""Which versions of Python are supported: said in several places, and the same in all of them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import bootstrap
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run import preflight

ROOT = Path(__file__).resolve().parents[2]
FIRST, LAST = 11, 13  # 3.11 to 3.13


@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_setup_and_every_start_take_the_same_versions(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    fake = SimpleNamespace(
        version_info=(3, minor, 0), version=f"3.{minor}.0 (main)", executable="/bin/python3", exit=sys.exit
    )
    for module in (bootstrap, preflight):
        monkeypatch.setattr(module, "sys", fake)
    if FIRST <= minor <= LAST:
        bootstrap.check_python()
        assert preflight.python() == f"3.{minor}.0"
        return
    with pytest.raises(SystemExit, match=rf"Python 3\.11 to 3\.13 is needed, .*python3 is 3\.{minor}\. Name another"):
        bootstrap.check_python()
    with pytest.raises(SluiceError, match=rf"Python 3\.{minor}\.0; Sluice supports 3\.11 to 3\.13"):
        preflight.python()


def test_the_package_and_the_pages_name_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{FIRST},<3.{LAST + 1}"
    minors = [int(found[1]) for one in project["classifiers"] if (found := re.search(r":: 3\.(\d+)$", one))]
    assert minors == list(range(FIRST, LAST + 1))
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"Python 3.{FIRST} to 3.{LAST}" in (ROOT / name).read_text()
