"""What vLLM's workers import of ours: methods that `collective_rpc` calls, and the engine that loads weights, by name.

The methods are mixed into vLLM's worker class (`worker_extension_cls`). The engine is registered by the entry point
`vllm.general_plugins`, in every process of every vLLM of this installation; importing this module registers it as well,
for an installation older than the entry point or a `VLLM_PLUGINS` without it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sluice.workers.guard.requests import GuardRequests
from sluice.workers.guard.vllm import WorkerRepeatTerminate

WEIGHT_TRANSFER = "sluice"
"""In vLLM's `weight_transfer_config`: the backend's name."""


def register_weight_transfer() -> None:
    """Make the engine known to this process's vLLM. Safe to call twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered
        module = "sluice.workers.engine.vllm.weight_transfer"
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, module, "FilesEngine")


class WorkerExtension:
    """Queries the model runner's caches, and the loaded repeat guard."""

    model_runner: Any

    def sluice_forget(self, keep_encoded: bool) -> int:
        """Drop what was computed with other weights, after a load. `keep_encoded`: the vision part stayed the same, so
        encoded images stay valid; returns how many there are.
        """
        runner = self.model_runner
        if not keep_encoded:
            runner.reset_encoder_cache()
        runner.reset_mm_cache()
        return len(runner.encoder_cache or ())

    def sluice_adapted_layers(self) -> list[str]:
        """Names of the layers that can have adapters; of those that vLLM fuses, also the parts."""
        manager = self.model_runner.lora_manager._adapter_manager
        parts = [name for names in manager.packed_modules.values() for name in names]
        return sorted({*manager.modules, *parts})

    def sluice_guard_try(self, token_ids: list[int]) -> dict[str, Any] | None:
        """Rules of the loaded guard, and its trigger after these tokens; None where none is loaded.

        It is called after the probe: from now on, requests can't bring their own rules.
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
        """From the processor that the model runner calls at every step."""
        sampler = getattr(self.model_runner, "sampler", None)
        loaded = list(getattr(sampler, "logits_processors", []))  # Model Runner V2
        if (batch := getattr(self.model_runner, "input_batch", None)) is not None:
            loaded += batch.logitsprocs.all
        return next((one.requests for one in loaded if isinstance(one, WorkerRepeatTerminate)), None)


register_weight_transfer()
