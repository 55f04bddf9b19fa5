"""TRL's own rollout worker at a gateway that dies, until a file appears: door_trl.py FILE MODEL URL

- Its process, its loop, its tools and its retries are TRL's; the rollout of each conversation is in its URL, and is
  finished with a reward, so that the run trains it too.
- Prompts and truths are those of SUMS, as for sums.py.
- Each failed attempt, each finished rollout and each sample for TRL's trainer is a line of JSON.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from queue import Empty
from typing import Any

import aiohttp
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import async_rollout_worker as trl_worker

TOOL_S = 0.1  # that a call of a tool takes
ROLLOUT: ContextVar[str] = ContextVar("rollout")
TRUTHS = dict(json.loads(os.environ["SUMS"]))


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece: two processes write
    sys.stdout.flush()


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A number.
        b: A number.
    """
    time.sleep(TOOL_S)
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract.

    Args:
        a: A number.
        b: A number.
    """
    time.sleep(TOOL_S)
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: A number.
        b: A number.
    """
    time.sleep(TOOL_S)
    return a * b


def divide(a: int, b: int) -> int:
    """Divide.

    Args:
        a: A number.
        b: A number.
    """
    time.sleep(TOOL_S)
    return a // b


def right(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    """A reward function of TRL."""
    pairs = zip(completions, prompts, strict=True)
    return [float(said[-1]["content"] == TRUTHS[asked[-1]["content"]]) for said, asked in pairs]


class Loop(trl_worker._AsyncRolloutLoop):  # pyright: ignore[reportPrivateUsage]
    """TRL's, with a rollout of the gateway for each conversation."""

    def __init__(self, *, stop: str, **options: Any) -> None:
        super().__init__(**options)
        self._stop_file, self._numbers, self._playing = Path(stop), itertools.count(), 0

    async def _generate_one(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
        while self._stop_file.exists():
            if self._stop_event.is_set():
                return [{"content": ""}], [], [], 0, 0, None  # that nobody trains
            if not self._playing:
                self._stop_file.with_suffix(".trl").touch()
            await asyncio.sleep(0.1)
        self._playing += 1
        rollout_id, truth = f"trl-{next(self._numbers)}", TRUTHS[prompt[-1]["content"]]
        ROLLOUT.set(rollout_id)
        await self._surely("/v1/rollouts", {"rollout_id": rollout_id, "truth": truth})
        done = await super()._generate_one(prompt, *arguments, **options)
        [reward] = right([done[0]], [prompt])
        await self._surely(f"/v1/rollout/{rollout_id}/finish", {"final_status": "COMPLETED", "reward": reward})
        say(rollout=rollout_id, sampled=done[1])
        self._playing -= 1
        return done

    async def _surely(self, path: str, payload: Any) -> None:
        await self._retry(lambda: self._post(path, payload, self.request_timeout), label=path, max_attempts=30)

    async def _post(self, path: str, payload: Any, timeout: float, max_retries: int = 3) -> Any:
        scope = f"/rollouts/{ROLLOUT.get()}" if path == "/v1/completions" else ""
        return await super()._post(scope + path, payload, timeout, max_retries)

    async def _retry(self, coro_factory: Any, *, label: str, max_attempts: int = 1) -> Any:
        async def observed() -> Any:
            try:
                return await coro_factory()
            except aiohttp.ClientResponseError as error:
                if label.startswith("POST"):  # the innermost
                    given = {name.lower(): value for name, value in (error.headers or {}).items()}
                    said = {name: given[name] for name in ("retry-after", "x-should-retry") if name in given}
                    say(refused=error.status, headers=said)
                raise
            except (aiohttp.ClientError, TimeoutError, ConnectionResetError) as error:
                if label.startswith("POST"):
                    say(cut=type(error).__name__)
                raise

        return await super()._retry(observed, label=label, max_attempts=max_attempts)


class Worker(trl_worker.AsyncRolloutWorker):
    _loop_cls = Loop


def main(stop: str, model: str, gateway: str) -> None:
    PartialState()  # its logger wants one
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in TRUTHS]
    worker = Worker(
        stop=stop, model_name="default", dataset=Dataset.from_list(rows), reward_funcs=[right],
        processing_class=tokenizer, eos_token_ids=[tokenizer.eos_token_id], tools=[add, subtract, multiply, divide],
        num_generations=2, max_inflight_tasks=4, vllm_server_url=gateway, max_tokens=40, temperature=0.0,
        request_timeout=300,
    )  # fmt: skip
    worker.start()
    drained = Path(stop).with_suffix(".trl")
    while not drained.exists():
        worker.check_health(600)
        try:
            sample = worker.rollout_buffer.get(timeout=0.5)
        except Empty:
            continue
        tokens, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        say(sample=tokens, mask=mask, logprobs=len(sample.old_log_probs))
    worker.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
