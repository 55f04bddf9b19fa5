"""Tools of the agent loop.

names in the configuration ──▶ load_tools ──▶ ToolBox ──▶ schemas for the model
tool_server_url ──▶ mcp_tools ──▶ ToolBox.plus ─┘    └──▶ run(calls) ──▶ tool messages
"""

from sluice.producers.agents.environment import Rollout
from sluice.producers.agents.tools.function import Tool, ToolError, tool
from sluice.producers.agents.tools.image import ToolImage
from sluice.producers.agents.tools.registry import ToolBox, load_tools

__all__ = ["Rollout", "Tool", "ToolBox", "ToolError", "ToolImage", "load_tools", "tool"]
