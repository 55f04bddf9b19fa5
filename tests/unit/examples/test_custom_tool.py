"""The example works as it says: named in the configuration, it is offered to the model and called."""

from __future__ import annotations

from pathlib import Path

from sluice.pipeline.config import load_config
from sluice.producers.agents.tools import load_tools

SETTING = "rollout_server.tools=[calculator, 'examples.custom_tool:days']"


async def test_a_tool_by_import_path_is_offered_and_called() -> None:
    tools = load_tools(load_config(None, [SETTING], {}).rollout_server)
    offered = {one["function"]["name"]: one["function"] for one in tools.schemas()}
    assert list(offered) == ["add", "subtract", "multiply", "divide", "days"]
    assert offered["days"]["parameters"]["properties"]["last"]["description"] == "A date such as 2026-11-21."
    arguments = ('{"first": "2026-11-21", "last": "2026-12-24"}', '{"first": "today", "last": "2026-12-24"}')
    calls = [{"id": str(at), "function": {"name": "days", "arguments": one}} for at, one in enumerate(arguments)]
    right, wrong = [message["content"] for message in await tools.run(calls)]
    assert right == "33"
    assert wrong == "Error: Invalid isoformat string: 'today'; write dates as 2026-11-21"


def test_it_is_as_short_as_the_documentation_says() -> None:
    assert len(Path("examples/custom_tool.py").read_text(encoding="utf-8").splitlines()) < 30
