"""Modules of the user's own: found in the working directory by every role, and named when they cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sluice.pipeline.errors import ConfigError
from sluice.pipeline.user_modules import load_object


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_module_of_the_working_directory_is_found_after_all_others(here: Path) -> None:
    (here / "my_task_of_this_test.py").write_text("def parse(): ...\n")
    (here / "json.py").write_text("raise AssertionError\n")
    assert load_object("my_task_of_this_test:parse", "key").__name__ == "parse"
    assert load_object("json:dumps", "key")({}) == "{}"
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_colon", r"key: 'no_colon' is no import path; write package\.module:name"),
        (":x", "write package"),
        ("json:", "write package"),
        ("json:dumbs", "'json' has no 'dumbs'; did you mean 'dumps'"),
        ("no.such.module:x", "cannot import 'no.such.module'.*working directory"),
        ("consumers.exact_answer:parse", r"sluice\.consumers\.tasks\.exact_answer"),
        ("producers.rollout.tools:tool", r"sluice\.producers\.agents\.tools"),
    ],
)
def test_what_cannot_be_loaded_is_named(here: Path, path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_object(path, "key")


def test_what_the_users_code_raises_is_the_users_error(here: Path) -> None:
    (here / "breaks_in_this_test.py").write_text("raise ValueError('my own')\n")
    with pytest.raises(ConfigError, match=r"cannot import 'breaks_in_this_test' \(ValueError: my own\)"):
        load_object("breaks_in_this_test:x", "key")


def test_a_script_that_exits_when_it_is_imported_is_named(here: Path) -> None:
    (here / "exits_in_this_test.py").write_text("import sys\nsys.exit(2)\n")
    for path in ("exits_in_this_test.py:x", "exits_in_this_test:x"):
        with pytest.raises(ConfigError, match=r"cannot import .*exits_in_this_test.*SystemExit: 2"):
            load_object(path, "key")


def test_a_file_is_found_from_the_working_directory_and_imported_once(here: Path) -> None:
    (here / "own").mkdir()
    (here / "own" / "beside_in_this_test.py").write_text("LIMIT = 3\n")
    text = "from beside_in_this_test import LIMIT\ncalls = []\ndef score(text, truth, row): return LIMIT\n"
    (here / "own" / "my_rewards.py").write_text(text)
    score = load_object("own/my_rewards.py:score", "key")
    assert score("", None, {}) == 3
    assert load_object(f"{here}/own/my_rewards.py:score", "key") is score


def test_two_files_of_one_name_are_two_modules(here: Path) -> None:
    for name in ("one", "two"):
        (here / name).mkdir()
        (here / name / "rewards.py").write_text(f"NAME = {name!r}\n")
    assert [load_object(f"{name}/rewards.py:NAME", "key") for name in ("one", "two")] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (None, "mine.py:score", r"key: .*mine\.py: no such file; give a path from the working directory"),
        ("def scor(): ...\n", "mine.py:score", r"'mine\.py' has no 'score'; did you mean 'scor'"),
        ("x = 1\nx.no\n", "mine.py:score", r"cannot import .*mine\.py, line 2 \(AttributeError"),
        ("def f(:\n", "mine.py:score", r"cannot import .*mine\.py.*SyntaxError"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(here: Path, text: str | None, path: str, says: str) -> None:
    if text is not None:
        (here / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_object(path, "key")


def test_an_example_that_came_with_the_package_is_found_unless_one_has_such_a_file(here: Path) -> None:
    assert load_object("examples/own_reward.py:score", "key").__module__.startswith("own_reward")
    (here / "examples").mkdir()
    (here / "examples/own_reward.py").write_text("def score(): return 'mine'\n")
    assert load_object("examples/own_reward.py:score", "key")() == "mine"
    with pytest.raises(ConfigError, match="no such file"):
        load_object("examples/no_such_example.py:score", "key")
