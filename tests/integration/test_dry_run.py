"""A dry run says what would be, and changes nothing: no file, no key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import torch
from redis.asyncio import Redis
from safetensors.torch import save_file

from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.load import read_config
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run import preflight
from sluice.pipeline.run.dry_run import DryRun, as_text, rehearse
from sluice.pipeline.status.run_end import END, START, RunEnd, RunStart, Supervision, read_end, write_end
from sluice.pipeline.wire.keys import Keys
from sluice.producers.source import fingerprint
from tests.command import call
from tests.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.pipeline.test_weights import model_dir

GOOD = '{"messages": [{"role": "user", "content": "hi"}], "truth": []}\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A model, good rows, rows of which the third is bad."""
    save_tiny_tokenizer(model_dir(tmp_path / "model"))
    (tmp_path / "good.jsonl").write_text(GOOD * 3)
    (tmp_path / "bad.jsonl").write_text(GOOD * 2 + '{"messages": []}\n' + GOOD)
    return tmp_path


def settings(home: Path, keys: Keys, *more: str, url: str | None = None, data: str = "good.jsonl") -> list[str]:
    broker = [f"broker.url={url}"] if url else [f"broker.embedded_dir={home / 'broker'}"]
    named = [f"run={keys.run}", f"run_dir={home / 'runs'}", f"model.path={home / 'model'}", f"data.path={home / data}"]
    return [*broker, *named, *more]


def dry(home: Path, keys: Keys, *more: str, **named: Any) -> DryRun:
    return rehearse(read_config(None, settings(home, keys, *more, **named)), "up", "defaults")


def tree(home: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content, every directory with its time."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted([home, *home.rglob("*")])
    }


async def dump(client: Redis, keys: Keys) -> dict[bytes, bytes]:
    raw: Any = client
    return {key: await raw.dump(key) async for key in raw.scan_iter(match=f"{keys.prefix}*")}


@pytest.fixture
async def begun(client: Redis, keys: Keys) -> None:
    """A run that was stopped in the middle."""
    raw: Any = client
    await raw.hset(keys.source, mapping={"cursor": "0:41", "exhausted": 0, "total": 100})
    await raw.hset(keys.counts, mapping={"enqueued": 42, "trained": 30, "dead": 2})
    await raw.set(keys.latest, 3)


async def test_nothing_is_written_neither_to_the_disk_nor_to_the_broker(
    home: Path, keys: Keys, client: Redis, begun: None, broker_config: BrokerConfig
) -> None:
    arguments = [word for item in settings(home, keys, url=broker_config.url) for word in ("--set", item)]
    files, held = tree(home), await dump(client, keys)
    for command in ("up", "run"):
        assert await asyncio.to_thread(call, command, "--dry-run", *arguments) == 0
    assert tree(home) == files
    assert held
    assert await dump(client, keys) == held


async def test_it_says_from_where_a_run_goes_on(
    home: Path, keys: Keys, client: Redis, begun: None, broker_config: BrokerConfig
) -> None:
    found = await asyncio.to_thread(dry, home, keys, url=broker_config.url)
    place = found.place
    assert (place.kind, place.version, place.cursor, place.enqueued, place.ended) == ("goes_on", 3, "0:41", 42, 32)
    assert "after row 42 of epoch 1; weights v3; 42 sequences enqueued, 30 trained, 2 dead" in place.says
    raw: Any = client
    await raw.hset(keys.source, "exhausted", 1)
    await raw.hset(keys.counts, "dropped", 10)
    found = await asyncio.to_thread(dry, home, keys, url=broker_config.url)
    assert found.place.kind == "complete"


