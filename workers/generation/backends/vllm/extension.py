"""What `collective_rpc` calls inside vLLM's workers; mixed into vLLM's own worker class."""

from __future__ import annotations

from typing import Any

from workers.generation.backends.vllm.weights import WeightLoader
from workers.guard.requests import GuardRequests
from workers.guard.vllm import WorkerRepeatTerminate


class WorkerExtension(WeightLoader):
    """`worker_extension_cls`: weights into the model, and questions to the repeat guard that is loaded."""

    model_runner: Any

    def sluice_guard_try(self, token_ids: list[int]) -> dict[str, Any] | None:
        """Rules of the loaded guard, and its trigger after these tokens; None where none is loaded.

        It comes after the probe: from now on requests cannot bring rules of their own.
        """
        requests = self._sluice_guard()
        if requests is None:
            return None
        requests.started()
        trigger = requests.rules.guard().push_all(token_ids)
        found = None if trigger is None else [trigger.rule, trigger.at_token]
        return {"rules": requests.rules.plain(), "trigger": found}

    def sluice_guard_take(self, key: str) -> list[Any] | None:
        """[rule, at_token] if the guard ended the request of this key."""
        requests = self._sluice_guard()
        trigger = None if requests is None else requests.take(key)
        return None if trigger is None else [trigger.rule, trigger.at_token]

    def sluice_guard_cost(self) -> dict[str, int]:
        """Fields of `GuardCost` since the last call."""
        requests = self._sluice_guard()
        if requests is None:
            return {}
        cost = requests.cost.taken()
        return {name: getattr(cost, name) for name in ("spent_ns", "elapsed_ns", "steps", "tokens")}

    def _sluice_guard(self) -> GuardRequests | None:
        """Of the processor that the model runner calls at every step."""
        sampler = getattr(self.model_runner, "sampler", None)
        loaded = list(getattr(sampler, "logits_processors", []))  # Model Runner V2
        if (batch := getattr(self.model_runner, "input_batch", None)) is not None:
            loaded += batch.logitsprocs.all
        return next((one.requests for one in loaded if isinstance(one, WorkerRepeatTerminate)), None)
