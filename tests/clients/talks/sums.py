"""A taskset of verifiers with a harness of its own: sums, whose agent writes its calls as text and runs them here.

With SUMS_UNTIL they come again and again until that file is there, and the harness repeats what is refused; what
verifiers makes of each refusal is a line of JSON.
"""

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

UNTIL = os.environ.get("SUMS_UNTIL")
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)
RUN = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}


def _goes_on(_: Any) -> bool:
    return not Path(str(UNTIL)).exists()


async def refused(response: Any) -> None:
    if not response.is_success:
        body = (await response.aread()).decode(errors="replace")
        print(json.dumps({"refused": response.status_code, "body": body[:400]}), flush=True)


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        system = "Tools: " + " ".join(sorted(RUN))
        sums = json.loads(os.environ["SUMS"])
        for prompt, answer in itertools.takewhile(_goes_on, itertools.cycle(sums)) if UNTIL else sums:
            yield SumTask(Sum(prompt=prompt, system_prompt=system, answer=answer))


class Calls(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *_: Any, **__: Any
    ) -> ProgramResult:
        data = trace.task.data
        messages: list[Any] = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        http = DefaultAsyncHttpxClient(event_hooks={"response": [refused]}, timeout=300)
        retries = 1000 if UNTIL else 0
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=retries, http_client=http) as client:
            for _turn in range(4):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=40)
                text = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                found = CALL.search(text)
                if found is None:
                    break
                call = json.loads(found[1])
                result = RUN[call["name"]](*call["arguments"].values())
                messages.append({"role": "tool", "tool_call_id": f"call_{_turn}", "content": str(result)})
        return ProgramResult(0, "", "")


__all__ = ["Calls", "Sums"]