async def test_a_run_that_the_broker_does_not_know_is_fresh(
    home: Path, keys: Keys, broker_config: BrokerConfig
) -> None:
    found = await asyncio.to_thread(dry, home, keys, "worker.count=3", "gateway.count=1", url=broker_config.url)
    assert (found.exit_code, found.place.kind) == (0, "fresh")
    assert {"trainer", "producer", "consumer-0", "worker-2", "gateway-0"} <= set(found.processes)
    assert found.processes["worker-2"][-3:-1] == ["worker", "-c"]
    assert found.directories["logs"] == str(home / "runs" / keys.run / "logs")
    text = as_text(found)
    assert "gateway http://127.0.0.1:8081/v1" in text
    assert str(broker_config.url).split("@")[0] not in text, "the password stays secret"


def test_without_a_broker_it_names_the_one_that_would_be_started(home: Path, keys: Keys) -> None:
    files = tree(home)
    found = dry(home, keys)
    [broker] = [check for check in found.checks if check.name == "broker"]
    assert "none running" in broker.says
    assert found.place.kind == "fresh"
    assert found.directories["broker"] == str(home / "broker")
    assert tree(home) == files


def test_files_of_an_earlier_run_are_named_where_no_broker_runs(home: Path, keys: Keys) -> None:
    for name in ("checkpoints/step-000007", "weights/v000006", "weights/v000007"):
        (home / "runs" / keys.run / name).mkdir(parents=True)
    (home / "broker" / "appendonlydir").mkdir(parents=True)
    place = dry(home, keys).place
    assert (place.kind, place.version) == ("goes_on", 7)
    assert "step-000007, v000007" in place.says


@pytest.mark.parametrize(
    ("number", "kept", "said"),
    [
        (0, [], ""),
        (7, [], "policy.kl_reference 7: the run has no versions yet; set it to 0"),
        (7, [5, 7, 8], ""),
        (7, [8, 9], "has no version 7; name one that is there (v8, v9), or start a run of another name"),
        (0, [8, 9], "has no version 0"),
    ],
)
@pytest.mark.parametrize(
    "loss", [["policy.kl_coef=0.1"], ["policy.loss=dpo", "producer.group_size=2"]], ids=["kl", "dpo"]
)
def test_a_reference_that_is_not_there_is_found_before_the_start(
    home: Path, keys: Keys, loss: list[str], number: int, kept: list[int], said: str
) -> None:
    for version in kept:
        (home / "runs" / keys.run / "weights" / f"v{version:06d}").mkdir(parents=True)
    (home / "good.jsonl").write_text(GOOD.replace("[]}", '"hi"}'))
    more = [f"policy.kl_reference={number}", "policy.enabled=true", "policy.advantage=reward", *loss]
    more.append("rollout_matching.task=exact_answer")
    found = dry(home, keys, *more)
    bad = [check.says for check in found.checks if not check.ok]
    assert (found.exit_code, len(bad)) == ((2, 1) if said else (0, 0)), bad
    assert said in "".join(bad)
    assert [check.name for check in found.checks if check.name == "policy"] == ["policy"]
    own = dry(home, keys, *more, "trainer.external=true").checks
    assert not [check for check in own if not check.ok]
    assert "without effect, since trainer.external is true" in next(one.says for one in own if one.name == "trainer")
    assert "policy" not in {check.name for check in dry(home, keys).checks}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda path: model_dir(path), ""),
        (lambda path: save_file({"a0": torch.zeros(3)}, model_dir(path) / "model.safetensors"), "a0 has another shape"),
        (
            lambda path: save_file({"c": torch.zeros(3)}, model_dir(path) / "model.safetensors"),
            "no tensor has the same",
        ),
        (lambda path: path.mkdir(), "not a model directory"),
    ],
)
def test_a_reference_directory_is_compared_before_the_start(
    home: Path, keys: Keys, made: Callable[[Path], object], said: str
) -> None:
    made(home / "other")
    (home / "good.jsonl").write_text(GOOD.replace("[]}", '"hi"}'))
    more = [f"policy.kl_reference={home / 'other'}", "policy.enabled=true", "policy.advantage=reward"]
    found = dry(home, keys, *more, "policy.kl_coef=0.1", "rollout_matching.task=exact_answer")
    bad = [check.says for check in found.checks if not check.ok]
    assert len(bad) == bool(said), bad
    assert said in "".join(bad)


