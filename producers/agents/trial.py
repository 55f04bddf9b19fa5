"""`sluice rollout try`: a model and its tools in your terminal, with the real agent loop and an in-process model.

- The gateway's own code makes turns, masks and tool calls, so training would see the same.
- A rollout lives as long as its LocalTrainer; nothing is published. Images are kept in a temporary directory.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import msgspec
from pydantic import ValidationError
from rich.panel import Panel
from rich.text import Text

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.images.store import images_of_run
from sluice.pipeline.prompts.admission import media_kind
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.queue.rollouts import Turn
from sluice.pipeline.terminal import Console
from sluice.pipeline.user_modules import installed
from sluice.pipeline.wire.messages import ImageRef, Message, SamplingParams, SequenceResult
from sluice.producers.agents.executor import Execution
from sluice.producers.agents.state import app_state
from sluice.producers.agents.tools.image import ToolImage
from sluice.producers.gateway.answers import chat_completion
from sluice.producers.gateway.images import RequestImages
from sluice.producers.gateway.parsers import ToolParser, assistant_message, load_parser
from sluice.producers.gateway.turns import Plan, plan_turn
from sluice.producers.http.schemas import (
    CompletionsRequest,
    CompletionsResponse,
    RolloutError,
    RolloutRequest,
    RolloutResponse,
    RolloutStatus,
)
from sluice.producers.tokenizer import load_policy_tokenizer

GROUP = "sluice.engines"


@dataclass(frozen=True, slots=True)
class TryOptions:
    """Options of the whole conversation."""

    system: str | None = None
    temperature: float = 1.0
    max_tokens: int = 512
    max_turns: int = 10
    seed: int = 0


class Trial:
    """A loaded model and a conversation, as a `with` block; not inside a running event loop."""

    def __init__(self, config: Config, options: TryOptions, console: Console | None = None) -> None:
        own = msgspec.structs.replace(config.rollout_server, tokenizers={})  # the model's own
        self._kept = tempfile.TemporaryDirectory(prefix="sluice-try-")
        images = msgspec.structs.replace(config.images, store=self._kept.name)
        self._config, self._options = msgspec.structs.replace(config, rollout_server=own, images=images), options
        self._view = View(console or Console())
        self._renderer: Renderer = load_policy_tokenizer(config.model)
        self._parser = load_parser(config.gateway.tool_parser, self._renderer.tokenizer)
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

    def say(self, text: str, images: Sequence[Path] = ()) -> bool:
        """Send one message, its images before the text, and run its rollout; returns whether it completed.

        A failed one changes nothing. Raises RequestError for a file that is no accepted image.
        """
        return self._runner.run(self._say(text, images))

    def converse(self) -> None:
        """Say each line of standard input until it ends."""
        self._view.note("/help lists the commands; Ctrl-D exits")
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
            self._view.note("the chat template does not include the tools: the model does not know them")
        self._images = RequestImages(self._config, model_takes_images=bool(self._renderer.placeholders))
        self._scope.callback(self._images.close)
        opened = installed(GROUP, "local")(self._config.model, self._config.worker, images_of_run(self._config))
        self._engine: Engine = await self._scope.enter_async_context(opened)

    async def _say(self, text: str, images: Sequence[Path]) -> bool:
        limits = self._config.images
        parts = [await asyncio.to_thread(ToolImage(path=one).part, limits, f"--image {one}") for one in images]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [*self._messages, {"role": "user", "content": content}]
        options = self._options
        try:
            request = RolloutRequest.model_validate(
                {
                    "rollout_id": f"try-{secrets.token_hex(8)}",
                    "server_url": "http://in.this.process",  # never called
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
        self._trainer = LocalTrainer(self._engine, self._renderer, self._parser, self._images, options.seed, self._show)
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
            self._kept.cleanup()


def _shows(renderer: Renderer, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the rendered prompt contains the tools."""
    said: list[Message] = [{"role": "user", "content": "?"}]
    told, untold = (replace(renderer, options=replace(renderer.options, tools=one)) for one in (tools, ()))
    return not tools or told.prompt(said) != untold.prompt(said)


class Engine(Protocol):
    """What `sluice.engines` provide: producers don't import workers."""

    async def decode(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int, images: Sequence[ImageRef] = ()
    ) -> SequenceResult:
        """One sequence; the prompt has one placeholder for each image. Raises SluiceError."""
        ...


class LocalTrainer:
    """One rollout; `on_turn` is given each turn as it ends: the call, its tokens, its answer."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        parser: ToolParser,
        images: RequestImages,
        seed: int,
        on_turn: Callable[[CompletionsRequest, Plan, CompletionsResponse], None],
    ) -> None:
        self._engine, self._renderer, self._parser = engine, renderer, parser
        self._images, self._seed, self._on_turn = images, seed, on_turn
        self.turns: list[Turn] = []
        self.held_up: RolloutError | None = None  # nothing here is refused

    async def complete(self, call: CompletionsRequest, *, until: float) -> CompletionsResponse:
        """The model's next turn. Raises RolloutError."""
        try:
            sampling = SamplingParams(
                temperature=call.temperature,
                top_p=call.top_p,
                max_new_tokens=call.max_tokens,
                stop=tuple(call.stop or ()),
            )
            taken = await self._images.of_messages([one.plain() for one in call.messages], until)
            plan = plan_turn(
                self.turns,
                taken.messages,
                call.tools or [],
                sampling=sampling,
                renderer=self._renderer,
                response_mask=call.response_mask,
                images=taken.refs,
            )
            await self._images.store(taken, until)
            seed = self._seed + len(self.turns)
            result = await self._engine.decode(plan.prompt_token_ids, sampling, seed, plan.images)
            message = assistant_message(self._parser(result.text), plan.key)
            answer: dict[str, Any] = chat_completion([result], model=call.model, messages=[message])
            turn = plan.turn(result, message)
        except (SluiceError, ValueError) as error:
            raise RolloutError("trainer_client_error", str(error)) from error
        self.turns.append(turn)
        reply = CompletionsResponse.model_validate(answer)
        self._on_turn(call, plan, reply)
        return reply

    async def finish(
        self, final_status: str, *, until: float, reward: float | None = None, num_turns: int | None = None
    ) -> bool:
        """Nothing is published."""
        del final_status, until
        return True

    async def completed(self, body: bytes, *, until: float) -> None:
        """Nothing to deliver: the answer is already here."""
        del body, until


HELP = """\
/tools   the tools that the model has
/tokens  token ids of the last rollout, with their mask
/reset   forget the conversation
/quit    exit (or Ctrl-D)
Anything else is sent to the model. Each message is a rollout; its prompt is the conversation so far."""


class View:
    """Turns on a terminal; the model's text is shown unchanged and never acted on."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def added(self, messages: Sequence[Message], plan: Plan, mask: Sequence[int] | None) -> None:
        """Show what a call adds: the prompt, or tool results."""
        if plan.parent < 0:
            images = f", {len(plan.images)} images (one token for each here)" if plan.images else ""
            self._line(f"prompt: {len(plan.added.token_ids)} tokens, {len(messages)} messages{images}", "dim")
            return
        for message in messages:
            self._line(f"  {message.get('name', message['role'])} → {_plain(_said(message.get('content')))}", "yellow")
        resync = ", resync: the reply's text renders differently" if plan.added.resynced else ""
        self._line(f"added: {len(plan.added.token_ids)} tokens, response_mask {len(mask or ())} x 0{resync}", "dim")

    def turn(self, number: int, reply: CompletionsResponse) -> None:
        """Show one reply."""
        choice = reply.choices[0]
        body = Text(_plain(choice.message.content or ""))
        for call in choice.message.tool_calls or ():
            body.append(f"\n→ {_plain(call.function.name)}({_plain(call.function.arguments)})", "cyan")
        counts = f"{len(reply.prompt_token_ids)} prompt + {len(reply.token_ids)} sampled tokens, {choice.finish_reason}"
        self._console.print(Panel(body, title=f"turn {number}", subtitle=counts, title_align="left"))

    def end(self, answer: RolloutResponse) -> None:
        """Show how the rollout ended."""
        metrics = answer.metrics
        self._line(
            f"{answer.status}: {answer.finish_reason}; {metrics.num_llm_calls} turns, {metrics.num_tool_calls} tool "
            f"calls, {metrics.response_tokens} tokens sampled, context {metrics.max_context_tokens}, "
            f"{metrics.total_latency_ms:.0f} ms",
            "green" if answer.error_message is None else "red",
        )
        if answer.error_message is not None:
            self._line(f"{answer.extra_fields.get('error_category')}: {_plain(answer.error_message)}", "red")

    def tools(self, schemas: Sequence[dict[str, Any]]) -> None:
        """Show names, parameters and descriptions."""
        for one in schemas:
            function = one["function"]
            names = ", ".join(function.get("parameters", {}).get("properties", {}))
            self._line(_plain(f"{function['name']}({names})  {function.get('description') or ''}"))
        if not schemas:
            self._line("no tools; name some in rollout_server.tools")

    def tokens(self, turns: Sequence[Turn], tokenizer: Any) -> None:
        """Show ids and text of a rollout's tokens: the prompt, then the added (mask 0) and sampled ones (mask 1)."""
        for turn in turns:
            self._segment("prompt" if turn.parent < 0 else "added, mask 0", turn.added_token_ids, tokenizer, "dim")
            self._segment("sampled, mask 1", turn.result.token_ids, tokenizer, "bold")
        if not turns:
            self._line("no tokens yet; send a message first")

    def note(self, text: str) -> None:
        """Show a line that isn't the model's."""
        self._line(text, "dim")

    def _segment(self, name: str, token_ids: Sequence[int], tokenizer: Any, style: str) -> None:
        pieces = "  ".join(f"{token} {tokenizer.decode([token])!r}" for token in token_ids)
        self._line(f"[{name}, {len(token_ids)} tokens]", "cyan")
        self._line(pieces, style)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style))


def _said(content: Any) -> Any:
    """A list of parts as one text, without the bytes of its images."""
    if not isinstance(content, list):
        return content
    parts = cast("list[dict[str, Any]]", content)
    return " ".join("[image]" if media_kind(part) else str(part.get("text", "")) for part in parts)


def _plain(text: Any) -> str:
    """Printable: terminal control characters are escaped."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in str(text))
