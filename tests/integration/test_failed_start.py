"""A run that fails before its processes start stores why, in place of how it ended the last time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.run.stack import run_stack
from sluice.pipeline.status.run_end import RunEnd, RunStart, Supervision, read_end, write_end
from tests.deadlines import HANG_S


def fail(home: Path, kind: type[Exception], *overrides: str, url: str = "") -> RunEnd:
    given = ["run=mine", f"run_dir={home}", "dashboard.enabled=false", *overrides]
    config = load_config(None, given, {"REDIS_URL": url})
    with pytest.raises(kind):
        run_stack(config, title="test")
    end = read_end(home / "mine")
    assert end is not None
    assert end.state == "failed"
    return end


def test_the_broker_that_does_not_answer_is_the_cause(tmp_path: Path) -> None:
    write_end(tmp_path / "mine", RunEnd(at=1.0, state="complete"))
    end = fail(tmp_path, SluiceError, url="redis://127.0.0.1:1/0")
    assert end.exit_code == 4
    assert end.cause.startswith("redis://127.0.0.1:1/0: the broker does not answer")
    assert (tmp_path / "mine" / "config.resolved.yaml").is_file(), "its directory names the run"


def test_an_embedded_broker_without_a_directory_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    end = fail(tmp_path, NotADirectoryError, f"broker.embedded_dir={tmp_path / 'file' / 'broker'}")
    assert "file/broker" in end.cause


def test_a_cause_that_is_no_unicode_hides_no_error(tmp_path: Path) -> None:
    assert "redis://host-?:1/0" in fail(tmp_path, SluiceError, url="redis://host-\udcff:1/0").cause


def test_what_fails_once_the_broker_runs_is_the_cause(tmp_path: Path) -> None:
    """The run's logs have no place."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "logs").touch()
    broker = f"broker.embedded_dir={tmp_path / 'broker'}"
    assert "logs" in fail(tmp_path, OSError, broker).cause


HELD = """
import sys
from pathlib import Path
from sluice.pipeline.status.run_end import RunStart, Supervision
with Supervision(Path(sys.argv[1]), RunStart(at=1.0, command='sluice run -c a.yaml')):
    print(flush=True)
    input()
"""


@contextlib.contextmanager
def supervised(directory: Path) -> Generator[subprocess.Popen[bytes]]:
    """A process that supervises the run."""
    held = subprocess.Popen([sys.executable, "-c", HELD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout is not None
    try:
        assert held.stdout.readline() == b"\n"
        yield held
    finally:
        held.kill()
        held.communicate(timeout=HANG_S)


def test_a_supervisor_that_was_killed_is_told_from_one_that_is_alive(tmp_path: Path) -> None:
    write_end(tmp_path, RunEnd(at=1.0, state="complete"))
    with supervised(tmp_path):
        assert read_end(tmp_path) is None
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("{}")
    os.utime(tmp_path / "logs" / "worker-0.log", (77.0, 77.0))
    end = read_end(tmp_path)
    assert end is not None
    assert (end.state, end.at, end.command, end.is_halt) == ("killed", 77.0, "sluice run -c a.yaml", True)
    with Supervision(tmp_path, RunStart(at=2.0)):
        assert read_end(tmp_path) is None, "it was started again"


def test_a_start_that_fails_beside_a_live_run_leaves_its_end_alone(tmp_path: Path) -> None:
    with supervised(tmp_path / "mine"):
        config = load_config(None, ["run=mine", f"run_dir={tmp_path}"], {"REDIS_URL": "redis://127.0.0.1:1/0"})
        with pytest.raises(ConfigError, match=r"run mine is running already \(`sluice run -c a\.yaml`.*--set run=NAME"):
            run_stack(config, title="test")
        assert read_end(tmp_path / "mine") is None
        assert not (tmp_path / "mine" / "end.json").exists()


def test_a_start_that_is_interrupted_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sluice.pipeline.run.stack.dashboard_listener", interrupted)
    given = ["run=mine", f"run_dir={tmp_path}", f"broker.embedded_dir={tmp_path / 'broker'}"]
    with pytest.raises(KeyboardInterrupt):
        run_stack(load_config(None, given, {}), title="test", command="sluice run -c a.yaml")
    end = read_end(tmp_path / "mine")
    assert end is not None
    assert (end.state, end.command) == ("interrupted", "sluice run -c a.yaml")
