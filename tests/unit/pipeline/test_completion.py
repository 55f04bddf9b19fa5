"""Completion, tried in a real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.command import call
from tests.deadlines import HANG_S

_ASK = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p sluice | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" sluice "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import contextlib

    file = tmp_path_factory.mktemp("completion") / "sluice.bash"
    with file.open("w") as stream, contextlib.redirect_stdout(stream):
        assert call("completion", "bash") == 0
    return file


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["sluice", "st"], {"status"}),
        (["sluice", "dlq", "re"], {"replay"}),
        (["sluice", "dlq", "list", "--dr"], {"--dropped"}),
        (["sluice", "run", "--dry"], {"--dry-run"}),
        (["sluice", "generate", "--backend", "v"], {"vllm"}),
        (["sluice", "completion", "z"], {"zsh"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_tab_completes(script: Path, typed: list[str], offered: set[str]) -> None:
    command = ["bash", "--norc", "-c", _ASK, "bash", str(script), *typed]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_theirs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("completion", shell) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("sluice", "status", "--dry-run"))


def test_install_writes_it_where_bash_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert call("completion", "bash", "--install") == 0
    [written] = [path for path in tmp_path.rglob("*") if path.is_file() and "bash-completion" in str(path)]
    assert "status" in written.read_text()
