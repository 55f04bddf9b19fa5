"""Settings: what is refused before any work, and what ties a begun run to its command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError, ModelError
from sluice.workers.engine.plugins import GenerationPlugin
from sluice.workers.offline.answers import MAX_N, MAX_ROWS, number_of, row_and_index
from sluice.workers.offline.run import model_digest
from sluice.workers.offline.settings import GenerateSettings, check_fit, make_plugins, make_settings

GUARD = "rollout_matching.repeat_terminate"


def settings(
    options: dict[str, Any] | None = None, overrides: tuple[str, ...] = (), dtype: str | None = None, **given: Any
) -> GenerateSettings:
    model = {"path": "m", "dtype": dtype, "device": None}
    given = {"source": "in.jsonl", "out": "-", **given}
    return make_settings(options=options or {}, model=model, overrides=overrides, **given)


def test_every_sequence_has_a_number_of_its_own() -> None:
    keys = [(row, index) for row in (0, 1, 2, MAX_ROWS - 1) for index in (0, 1, MAX_N - 1)]
    numbers = [number_of(*key) for key in keys]
    assert [row_and_index(number) for number in numbers] == keys
    assert max(numbers) < 1 << 32  # the step between two seeds
    assert number_of(7, 0) == 7  # as `generate_text_batch` counts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, "--n must be"),
        ({"max_batch": 0}, "--max-batch"),
        ({"as_json": True}, "both use standard output"),
        ({"out": "nosuch/a.jsonl"}, "nosuch: no such directory"),
        ({"out": "."}, "is a directory"),
        ({"out": "a.csv"}, "a.csv: the suffix selects the format"),
        ({"fallback_backend": "hf"}, "needs --backend vllm"),
        ({"options": {"top_p": 2.0}}, "top_p must be"),
        ({"overrides": ("modle.dtype=float32",)}, "did you mean 'model'"),
        ({"overrides": ("worker.vllm.max_model_length=5",)}, "max_model_len"),
        ({"overrides": ("sampling.top_p=0.5",)}, "no effect here"),
        ({"overrides": ("rollout_matching.task=detection",)}, "no effect here"),
        ({"overrides": (f"{GUARD}.ngram_sise=5",)}, "did you mean 'ngram_size'"),
        ({"overrides": (f"{GUARD}.enabled=true",), "options": {"eos_token_ids": ()}}, "ignore-eos"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**given)


def test_the_output_is_never_the_input(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    with pytest.raises(ConfigError, match="same file"):
        settings(source=str(path), out=f"{tmp_path}/../{tmp_path.name}/a.jsonl")


def test_an_argument_wins_over_set_and_rare_keys_arrive() -> None:
    found = settings(overrides=("model.dtype=float16", "model.variant=text", "worker.vllm.max_model_len=64"))
    assert (found.model.dtype, found.model.variant, found.vllm.max_model_len) == ("float16", "text", 64)
    assert settings(overrides=("model.dtype=float16",), dtype="float32").model.dtype == "float32"


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_batch": 2, "torch_threads": 1, "as_json": False, "restart": True}, True),
        ({"overrides": ("worker.vllm.max_model_len=64",)}, True),  # the backend is hf
        ({"overrides": (f"{GUARD}.ngram_size=5",)}, True),  # the guard is off
        ({"overrides": (f"{GUARD}.enabled=true",)}, False),
        ({"options": {"seed": 1}}, False),
        ({"options": {"stop": ("x",)}}, False),
        ({"n": 2}, False),
        ({"dtype": "bfloat16"}, False),
        ({"fields": "minimal"}, False),
        ({"plugins": ("balanced_json",)}, False),
        ({"enable_thinking": True}, False),
        ({"on_malformed": "skip"}, False),
    ],
)
def test_a_run_is_the_same_while_what_decides_its_answers_is(given: dict[str, Any], same: bool) -> None:
    assert (settings(**given).identity() == settings().identity()) == same


def test_the_whole_guard_arrives_and_ties_a_run_to_it() -> None:
    found = settings(overrides=(f"{GUARD}={{enabled: true, ngram_size: 9}}", f"{GUARD}.ngram_repeats=3"))
    assert found.repeat_terminate == RepeatTerminateConfig(enabled=True, ngram_size=9, ngram_repeats=3)
    other = settings(overrides=(f"{GUARD}={{enabled: true, ngram_size: 8}}", f"{GUARD}.ngram_repeats=3"))
    assert found.identity() != other.identity()


def test_a_model_is_known_by_its_contents(tmp_path: Path) -> None:
    directory = tmp_path / "one"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    weights = directory / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    first = model_digest(str(directory))
    assert model_digest(str(directory.rename(tmp_path / "two"))) == first
    (tmp_path / "two/model.safetensors").write_bytes(bytes([0, 1]) * 1_500_000)
    assert model_digest(str(tmp_path / "two")) != first
    with pytest.raises(ModelError, match="no such directory"):
        model_digest(str(tmp_path / "three"))
    with pytest.raises(ModelError, match="--model must be a directory"):
        model_digest("some-one/a-model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("balanced_jsn", "did you mean 'balanced_json'"),
        ("nosuch.module:Class", "cannot import"),
        ("json:JSONDecoder", "no GenerationPlugin class"),
    ],
)
def test_a_plugin_that_is_not_there_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plugins([name])


def test_a_plugin_is_refused_before_its_backend_is_loaded() -> None:
    hooked = make_plugins(["balanced_json"])
    check_fit(hooked, backend="hf", request_types=["text", "vlm"])
    with pytest.raises(ConfigError, match="--plugin: plugin 'balanced_json' works on hf"):
        check_fit(hooked, backend="vllm", request_types=["text"])

    class AnywhereByItsWord(GenerationPlugin):
        hooks = frozenset({"stopping_criteria"})

    with pytest.raises(ConfigError, match="needs the hooks stopping_criteria"):
        check_fit([AnywhereByItsWord()], backend="vllm", request_types=["text"])


def test_plugins_by_name() -> None:
    assert [plugin.name for plugin in make_plugins(["balanced_json", "duplicate_objects"])] == [
        "balanced_json",
        "duplicate_objects",
    ]
