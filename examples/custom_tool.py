r"""A tool of your own, by import path:

    sluice rollout try --model DIR --interactive \
      --set rollout_server.tools='[calculator, "sluice.examples.custom_tool:days"]'

The model is told the name, the docstring and the parameters. What fails is told to the model as "Error: …".
"""

from __future__ import annotations

from datetime import date
from typing import Annotated

from pydantic import Field

from sluice.producers.agents.tools import ToolError, tool

Day = Annotated[str, Field(description="A date such as 2026-11-21.")]


@tool
async def days(first: Day, last: Day) -> int:
    """How many days there are from the first date to the last one."""
    try:
        return (date.fromisoformat(last) - date.fromisoformat(first)).days
    except ValueError as error:
        raise ToolError(f"{error}; write dates as 2026-11-21") from error
