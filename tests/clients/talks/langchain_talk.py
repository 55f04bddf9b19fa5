"""LangChain's chat model with bound tools, in a loop that its user writes."""

import json
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base_url, rollout_id, prompt = sys.argv[1:]


@tool
def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


@tool
def subtract(a: int, b: int) -> int:
    """a - b"""
    return a - b


@tool
def multiply(a: int, b: int) -> int:
    """a * b"""
    return a * b


@tool
def divide(a: int, b: int) -> int:
    """a // b"""
    return a // b


tools = {one.name: one for one in (add, subtract, multiply, divide)}
model = ChatOpenAI(
    model="policy", base_url=base_url, api_key="none", temperature=0.0, max_completion_tokens=40, max_retries=0,
    timeout=60, default_headers={"X-Rollout-Id": rollout_id},
).bind_tools(list(tools.values()))  # fmt: skip
messages = [HumanMessage(prompt)]
for _ in range(4):
    messages.append(model.invoke(messages))
    if not messages[-1].tool_calls:
        break
    messages += [tools[call["name"]].invoke(call) for call in messages[-1].tool_calls]
print(json.dumps({"answer": messages[-1].content}))
