"""A rollout server of Osmosis' SDK: an agent with the calculator's tools, and a grader that compares with the label."""

import json
import sys
from typing import Any

import uvicorn
from openai import AsyncOpenAI
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local.backend import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.server.app import create_rollout_server

RUN = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": NUMBERS}} for name in RUN
]


class Sums(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> list[Any]:
        own, messages = get_rollout_context(), list(ctx.prompt)
        assert own is not None
        async with AsyncOpenAI(base_url=own.chat_completions_url, api_key=own.api_key or "none") as client:
            for _ in range(4):
                asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 40}
                answer = await client.chat.completions.create(**asked)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    result = RUN[call.function.name](*(json.loads(call.function.arguments)[name] for name in "ab"))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
                if not message.tool_calls:
                    break
        return messages


class Right(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        assert ctx.sample is not None
        ctx.set_reward(float(ctx.sample.messages[-1].get("content") == ctx.label))


uvicorn.run(create_rollout_server(backend=LocalBackend(workflow=Sums, grader=Right)), port=int(sys.argv[1]), workers=1)
