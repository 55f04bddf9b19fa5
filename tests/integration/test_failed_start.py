"""A run that fails before its processes start stores why, in place of how it ended the last time."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run.stack import run_stack
from sluice.pipeline.status.run_end import RunEnd, read_end, write_end


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
