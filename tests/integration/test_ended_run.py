"""A run whose embedded broker has ended: its state can be read, nothing of it changes, and what needs it says so."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from sluice.consumers.dashboard.app import listening
from sluice.pipeline.broker import connection as connections
from sluice.pipeline.broker.embedded import embedded_broker, is_stored, stored_broker
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.types import DashboardConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.http.server import bind, bind_near
from sluice.pipeline.run import provenance
from sluice.pipeline.status.descriptions import condition
from sluice.pipeline.status.heartbeat import ALIVE_S, Heartbeat
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.report import as_json
from sluice.pipeline.status.run_end import RunEnd, RunStart, Supervision, write_end
from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.wire.keys import Keys
from tests.command import call
from tests.deadlines import HANG_S
from tests.integration.test_dlq_command import bury_one
from tests.killable_broker import free_ports
from tests.roles import eventually

RUN = "ended"


def files(directory: Path) -> dict[str, tuple[int, bytes]]:
    found = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run with two dead sequences, which was then killed with its broker."""
    home = tmp_path_factory.mktemp("ended")
    made = [f"run={RUN}", f"run_dir={home / 'runs'}", f"broker.embedded_dir={home / 'broker'}", "dashboard.port=0"]
    config = load_config(None, made, {})

    async def fill() -> None:
        client = connections.connect(config.broker)
        await bury_one(client, Keys(RUN))
        raw: Any = client
        await raw.bgrewriteaof()  # from now on there are a base and what follows it
        await eventually(lambda: rewritten(raw), "the rewrite")
        await raw.set(Keys(RUN).latest, 7)
        await client.aclose()

    with embedded_broker(config.broker):
        asyncio.run(fill())
    stale = {"url": "redis://:gone@127.0.0.1:1/0", "pid": 1}  # as a killed one leaves it
    (home / "broker" / "broker.json").write_text(json.dumps(stale))
    return made


async def rewritten(raw: Any) -> bool:
    facts = await raw.info("persistence")
    return not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]


