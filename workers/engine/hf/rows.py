"""One sequence of the running batch.

Plugin hooks are real transformers objects, called for one sequence alone and without padding. A hook that raises ends
only its own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.processor import VisionInputs
from sluice.pipeline.wire.sampled_tokens import Place
from sluice.workers.engine.adapters import Policy
from sluice.workers.engine.constraints import Grammars
from sluice.workers.engine.contracts import EngineFacts, SequenceRequest
from sluice.workers.engine.plugins.base import GenerationPlugin
from sluice.workers.engine.running import RunningSequence
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.watch import Watch


class Row(RunningSequence):
    """A sequence with its images, its plugin hooks and its repeat guard, if any."""

    __slots__ = ("hooks", "pad_token_id", "policy", "vision", "watch")

    def __init__(
        self,
        request: SequenceRequest,
        tokenizer: Any,
        facts: EngineFacts,
        vision: VisionInputs | None = None,
        guard: GuardRules | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Raises RequestError for a request the engine can't decode whole."""
        super().__init__(request, tokenizer, facts, None if vision is None else vision.token_ids, grammars)
        self.policy: Policy | None = None  # under which its cache was computed; None: not prefilled yet
        self.vision = vision
        self.pad_token_id = request.pad_token_id
        rules = request.probe_guard or guard
        self.watch = Watch(rules.guard(), self.tokens, self.eos[0]) if rules is not None else None
        self.hooks: RowHooks | None = None
        if any(plugin.hooks for plugin in request.plugins):
            self.hooks = RowHooks(request.plugins, self.prompt, tokenizer, torch.device(facts.device))
            for token in self.tokens:
                self.hooks.take(token)
            if self.tokens:
                self._ask_hooks(self.hooks, torch.zeros(facts.vocab_size))

    def accept(
        self, token: int, logprob: float, version: int, logits: torch.Tensor, place: Place | None = None
    ) -> None:
        """Take a sampled token; `logits` (vocab,) are untouched. Raises EngineError, RequestError."""
        self.push(token, logprob, version, place)
        if self.hooks is None:
            return
        self.hooks.take(token)
        self._ask_hooks(self.hooks, logits)

    def _ask_hooks(self, hooks: RowHooks, logits: torch.Tensor) -> None:
        if self.finish_reason != "stop" and (name := hooks.stops(logits)) is not None:
            self.end("stop", name)


class RowHooks:
    """Stopping criteria and logits processors of one sequence, and its token ids in the form they expect."""

    def __init__(
        self, plugins: Sequence[GenerationPlugin], prompt: Sequence[int], tokenizer: Any, device: torch.device
    ) -> None:
        self._ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)  # (1, prompt + generated)
        self._criteria: list[tuple[str, Any]] = []
        self._processors: list[tuple[str, Any]] = []
        for plugin in plugins:
            name = plugin.name or type(plugin).__name__
            try:
                criteria = list(plugin.stopping_criteria(len(prompt), tokenizer))
                processors = list(plugin.logits_processors(len(prompt), tokenizer))
            except Exception as error:
                raise _failed(name, error) from error
            self._criteria += [(name, one) for one in criteria]
            self._processors += [(name, one) for one in processors]

    def take(self, token: int) -> None:
        """Append the sequence's next token."""
        new = torch.tensor([[token]], dtype=torch.int64, device=self._ids.device)
        self._ids = torch.cat([self._ids, new], dim=1)

    def stops(self, logits: torch.Tensor) -> str | None:
        """Name of the plugin that ends the sequence here; `logits` (vocab,) are the newest token's."""
        for name, criterion in self._criteria:
            try:
                if bool(torch.as_tensor(criterion(self._ids, logits.unsqueeze(0))).all()):
                    return name
            except Exception as error:
                raise _failed(name, error) from error
        return None

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (vocab,) to sample from; the input isn't changed."""
        if bool(logits.isnan().any()):
            return logits  # the model's fault; the row reports it
        scores = logits.unsqueeze(0).clone() if self._processors else logits.unsqueeze(0)
        for name, processor in self._processors:
            try:
                scores = processor(self._ids, scores)
                if scores.shape != (1, len(logits)) or not bool((scores > float("-inf")).any()):
                    raise ValueError(f"it must leave a token to sample, in shape (1, {len(logits)})")
            except Exception as error:
                raise _failed(name, error) from error
        return scores[0]


def _failed(name: str, error: Exception) -> RequestError:
    return RequestError(f"plugin {name!r} failed: {error!r}; fix it or remove it")
