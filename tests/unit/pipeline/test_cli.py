"""The command line: exit codes, clear refusals, and a doctor that finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.pipeline import errors
from sluice.pipeline.cli import main as cli
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run.preflight import diagnose
from tests.deadlines import HANG_S
from tests.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.pipeline.test_weights import model_dir


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def kinds() -> list[type[SluiceError]]:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SluiceError)]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_becomes_one_line_and_its_exit_code(
    kind: type[SluiceError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("task group", [ValueError("noise"), ExceptionGroup("inner", [kind("what to do")])])

    monkeypatch.setattr("sluice.pipeline.config.load_config", fail)
    monkeypatch.setattr("os._exit", sys.exit)  # of an engine that hangs: tests/unit/test_process_end.py leaves really
    assert call("config", "show") == kind.exit_code
    assert kind.exit_code in range(1, 10)
    assert capsys.readouterr().err == "error: what to do\n"


def test_only_hopeless_errors_share_a_code_with_what_is_never_restarted() -> None:
    """The supervisor sees exit codes alone: an engine that failed must not look like a model that cannot load."""
    final = {kind.exit_code for kind in (errors.ConfigError, errors.DataError, errors.ModelError)}
    for kind in (errors.EngineError, errors.BrokerError, errors.WeightsError, errors.LeaseLost, errors.TornWeights):
        assert kind.exit_code not in final


def test_an_error_of_the_broker_client_is_a_broker_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import redis

    def fail(*_: object, **__: object) -> None:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr("sluice.pipeline.config.load_config", fail)
    assert call("config", "show") == errors.BrokerError.exit_code
    assert "gone" in capsys.readouterr().err


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("task group", [ZeroDivisionError()])

    monkeypatch.setattr("sluice.pipeline.config.load_config", fail)
    with pytest.raises(ExceptionGroup):
        cli.main(["config", "show"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "Unknown command"),
        (["produce", "--confg", "x"], "Did you mean --config?"),
        (["up", "--workers", "many"], "--workers"),
        (["config", "show", "--set", "trainer.learning_rat=1"], "did you mean 'learning_rate'?"),
        (["config", "show", "--set", "nonsense"], "path.to.key=value"),
        (["config", "show", "-c", "nosuch.yaml"], "nosuch.yaml"),
    ],
)
def test_a_mistake_is_refused_with_a_clear_word(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    said = capsys.readouterr()
    assert words in " ".join((said.err + said.out).split())


def test_help_imports_no_engine(record_property: pytest.FixtureRequest) -> None:
    script = (
        "import sys, time\nstart = time.perf_counter()\nfrom sluice.pipeline.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(time.perf_counter() - start, [m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_S)
    took, _, heavy = done.stdout.splitlines()[-1].partition(" ")
    record_property("help_s", took)  # pyright: ignore[reportCallIssue]
    assert heavy == "[]"
    for name in ("demo", "run", "doctor", "worker", "train"):
        assert f" {name} " in done.stdout


def test_show_prints_what_check_accepts_and_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    assert call_ok("config", "show", "--set", "broker.url=redis://:secret@h:1/0", "--set", "run=shown")
    file.write_text(capsys.readouterr().out)
    assert "secret" not in file.read_text()
    assert call("config", "check", str(file)) == 0
    assert "c.yaml: ok" in capsys.readouterr().out
    file.write_text("nonsense: 1")
    assert call("config", "check", str(file)) == 2


def call_ok(*arguments: str) -> bool:
    cli.main(list(arguments))
    return True


def test_schema_is_json_and_knows_when_a_file_is_old(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "schema") == 0
    text = capsys.readouterr().out
    assert "Config" in json.loads(text)["$defs"]
    file = tmp_path / "schema.json"
    file.write_text(text)
    assert call("config", "schema", "--check", str(file)) == 0
    file.write_text("{}")
    assert call("config", "schema", "--check", str(file)) == 2


def test_the_doctor_finds_a_good_set_up_good(
    tmp_path: Path, broker_config: BrokerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_dir(tmp_path / "model")
    save_tiny_tokenizer(model)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "hi"}], "truth": []}\n')
    settings = (f"broker.url={broker_config.url}", f"model.path={model}", f"data.path={data}")
    assert diagnose(None, settings) == 0
    said = capsys.readouterr().out
    assert "all checks passed" in said
    assert "2 tensors" in said
    assert str(broker_config.url) not in said, "the password stays secret"


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["nonsense=1"], 2, "WRONG config"),
        (["broker.url=redis://127.0.0.1:1/0"], 4, "WRONG broker"),
        (["broker.url=redis://127.0.0.1:1/0", "model.path=nosuch", "data.path=nosuch"], 4, "WRONG data"),
        (["model.path=nosuch", "data.path=nosuch"], 5, "WRONG model"),
        (["data.path=nosuch"], 3, "WRONG data"),
    ],
)
def test_the_doctor_names_all_and_exits_with_the_first(
    settings: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(None, (f"broker.embedded_dir={tmp_path}", *settings)) == code
    assert words in capsys.readouterr().out


def test_the_doctor_finds_a_damaged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_dir(tmp_path / "model")
    settings = (f"broker.embedded_dir={tmp_path}", f"model.path={model}")
    assert diagnose(None, settings) == 5
    assert "tokenizer.json missing" in capsys.readouterr().out
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes((6).to_bytes(8, "little") + b'{"a":1}')
    assert diagnose(None, settings) == 5
    assert "model.safetensors" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "sluice.pipeline.cli.main", "config", "schema"],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
