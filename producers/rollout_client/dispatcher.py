"""The rollouts in flight: each is answered and finished, dropped with a reason, or left open on stop.

- At most `rollout.max_concurrent` requests at a time; each has `rollout.timeout_s`, including its finish.
- A rollout is requested again after a restart; rollout servers and the gateway know it by its id.
- A broker that lost its newest writes (a power loss) may have lost the end of a rollout, which is then open, and nobody
  is at work on it: it is requested again. If it lost turns too, the gateway refuses the end, and it is played again.
- An answer with status ERROR is data: the rollout is finished as ERROR, and the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote
from zlib import crc32

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.rollouts import RolloutHead, Rollouts
from sluice.pipeline.run.role import Role
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.waits import WaitKind
from sluice.producers.rollout_client import polling
from sluice.producers.rollout_client.peer import GATEWAY_KEY, Answer, Peer, PeerSilent, Refused, read_answer, tool_names

_LOOK_S = 0.25  # between two checks whether a rollout is closed
_ASK_AFTER_S = 3.0  # then ask its server whether it still knows the rollout
_SEE_S = 10.0  # between two looks for open rollouts that nobody is at work on
_FORGET_S = 5.0
_NO_SUCH_PATH = (404, 405, 501)
_TURNS_LOST = 409  # the gateway's answer to a finish


class _TurnsLost(Refused):
    """The broker lost turns of a rollout whose server says that it is complete."""


class Dispatcher:
    """Owns the tasks of the rollouts in flight; they run in the caller's `tasks`."""

    def __init__(self, role: Role, rollouts: Rollouts, server: Peer, gateway: Peer, tasks: asyncio.TaskGroup) -> None:
        self._role, self._rollouts, self._server, self._gateway = role, rollouts, server, gateway
        self._tasks, self._config = tasks, role.config.rollout
        self._slots = asyncio.Semaphore(self._config.max_concurrent)
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._answered = self._failed = self._llm_calls = 0

    async def wait_for_peers(self) -> bool:
        """Wait until both peers are up; False when asked to stop. Raises DeadlineExceeded, ConfigError."""
        polled = self._config.protocol == "polling"
        found = await self._wait_for(self._server, "/health" if polled else "/tools")
        if found is None or await self._wait_for(self._gateway, "/health") is None:
            return False
        tools = {} if polled else {"tools": tool_names(found)}
        get_logger().info("connected to the rollout server", url=self._server.url, **tools)
        self._role.status.waiting(None)
        return True

    def ask(self, heads: Iterable[RolloutHead], *, again: bool = False) -> None:
        """Post these as slots become free. Skips those in flight and those someone else requested.

        `again`: an earlier producer may have posted them.
        """
        for head in heads:
            if head.request and head.rollout_id not in self._in_flight:
                task = self._tasks.create_task(self._one(head, again))
                self._in_flight[head.rollout_id] = task
                task.add_done_callback(lambda _, rollout_id=head.rollout_id: self._in_flight.pop(rollout_id))
        self._tell()

    async def ask_lost(self) -> bool:
        """Request what is open and not in flight: an earlier producer's, or the broker lost its end.

        Returns whether anything is in flight then.
        """
        lost = [head for head in await self._rollouts.still_open(self._in_flight) if head.request]
        self.ask(lost, again=True)
        return bool(self._in_flight)

    def look_for_lost(self) -> None:
        """Do so every few seconds, until `leave`."""
        self._looking = self._tasks.create_task(self._look())

    async def fewer_than(self, count: int) -> bool:
        """Wait until fewer than `count` are in flight; False when asked to stop."""
        asked = asyncio.ensure_future(self._role.stop.wait())
        try:
            while len(self._in_flight) >= count and not asked.done():
                self._role.status.waiting(WaitKind.ROLLOUTS, self._server.url, len(self._in_flight))
                await asyncio.wait({asked, *self._in_flight.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        self._role.status.waiting(None)
        return not self._role.stop.is_set()

    def leave(self) -> None:
        """Stop requesting; open rollouts stay open for the next start."""
        if self._looking is not None:
            self._looking.cancel()
        for task in self._in_flight.values():
            task.cancel()

    async def _look(self) -> None:
        while await self._role.nap(_SEE_S):
            await self.ask_lost()

    async def _one(self, head: RolloutHead, again: bool) -> None:
        async with self._slots:
            until = asyncio.get_running_loop().time() + self._config.timeout_s
            try:
                if self._config.protocol != "async":
                    self._count(head, await self._played(head, until, again))
                else:
                    await self._init(head, until)
                    await self._closed(head, until)
                    self._answered += 1
            except (PeerSilent, Refused) as error:
                reason = "turns_lost" if isinstance(error, _TurnsLost) else "rollout_error"
                if await self._rollouts.drop(head.rollout_id, reason, str(error)) == "ok":
                    self._failed += 1
                    get_logger().warning("rollout dropped", rollout_id=head.rollout_id, cause=str(error))
        self._tell()

    async def _played(self, head: RolloutHead, until: float, again: bool) -> Answer:
        """Its answer, once it is closed."""
        try:
            answer = await self._answer(head, until, again)
            await self._finish(head, answer, until)
        except _TurnsLost as error:
            get_logger().warning("the rollout is played again", rollout_id=head.rollout_id, cause=str(error))
            await self._forget(head)
            answer = await self._answer(head, until, again=True)
            await self._finish(head, answer, until)
        return answer

    async def _answer(self, head: RolloutHead, until: float, again: bool) -> Answer:
        if self._config.protocol == "sync":
            return read_answer(await self._post("/rollout", head, until), head.rollout_id)
        url = called_back_at(self._role.config, head.rollout_id)
        with _addressed():
            return await polling.answered(self._server, head, url, again=again, until=until)

    async def _finish(self, head: RolloutHead, answer: Answer, until: float) -> None:
        """Close it; our own server has already done so, and the gateway then repeats its answer."""
        path = f"/v1/rollout/{quote(head.rollout_id, safe=':')}/finish"
        body = {"final_status": answer.status, "reward": answer.reward, "num_turns": answer.num_turns}
        try:
            await self._gateway.call("POST", path, body, until=until)
        except Refused as error:
            if error.status == _TURNS_LOST:
                raise _TurnsLost(str(error), error.status) from error
            raise

    async def _forget(self, head: RolloutHead) -> None:
        """Its server's kept answer, if it keeps one and has this route."""
        if self._config.protocol != "polling":
            until = asyncio.get_running_loop().time() + _FORGET_S
            with contextlib.suppress(PeerSilent, Refused):
                await self._server.call("POST", "/rollout/forget", {"rollout_id": head.rollout_id}, until=until)

    async def _init(self, head: RolloutHead, until: float) -> None:
        await self._post("/v1/rollout/init", head, until)

    async def _closed(self, head: RolloutHead, until: float) -> None:
        """Wait until the gateway has closed it. If its server forgot it, or the answer never came, ask again.

        What a repeat doesn't close has lost turns, or its end after it was delivered: its server has to play it again.
        """
        loop = asyncio.get_running_loop()
        due, asked_again = loop.time() + _ASK_AFTER_S, False
        while await self._rollouts.is_open(head.rollout_id):
            if loop.time() > until:
                raise PeerSilent(f"{self._server.url} never completed it within {self._config.timeout_s:g} s")
            if loop.time() > due:
                if not await self._is_at_work(head, until):
                    if asked_again:
                        await self._forget(head)
                    await self._init(head, until)
                    asked_again = True
                due = loop.time() + _ASK_AFTER_S
            await asyncio.sleep(_LOOK_S)

    async def _is_at_work(self, head: RolloutHead, until: float) -> bool:
        path = f"/rollout/{quote(head.rollout_id, safe=':')}/status"
        soon = min(until, asyncio.get_running_loop().time() + _ASK_AFTER_S)
        try:
            found = read_json(await self._server.call("GET", path, until=soon), dict[str, Any], "it")
        except (PeerSilent, Refused, MessageError):
            return True  # it is down, or doesn't have this route
        return found.get("status") in (None, "queued", "running")

    async def _post(self, path: str, head: RolloutHead, until: float) -> bytes:
        key = os.environ.get(GATEWAY_KEY)
        server_url = called_back_at(self._role.config, head.rollout_id)
        body = {**head.request, "server_url": server_url, "callback_api_key": key or None}
        with _addressed():
            return await self._server.call("POST", path, body, until=until)

    async def _wait_for(self, peer: Peer, path: str) -> bytes | None:
        until, said = asyncio.get_running_loop().time() + self._config.timeout_s, False
        cause = f"{peer.name} at {peer.url} (GET {path})"
        while (found := await peer.is_there(path)) is None:
            if not said:
                get_logger().info(f"waiting for {peer.name}", url=peer.url, at_most_s=self._config.timeout_s)
            said = True
            self._role.status.waiting(WaitKind.PEER, cause)
            if asyncio.get_running_loop().time() > until:
                raise DeadlineExceeded(f"{self._role.name}: waited {self._config.timeout_s:g} s for {cause}")
            if not await self._role.nap(_LOOK_S):
                return None
        return found

    def _count(self, head: RolloutHead, answer: Answer) -> None:
        self._answered += 1
        self._llm_calls += answer.metrics.num_llm_calls
        if answer.status == "ERROR":
            self._failed += 1
            category = (answer.extra_fields or {}).get("error_category")
            get_logger().warning(
                "rollout failed", rollout_id=head.rollout_id, category=category, message=answer.error_message
            )

    def _tell(self) -> None:
        self._role.status.fact(
            rollouts=len(self._in_flight), answered=self._answered, failed=self._failed, llm_calls=self._llm_calls
        )


@contextlib.contextmanager
def _addressed() -> Iterator[None]:
    """A server without the path is another one than the configuration says: ConfigError."""
    try:
        yield
    except Refused as error:
        if error.status in _NO_SUCH_PATH:
            raise ConfigError(f"{error}; check rollout.url and rollout.protocol") from error
        raise


def gateway_urls(config: Config) -> list[str]:
    """At least one."""
    if config.rollout.gateway_url:
        return [config.rollout.gateway_url.rstrip("/")]
    first = config.gateway.port
    return [f"http://127.0.0.1:{port}" for port in range(first, first + max(1, config.gateway.count))]


def called_back_at(config: Config, rollout_id: str) -> str:
    """Always the same gateway for a rollout: the address is part of the request."""
    urls = gateway_urls(config)
    return urls[crc32(rollout_id.encode()) % len(urls)]