def test_the_first_malformed_row_is_shown(home: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for item in settings(home, keys, data="bad.jsonl") for word in ("--set", item)]
    assert call("run", "--dry-run", *arguments) == 3
    assert f"1 of 4 rows malformed, the first at {home / 'bad.jsonl'}:3" in capsys.readouterr().out
    assert call("run", "--dry-run", "--json", *arguments, "--set", "data.on_malformed=skip") == 0
    shown = json.loads(capsys.readouterr().out)
    assert next(check["says"] for check in shown["checks"] if check["name"] == "data").endswith("they are skipped")


@pytest.mark.parametrize("command", ["up", "run"])
def test_a_start_is_refused_with_every_problem_and_leaves_nothing(
    home: Path, keys: Keys, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = ["model.path=nosuch", "rollout_matching.match=nosuch:match", "rollout_matching.target=nosuch:target"]
    arguments = [word for item in settings(home, keys, *more, data="bad.jsonl") for word in ("--set", item)]
    files = tree(home)
    assert call(command, *arguments) == 5
    said = capsys.readouterr().err
    assert "error: 3 problems; nothing was started\n  nosuch: no such directory" in said
    for words in ("bad.jsonl:3: malformed row", "rollout_matching.match: cannot import", "rollout_matching.target: "):
        assert words in said
    assert tree(home) == files


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("worker.renew_s=14", "worker.renew_s 14.0 must be at most half of worker.lease_s"),
        ("policy.enabled=false", "policy.enabled is false"),
        ("worker.cuont=2", "did you mean 'count'?"),
        ("worker.max_batch=0", "worker.max_batch must be > 0"),
    ],
    ids=["rule between keys", "reward without a policy", "unknown key", "number"],
)
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_what_is_wrong_with_the_configuration_hides_nothing_else(
    home: Path, keys: Keys, capsys: pytest.CaptureFixture[str], command: str, more: str, said: str
) -> None:
    named = [more, f"model.path={home / 'nomodel'}", "rollout_matching.reward=nosuch.py:score"]
    arguments = [word for item in settings(home, keys, *named, data="no.jsonl") for word in ("--set", item)]
    assert call(command, *arguments) == 2, "the configuration is the first of the checks"
    shown = "".join(capsys.readouterr())
    for words in (said, "nomodel: no such directory", "no.jsonl: no such file", "nosuch.py: no such file"):
        assert words in shown, shown
    assert command == "doctor" or "problems; nothing was started" in shown


def test_a_check_is_left_out_where_its_own_section_is_wrong(
    home: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["model.pth=elsewhere", "model.path=''", "data.limit=-1", "producer.max_in_flight=none"]
    arguments = [word for item in settings(home, keys, *more) for word in ("--set", item)]
    assert call("up", "--dry-run", "--json", *arguments) == 2
    shown = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in shown["checks"]} == {"config", "engine", "broker"}
    assert [check["name"] for check in shown["checks"] if not check["ok"]] == ["config", "config", "config"]
    assert not shown["processes"]
    arguments = [word for item in settings(home, keys, "data.limit=-1") for word in ("--set", item)]
    assert call("up", "--dry-run", *arguments) == 2
    shown = capsys.readouterr().out
    assert "WRONG config   defaults: data.limit must be >= 0, got -1" in shown
    assert "ok    model" in shown
    assert "data     " not in shown
    assert "processes" not in shown


def test_the_number_of_workers_keeps_its_rule(home: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for item in settings(home, keys) for word in ("--set", item)]
    assert call("run", "--workers", "-1", *arguments) == 2
    assert "worker.count must be >= 0, got -1" in capsys.readouterr().err


def test_data_and_a_model_must_be_named(home: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for item in settings(home, keys, "data.path=''", "model.path=''") for word in ("--set", item)]
    assert call("run", *arguments) == 5
    said = capsys.readouterr().err
    assert "no model is set; pass --model DIR" in said
    assert "data.path is not set; give --data FILE.jsonl" in said


