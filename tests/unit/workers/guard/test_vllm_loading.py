"""Both runners of vLLM load the guard by name, through their own loaders and from vLLM's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError, EngineError
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.requests import ADDITIONAL, EXTRA, GuardArguments
from sluice.workers.guard.rules import JSON, SWITCH, GuardRules
from tests.loop_models import LoopModel, in_lower_case, save_loop_model
from tests.merged_tokenizers import qwen_like
from tests.unit.workers.guard.slots import Request, changed_rows, context, request_state

pytestmark = pytest.mark.vllm

STOCK, OURS = "sluice.workers.guard.vllm:RepeatTerminate", "sluice.workers.guard.vllm:WorkerRepeatTerminate"
CONFIG = RepeatTerminateConfig(enabled=True, min_new_tokens=1, max_consecutive_token_repeats=3)
RUNNERS = ("V1", "V2")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> LoopModel:
    return save_loop_model(tmp_path_factory.mktemp("loops"), context=64)


@pytest.fixture(scope="module")
def config(loops: LoopModel) -> Any:
    """Of a stock server."""
    return engine_config(loops)


def engine_config(loops: LoopModel, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(loops.directory), enforce_eager=True, **options).create_engine_config()


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COORDEXP_" + SWITCH, "1")
    monkeypatch.setenv("SLUICE_" + JSON, json.dumps(GuardRules(CONFIG).plain()["config"]))


def load(runner: str, name: str, config: Any, state: Any = None) -> Any:
    """The one processor of that name."""
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

    if runner == "V1":
        found = build_logitsprocs(config, torch.device("cpu"), False, False, [name]).non_argmax_invariant
        return next(item for item in found if type(item).__name__ == name.partition(":")[2])
    (only,) = build_custom_logits_processors(config, state or request_state(), False, [name])
    return only


def rows_forced(runner: str, name: str, config: Any, extra: dict[str, Any] | None = None) -> tuple[Any, dict[int, int]]:
    """The processor, and row → id of what it ends in a step of one healthy and one looping request."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    state, sampling = request_state(), SamplingParams(extra_args=extra)
    loaded = load(runner, name, config, state)
    logits = torch.randn(2, config.model_config.get_vocab_size(), generator=torch.Generator().manual_seed(5))
    before = logits.clone()
    if runner == "V1":
        added = [(0, sampling, [1], [1, 2, 1]), (1, sampling, [1], [2, 2, 2])]
        loaded.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
        loaded.apply(logits)
    else:
        taken = [loaded.add_request(slot, sampling) for slot in (0, 1)]
        assert taken == [loaded.requests is not None] * 2
        requests = Request(state, 0, [1], [1, 2, 1]), Request(state, 1, [1], [2, 2, 2])
        loaded.apply(logits, context(state, [(item.slot, item.visible) for item in requests]))
    return loaded, changed_rows(before, logits)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("switched_on")
