"""One import name: what is installed is `sluice`, and nothing of a user's own can shadow it or be shadowed by it."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import sluice
from tests.deadlines import HANG_S

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pipeline", "workers", "producers", "consumers", "demo", "bench")
APACHE_2 = (
    "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # sha256 of apache.org/licenses/LICENSE-2.0.txt
)


def run(command: Sequence[str | Path], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_old_spelling_answers_with_the_new_one(folder: str) -> None:
    done = run([sys.executable, "-c", f"import {folder}"], ROOT)
    assert f"import {folder} as sluice.{folder}" in done.stderr


def test_type_checkers_and_programs_find_the_same_public_names() -> None:
    tree = ast.parse(Path(sluice.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    homes = {(name, module) for module, names in sluice._HOMES.items() for name in names}
    assert typed == homes
    for name, _ in homes:
        assert getattr(sluice, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Rolouts'"):
        sluice.Rolouts  # noqa: B018


def test_importing_sluice_loads_nothing_of_it() -> None:
    script = "import sluice, sys; print([name for name in sys.modules if name.startswith('sluice.')])"
    assert run([sys.executable, "-P", "-c", script], ROOT, PYTHONPATH=str(ROOT)).stdout.strip() == "[]"


def test_pyright_reads_every_folder_behind_its_link(tmp_path: Path) -> None:
    """An error planted in each folder is found, and in the kernel also what only strict mode finds."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "planted.py").write_text("wrong: int = ''\n")
    (tmp_path / "pipeline/strict.py").write_text("def loose(value):\n    return value\n")
    (tmp_path / "sluice").mkdir()
    for link in (ROOT / "sluice").iterdir():
        if link.is_symlink() and link.name in FOLDERS:
            (tmp_path / "sluice" / link.name).symlink_to(os.readlink(link))
    done = run([Path(sys.executable).parent / "pyright", "--outputjson"], tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong = {Path(one["file"]).parent.name for one in found if one.get("rule") == "reportAssignmentType"}
    strict = {Path(one["file"]).parent.name for one in found if one.get("rule") == "reportMissingParameterType"}
    assert (wrong, strict) == (set(FOLDERS), {"pipeline"})


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel that was built from the source distribution installs."""
    folder = tmp_path_factory.mktemp("package")
    build = [sys.executable, "-P", "-m", "hatchling", "build", "-d", folder]
    done = run([*build, "-t", "sdist"], ROOT)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "source")
    (source,) = (folder / "source").iterdir()
    done = run([*build, "-t", "wheel"], source)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_one_name_is_installed_with_all_that_belongs_to_it(installed: Path) -> None:
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"sluice"}
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS, "configs", "examples", ":(glob)docs/*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    missing = [path for path in tracked if (ROOT / path).is_file() and not (installed / "sluice" / path).is_file()]
    assert missing == []
    assert (installed / "sluice/py.typed").is_file()
    assert not any((installed / "sluice/docs").glob("*/")), "pictures, decisions and the site's files stay out"


def test_the_source_distribution_has_no_recipe_that_cannot_work_there(installed: Path) -> None:
    """What they copy into an image lies at the top here alone."""
    (source,) = (installed.parent / "source").iterdir()
    assert not {"Dockerfile", "docker-compose.yml"} & {path.name for path in source.iterdir()}
    assert not [folder for folder in FOLDERS if (source / folder).exists()]


def test_the_licence_and_those_of_others_come_along(installed: Path) -> None:
    """In the source distribution and in the wheel, whose metadata name the licence."""
    (source,) = (installed.parent / "source").iterdir()
    (info,) = installed.glob("*.dist-info")
    for name in ("LICENSE", "NOTICE"):
        text = (ROOT / name).read_text()
        assert (source / name).read_text() == text
        assert (info / "licenses" / name).read_text() == text
    metadata = (info / "METADATA").read_text().splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE", "License-File: NOTICE"} <= set(metadata)
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    for page in ("CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"):
        assert (source / page).is_file()


VENDORED = (
    ("consumers/dashboard/static/htmx.min.js", 'version:"2.0.11"', "htmx 2.0.11"),
    ("consumers/dashboard/static/uplot.min.js", "uPlot (v1.6.32)", "uPlot 1.6.32"),
    ("producers/http/static/swagger-ui-bundle.js", 'PACKAGE_VERSION:"5.35.0"', "swagger-ui 5.35.0"),
)
LICENCES = (
    "consumers/dashboard/static/NOTICE",
    "producers/http/static/swagger-ui.LICENSE",
    "producers/http/static/swagger-ui.NOTICE",
    "producers/http/static/swagger-ui-bundle.js.LICENSE.txt",
)


def test_what_others_wrote_is_in_the_notice(installed: Path) -> None:
    """Minified files and Swagger UI, with their versions; the texts of their licences are installed beside them."""
    notice = (ROOT / "NOTICE").read_text()
    others = [path for path in installed.rglob("static/*") if re.search(r"\.min\.|swagger-ui.*\.(js|css)$", path.name)]
    assert len(others) == 6
    for path in others:
        assert path.name in notice
        assert str(path.parent.relative_to(installed)) in notice
    for name, inside, said in VENDORED:
        assert inside in (installed / "sluice" / name).read_text()
        assert said in notice
    assert all((installed / "sluice" / name).read_text().strip() for name in LICENCES)


SHADOWS = (*(f"{name}/__init__.py" for name in FOLDERS), "consumers.py", "redis.py", "msgspec.py", "logging.py")


def test_files_of_the_working_directory_shadow_nothing(installed: Path, tmp_path: Path) -> None:
    """Commands work beside a user's own `pipeline/` or `redis.py`, and find a config and a task of the user's."""
    for name in SHADOWS:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('shadowed')\n")
    command = [sys.executable, "-P", "-m", "sluice.pipeline.cli.main"]
    for words in (
        ["--help"],
        ["config", "check", "text", "configs/text.yaml"],
        ["help", "docs", "tasks"],
        ["rollout", "--help"],
        ["guard", "--help"],
    ):
        done = run([*command, *words], tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr
