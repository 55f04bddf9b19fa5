"""What `sluice rollout try` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from pipeline.queue.rollouts import Turn
from pipeline.wire.messages import Message
from producers.gateway.turns import Plan
from producers.rollout.schemas import CompletionsResponse, RolloutResponse

HELP = """\
/tools   the tools that the model has
/tokens  token ids of the last rollout, with their mask
/reset   forget the conversation
/quit    end (Ctrl-D as well)
All else is said to the model. Each message is a rollout, whose prompt is the conversation so far."""


class View:
    """Turns on a terminal; what the model wrote is shown as it is, and never acted on."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def added(self, messages: Sequence[Message], plan: Plan, mask: Sequence[int] | None) -> None:
        """What a call adds: the prompt, or tool results."""
        if plan.parent < 0:
            self._line(f"prompt: {len(plan.added.token_ids)} tokens, {len(messages)} messages", "dim")
            return
        for message in messages:
            self._line(f"  {message.get('name', message['role'])} → {_plain(message.get('content'))}", "yellow")
        resync = ", resync: the reply renders differently as text" if plan.added.resynced else ""
        self._line(f"added: {len(plan.added.token_ids)} tokens, response_mask {len(mask or ())} x 0{resync}", "dim")

    def turn(self, number: int, reply: CompletionsResponse) -> None:
        """One reply."""
        choice = reply.choices[0]
        body = Text(_plain(choice.message.content or ""))
        for call in choice.message.tool_calls or ():
            body.append(f"\n→ {_plain(call.function.name)}({_plain(call.function.arguments)})", "cyan")
        counts = f"{len(reply.prompt_token_ids)} prompt + {len(reply.token_ids)} sampled tokens, {choice.finish_reason}"
        self._console.print(Panel(body, title=f"turn {number}", subtitle=counts, title_align="left"))

    def end(self, answer: RolloutResponse) -> None:
        """How the rollout ended."""
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
        """Names, parameters and descriptions."""
        for one in schemas:
            function = one["function"]
            names = ", ".join(function.get("parameters", {}).get("properties", {}))
            self._line(_plain(f"{function['name']}({names})  {function.get('description') or ''}"))
        if not schemas:
            self._line("no tools; name some in rollout_server.tools")

    def tokens(self, turns: Sequence[Turn], tokenizer: Any) -> None:
        """Ids and pieces of a rollout: the prompt, then what was added (mask 0) and sampled (mask 1)."""
        for turn in turns:
            self._segment("prompt" if turn.parent < 0 else "added, mask 0", turn.added_token_ids, tokenizer, "dim")
            self._segment("sampled, mask 1", turn.result.token_ids, tokenizer, "bold")
        if not turns:
            self._line("no tokens yet; say something")

    def note(self, text: str) -> None:
        """One line of ours."""
        self._line(text, "dim")

    def _segment(self, name: str, token_ids: Sequence[int], tokenizer: Any, style: str) -> None:
        pieces = "  ".join(f"{token} {tokenizer.decode([token])!r}" for token in token_ids)
        self._line(f"[{name}, {len(token_ids)} tokens]", "cyan")
        self._line(pieces, style)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style))


def _plain(text: Any) -> str:
    """Printable: what would steer the terminal is written out."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in str(text))
