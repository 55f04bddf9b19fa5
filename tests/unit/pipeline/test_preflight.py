"""Which checks a start makes, where they run, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.types import WorkerConfig
from sluice.pipeline.errors import DataError, NotReady, SluiceError
from sluice.pipeline.run import preflight
from sluice.pipeline.run.preflight import Check
from sluice.pipeline.run.stack import child_environment, counts


def test_a_host_checks_what_its_own_roles_read() -> None:
    assert preflight.inputs_of(["producer"]) == ["data"]
    assert preflight.inputs_of(["worker", "gateway", "rollout-server"]) == ["model"]
    assert preflight.inputs_of([role for role, count in counts(Config()).items() if count != 0]) == [
        "model",
        "data",
        "task",
        "disk",
    ]


def test_one_message_has_every_problem_and_the_first_exit_code() -> None:
    good = Check(name="a", ok=True, says="fine")
    named = (("b", 5), ("c", 3))
    bad = [Check(name=name, ok=False, says=f"{name} is wrong\nsee there", exit_code=code) for name, code in named]
    preflight.refuse([good])
    with pytest.raises(NotReady) as caught:
        preflight.refuse([good, bad[0]])
    assert (str(caught.value), caught.value.exit_code) == ("b is wrong\nsee there", 5)
    with pytest.raises(NotReady) as caught:
        preflight.refuse([good, *bad])
    assert str(caught.value).splitlines() == [
        "2 problems; nothing was started", "  b is wrong", "  see there", "  c is wrong", "  see there",
    ]  # fmt: skip
    assert caught.value.exit_code == 5


def test_a_function_that_ends_its_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("import os\nprint('{}')\nos.write(2, b'on my way')\nos._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    [check] = preflight.examine_inputs(load_config(None, ["rollout_matching.match=leaving:match"], {}), ["task"])
    assert not check.ok
    assert "ended with exit code 7" in check.says
    assert "on my way" in check.says


def test_a_child_reads_a_configuration_without_limits(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    more = [f"data.path={tmp_path / 'rows.jsonl'}", "broker.retry_for_s=.inf", "policy.weight_cap=.inf"]
    [check] = preflight.examine_inputs(load_config(None, more, {}), ["data"], apart=True)
    assert check.ok, check.says
    assert "1 row" in check.says


@pytest.mark.parametrize(
    ("text", "said"), [("", "no rows; write one"), ("\n\n", "no rows; write one"), ("{}\n", "none is left")]
)
def test_a_file_without_a_usable_row_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    named = [f"data.path={tmp_path / 'rows.jsonl'}", "data.on_malformed=skip"]
    for more in ([], ["preflight.max_s=0"])[: 1 if "none" in said else 2]:
        with pytest.raises(DataError, match=said):
            preflight.data(load_config(None, [*named, *more], {}), needed=True)
    if not text.strip():
        assert "0 rows" in preflight.data(load_config(None, [*named, "data.limit=0"], {}), needed=True)


def test_a_path_that_nobody_may_look_at_is_an_error_of_its_check() -> None:
    def look() -> str:
        raise PermissionError(13, "Permission denied", "/locked/model")

    check = preflight.examine("model", look)
    assert (check.ok, check.exit_code) == (False, 1)
    assert "/locked/model: Permission denied" in check.says


def test_the_disk_of_an_embedded_broker_counts_where_one_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "runs").mkdir()
    real = preflight.shutil.disk_usage
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda place: real(place)._replace(free=1 if place.name == "full" else 1 << 40)
    )
    named = [f"run_dir={tmp_path / 'runs'}", f"broker.embedded_dir={tmp_path / 'full'}"]
    with pytest.raises(SluiceError, match=r"full: 0[.]0 GiB free"):
        preflight.disk(load_config(None, named, {}))
    preflight.disk(load_config(None, [*named, "broker.url=redis://elsewhere:6379/0"], {}))


def test_a_child_of_a_supervisor_does_not_read_the_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["data.path=nosuch.jsonl"], {})
    with pytest.raises(Exception, match="no such file"):
        preflight.rows_in_order(config)
    monkeypatch.setenv(preflight.CHECKED, child_environment(config)[preflight.CHECKED])
    preflight.rows_in_order(config)


def test_an_engine_that_is_not_installed_is_named() -> None:
    assert "torch" in preflight.engine(Config(worker=WorkerConfig(backend="hf")))