def test_rows_that_were_not_reached_in_time_are_named(home: Path, keys: Keys) -> None:
    found = dry(home, keys, "preflight.max_s=0")
    [check] = [check for check in found.checks if check.name == "data"]
    assert (check.ok, check.is_note) == (True, True)
    assert "0 rows, none malformed; the rest is unscanned (preflight.max_s 0)" in check.says


def test_all_that_is_wrong_is_said_and_the_first_decides(home: Path, keys: Keys) -> None:
    found = dry(home, keys, "model.path=nosuch", "data.path=nosuch", url="redis://127.0.0.1:1/0")
    assert found.exit_code == 4
    assert [check.name for check in found.checks if not check.ok] == ["broker", "model", "data"]
    assert found.place.kind == "unknown"


async def test_a_run_of_other_data_is_refused(
    home: Path, keys: Keys, client: Redis, broker_config: BrokerConfig
) -> None:
    raw: Any = client
    await raw.hset(keys.source, mapping={"cursor": "0:1", "data": "other", "path": "other.jsonl"})
    found = await asyncio.to_thread(dry, home, keys, url=broker_config.url)
    [check] = [check for check in found.checks if check.name == "run"]
    assert found.exit_code == check.exit_code == 2
    assert "was started on other data than" in check.says


def test_an_edited_file_of_a_complete_run_is_refused_once_the_embedded_broker_is_up(
    home: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(None, settings(home, keys)).config
    source = {"cursor": "0:2", "data": fingerprint(config.data), "path": config.data.path, "exhausted": 1}
    with embedded_broker(config.broker) as url, redis.Redis.from_url(url) as client:
        client.hset(keys.source, mapping=source)
    (home / "good.jsonl").write_text(GOOD.replace("hi", "ho") * 2)
    arguments = [word for item in settings(home, keys) for word in ("--set", item)]
    ran = home / "runs" / keys.run
    write_end(ran, RunEnd(at=1.0, state="complete", command="sluice run -c a.yaml"))
    (ran / START).write_bytes(msgspec.json.encode(RunStart(at=1.0, command="sluice run -c a.yaml")))
    was = tree(ran)
    for _ in range(2):
        assert call("run", *arguments) == 2
        assert {name: told[1] for name, told in tree(ran).items()} == {name: told[1] for name, told in was.items()}
        assert f"run '{keys.run}' was started on other data than {config.data.path}" in capsys.readouterr().err
    (ran / END).unlink()
    assert call("run", *arguments) == 2
    killed = read_end(ran)
    assert killed is not None
    assert killed.state == "killed", "the start that was refused isn't its end"
    with embedded_broker(config.broker) as url, redis.Redis.from_url(url, decode_responses=True) as client:
        assert client.hgetall(keys.source) == {name: str(value) for name, value in source.items()}


def test_a_port_that_is_taken_and_a_run_that_is_alive_are_found_before_the_start(home: Path, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Supervision(home / "runs" / keys.run, RunStart(at=1.0, command="sluice up", pid=4711)):
            found = dry(home, keys, "gateway.count=1", f"gateway.port={port}")
    bad = {each.name: each.says for each in found.checks if not each.ok}
    assert found.exit_code == 2
    assert bad["ports"] == f"port {port} is in use; stop what listens there, or set another gateway.port"
    assert f"run {keys.run} is running already (`sluice up`, process 4711, since" in bad["run"]


@contextlib.contextmanager
def unprivileged() -> Generator[None]:
    """Root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_place_where_nobody_may_write_is_found_before_the_start(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    config = Config(run_dir=str(closed / "runs"), broker=BrokerConfig(embedded_dir=str(tmp_path / "broker")))
    with unprivileged(), pytest.raises(SluiceError, match=r"no right to write there; change its owner, or set run_dir"):
        preflight.disk(config)