@pytest.fixture
def config(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("REDIS_URL", raising=False)
    return load_config(None, overrides, {})


def words(overrides: list[str]) -> list[str]:
    return [word for item in overrides for word in ("--set", item)]


def test_status_top_and_dead_letters_are_those_it_stored(
    config: Config, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(Path(config.broker.embedded_dir))
    shown = (
        (("status", "--json"), "latest_version", '"latest_version":7'),
        (("top", "--once"), "weights v7", "dead 2"),
        (("dlq", "list"), "invalid_request", "2 in all"),
        (("dlq", "show", f"{RUN}:a:0"), "reason", "invalid_request"),
    )
    for command, *expected in shown:
        assert call(*command, *words(overrides)) == 0
        out, err = capsys.readouterr()
        assert "the run's broker has ended; this is what it stored last, at 20" in err
        for text in expected:
            assert text in out
    assert call("status", "--why", *words(overrides)) in (0, 1)
    assert files(Path(config.broker.embedded_dir)) == before, "only copies are read"


def test_a_run_is_named_by_its_directory_from_anywhere(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paths of its configuration are relative to where it was started."""
    relative = load_config(None, [f"run={RUN}", "run_dir=runs", "broker.embedded_dir=broker"], {})
    monkeypatch.chdir(Path(config.run_dir).parent)
    provenance.store(relative, Path(config.run_dir) / RUN)
    (home := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(home)
    run = os.path.relpath(Path(config.run_dir) / RUN)
    for command, expected in (
        (("status", run), "weights v7"),
        (("status", "-c", run), "weights v7"),
        (("top", run, "--once"), "dead 2"),
        (("dlq", "list", run), "2 in all"),
        (("dlq", "show", run, f"{RUN}:a:0"), "invalid_request"),
    ):
        assert call(*command) == 0
        assert expected in capsys.readouterr().out
    assert call("dlq", "drop", run, "--all", "--yes") == 4
    assert "start one with `sluice broker`" in capsys.readouterr().err
    moved = tmp_path / "moved"
    shutil.copytree(Path(config.run_dir) / RUN, moved / RUN)
    shutil.copytree(config.broker.embedded_dir, moved / RUN / "broker")
    assert call("status", str(moved / RUN), "--json") == 0
    assert '"latest_version":7' in capsys.readouterr().out


def test_a_run_without_its_broker_never_reads_that_of_the_working_directory(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another project's broker, in the same place below it, has a run of the same name."""
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    shutil.copytree(config.broker.embedded_dir, other / ".sluice/broker")
    monkeypatch.chdir(home)
    relative = load_config(None, [f"run={RUN}"], {})
    provenance.store(relative, home / ".sluice/runs" / RUN)
    absolute = load_config(None, [f"run={RUN}", f"run_dir={home / 'far'}"], {})
    provenance.store(absolute, home / "far" / RUN)
    for copy in ("kept", ".sluice/runs"):
        shutil.copytree(home / ".sluice/runs" / RUN, other / copy / RUN)
    old = other / "old" / RUN
    shutil.copytree(home / "far" / RUN, old)
    (old / "origin.json").unlink()  # as an earlier release stored it
    monkeypatch.chdir(other)
    for run in (other / "kept" / RUN, other / ".sluice/runs" / RUN, home / "far" / RUN, old):
        for command in (["status", str(run)], ["dlq", "list", str(run)], ["dlq", "drop", str(run), "--all", "--yes"]):
            assert call(*command) == 4, command
            assert "names no running embedded broker" in capsys.readouterr().err
    assert call("dlq", "list", str(old), "--set", f"broker.embedded_dir={other / '.sluice/broker'}") == 0


def test_a_broker_that_was_moved_with_its_run_is_known_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(config.broker.embedded_dir, home / ".sluice/broker")
    monkeypatch.chdir(home)
    provenance.store(load_config(None, [f"run={RUN}"], {}), home / ".sluice/runs" / RUN)
    monkeypatch.chdir(tmp_path)
    home.rename(tmp_path / "moved")
    assert call("status", str(tmp_path / "moved/.sluice/runs" / RUN)) == 0
    assert "weights v7" in capsys.readouterr().out


def test_a_run_whose_broker_has_a_password_asks_for_its_address(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(config.broker.embedded_dir, tmp_path / ".sluice/broker")
    monkeypatch.chdir(tmp_path)
    run = Path(".sluice/runs") / RUN
    provenance.store(load_config(None, [f"run={RUN}", "broker.url=redis://:pa55@127.0.0.1:1/0"], {}), run)
    for command in (["status", str(run)], ["top", str(run), "--once"], ["dlq", "drop", str(run), "--all", "--yes"]):
        assert call(*command) == 4
        said = capsys.readouterr().err
        assert "set REDIS_URL: the address of the run's broker (redis://:***@127.0.0.1:1/0) has a password" in said
    assert call("dashboard", str(run)) == 4
    assert "set REDIS_URL" in capsys.readouterr().err
    assert not any("pa55" in path.read_text() for path in run.iterdir())
    monkeypatch.setenv("REDIS_URL", "redis://:pa55@127.0.0.1:1/0")
    assert call("status", str(run)) == 4
    assert "redis://:***@127.0.0.1:1/0: the broker does not answer" in capsys.readouterr().err


def test_without_the_broker_the_stored_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / RUN
    for url, more in (("redis://127.0.0.1:1/0", "does not answer"), ("redis://:pa55@127.0.0.1:1/0", "set REDIS_URL")):
        monkeypatch.delenv("REDIS_URL", raising=False)
        provenance.store(load_config(None, [f"run={RUN}", f"run_dir={tmp_path}", f"broker.url={url}"], {}), run)
        end = RunEnd(
            at=time.time() - 300, state="failed", exit_code=1, cause="consumer-0 ended once", kind="SluiceError"
        )
        write_end(run, end)
        last = Snapshot(run=RUN, state="new", enqueued=9, trained=8, latest_version=3, end=end)
        (run / "summary.json").write_bytes(msgspec.json.encode(as_json(last)))
        for command in (["status", str(run)], ["status", str(run), "--why"], ["top", str(run), "--once"],
                        ["dlq", "list", str(run)], ["dlq", "replay", str(run), "--all"],
                        ["dlq", "drop", str(run), "--all", "--yes"]):  # fmt: skip
            assert call(*command) == 4, command
            first, *others = capsys.readouterr().err.splitlines()
            assert first == (
                f"run {RUN}: failed 5 min ago: consumer-0 ended once; "
                "enqueued 9, trained 8, dead 0, dropped 0, weights v3"
            )
            assert more in "".join(others)
        write_end(run, RunEnd(at=time.time(), state="interrupted", exit_code=130))
        assert call("status", str(run)) == 4
        first = capsys.readouterr().err.splitlines()[0]
        assert re.fullmatch(rf"run {RUN}: interrupted [\d.]+ s ago; run the same command again to continue", first), (
            "the summary is an older one"
        )


async def test_a_killed_supervisor_is_told_once_no_role_of_the_run_is_alive(
    client: Redis, keys: Keys, tmp_path: Path
) -> None:
    """Roles that were started by hand since write files too, later than their heartbeats by a broker that is behind."""

    async def beat(role: str, age_s: float) -> None:
        at = time.time() - age_s
        row = Heartbeat(role=role, name=role, pid=1, host="h", started=at, at=at)
        await client.hset(keys.processes, role, msgspec.json.encode(row).decode())  # type: ignore[misc]

    with Supervision(tmp_path, RunStart(at=time.time() - 60)):
        pass  # it stores no end, as if it was killed
    (tmp_path / "metrics.jsonl").touch()
    later = time.time() + 3
    os.utime(tmp_path / "metrics.jsonl", (later, later))
    await beat("dashboard", 0.0)
    for age_s, state, words in ((0.0, None, "running"), (ALIVE_S + 1, "killed", "interrupted without notice")):
        await beat("trainer", age_s)
        now = await inspect(client, keys, 1, tmp_path)
        assert (now.end and now.end.state, condition(now)) == (state, words)


def test_a_run_that_was_renamed_shows_no_counts_of_its_new_name(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provenance.store(config, tmp_path / "kept")
    kept = str(tmp_path / "kept")
    for command in (["status", kept], ["status", "-c", kept], ["status", "-c", f"{kept}/config.resolved.yaml"]):
        assert call(*command) == 2
        assert f"kept was renamed from {RUN}, the run's name in its broker" in capsys.readouterr().err


def test_what_names_no_run_or_two_is_refused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    provenance.store(config, tmp_path / ".sluice/runs/mine")
    (tmp_path / "some.yaml").write_text("run: some")
    run = Path(config.run_dir) / RUN
    for command in ("status", "top", "dlq list", "dlq show", "dlq replay", "dlq drop"):
        name = command.split()
        for given, expected in (
            ((str(run), "-c", "text"), f"both {run} and -c text name a run; give one of them"),
            ((), "name a run, by its directory or by -c; the newest: .sluice/runs/mine"),
            (("mine",), "mine is no run's directory: it has no config.resolved.yaml; did you mean .sluice/runs/mine?"),
            ((".sluice/runs",), "did you mean .sluice/runs/mine?"),
            (("nowhere",), "runs are below run_dir"),
            (("some.yaml",), "a configuration is given as -c some.yaml"),
        ):
            rest = {"dlq show": [f"{RUN}:a:0"], "dlq replay": ["--all"], "dlq drop": ["--all", "--yes"]}
            assert call(*name, *given, *rest.get(command, [])) == 2
            assert expected in capsys.readouterr().err


def test_what_changes_the_run_needs_its_broker(
    config: Config, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (("dlq", "replay", "--all"), ("dlq", "drop", "--all", "--yes")):
        assert call(*command, *words(overrides)) == 4
        assert "start one with `sluice broker` or `sluice up`" in capsys.readouterr().err


def test_a_broker_that_runs_is_asked_itself(config: Config) -> None:
    with embedded_broker(config.broker), stored_broker(config) as found:
        assert not is_stored(config, found)
    with stored_broker(config) as found:
        assert is_stored(config, found)


def test_a_directory_without_data_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("status", "--set", f"broker.embedded_dir={tmp_path}", "--set", "broker.url=null") == 4
    assert "names no running embedded broker" in capsys.readouterr().err


async def read(url: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(get)


def holds(work: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    async def tried() -> bool:
        try:
            return await work()
        except OSError:
            return False

    return tried


async def test_the_dashboard_shows_it_and_follows_the_run_when_it_is_back(config: Config) -> None:
    [port] = free_ports(1)
    given = words([f"run={RUN}", f"run_dir={config.run_dir}", f"dashboard.port={port}",
                   f"broker.embedded_dir={config.broker.embedded_dir}"])  # fmt: skip
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "dashboard", "--allow-actions", *given]
    serving = await asyncio.create_subprocess_exec(*command)
    url = f"http://127.0.0.1:{port}"

    async def shows_stored() -> bool:
        return "what it stored last" in await read(url + "/dead-letters")

    async def shows_running() -> bool:
        return "what it stored last" not in await read(url + "/dead-letters")

    try:
        await eventually(holds(shows_stored), "the stored state")
        assert "invalid_request" in await read(url + "/dead-letters")
        assert "Replay" not in await read(url + "/dead-letters"), "nothing can be changed"
        with embedded_broker(config.broker):
            await eventually(holds(shows_running), "the run's own broker")
            serving.terminate()
            assert await asyncio.wait_for(serving.wait(), HANG_S) == 143
    finally:
        if serving.returncode is None:
            serving.kill()
            await serving.wait()


async def test_the_dashboard_of_a_renamed_run_shows_what_its_broker_stored(config: Config, tmp_path: Path) -> None:
    provenance.store(config, tmp_path / "kept")
    shutil.copytree(config.broker.embedded_dir, tmp_path / "kept" / "broker")
    [port] = free_ports(1)
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "dashboard", str(tmp_path / "kept")]
    serving = await asyncio.create_subprocess_exec(*command, "--set", f"dashboard.port={port}")
    url = f"http://127.0.0.1:{port}"

    async def shows_stored() -> bool:
        return "invalid_request" in await read(url + "/dead-letters")

    try:
        await eventually(holds(shows_stored), "the dead letters of the run's own name")
        page = await read(url + "/")
        assert f'title="The run\'s name">{RUN}</span>' in page
        assert f'{tmp_path / "kept"}">(directory kept)</span>' in page
    finally:
        serving.terminate()
        await asyncio.wait_for(serving.wait(), HANG_S)


def test_a_second_dashboard_has_a_port_of_its_own() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        second = bind_near("127.0.0.1", port)
        assert second is not None
        with second:
            assert second.getsockname()[1] != port
        with pytest.raises(ConfigError, match="is in use"):
            bind("127.0.0.1", port)
    assert bind_near("192.0.2.1", 0) is None


def test_the_dashboard_of_an_old_run_has_a_port_beside_that_of_a_live_one() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listening(DashboardConfig(port=port), usual=port) as second:
            assert second.getsockname()[1] != port
        with pytest.raises(ConfigError, match=rf"port {port} is in use.*set another dashboard\.port"):
            listening(DashboardConfig(port=port))
