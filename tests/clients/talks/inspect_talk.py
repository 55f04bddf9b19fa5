"""An evaluation of inspect_ai with tools; it knows of rollouts by its base URL. Its score must be right, too."""

import json
import sys
from tempfile import TemporaryDirectory

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

base_url, rollout_id, prompt = sys.argv[1:]


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> int:
        """a + b

        Args:
            a: first
            b: second
        """
        return a + b

    return execute


@tool
def subtract() -> Tool:
    async def execute(a: int, b: int) -> int:
        """a - b

        Args:
            a: first
            b: second
        """
        return a - b

    return execute


@tool
def multiply() -> Tool:
    async def execute(a: int, b: int) -> int:
        """a * b

        Args:
            a: first
            b: second
        """
        return a * b

    return execute


@tool
def divide() -> Tool:
    async def execute(a: int, b: int) -> int:
        """a // b

        Args:
            a: first
            b: second
        """
        return a // b

    return execute


gateway = base_url.removesuffix("/v1")
config = GenerateConfig(temperature=0.0, max_tokens=40, max_retries=0)
model = get_model(
    "openai-api/sluice/policy", base_url=f"{gateway}/rollouts/{rollout_id}/v1", api_key="none", config=config
)
task = Task(
    dataset=[Sample(input=prompt, target="none")],
    solver=[use_tools(add(), subtract(), multiply(), divide()), generate()],
    scorer=match(),
)
with TemporaryDirectory() as logs:
    [log] = evaluate(task, model=model, log_dir=logs, display="none")
    assert log.status == "success", log.error
    print(json.dumps({"answer": log.samples[0].output.completion}))