def test_a_stock_server_ends_a_loop_by_the_models_own_end(runner: str, config: Any, loops: LoopModel) -> None:
    loaded, forced = rows_forced(runner, STOCK, config)
    assert forced == {1: loops.eos}
    assert loaded.requests.rules.config == CONFIG
    assert not loaded.is_argmax_invariant()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_stock_server_counts_keys_by_its_own_tokenizer(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    tokenizer = qwen_like()
    loops = save_loop_model(tmp_path, context=64, tokenizer=tokenizer)
    guard = {"enabled": True, "min_new_tokens": 1, "max_object_keys": 4}
    monkeypatch.setenv("COORDEXP_" + SWITCH, "1")
    monkeypatch.setenv("COORDEXP_" + JSON, json.dumps(guard))
    state, config = request_state(), engine_config(loops)
    loaded = load(runner, STOCK, config, state)
    few, many = (
        tokenizer.encode(json.dumps({f"object_{at}": 1 for at in range(count)}), add_special_tokens=False)
        for count in (3, 4)
    )
    logits = torch.zeros(2, len(tokenizer))
    before = logits.clone()
    if runner == "V1":
        added = [(row, SamplingParams(), many, tokens) for row, tokens in enumerate((few, many))]
        loaded.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
        loaded.apply(logits)
    else:
        requests = [Request(state, row, [1], tokens) for row, tokens in enumerate((few, many))]
        for one in requests:
            loaded.add_request(one.slot, SamplingParams())
        loaded.apply(logits, context(state, [(item.slot, item.visible) for item in requests]))
    assert changed_rows(before, logits) == {1: loops.eos}


def test_a_stock_server_whose_tokenizer_does_not_write_the_prefix_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = save_loop_model(tmp_path, context=64)
    in_lower_case(tmp_path)
    monkeypatch.setenv("COORDEXP_" + SWITCH, "1")
    guard = {"enabled": True, "max_object_keys": 4, "object_key_prefix": '"Object_'}
    monkeypatch.setenv("COORDEXP_" + JSON, json.dumps(guard))
    with pytest.raises(ConfigError, match=r"Object_' occurs 4 times in an answer, but 0 times in its tokens"):
        load("V1", STOCK, engine_config(loops))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_stock_server_without_the_switch_is_left_alone(
    runner: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_" + JSON, json.dumps({"enabled": True}))
    loaded, forced = rows_forced(runner, STOCK, config)
    assert (loaded.requests, forced) == (None, {})


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_stock_server_that_is_told_nonsense_does_not_start(
    runner: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_" + SWITCH, "1")
    monkeypatch.setenv("COORDEXP_" + JSON, '{"min_tokens": 3}')
    with pytest.raises(ConfigError, match=r"min_tokens.*min_new_tokens"):
        load(runner, STOCK, config)


@pytest.mark.parametrize("runner", RUNNERS)
def test_our_backend_brings_rules_whole_and_asks_for_the_trigger(runner: str, loops: LoopModel) -> None:
    rules = GuardRules(CONFIG, ObjectKeys.of(b"key", [b"k", b"e", b"y", b"key"], answer=[3]))
    config = engine_config(loops, additional_config={ADDITIONAL: rules.plain()})
    loaded, forced = rows_forced(runner, OURS, config, GuardArguments(key="a", forced=8).plain())
    assert forced == {1: 8}
    assert loaded.requests.rules == rules
    assert loaded.requests.take("a") == RepeatTrigger("consecutive", 3)


@pytest.mark.parametrize("runner", RUNNERS)
def test_our_backend_without_rules_does_not_start(runner: str, config: Any) -> None:
    with pytest.raises(EngineError, match=ADDITIONAL):
        load(runner, OURS, config)


@pytest.mark.parametrize("name", [STOCK, OURS])
def test_speculative_decoding_is_refused(name: str, loops: LoopModel) -> None:
    config = engine_config(loops, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert config.speculative_config is not None
    with pytest.raises(EngineError, match="speculative"):
        load("V2", name, config)
    with pytest.raises(ValueError, match="speculative"):
        load("V1", name, config)


def admit(runner: str, name: str, sampling: Any) -> None:
    """As vLLM's front end lets a request in."""
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

    if runner == "V1":
        validate_logits_processors_parameters([name], sampling)
    else:
        build_custom_logits_processors_params_validator([name])(sampling)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_stock_server_refuses_what_it_could_not_end(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams

    endless, ours = SamplingParams(ignore_eos=True), SamplingParams(extra_args={EXTRA: {"key": "a", "forced": 1}})
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    for asked in (endless, grammar):
        admit(runner, STOCK, asked)
    monkeypatch.setenv("COORDEXP_" + SWITCH, "1")
    monkeypatch.setenv("COORDEXP_" + JSON, json.dumps({"enabled": True}))
    admit(runner, STOCK, SamplingParams(extra_args={"theirs": 1}))
    with pytest.raises(VLLMClientError, match="ignore_eos"):
        admit(runner, STOCK, endless)
    with pytest.raises(VLLMClientError, match="structured outputs"):
        admit(runner, STOCK, grammar)
    with pytest.raises(VLLMClientError, match=EXTRA):
        admit(runner, STOCK, ours)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "changed", [{"forced": -1}, {"offset": -1}, {"probe": {"config": 3}}, {"probe": {}}, {"key": None}, {"keys": "a"}]
)
def test_our_backend_refuses_arguments_that_would_stop_the_engine(runner: str, changed: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    right = {"key": "a", "forced": 1}
    admit(runner, OURS, SamplingParams(extra_args={EXTRA: right}))
    with pytest.raises(VLLMClientError, match=EXTRA):
        admit(runner, OURS, SamplingParams(extra_args={EXTRA: {**right, **changed}}))
