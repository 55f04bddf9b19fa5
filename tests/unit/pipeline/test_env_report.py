"""`sluice env` always comes out, and tells no secret."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.run.env import as_text, ask, environment, report
from tests.deadlines import HANG_S


def test_it_names_what_a_bug_report_needs(broker_config: BrokerConfig) -> None:
    found = report(None, (f"broker.url={broker_config.url}",))
    assert list(found.sections) == [
        "machine", "gpu", "versions", "limits", "environment", "configuration", "broker",
    ]  # fmt: skip
    assert {"sluice", "python", "torch", "transformers", "redis"} <= set(found.sections["versions"])
    assert {"system", "cpu", "memory"} <= set(found.sections["machine"])
    assert {"open files", "/dev/shm"} <= set(found.sections["limits"])
    assert found.sections["broker"]["aof"] == "on"
    assert found.sections["broker"]["server"].split()[1]
    password = str(broker_config.url).split("@")[0].rpartition(":")[2]
    assert password not in as_text(found)


def test_secrets_are_told_as_set_and_paths_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:hush@h:1/0")
    monkeypatch.setenv("SLUICE_GATEWAY_API_KEY", "hush")
    monkeypatch.setenv("SLUICE_SOMETHING_NEW", "hush")
    monkeypatch.setenv("SLUICE_RUN_DIR", "/runs")
    found = environment()
    assert "hush" not in "".join(found.values())
    assert (found["REDIS_URL"], found["SLUICE_GATEWAY_API_KEY"]) == ("set", "set")
    assert found["SLUICE_RUN_DIR"] == "/runs"
    assert found["SLUICE_MODEL"] == "not set"


@pytest.mark.parametrize(
    ("overrides", "section", "words"),
    [
        (("worker.conut=1",), "configuration", "did you mean 'count'?"),
        (("broker.url=redis://127.0.0.1:1/0",), "broker", "does not answer"),
    ],
)
def test_what_is_wrong_is_a_line_of_the_report(
    overrides: tuple[str, ...], section: str, words: str, tmp_path: Path
) -> None:
    found = report(None, (f"run_dir={tmp_path}", *overrides))
    assert words in found.sections[section]["problem"]


def test_a_probe_that_hangs_or_fails_costs_its_own_line_alone() -> None:
    gate = threading.Event()

    def hangs() -> dict[str, str]:
        gate.wait(HANG_S)
        return {}

    def fails() -> dict[str, str]:
        raise OSError("no such device")

    found = ask({"hangs": hangs, "fails": fails, "works": lambda: {"a": "b"}}, 0.5)
    gate.set()
    assert found == {
        "hangs": {"problem": "no answer within 0.5 s"},
        "fails": {"problem": "OSError: no such device"},
        "works": {"a": "b"},
    }
