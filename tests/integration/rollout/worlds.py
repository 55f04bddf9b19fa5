"""Environments of the tests, in a module that a process imports quickly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

closed: list[str] = []
hanging: list[str] = []  # that are in a step which never ends


class Counting:
    """Ends with the third action; the row says how it behaves."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.name, self.wish = row["rollout_id"], row["metadata"].get("wish", "")
        if self.wish == "reset fails":
            raise OSError("no sandbox")
        return [*row["messages"], {"role": "user", "content": "begin"}]

    def step(self, action: dict[str, Any], state: dict[str, Any]) -> tuple[Any, float | None, bool]:
        state["steps"] = state.get("steps", 0) + 1
        if self.wish == "step fails":
            raise ValueError("a secret")
        if self.wish == "no tuple":
            return "only this"  # type: ignore[return-value]
        if self.wish == "nan":
            return "so", float("nan"), False
        if self.wish == "no json":
            return [{"role": "user", "content": "ok", "info": object()}], None, False
        return [{"role": "user", "content": f"after {action['content']}"}], 0.25, state["steps"] == 3

    async def close(self) -> None:
        closed.append(self.name)


class Hanging(Counting):
    """Its steps never end."""

    async def step(self, action: dict[str, Any], state: dict[str, Any]) -> tuple[Any, float | None, bool]:
        hanging.append(self.name)
        await asyncio.Event().wait()
        raise AssertionError


class Apart(Counting):
    """The same in a process of its own; it writes down that it was closed."""

    own_process = True

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.path = row["metadata"]["path"]
        print("noise of the environment")
        return [*await super().reset(row), {"role": "user", "content": f"pid {os.getpid()}"}]

    def step(self, action: dict[str, Any], state: dict[str, Any]) -> tuple[Any, float | None, bool]:
        if self.wish == "dies":
            os._exit(3)
        return super().step(action, state)

    async def close(self) -> None:
        with open(self.path, "a") as file:  # noqa: ASYNC230
            file.write(f"closed {os.getpid()}\n")


class Waiting:
    """In a process of its own; a step lasts until there is a file `go`, and what it starts lasts for ever."""

    own_process = True

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.home = Path(row["metadata"]["home"])
        with (self.home / "alive").open("w") as pipe:
            subprocess.Popen(["sleep", "600"], stdout=pipe)
        return row["messages"]

    def step(self, action: dict[str, Any], state: dict[str, Any]) -> tuple[Any, float | None, bool]:
        (self.home / "begun").touch()
        while not (self.home / "go").exists():
            time.sleep(0.02)
        return "so", None, False

    def close(self) -> None:
        time.sleep(0.2)
        (self.home / "closed").touch()
