"""The guard as vLLM loads it, on both of its runners.

A stock server loads it with `vllm serve MODEL --logits-processors sluice.workers.guard.vllm:RepeatTerminate`.

- Loaded by name at start-up. An entry point would be loaded everywhere, and silently dropped with speculative decoding.
- A guard that can't be active is an error at start-up; a request it couldn't end is refused.
- `apply` never raises for a request that `validate_params` accepted: an error there ends the whole engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Interface
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Interface

from sluice.pipeline.errors import ConfigError, GuardRefused
from sluice.workers.guard.requests import ADDITIONAL, EXTRA, GuardArguments, GuardRequests
from sluice.workers.guard.rules import GuardRules, from_environment
from sluice.workers.guard.vllm_runners import V1Rows, V2Slots, check_interfaces
from sluice.workers.model_files import eos_token_ids

_log = init_logger("vllm.sluice.repeat_terminate")


class WorkerRepeatTerminate(V1Interface, V2Interface):
    """The processor our own backend loads; its complete rules come in `additional_config`.

    The V1 runner constructs it with (vllm_config, device, is_pin_memory), Model Runner V2 with (vllm_config, state).
    """

    def __init__(self, vllm_config: Any, device_or_state: Any, is_pin_memory: bool | None = None) -> None:
        check_interfaces()
        if vllm_config.speculative_config is not None:
            raise GuardRefused("the repeat guard cannot watch speculative decoding; switch one of them off")
        self.requests = self._made(vllm_config)
        self._v1: V1Rows | None = None
        self._v2: V2Slots | None = None
        if self.requests is None:
            return
        if is_pin_memory is None:
            self._v2 = V2Slots(self.requests, device_or_state)
        else:
            self._v1 = V1Rows(self.requests, MoveDirectionality.SWAP)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for unreadable arguments."""
        try:
            asked = GuardArguments.of(sampling_params.extra_args)
            if asked is not None and asked.probe is not None:
                GuardRules.from_plain(asked.probe)
        except msgspec.ValidationError as error:
            raise ValueError(f"extra_args[{EXTRA!r}]: {error}") from error

    def is_argmax_invariant(self) -> bool:
        """It changes greedy rows too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1 runner: the rows of the batch."""
        if self._v1 is not None:
            self._v1.update_state(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Model Runner V2: a request in a slot."""
        return self._v2 is not None and self._v2.add_request(req_idx, sampling_params)

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """float32 logits (rows, vocab); `ctx` from Model Runner V2."""
        if self._v1 is not None:
            return self._v1.apply(logits)
        return logits if self._v2 is None else self._v2.apply(logits, ctx)

    def _made(self, vllm_config: Any) -> GuardRequests | None:
        """None: nothing to do."""
        plain = (vllm_config.additional_config or {}).get(ADDITIONAL)
        if plain is None:
            raise GuardRefused(f"the repeat guard has no rules: additional_config[{ADDITIONAL!r}] is missing")
        return GuardRequests(GuardRules.from_plain(plain))


class RepeatTerminate(WorkerRepeatTerminate):
    """For a stock `vllm serve`: the subtree comes from the environment, and a loop ends with the request's own EOS.

    Without its switch, or with `enabled: false`, it does nothing.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for a request the guard couldn't end, or one that sets the guard's own arguments."""
        if EXTRA in (sampling_params.extra_args or {}):
            raise ValueError(f"extra_args[{EXTRA!r}] is not for clients; remove it")
        asked = {"ignore_eos": sampling_params.ignore_eos, "structured outputs": sampling_params.structured_outputs}
        refused = [name for name, value in asked.items() if value]  # a grammar allows no EOS in the middle of its text
        if refused and _is_switched_on():
            raise ValueError(f"{refused[0]}: this server ends loops by EOS (repeat_terminate); leave {refused[0]} out")

    def _made(self, vllm_config: Any) -> GuardRequests | None:
        config = from_environment()
        if config is None:
            _log.info("repeat_terminate is switched off in this server's environment")
            return None
        from vllm.tokenizers import cached_tokenizer_from_config

        model = vllm_config.model_config
        tokenizer: Any = cached_tokenizer_from_config(model)
        ends = eos_token_ids(
            [
                getattr(tokenizer, "eos_token_id", None),
                model.try_get_generation_config().get("eos_token_id"),
                getattr(model.hf_text_config, "eos_token_id", None),
            ]
        )
        rules = GuardRules.for_engine(config, tokenizer, ends, model.model)
        _log.warning("repeat_terminate is active: %s", config)
        return None if rules is None else GuardRequests(rules, ends[0])


def _is_switched_on() -> bool:
    """As of server start; a file removed since then is not the client's fault."""
    try:
        return from_environment() is not None
    except ConfigError:
        return True
