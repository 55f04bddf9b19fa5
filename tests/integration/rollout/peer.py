"""A trainer that is not ours: an HTTP server that answers from a script, with a real tokenizer's tokens.

- It tokenises the messages anew for every call, and samples what the script says.
- A script's entry is what the model says, or a function that answers the request itself (slow, lying, broken).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice.pipeline.prompts.chat_template import ChatTemplateOptions, conversation, render


@dataclass
class Says:
    """A model's turn; `calls` are (id, tool, arguments)."""

    content: str | None = ""
    calls: Sequence[tuple[str, str, Any]] = ()
    sampled: str | None = None  # the text of its tokens; None: as the template renders the message
    finish_reason: str = "stop"

    def message(self) -> dict[str, Any]:
        made = [
            {"id": name, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
            for name, tool, arguments in self.calls
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": made} if made else {})


Answer = Callable[["ScriptedTrainer", dict[str, Any]], Awaitable[web.StreamResponse]]


async def asleep(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class ScriptedTrainer:
    """`script` holds one entry per call; the last one is for all that follow."""

    tokenizer: Any
    script: Sequence[Says | Answer]
    shows_tools: bool = True
    completed_with: list[int] = field(default_factory=list)  # statuses of the callbacks before they are taken
    finish_with: int = 200
    url: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    finished: list[tuple[str, str]] = field(default_factory=list)  # rollout_id, final_status
    rewards: list[float | None] = field(default_factory=list)  # of those that finished
    num_turns: list[int | None] = field(default_factory=list)  # of those
    completed: list[bytes] = field(default_factory=list)

    def honest(self, says: Says, call: dict[str, Any]) -> dict[str, Any]:
        """The reply of a trainer that does its work."""
        prompt, token_ids = self.prompt(call), self.sampled(says, call)
        return {
            "id": "c-1",
            "object": "chat.completion",
            "created": 1,
            "model": "default",
            "choices": [{"index": 0, "message": says.message(), "finish_reason": says.finish_reason}],
            "token_ids": token_ids,
            "logprobs": [-0.5] * len(token_ids),
            "prompt_token_ids": prompt,
        }

    def prompt(self, call: dict[str, Any]) -> list[int]:
        options = ChatTemplateOptions(tools=(call["tools"] or ()) if self.shows_tools else ())
        return render(self.tokenizer, conversation(call["messages"]), options)

    def sampled(self, says: Says, call: dict[str, Any]) -> list[int]:
        if says.sampled is not None:
            return self.tokenizer(says.sampled, add_special_tokens=False)["input_ids"]
        options = ChatTemplateOptions(
            add_generation_prompt=False, tools=(call["tools"] or ()) if self.shows_tools else ()
        )
        whole = render(self.tokenizer, conversation([*call["messages"], says.message()]), options)
        turn = whole[len(self.prompt(call)) :]
        eos = self.tokenizer.eos_token_id
        return turn[: turn.index(eos) + 1] if eos in turn else turn

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        call = await request.json()
        self.calls.append(call)
        self.keys.append(request.headers.get("Authorization"))
        entry = self.script[min(len(self.calls), len(self.script)) - 1]
        if isinstance(entry, Says):
            return web.json_response(self.honest(entry, call))
        return await entry(self, call)

    async def _finish(self, request: web.Request) -> web.Response:
        said = await request.json()
        self.finished.append((request.match_info["id"], said["final_status"]))
        self.rewards.append(said.get("reward"))
        self.num_turns.append(said.get("num_turns"))
        return web.Response(status=self.finish_with)

    async def _completed(self, request: web.Request) -> web.Response:
        self.completed.append(await request.read())
        return web.Response(status=self.completed_with.pop(0) if self.completed_with else 200)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedTrainer]:
        """Serve on a free port of this host."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/rollout/{id}/finish", self._finish)
        app.router.add_post("/v1/rollout/completed", self._completed)
        async with TestServer(app, host="127.0.0.1") as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self
