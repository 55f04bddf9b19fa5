"""Under which heading `sluice --help` lists a command, and in which order.

- A command that is not named here, such as one of another package, is listed under Tools.
"""

from __future__ import annotations

from cyclopts import Group

HEADINGS: dict[str, tuple[str, ...]] = {
    "Start here": ("help", "demo", "doctor"),
    "Run": ("run", "up", "generate"),
    "Look": ("status", "top", "dashboard", "dlq", "audit"),
    "Roles, one process each": (
        "produce", "worker", "consume", "train", "score", "gateway", "rollout-server", "broker",
    ),
    "Tools": ("config", "rollout", "guard", "export", "bench", "env", "completion"),
}  # fmt: skip

_LAST = "Tools"
OPTIONS = Group("Options", sort_key=len(HEADINGS))
_GROUPS = {heading: Group(heading, sort_key=place) for place, heading in enumerate(HEADINGS)}


def heading_of(command: str) -> tuple[Group, int]:
    """The group of a command, and its place in there."""
    for heading, commands in HEADINGS.items():
        if command in commands:
            return _GROUPS[heading], commands.index(command)
    return _GROUPS[_LAST], len(HEADINGS[_LAST])
