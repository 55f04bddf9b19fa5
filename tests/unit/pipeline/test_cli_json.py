"""`--json`: one object with `schema_version` is all that stdout has, whatever the command finds."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.broker import connection as connections
from sluice.pipeline.cli.main import build
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.terminal import json_line
from sluice.pipeline.wire.keys import Keys
from tests.command import call, options, walk
from tests.factories import decode_job
from tests.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.pipeline.test_weights import model_dir

ELSEWHERE = {  # decode, train or measure; tested where that is
    "audit", "demo", "generate", "bench all", "bench crash", "bench elastic", "bench engine", "bench fleet",
    "bench guard", "bench images", "bench operate", "bench pipeline", "bench proximal", "bench queue", "bench rollout",
    "bench scale", "bench train", "bench weights", "export", "replay", "task try", "trace",
}  # fmt: skip
PLENTY = Credit(max_in_flight=100, samples_per_version=100, max_staleness=1)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, broker_config: BrokerConfig) -> dict[str, tuple[list[str], int]]:
    """Command → arguments, exit code."""
    home, run = tmp_path_factory.mktemp("json"), f"json-{uuid.uuid4().hex[:8]}"
    model, rows, bad = model_dir(home / "model"), home / "rows.jsonl", home / "bad.yaml"
    save_tiny_tokenizer(model)
    truth = [{"desc": "six", "bbox_2d": [0, 0, 500, 500]}]
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}], "truth": truth}) + "\n")
    bad.write_text("runn: x\n")
    where = ["--set", f"broker.url={broker_config.url}", "--set", f"run_dir={home}", "--set", f"run={run}"]
    dead = asyncio.run(bury_three(broker_config, Keys(run)))
    named = [*where, "--set", f"model.path={model}", "--set", f"data.path={rows}"]
    return {
        "bench truth": (["GPT-2", "--quick"], 0),
        "config check": ([str(bad), "configs/text.yaml"], 2),
        "config show": (where, 0),
        "dlq drop": ([dead[0], *where, "--yes"], 0),
        "dlq list": (where, 0),
        "dlq replay": ([dead[1], *where], 0),
        "dlq show": ([dead[2], *where], 0),
        "doctor": (named, 0),
        "env": (where, 0),
        "guard replay": ([str(answers(home))], 0),
        "run": ([*named, "--dry-run"], 0),
        "status": (where, 0),
        "up": ([*where, "--dry-run"], 5),
    }


async def bury_three(broker: BrokerConfig, keys: Keys) -> list[str]:
    """The ids of three dead sequences."""
    client = connections.connect(broker)
    try:
        queue, jobs = JobQueue(client, keys, worker="w"), [decode_job(f"{keys.run}:{name}", n=1) for name in "abc"]
        await queue.enqueue(jobs, PLENTY)
        for claim in (await queue.claim(3, 30, 3)).claims:
            assert await queue.fail(claim, "invalid_request", "no") == 1
        return [f"{job.job_id}:0" for job in jobs]
    finally:
        await client.aclose()


def answers(home: Path) -> Path:
    file = home / "answers.jsonl"
    row = {"id": "a", "index": 0, "prompt_token_ids": [1], "token_ids": [2, 3], "finish_reason": "stop", "text": "x"}
    file.write_text(json.dumps(row) + "\n")
    return file


def with_json() -> list[str]:
    return [
        " ".join(words) for words, command in walk(build()) if any("--json" in each.names for each in options(command))
    ]


@pytest.mark.parametrize("name", sorted(set(with_json()) - ELSEWHERE))
def test_stdout_has_one_object_with_its_schema_version(
    name: str, calls: dict[str, tuple[list[str], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, code = calls[name]
    assert call(*name.split(), *arguments, "--json") == code
    said = capsys.readouterr()
    shown = json.loads(said.out)
    assert isinstance(shown["schema_version"], int)
    assert said.out.count("\n") == 1


def test_an_error_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("status", "--set", "broker.url=redis://127.0.0.1:1/0", "--json") == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")


def test_the_configuration_is_shown_without_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "show", "--json", "--set", "broker.url=redis://:secret@h:1/0") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["broker"]["url"] is None
    assert shown["config"]["worker"]["count"] == 1


def test_check_says_which_file_is_wrong_and_why(calls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call("config", "check", *calls["config check"][0], "--json")
    bad, good = json.loads(capsys.readouterr().out)["files"]
    assert (bad["ok"], good["ok"], good["error"]) == (False, True, None)
    assert "did you mean 'run'?" in bad["error"]


def test_an_object_without_a_version_is_refused_and_nan_is_null() -> None:
    with pytest.raises(ValueError, match="schema_version"):
        json_line({"a": 1})

    class Shown(msgspec.Struct):
        schema_version: int
        value: float

    assert json.loads(json_line(Shown(7, float("nan")))) == {"schema_version": 7, "value": None}
