"""A model and its tools on one's own terminal: the real agent loop, with the trainer's side in this process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any

import msgspec
from pydantic import ValidationError

from pipeline.config.types import Config
from pipeline.errors import ConfigError
from pipeline.prompts.turn_tokens import Renderer
from pipeline.terminal import Console
from pipeline.wire.messages import Message
from producers.gateway.tool_calls import load_tool_parser
from producers.gateway.turns import Plan
from producers.rollout.app_state import app_state
from producers.rollout.executor import Execution
from producers.rollout.schemas import CompletionsRequest, CompletionsResponse, RolloutRequest, RolloutStatus
from producers.rollout.try_trainer import Engine, LocalTrainer
from producers.rollout.try_view import HELP, View
from producers.tokenizer import load_policy_tokenizer

GROUP = "sluice.engines"


@dataclass(frozen=True, slots=True)
class TryOptions:
    """Of the whole conversation."""

    system: str | None = None
    temperature: float = 1.0
    max_tokens: int = 512
    max_turns: int = 10
    seed: int = 0


class Trial:
    """A loaded model and a conversation, for the length of a `with` block; not inside a running event loop."""

    def __init__(self, config: Config, options: TryOptions, console: Console | None = None) -> None:
        own = msgspec.structs.replace(config.rollout_server, tokenizers={})  # the model's
        self._config, self._options = msgspec.structs.replace(config, rollout_server=own), options
        self._view = View(console or Console())
        self._renderer: Renderer = load_policy_tokenizer(config.model)
        self._parser = load_tool_parser(config.gateway.tool_parser)
        self._runner, self._scope = asyncio.Runner(), AsyncExitStack()
        self._trainer: LocalTrainer | None = None
        self._reset()

    def __enter__(self) -> Trial:
        try:
            self._runner.run(self._open())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def say(self, text: str) -> bool:
        """One message, and the rollout that it starts; whether it completed. A failed one changes nothing."""
        return self._runner.run(self._say(text))

    def converse(self) -> None:
        """Lines of standard input until it ends."""
        self._view.note("/help lists the commands; Ctrl-D ends")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.say(line)

    def _command(self, line: str) -> None:
        if line == "/tools":
            self._view.tools(self._state.tools.schemas())
        elif line == "/tokens":
            self._view.tokens(self._trainer.turns if self._trainer else (), self._renderer.tokenizer)
        elif line == "/reset":
            self._reset()
            self._view.note("forgotten")
        else:
            self._view.note(HELP)

    async def _open(self) -> None:
        self._state = await self._scope.enter_async_context(app_state(self._config))
        if not _shows(self._renderer, self._state.tools.schemas()):
            self._view.note("the chat template does not show the tools: the model is not told of them")
        opened = _open_engine()(self._config.model, self._config.worker)
        self._engine: Engine = await self._scope.enter_async_context(opened)

    async def _say(self, text: str) -> bool:
        messages = [*self._messages, {"role": "user", "content": text}]
        options = self._options
        try:
            request = RolloutRequest.model_validate(
                {
                    "rollout_id": f"try-{secrets.token_hex(8)}",
                    "server_url": "http://in.this.process",  # never asked
                    "messages": messages,
                    "sampling_params": {"temperature": options.temperature, "max_tokens": options.max_tokens},
                    "tokenizer_name": "policy",
                    "max_turns": options.max_turns,
                }
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}; correct the option") from error
        self._shown = len(messages)
        self._trainer = LocalTrainer(self._engine, self._renderer, self._parser, options.seed, self._show)
        answer = await Execution(request, self._state, self._trainer).run()
        self._view.end(answer)
        if answer.status is not RolloutStatus.COMPLETED:
            return False
        self._messages = [one.plain() for one in answer.final_messages]
        return True

    def _show(self, call: CompletionsRequest, plan: Plan, reply: CompletionsResponse) -> None:
        messages = [one.plain() for one in call.messages]
        new = messages if plan.parent < 0 else messages[self._shown :]
        self._view.added(new, plan, call.response_mask)
        self._shown = len(messages) + 1  # and the reply
        self._view.turn(plan.depth + 1, reply)

    def _reset(self) -> None:
        system = self._options.system
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._trainer = None

    def _close(self) -> None:
        try:
            self._runner.run(self._scope.aclose())
        finally:
            self._runner.close()


def _shows(renderer: Renderer, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the tools are in what the model reads."""
    said: list[Message] = [{"role": "user", "content": "?"}]
    told, untold = (replace(renderer, options=replace(renderer.options, tools=one)) for one in (tools, ()))
    return not tools or told.prompt(said) != untold.prompt(said)


def _open_engine() -> Any:
    """Producers know no worker: engines are found by name. Raises ConfigError."""
    found = entry_points(group=GROUP, name="local")
    if not found:
        raise ConfigError(f"no engine is installed ({GROUP}: local); install the project again")
    return next(iter(found)).load()
