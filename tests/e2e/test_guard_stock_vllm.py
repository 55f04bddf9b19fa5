"""The guard inside a stock vLLM server: it ends loops there, and a server that cannot have it does not start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import HANG_S, RUN_S
from tests.killable_broker import free_ports
from tests.loop_models import LoopModel, save_loop_model
from tests.merged_tokenizers import qwen_like

pytestmark = pytest.mark.vllm
GUARD = {
    "enabled": True,
    "min_new_tokens": 12,
    "max_consecutive_token_repeats": 8,
    "ngram_size": 24,
    "max_object_keys": 4,
}
TOKENIZER: Any = qwen_like()
ENTRY: tuple[int, ...] = tuple(TOKENIZER.encode(', "object_1": 2', add_special_tokens=False))
SWITCH = "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION"


def start(model: Path, log: Path, port: int, **environment: str) -> subprocess.Popen[bytes]:
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.getcwd(),
    }  # fmt: skip
    # `vllm serve` of the CPU build asks for the metadata of a package that is named otherwise; this is its server.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-num-seqs", "8", "--served-model-name", "m"]
    command += ["--dtype", "float32"]  # bfloat16 ends the worker by SIGILL on processors that do not have it
    command += ["--logits-processors", "sluice.workers.guard.vllm:RepeatTerminate"]
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **ours, **environment}, start_new_session=True
        )


def end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(HANG_S)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> LoopModel:
    return save_loop_model(tmp_path_factory.mktemp("loops"), chains=(((), ENTRY),), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def address(loops: LoopModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("stock"), free_ports(1)[0]
    (folder / "guard.json").write_text(json.dumps(GUARD))
    environment = {SWITCH: "on", "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH": str(folder / "guard.json")}
    server = start(loops.directory, folder / "log", port, **environment)
    try:
        until = time.monotonic() + RUN_S
        while ask(f"http://127.0.0.1:{port}/health")[0] != 200:
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < until, f"not up after {RUN_S} s\n{(folder / 'log').read_text()[-3000:]}"
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        end(server)


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(HTTP status, answer); status 0 when nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=HANG_S
        ) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, None


def complete(address: str, token: int, **options: Any) -> tuple[int, Any]:
    body = {"model": "m", "prompt": [token], "temperature": 0, "max_tokens": 60, "return_token_ids": True, **options}
    return ask(f"{address}/v1/completions", body)


def test_a_loop_is_ended_and_a_healthy_sequence_is_not(address: str, loops: LoopModel) -> None:
    loop = next(token for token in loops.looping if loops.successor[token] == token)
    status, answer = complete(address, loop)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [loop] * 12 + [loops.eos])
    healthy = loops.healthy[-20]
    status, answer = complete(address, healthy)
    assert (status, answer["choices"][0]["token_ids"]) == (200, loops.continuation(healthy, 60))


def test_object_keys_are_counted_in_what_the_tokens_write(address: str, loops: LoopModel) -> None:
    status, answer = complete(address, ENTRY[-1])
    tokens = loops.continuation(ENTRY[-1], 60)
    at = next(at for at in range(12, 60) if TOKENIZER.decode(tokens[:at]).count('"object_') >= 4)
    assert (status, answer["choices"][0]["token_ids"]) == (200, [*tokens[:at], loops.eos])


@pytest.mark.parametrize(
    "options",
    [{"ignore_eos": True}, {"vllm_xargs": {"sluice_guard": "x"}}],
)
def test_a_request_that_the_guard_could_not_end_is_refused(
    address: str, loops: LoopModel, options: dict[str, Any]
) -> None:
    assert complete(address, loops.healthy[0], **options)[0] == 400
