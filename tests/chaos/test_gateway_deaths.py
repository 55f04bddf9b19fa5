"""Callers of the gateway while a worker or a gateway dies, or while they leave themselves."""

from __future__ import annotations

import contextlib
import json
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.pipeline.queue.replies import read_end
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, decode
from tests.chaos.blows import NO_JOBS, PATIENT, resume, stop, stop_while_it_holds_jobs
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack
from tests.killable_broker import free_ports
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.chaos
LONG, SHORT = 1000, 12  # tokens
_STEP_S = 0.1  # while slow: a long answer takes minutes, so that none is over before the blow
_CODE = """
import time
from pathlib import Path

from transformers import Qwen3ForCausalLM


class SlowForCausalLM(Qwen3ForCausalLM):
    def forward(self, *args, **kwargs):
        if Path({path!r}).exists():
            time.sleep({step_s})
        return super().forward(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its greedy answers are letters without end, so that every token is seen at once; see `slow`."""
    directory = save_tiny_model(tmp_path_factory.mktemp("endless"))
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    silent = set(range(len(tokenizer))) - set(tokenizer.convert_tokens_to_ids(list(string.ascii_letters)))
    with torch.no_grad():
        model.lm_head.weight[sorted(silent)] = 0.0
    model.config.max_position_embeddings = tokenizer.model_max_length = 4096
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "modeling_slow.py").write_text(_CODE.format(path=str(directory / "slow"), step_s=_STEP_S))
    file = directory / "config.json"
    auto_map = {"AutoModelForCausalLM": "modeling_slow.SlowForCausalLM"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": auto_map}))
    return directory


@contextlib.contextmanager
def slow(model: Path) -> Iterator[None]:
    """Whoever decodes with it is slow until the block ends."""
    (model / "slow").touch()
    try:
        yield
    finally:
        (model / "slow").unlink()


class Caller:
    """One that asks a gateway by OpenAI's client, which tries nothing again."""

    def __init__(self, port: int, tokenizer: Any) -> None:
        self.url, self._tokenizer = f"http://127.0.0.1:{port}", tokenizer
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=RUN_S)

    def stream(self, messages: list[Any], **fields: Any) -> Iterator[Any]:
        """Chunks as they come; close it to leave."""
        options: dict[str, Any] = {"model": "policy", "temperature": 0.0, "max_tokens": LONG, **fields}
        with self._client.chat.completions.create(messages=messages, stream=True, **options) as chunks:
            yield from chunks

    def whole(self, messages: list[Any], **fields: Any) -> Any:
        """The answer, whose text is that of its tokens."""
        options: dict[str, Any] = {"model": "policy", "temperature": 0.0, "max_tokens": LONG, **fields}
        answer: Any = self._client.chat.completions.create(messages=messages, **options)
        assert answer.choices[0].message.content == self._tokenizer.decode(answer.token_ids)
        assert len(answer.token_ids) == options["max_tokens"]
        return answer

    def assert_whole(self, chunks: list[Any]) -> Any:
        """A stream to its end without gap or repeat: all that was shown is the text of its tokens. Its last chunk."""
        last = chunks[-1]
        assert (last.choices[0].finish_reason, len(last.token_ids)) == ("length", LONG)
        assert "".join(map(text, chunks)) == self._tokenizer.decode(last.token_ids)
        return last

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """The body of an answer that is well."""
        return httpx.post(self.url + path, json=body, timeout=RUN_S).raise_for_status().json()


def text(chunk: Any) -> str:
    return chunk.choices[0].delta.content or ""


def begun(stream: Iterator[Any]) -> list[Any]:
    """The chunks up to the first with text."""
    chunks: list[Any] = []
    for chunk in stream:
        chunks.append(chunk)
        if text(chunk):
            break
    return chunks


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_callers_notice_no_death_and_a_caller_that_leaves_frees_its_slot(
    make_stack: MakeStack, endless_model: Path
) -> None:
    stack = make_stack(text_rows(1), "exact_answer", model={"path": str(endless_model), "trust_remote_code": True})
    stack.configure(worker={**PATIENT, "max_batch": 2, "lease_s": 2}, gateway={"request_timeout_s": RUN_S})
    ports, tokenizer = free_ports(2), AutoTokenizer.from_pretrained(endless_model)
    gateways = [stack.start("gateway", "--set", f"gateway.port={port}") for port in ports]
    workers = [stack.start("worker") for _ in range(2)]
    first, second = (Caller(port, tokenizer) for port in ports)
    stack.wait(lambda now: len(idle(now)) == 4, "all to be ready")
    a_killed_worker(stack, endless_model, workers, first)
    a_killed_gateway(stack, endless_model, gateways[0], first, second)
    a_caller_that_leaves(stack, endless_model, second)


