"""The trainer's side of a rollout, in this process: the gateway's rules over a model that is loaded here.

- Turns, masks and tool calls are made by the gateway's own code, so what is seen here is what training would see.
- The rollout lives as long as this object; nothing is stored or published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pipeline.errors import SluiceError
from pipeline.prompts.turn_tokens import Renderer
from pipeline.queue.rollouts import Turn
from pipeline.wire.messages import SamplingParams, SequenceResult
from producers.gateway.completion import chat_completion
from producers.gateway.tool_calls import ToolParser, assistant_message
from producers.gateway.turns import Plan, plan_turn
from producers.rollout.errors import RolloutError
from producers.rollout.schemas import CompletionsRequest, CompletionsResponse


class Engine(Protocol):
    """What `sluice.engines` give."""

    async def decode(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> SequenceResult:
        """One sequence. Raises SluiceError."""
        ...


class LocalTrainer:
    """One rollout; `on_turn` is shown each turn as it comes: the call, its tokens, its answer."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        parser: ToolParser,
        seed: int,
        on_turn: Callable[[CompletionsRequest, Plan, CompletionsResponse], None],
    ) -> None:
        self._engine, self._renderer, self._parser = engine, renderer, parser
        self._seed, self._on_turn = seed, on_turn
        self.turns: list[Turn] = []

    async def complete(self, call: CompletionsRequest, *, until: float) -> CompletionsResponse:
        """The model's next turn. Raises RolloutError."""
        del until  # whoever runs the rollout ends it
        try:
            sampling = SamplingParams(
                temperature=call.temperature,
                top_p=call.top_p,
                max_new_tokens=call.max_tokens,
                stop=tuple(call.stop or ()),
            )
            plan = plan_turn(
                self.turns,
                [one.plain() for one in call.messages],
                call.tools or [],
                sampling=sampling,
                renderer=self._renderer,
                response_mask=call.response_mask,
            )
            result = await self._engine.decode(plan.prompt_token_ids, sampling, self._seed + len(self.turns))
            message = assistant_message(self._parser(result.text), plan.key)
            answer: dict[str, Any] = chat_completion([result], model=call.model, messages=[message])
        except (SluiceError, ValueError) as error:
            raise RolloutError("trainer_client_error", str(error)) from error
        self.turns.append(plan.turn(result, message))
        reply = CompletionsResponse.model_validate(answer)
        self._on_turn(call, plan, reply)
        return reply

    async def finish(self, final_status: str, *, until: float) -> bool:
        """Nothing is published."""
        del final_status, until
        return True

    async def completed(self, body: bytes, *, until: float) -> None:
        """The answer is at hand already."""
        del body, until
