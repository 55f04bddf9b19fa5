"""An agent of the openai-agents package: its loop, its tools; it knows of rollouts by one header."""

import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

base_url, rollout_id, prompt = sys.argv[1:]
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


@function_tool
def subtract(a: int, b: int) -> int:
    """a - b"""
    return a - b


@function_tool
def multiply(a: int, b: int) -> int:
    """a * b"""
    return a * b


@function_tool
def divide(a: int, b: int) -> int:
    """a // b"""
    return a // b


client = AsyncOpenAI(
    base_url=base_url, api_key="none", default_headers={"X-Rollout-Id": rollout_id}, max_retries=0, timeout=60
)
agent = Agent(
    name="sums",
    model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
    model_settings=ModelSettings(temperature=0.0, max_tokens=40),
    tools=[add, subtract, multiply, divide],
)
print(json.dumps({"answer": Runner.run_sync(agent, prompt, max_turns=4).final_output}))
