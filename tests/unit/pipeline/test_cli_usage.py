"""Wrong usage is one line on stderr, and exit code 2; each exit code is what the table says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sluice.pipeline import errors
from sluice.pipeline.cli.options import overriding
from sluice.pipeline.config import load_config
from sluice.pipeline.errors import EXIT_CODES, INTERRUPTED, SOME_ROWS_FAILED, TERMINATED, WRONG_USAGE, SluiceError
from tests.command import call
from tests.deadlines import HANG_S
from tests.unit.pipeline.test_weights import model_dir

BOXES = "╭╮╰╯│─"
CLOSED = "broker.url=redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stats"], 'Did you mean "status"? See `sluice --help`.'),
        (["dlq", "lst"], 'Did you mean "list"? See `sluice dlq --help`.'),
        (["dlq", "nonsense"], "Commands: drop, list, replay, show."),
        (["run", "--dryrun"], "Did you mean --dry-run? See `sluice run --help`."),
        (["up", "--workers", "many"], "--workers"),
        (["generate", "--backend", "vlm", "--model", "m", "--in", "-", "--out", "-"], 'Did you mean "vllm"?'),
        (["completion"], "SHELL"),
        (["dlq", "show"], "See `sluice dlq show --help`."),
        (["config", "show", "--set", "worker.conut=1"], "did you mean 'count'?"),
        (["up", "--json"], "--dry-run"),
        (["config", "check"], "name the files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_that_says_what_was_meant(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == WRONG_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert not set(BOXES) & set(said.err)


def test_the_table_has_the_codes_of_all_errors_and_no_other() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SluiceError)]
    assert {kind.exit_code for kind in kinds} | {0, SOME_ROWS_FAILED, INTERRUPTED, TERMINATED} == set(EXIT_CODES)


def test_an_extra_is_installed_by_the_names_of_its_packages() -> None:
    """An index may have another `sluice`, or none."""
    said = errors.how_to_install("data")
    assert re.fullmatch(r"`pip install 'datasets[<>=][^']+' 'pyarrow[<>=][^']+'`", said), said


def test_codes_are_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, model = tmp_path / "rows.jsonl", model_dir(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    rows.write_text('{"messages": []}\n')
    here = ("--set", f"broker.embedded_dir={tmp_path / 'broker'}", "--set", f"run_dir={tmp_path}")
    assert (
        call("run", "--dry-run", *here, "--model", str(model), "--data", str(rows)) == errors.DataError.exit_code == 3
    )
    assert f"{rows}:1" in capsys.readouterr().out
    assert call("run", "--dry-run", *here, "--data", str(rows)) == errors.ModelError.exit_code == 5
    assert call("status", "--set", CLOSED) == errors.BrokerError.exit_code == 4
    assert call("config", "show", "-c", str(tmp_path / "nosuch.yaml")) == errors.ConfigError.exit_code == 2
    assert call("audit", str(tmp_path / "nosuch")) == errors.DataError.exit_code


@pytest.mark.parametrize("name", ["2024-01-01", "1e3", "[a, b]", "null", "a: b", "tab\there", "ø 🙂 \"'\\"])
def test_a_path_in_an_option_is_no_yaml(name: str) -> None:
    found = load_config(None, overriding(model=Path(name), data=Path(name)), {})
    assert (found.model.path, found.data.path) == (name, name)


@pytest.mark.parametrize("words", [["help", "docs", "tour"], ["--version"], ["config", "show"]])
@pytest.mark.parametrize("streams", ["", ">&-", "2>&-", ">&- 2>&-"])
def test_a_narrow_encoding_or_a_closed_stream_is_no_error(words: list[str], streams: str, tmp_path: Path) -> None:
    command = f'exec "$@" {streams}'
    sluice = [sys.executable, "-P", "-m", "sluice.pipeline.cli.main", *words]
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    ended = subprocess.run(["sh", "-c", command, "sh", *sluice], capture_output=True, cwd=tmp_path, env=environ)
    assert (ended.returncode, ended.stderr, ended.stdout != b"") == (0, b"", ">&-" not in streams.split())


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    """While it reads a configuration from a pipe whose other end writes nothing."""
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "config", "show", "-c", str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        with pipe.open("w"):  # there once the command has it open too
            until = time.monotonic() + HANG_S
            while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                assert time.monotonic() < until, "it doesn't read"  # a signal just before would not end the read
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == INTERRUPTED
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"
