"""Redis Cluster: everything that belongs to a run is in one slot, so that slot's primary serves the run.

- `broker.url` names some nodes; each is asked for the slot's primary until one answers. Every new connection asks
  again, so connections follow the slot when it moves or its primary fails over.
- Addresses are those the nodes announce; user, password and TLS come from `broker.url`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from sluice.pipeline.wire.keys import Keys

Address = tuple[str, int]


class SlotPrimary:
    """Finds the primary of a run's slot; `server` holds a node's connection arguments for redis.Redis."""

    def __init__(self, nodes: Sequence[Address], run: str, server: dict[str, Any], timeout_s: float) -> None:
        self.slot: int = key_slot(Keys(run).prefix.encode())
        self._nodes, self._timeout_s = list(nodes), timeout_s
        self._server = {name: value for name, value in server.items() if name != "db"}

    def find(self) -> Address:
        """The primary's current address; raises redis.ConnectionError if no node knows it."""
        problems: list[str] = []
        for node in list(self._nodes):
            try:
                ranges = self._ask(node)
            except (redis.RedisError, OSError) as error:
                problems.append(f"{node[0]}:{node[1]}: {error}")
                continue
            for first, last, primary, *_ in ranges:
                if first <= self.slot <= last:
                    self._learn(ranges, node)
                    return _address(primary, node)
            problems.append(f"{node[0]}:{node[1]}: no server for slot {self.slot}")
        raise redis.ConnectionError(f"no cluster node knows a primary for slot {self.slot} ({'; '.join(problems)})")

    def _ask(self, node: Address) -> list[Any]:
        limits: dict[str, Any] = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        with redis.Redis(*node, retry=Retry(NoBackoff(), 0), **limits, **self._server) as client:
            return cast("list[Any]", cast(Any, client).execute_command("CLUSTER SLOTS"))

    def _learn(self, ranges: list[Any], asked: Address) -> None:
        """Remember nodes that the URL doesn't name, so they can be asked too."""
        for _, _, *nodes in ranges:
            self._nodes += [found for node in nodes if (found := _address(node, asked)) not in self._nodes]


def _address(node: Any, asked: Address) -> Address:
    """An empty host means the node that was asked."""
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return (host or asked[0]), int(node[1])
