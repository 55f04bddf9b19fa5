"""One sequence of the running batch."""

from __future__ import annotations

from typing import Any

import torch

from workers.generation.backends.hf.hooks import RowHooks
from workers.generation.contracts import EngineFacts, SequenceRequest
from workers.generation.preprocess import VisionInputs
from workers.generation.running import RunningSequence
from workers.guard.rules import GuardRules
from workers.guard.watch import Watch


class Row(RunningSequence):
    """A sequence with its image, its plugin hooks and its repeat guard, if any."""

    __slots__ = ("hooks", "pad_token_id", "vision", "watch")

    def __init__(
        self,
        request: SequenceRequest,
        tokenizer: Any,
        facts: EngineFacts,
        vision: VisionInputs | None = None,
        guard: GuardRules | None = None,
    ) -> None:
        """Raises RequestError for a request that the engine cannot decode whole."""
        super().__init__(request, tokenizer, facts, None if vision is None else vision.token_ids)
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

    def accept(self, token: int, logprob: float, version: int, logits: torch.Tensor) -> None:
        """Take a sampled token; `logits` (vocab,) are the untouched ones. Raises EngineError, RequestError."""
        self.push(token, logprob, version)
        if self.hooks is None:
            return
        self.hooks.take(token)
        self._ask_hooks(self.hooks, logits)

    def _ask_hooks(self, hooks: RowHooks, logits: torch.Tensor) -> None:
        if self.finish_reason != "stop" and (name := hooks.stops(logits)) is not None:
            self.end("stop", name)
