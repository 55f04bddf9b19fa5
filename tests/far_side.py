"""A rollout server that is not ours, and the gateway's two routes that a producer calls, each on a port of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from sluice.pipeline.queue.rollouts import Rollouts
from sluice.pipeline.wire.keys import Keys
from tests.factories import sequence_result

Body = dict[str, Any]
Script = Callable[[int, Body], Awaitable[web.Response] | web.Response]  # (how often this id was asked for, request)


def completed(_: int, body: Body) -> web.Response:
    """The script of a server that does what it should."""
    return answer(body)


def answer(body: Body, status: str = "COMPLETED", **more: Any) -> web.Response:
    """A RolloutResponse."""
    return web.json_response(
        {"rollout_id": body["rollout_id"], "status": status, "metrics": {"num_llm_calls": 2}, **more}
    )


class FarSide:
    """A scripted rollout server; `finish` closes rollouts in the real broker as the gateway does."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self.rollouts = Rollouts(client, keys, partitions=1, ttl_s=60)
        self.script: Script = completed
        self.forgets = 0  # how often it loses a rollout of the asynchronous protocol
        self.posted: list[Body] = []
        self.headers: list[tuple[str, str | None]] = []
        self.finished: list[tuple[str, str]] = []
        self.rewards: list[float | None] = []  # of these, as they came
        self.num_turns: list[int | None] = []  # of these
        self.keeps_turns = True  # False: its broker has lost some of every rollout
        self.forgotten: list[str] = []
        self.cancelled: list[Body] = []
        self.running = self.most = 0
        self._runners: list[web.AppRunner] = []

    async def start(self, port: int = 0) -> str:
        """The server's address."""
        get, post = web.get("/tools", self._tools), web.post("/rollout", self._rollout)
        more = [web.post("/v1/rollout/init", self._init), web.get("/rollout/{id}/status", self._status)]
        more += [web.get("/health", self._health), web.get("/rollout/{id}/result", self._result)]
        more += [web.post("/rollout/forget", self._forget)]
        return await self._serve([get, post, *more, web.post("/rollout/cancel", self._cancel)], port)

    async def start_gateway(self) -> str:
        """The gateway's address."""
        routes = [web.get("/health", self._health), web.post("/v1/rollout/{id}/finish", self._finish)]
        return await self._serve(routes, 0)

    async def stop(self) -> None:
        """Both."""
        for runner in self._runners:
            await runner.cleanup()
        self._runners = []

    async def _serve(self, routes: list[web.RouteDef], port: int) -> str:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def _note(self, request: web.Request) -> None:
        self.headers.append((request.path, request.headers.get("Authorization")))

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _tools(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.json_response({"tools": [{"type": "function", "function": {"name": "add"}}]})

    async def _rollout(self, request: web.Request) -> web.Response:
        self._note(request)
        body = await request.json()
        self.posted.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            done = self.script(self.asked(body["rollout_id"]), body)
            return done if isinstance(done, web.Response) else await done
        finally:
            self.running -= 1

    async def _result(self, request: web.Request) -> web.Response:
        """Of the protocol in which it is asked for: what `script` gave, if the lease is right; before, it runs."""
        name = request.match_info["id"]
        if request.headers.get("X-Osmosis-Rollout-Lease") != f"lease of {name}":
            return web.Response(status=403)
        done = self.script(-1, {"rollout_id": name})
        return done if isinstance(done, web.Response) else await done

    async def _cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append(await request.json())
        return web.json_response({"dispositions": {}})

    async def _forget(self, request: web.Request) -> web.Response:
        self.forgotten.append((await request.json())["rollout_id"])
        return web.Response(status=404)  # it has no such route

    async def _init(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.posted.append(body)
        if self.asked(body["rollout_id"]) > self.forgets:
            await self.close(body["rollout_id"], "COMPLETED")
        return web.json_response({"rollout_id": body["rollout_id"], "tools": []}, status=202)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"rollout_id": request.match_info["id"], "status": "unknown"})

    async def _finish(self, request: web.Request) -> web.Response:
        self._note(request)
        body = await request.json()
        status = body["final_status"]
        self.finished.append((request.match_info["id"], status))
        self.rewards.append(body["reward"])
        self.num_turns.append(body["num_turns"])
        if not self.keeps_turns:
            return web.Response(status=409, text="the broker lost the newest")
        return web.json_response({"state": await self.close(request.match_info["id"], status)})

    async def close(self, rollout_id: str, status: str) -> str:
        """Publish or drop it."""
        found = await self.rollouts.load(rollout_id)
        assert found is not None
        head = found.head
        if status == "ERROR":
            return await self.rollouts.drop(rollout_id, "rollout_error")
        result = sequence_result(head.group_id, head.index, head.group_size, rollout_id=rollout_id)
        return await self.rollouts.publish(rollout_id, [result], 0)

    def asked(self, rollout_id: str) -> int:
        """How often."""
        return sum(body["rollout_id"] == rollout_id for body in self.posted)
