"""What the guard leans on inside vLLM, looked at before it is loaded: another release may have moved it.

vLLM does not promise these interfaces. One that differs would fail in the middle of a step, or never call the guard.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from pipeline.errors import GuardRefused

_V1_METHODS = {
    "update_state": ["self", "batch_update"],
    "apply": ["self", "logits"],
    "is_argmax_invariant": ["self"],
    "validate_params": ["sampling_params"],
    "__init__": ["self", "vllm_config", "device", "is_pin_memory"],
}
_V1_UPDATE = {"batch_size", "removed", "added", "moved"}
_V2_METHODS = {
    "add_request": ["self", "req_idx", "sampling_params"],
    "apply": ["self", "logits", "ctx"],
    "validate_params": ["sampling_params"],
    "__init__": ["self", "vllm_config", "req_states"],
}
_V2_CONTEXT = {"idx_mapping_np", "input_ids", "seq_lens_upper_bound_np"}
_V2_STATE = {"all_token_ids", "prompt_len", "prefill_len"}


def check_interfaces() -> None:
    """Raises GuardRefused if the installed vLLM is not the one that the guard knows."""
    from vllm.v1.sample.logits_processor import interface as v1
    from vllm.v1.worker.gpu.sample.logits_processor import interface as v2

    check_v1(v1)
    check_v2(v2)


def check_v1(module: Any) -> None:
    """The V1 runner's interface. Raises GuardRefused that says what moved."""
    _check_methods("V1", module.LogitsProcessor, _V1_METHODS)
    _check_fields("V1", module.BatchUpdate, _V1_UPDATE)


def check_v2(module: Any) -> None:
    """Model Runner V2's interface. Raises GuardRefused that says what moved."""
    _check_methods("Model Runner V2", module.LogitsProcessor, _V2_METHODS)
    _check_fields("Model Runner V2", module.LogitsContext, _V2_CONTEXT)
    _check_fields("Model Runner V2", module.LogitsProcRequestState, _V2_STATE)


def _check_methods(runner: str, kind: type, wanted: dict[str, list[str]]) -> None:
    for name, parameters in wanted.items():
        method = getattr(kind, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != parameters:
            raise _moved(runner, f"{kind.__name__}.{name} takes {found}, and the guard knows {parameters}")
    known = {*wanted, "apply_staged_writes"}
    if more := sorted(getattr(kind, "__abstractmethods__", frozenset()) - known):
        raise _moved(runner, f"{kind.__name__} wants the methods {', '.join(more)}, which the guard does not have")


def _check_fields(runner: str, kind: type, wanted: set[str]) -> None:
    found = {field.name for field in dataclasses.fields(kind)}
    if missing := sorted(wanted - found):
        raise _moved(runner, f"{kind.__name__} has no {', '.join(missing)}")


def _moved(runner: str, what: str) -> GuardRefused:
    import vllm

    return GuardRefused(
        f"vLLM {vllm.__version__}: its interface for logits processors ({runner}) is not the one that the repeat guard "
        f"was written for: {what}; install the vLLM that this release names, or set repeat_terminate.enabled to false"
    )
