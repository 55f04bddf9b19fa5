"""A vLLM whose interface moved is refused by name, before anything is loaded.

The stand-ins are what another release might bring: vLLM's own classes with one thing changed.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sluice.pipeline.errors import EngineError
from sluice.workers.guard.vllm_runners import check_interfaces, check_v1, check_v2

pytestmark = pytest.mark.vllm


def interfaces() -> dict[str, ModuleType]:
    from vllm.v1.sample.logits_processor import interface as v1
    from vllm.v1.worker.gpu.sample.logits_processor import interface as v2

    return {"V1": v1, "Model Runner V2": v2}


def changed(runner: str, **classes: Any) -> Any:
    """The installed interface, with some of its classes replaced."""
    return SimpleNamespace(**{**vars(interfaces()[runner]), **classes})


def without(kind: Any, field: str) -> type:
    return dataclasses.make_dataclass(
        kind.__name__, [item.name for item in dataclasses.fields(kind) if item.name != field]
    )


def processor(runner: str, **methods: Any) -> type:
    return type("LogitsProcessor", (interfaces()[runner].LogitsProcessor,), methods)


def check(runner: str, module: Any) -> None:
    (check_v1 if runner == "V1" else check_v2)(module)


def refused(runner: str, module: Any) -> str:
    with pytest.raises(EngineError) as caught:
        check(runner, module)
    text = str(caught.value)
    assert f"({runner})" in text
    assert "repeat_terminate.enabled" in text
    return text


def test_the_installed_vllm_is_the_one_that_the_guard_knows() -> None:
    check_interfaces()
    for runner in interfaces():
        check(runner, changed(runner))


def apply_renamed(self: Any, scores: Any) -> Any: ...
def update_renamed(self: Any, update: Any) -> None: ...
def start_longer(self: Any, vllm_config: Any, device: Any, is_pin_memory: bool, more: int = 0) -> None: ...
def apply_shorter(self: Any, logits: Any) -> Any: ...
def add_renamed(self: Any, slot: int, sampling_params: Any) -> bool: ...
def start_renamed(self: Any, vllm_config: Any, states: Any) -> None: ...
def validate_instance(self: Any, sampling_params: Any) -> None: ...


@pytest.mark.parametrize(
    ("runner", "name", "method", "found"),
    [
        ("V1", "apply", apply_renamed, "scores"),
        ("V1", "update_state", update_renamed, "'update'"),
        ("V1", "__init__", start_longer, "more"),
        ("V1", "validate_params", validate_instance, "self"),
        ("Model Runner V2", "apply", apply_shorter, "['self', 'logits']"),
        ("Model Runner V2", "add_request", add_renamed, "slot"),
        ("Model Runner V2", "__init__", start_renamed, "states"),
        ("Model Runner V2", "validate_params", validate_instance, "self"),
    ],
)
def test_a_method_that_takes_something_else_is_named(runner: str, name: str, method: Any, found: str) -> None:
    text = refused(runner, changed(runner, LogitsProcessor=processor(runner, **{name: method})))
    assert f"LogitsProcessor.{name} takes" in text
    assert found in text


@pytest.mark.parametrize("runner", ["V1", "Model Runner V2"])
def test_a_method_that_is_gone_is_named(runner: str) -> None:
    bare = type("LogitsProcessor", (), {"__init__": interfaces()[runner].LogitsProcessor.__init__})
    assert "LogitsProcessor." in (text := refused(runner, changed(runner, LogitsProcessor=bare)))
    assert "takes None" in text


@pytest.mark.parametrize("runner", ["V1", "Model Runner V2"])
def test_a_method_that_a_processor_must_now_have_is_named(runner: str) -> None:
    @abstractmethod
    def finish(self: Any) -> None: ...

    text = refused(runner, changed(runner, LogitsProcessor=processor(runner, finish=finish)))
    assert "requires the methods finish" in text


@pytest.mark.parametrize(
    ("runner", "kind", "field"),
    [
        *(("V1", "BatchUpdate", field) for field in ("batch_size", "removed", "added", "moved")),
        *(
            ("Model Runner V2", "LogitsContext", field)
            for field in ("idx_mapping_np", "input_ids", "seq_lens_upper_bound_np")
        ),
        *(
            ("Model Runner V2", "LogitsProcRequestState", field)
            for field in ("all_token_ids", "prompt_len", "prefill_len")
        ),
    ],
)
def test_a_field_that_is_gone_is_named(runner: str, kind: str, field: str) -> None:
    module = changed(runner, **{kind: without(getattr(interfaces()[runner], kind), field)})
    assert f"{kind} has no {field}" in refused(runner, module)
