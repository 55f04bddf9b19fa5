"""Help that teaches: every command and option is explained, and every example is one that can be typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.cli.main import GROUP, HEADINGS, as_markdown, build, examples, paragraphs
from tests.command import call, options, walk
from tests.deadlines import HANG_S

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("pipeline", "workers", "producers", "consumers", "demo", "bench")
APP = build()
COMMANDS = list(walk(APP))
NAMES = [" ".join(words) for words, _ in COMMANDS]
BOXES = "╭╮╰╯│─"
HEAVY = (
    "torch", "transformers", "vllm", "numpy", "scipy", "fastapi", "starlette", "uvicorn", "pydantic", "textual",
    "redis", "arq", "aiohttp", "pyarrow", "datasets", "prometheus_client", "jinja2", "wandb", "tensorboard",
)  # fmt: skip


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=NAMES)
def test_every_command_explains_itself_and_its_options(words: tuple[str, ...], command: Any) -> None:
    assert paragraphs(cleandoc(command.help))
    unexplained = [each.names or each.name for each in options(command) if not (each.parameter.help or "").strip()]
    assert not unexplained


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=NAMES)
def test_every_command_has_an_example_that_can_be_typed(words: tuple[str, ...], command: Any) -> None:
    found = examples(cleandoc(command.help))
    assert found
    for example in found:
        program, *typed = shlex.split(example)
        assert program == "sluice"
        assert tuple(typed[: len(words)]) == words, "an example is of its own command"
        APP.parse_args(typed, exit_on_error=False, print_error=False)
        files = [word for word in typed if word.startswith(("configs/", "docs/"))]
        assert all(Path(file).exists() for file in files), files


def test_every_installed_command_has_its_heading() -> None:
    listed = {name for names in HEADINGS.values() for name in names}
    assert {entry.name for entry in entry_points(group=GROUP)} <= listed


def test_the_command_alone_shows_the_headings_the_documents_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call() == 0
    said = capsys.readouterr().out
    assert call("--help") == 0
    assert capsys.readouterr().out == said
    for words in (*HEADINGS, "sluice help docs tour", "130 Ctrl-C", "sluice demo"):
        assert words in said
    assert not set(BOXES) & set(said)


def test_examples_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("generate", "--help") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    [generate] = [command for words, command in COMMANDS if words == ("generate",)]
    assert set(examples(cleandoc(generate.help))) <= set(lines)


def test_help_explains_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("help", "dlq", "replay") == 0
    assert "Usage: sluice dlq replay" in capsys.readouterr().out
    assert call("help", "exit-codes") == 0
    assert "130  interrupted" in capsys.readouterr().out
    assert call("help", "docs", "audit") == 0
    assert capsys.readouterr().out == (ROOT / "docs/audit.md").read_text()
    assert call("help", "docs") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert set(listed) == {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert call("help", "docs", "audits") == 2
    assert "no page 'audits'; did you mean 'audit'?" in capsys.readouterr().err
    assert call("help", "stats") == 2
    assert 'Did you mean "status"' in capsys.readouterr().err


def test_every_page_that_is_named_is_one_that_help_shows() -> None:
    """An installed sluice has no docs/ beside it: messages name the command that shows a page."""
    texts = [path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {page for text in texts for page in re.findall(r"sluice help docs ([a-z-]+)`", text)}
    assert {"training-distributed", "audit", "tasks", "tour"} <= named
    assert named <= {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_the_version_names_the_engines_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:4] == ["sluice", "python", "torch", "transformers"]


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys\nfrom sluice.pipeline.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_page_of_all_commands_is_up_to_date() -> None:
    """Mend it with `sluice help --markdown > docs/cli.md`."""
    assert Path("docs/cli.md").read_text() == as_markdown(APP)
