from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.demo.digits.model import ModelSettings
from sluice.demo.digits.warm_start import WarmStartProgress, WarmStartSettings, ensure_warm_start, warm_start_key

TINY = WarmStartSettings(
    num_steps=2,
    batch_size=2,
    model=ModelSettings(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1),
)


def test_second_call_reuses_the_cached_directory(tmp_path: Path) -> None:
    heard: list[WarmStartProgress] = []
    first = ensure_warm_start(tmp_path, TINY, heard.append)
    assert [item.step for item in heard] == [1, 2]
    assert ensure_warm_start(tmp_path, TINY, heard.append) == first
    assert len(heard) == 2
    assert list(tmp_path.iterdir()) == [first]


def test_directory_loads_and_agrees_with_the_tokenizer(tmp_path: Path) -> None:
    directory = ensure_warm_start(tmp_path, TINY)
    network: Any = AutoModelForCausalLM.from_pretrained(directory)
    codec: Any = AutoTokenizer.from_pretrained(directory)
    assert network.dtype == torch.float32
    assert network.config.vocab_size == len(codec)
    assert network.generation_config.eos_token_id == codec.eos_token_id
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


def test_same_settings_give_the_same_weights(tmp_path: Path) -> None:
    directories = [ensure_warm_start(tmp_path / name, TINY) for name in ("one", "two")]
    one, two = ((directory / "model.safetensors").read_bytes() for directory in directories)
    assert one == two


def test_key_follows_every_setting() -> None:
    variants = [
        TINY,
        replace(TINY, num_steps=3),
        replace(TINY, data_seed=6),
        replace(TINY, learning_rate=1e-3),
        replace(TINY, stop_loss=0.1),
        replace(TINY, model=replace(TINY.model, seed=1)),
    ]
    assert len({warm_start_key(settings) for settings in variants}) == len(variants)


def test_a_loss_that_is_low_enough_ends_it_early(tmp_path: Path) -> None:
    heard: list[WarmStartProgress] = []
    settings = replace(TINY, num_steps=20, stop_loss=1e9)
    ensure_warm_start(tmp_path, settings, heard.append)
    assert len(heard) == 8  # the mean needs that many
    ensure_warm_start(tmp_path, replace(settings, num_steps=10, stop_loss=0.0), heard.append)
    assert len(heard) == 8 + 10


def test_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(_: WarmStartProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_warm_start(tmp_path, TINY, interrupt)
    assert list(tmp_path.iterdir()) == []
