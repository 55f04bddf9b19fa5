r"""An environment behind OpenEnv's server, played by its own client. Tried with openenv 0.10.0.

    python -m venv openenv && openenv/bin/pip install openenv==0.10.0
    OPENENV_URL=http://127.0.0.1:8000 OPENENV_PYTHON=openenv/bin/python \
      sluice run -c configs/agents.yaml --model DIR --data rows.jsonl \
      --set rollout_server.environment=sluice.examples.openenv_environment:OpenEnv \
      --set rollout_matching.task=reward

A row of rows.jsonl; `reset` is optional, and goes to the server's reset:

    {"id": 1, "messages": [{"role": "system", "content": "Play."}], "metadata": {"reset": {"seed": 7}}}

openenv pins packages that ours may have in other versions, so its client runs in a process of an environment with it.
A rollout has one session of the server, which must allow as many (`max_concurrent_envs`) as rollouts are in flight.
"""

from __future__ import annotations

import json
import os
from typing import Any


class OpenEnv:
    """One session. Give a class of your own other `action` and `text` where the server's models have more fields."""

    own_process = os.environ.get("OPENENV_PYTHON", False)  # not set: in the rollout server, which then needs openenv
    url = os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")

    def __init__(self) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=self.url).sync()  # its loop runs on while the model writes
        self._episode: Any = None

    def action(self, content: str) -> dict[str, Any]:
        """The server's action for what the model wrote."""
        return {"message": content}

    def text(self, observation: dict[str, Any]) -> str:
        """What the model reads of an observation."""
        return json.dumps(observation)

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The row's messages, and what the server begins with."""
        asked = {"episode_id": row["rollout_id"], **row["metadata"].get("reset", {})}
        found = self._client.reset(**asked)
        self._episode = self._client.state().get("episode_id")
        return [*row["messages"], {"role": "user", "content": self.text(found.observation)}]

    def step(self, action: dict[str, Any], state: dict[str, Any]) -> tuple[str, float | None, bool]:
        """Observation, reward and done as the server says them."""
        found = self._client.step(self.action(str(action["content"])))
        if self._client.state().get("episode_id") != self._episode:  # a lost connection is made anew without a word
            raise ConnectionError("the server lost the episode")
        return self.text(found.observation), found.reward, found.done

    def close(self) -> None:
        """Ends the session."""
        self._client.close()