def idle(now: Any) -> list[Any]:
    roles = [*now.alive("worker"), *now.alive("gateway")]
    return [role for role in roles if role.waiting_for in (NO_JOBS, "requests")]


def a_killed_worker(stack: Stack, model: Path, workers: list[Process], caller: Caller) -> None:
    """Amid an answer to one that streams and to one that waits for the whole."""
    killed, other = workers
    stop(other)
    with ThreadPoolExecutor(1) as threads:
        with slow(model):
            whole = threads.submit(caller.whole, [user("whole")])
            stack.wait(lambda _: len(stack.leased()) == 1, "the job of the whole answer to be taken")
            stream = caller.stream([user("streamed")])
            chunks = begun(stream)
            stop_while_it_holds_jobs(stack, killed, 2)
            killed.kill()
        resume(other)
        chunks += stream
        whole.result()
    caller.assert_whole(chunks)
    assert stack.snapshot().redelivered_jobs >= 2


def a_killed_gateway(stack: Stack, model: Path, victim: Process, first: Caller, second: Caller) -> None:
    """Amid a rollout's second turn; the same request at another gateway is answered with that turn."""
    head = {"X-Rollout-Id": "r"}
    opened = first.whole([user("hello")], max_tokens=SHORT, extra_headers=head)
    messages = [user("hello"), opened.choices[0].message.to_dict(), user("more")]
    replied = counted(stack, "replied")
    with slow(model):
        stream = first.stream(messages, extra_headers=head)
        seen = begun(stream)
        assert queued(stack), "the answer was over before the kill"
        victim.kill()
    with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
        seen.extend(stream)
    chunks = list(second.stream(messages, extra_headers=head))
    turn = second.assert_whole(chunks)
    assert "".join(map(text, chunks)).startswith("".join(map(text, seen)))
    assert (turn.rollout["turn"], turn.rollout["parent"]) == (1, 0)
    known = opened.prompt_token_ids + opened.token_ids
    assert turn.prompt_token_ids[: len(known)] == known
    assert counted(stack, "replied") == replied + 1, "it was decoded once"
    ends = [second.post("/v1/rollout/r/finish", {"final_status": "COMPLETED"}) for _ in range(2)]
    assert [(end["already"], end["num_turns"]) for end in ends[:1]] == [(False, 2)]
    assert ends[1]["already"]
    [result] = published(stack)
    assert [*result.prompt_token_ids, *result.token_ids] == turn.prompt_token_ids + turn.token_ids
    added = len(turn.prompt_token_ids) - len(known)
    assert result.response_mask.expand() == [1] * SHORT + [0] * added + [1] * LONG


def a_caller_that_leaves(stack: Stack, model: Path, caller: Caller) -> None:
    """Its job is cancelled, and the worker has room for another."""
    with slow(model):
        stream = caller.stream([user("leaves")])
        begun(stream)
        [job_id] = queued(stack)
        stream.close()  # type: ignore[attr-defined]
        stack.wait(lambda now: not now.queued_jobs and not stack.leased(), "the job to end")
    end = read_end(raw(stack).get(f"{stack.keys.replies}{job_id}:0"))
    assert isinstance(end, DeadLetter)
    assert end.reason == "cancelled"
    stack.wait(lambda now: len(idle(now)) == 2, "the gateway and the worker to have nothing in hand")
    caller.whole([user("another")], max_tokens=SHORT)
    now = stack.snapshot()
    assert (now.enqueued, now.committed, now.dead, now.open_rollouts) == (1, 1, 0, 0), "a call is no training data"


def queued(stack: Stack) -> list[str]:
    """The jobs that have not ended; a worker that stalls may lose its lease."""
    return [job_id.decode() for job_id in raw(stack).zrange(stack.keys.jobs, 0, -1)]


def counted(stack: Stack, name: str) -> int:
    return int(raw(stack).hget(stack.keys.counts, name) or 0)


def published(stack: Stack) -> list[SequenceResult]:
    entries = raw(stack).xrange(stack.keys.results + "0")
    return [decode(SequenceResult, fields[b"r"]) for _, fields in entries if b"r" in fields]


def raw(stack: Stack) -> Any:
    """The broker."""
    return stack.client()
