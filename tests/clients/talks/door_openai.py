"""Rollouts of the openai package at gateways that die, until a file appears: door_openai.py FILE AGENTS URL…

- Prompts and truths are those of SUMS, as for sums.py. Every other agent streams.
- Its own retries bring every call through; only a stream that breaks off is repeated here, unchanged.
- Each refusal, each repeated call, each cut stream and each finished rollout is a line of JSON.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

RUN = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in RUN]
TOOL_S = 0.1  # that a call of a tool takes

stop, agents, *gateways = sys.argv[1:]


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


async def refused(response: Any) -> None:
    if not response.is_success:
        body = (await response.aread()).decode(errors="replace")
        headers = {
            name: response.headers[name] for name in ("retry-after", "x-should-retry") if name in response.headers
        }
        say(refused=response.status_code, headers=headers, body=body[:400])


async def again(request: Any) -> None:
    if int(request.headers.get("x-stainless-retry-count", 0)):
        say(again=request.url.path)


async def whole(client: AsyncOpenAI, asked: Any) -> Any:
    return await client.chat.completions.create(**asked)


async def streamed(client: AsyncOpenAI, asked: Any) -> Any:
    while True:
        try:
            more: dict[str, Any] = {}
            async with client.chat.completions.stream(**asked) as stream:
                async for event in stream:
                    if event.type == "chunk" and "token_ids" in (event.chunk.model_extra or {}):
                        more = event.chunk.model_extra or {}
                answer = await stream.get_final_completion()
            answer.token_ids = more["token_ids"]  # pyright: ignore[reportAttributeAccessIssue]
            return answer
        except APIStatusError:
            raise  # its own retries have given up
        except APIError as error:  # the connection, or an event of the stream
            say(cut=type(error).__name__, body=str(getattr(error, "body", None)))
            await asyncio.sleep(0.5)


async def rollout(client: AsyncOpenAI, rollout_id: str, prompt: str, truth: str, turn: Any) -> None:
    await client.post("/rollouts", body={"rollout_id": rollout_id, "truth": truth}, cast_to=object)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    sampled: list[int] = []
    while True:
        asked = {"model": "default", "messages": messages, "tools": TOOLS, "extra_body": {"rollout_id": rollout_id}}
        answer = await turn(client, asked)
        sampled += answer.token_ids
        message = answer.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            break
        await asyncio.sleep(TOOL_S)
        for call in message.tool_calls:
            result = RUN[call.function.name](*json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    ended = {"final_status": "COMPLETED", "reward": float(message.content == truth)}
    await client.post(f"/rollout/{rollout_id}/finish", body=ended, cast_to=object)
    say(rollout=rollout_id, sampled=sampled)


async def agent(place: int) -> None:
    hooks: Any = {"request": [again], "response": [refused]}
    async with AsyncOpenAI(
        base_url=f"{gateways[place % len(gateways)]}/v1", api_key="none", max_retries=1000, timeout=300,
        http_client=DefaultAsyncHttpxClient(event_hooks=hooks),
    ) as client:  # fmt: skip
        sums = itertools.cycle(json.loads(os.environ["SUMS"]))
        for number, (prompt, truth) in enumerate(sums):
            if Path(stop).exists():
                return
            await rollout(client, f"openai-{place}-{number}", prompt, truth, streamed if place % 2 else whole)


async def main() -> None:
    await asyncio.gather(*map(agent, range(int(agents))))


asyncio.run(main())
