"""Scores of given tokens against one plain forward pass of each sequence alone, on a tiny real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.pipeline.config.types import ModelConfig
from sluice.workers.engine.hf import passes
from sluice.workers.engine.hf.model import LoadedModel, load_model
from sluice.workers.engine.hf.passes import token_logprobs
from tests.contract.engine_fixtures import ragged_prompts, reference, reference_logprobs
from tests.tiny_models import save_tiny_model
from tests.tiny_vlms import save_tiny_llava, save_tiny_qwen_vl

EXACT = 1e-4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(source: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(source), device="cpu"))


@pytest.fixture(scope="module")
def plain(source: Path) -> Any:
    return reference(source)


def widths_of(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all passes from now on."""
    shapes: list[tuple[int, ...]] = []
    real = model.module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        shapes.append((*kwargs["input_ids"].shape, kwargs.get("logits_to_keep", 0)))
        return real(*args, **kwargs)

    monkeypatch.setattr(model.module, "forward", noted)
    return shapes


def assert_exact(
    found: list[list[float]],
    plain: Any,
    sequences: list[list[int]],
    firsts: list[int],
    heats: list[float] | None = None,
) -> None:
    heats = heats or [1.0] * len(sequences)
    for logprobs, sequence, first, heat in zip(found, sequences, firsts, heats, strict=True):
        expected = reference_logprobs(plain, sequence[:first], sequence[first:], heat)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("pass_tokens", [1, 150, 10_000])
def test_ragged_sequences_score_as_each_does_alone(
    model: LoadedModel, plain: Any, monkeypatch: pytest.MonkeyPatch, pass_tokens: int
) -> None:
    sequences = [[7, *prompt] for prompt in ragged_prompts(9)]
    firsts = [1 + index % (len(sequence) - 1) for index, sequence in enumerate(sequences)]
    shapes = widths_of(model, monkeypatch)
    heats = [0.5 + index / 4 for index in range(9)]
    assert_exact(token_logprobs(model, sequences, firsts, pass_tokens, heats), plain, sequences, firsts, heats)
    assert all(rows * width <= pass_tokens or rows == 1 for rows, width, _ in shapes)
    assert len(shapes) == {1: 9, 10_000: 1}.get(pass_tokens, len(shapes))


def test_few_logits_at_a_time_change_nothing(model: LoadedModel, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SCORED_LOGITS", 3 * 7 * model.facts.vocab_size)
    sequences = [[7, *prompt, 9, 9] for prompt in ragged_prompts(3, longest=50, seed=4)]
    firsts = [1, 2, len(sequences[2]) - 1]
    shapes = widths_of(model, monkeypatch)
    assert_exact(token_logprobs(model, sequences, firsts, 10_000), plain, sequences, firsts)
    assert len(shapes) > 1
    assert {keep for _, _, keep in shapes} <= set(range(1, 8))


@pytest.mark.parametrize("save", [save_tiny_llava, save_tiny_qwen_vl])
def test_text_in_a_model_with_a_vision_part(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    """Qwen's positions have three axes."""
    seeing = load_model(ModelConfig(path=str(save(tmp_path)), device="cpu"))
    assert seeing.vision is not None
    sequences = [[7, *prompt] for prompt in ragged_prompts(4)]
    found = token_logprobs(seeing, sequences, [1] * 4, 10_000)
    for logprobs, sequence in zip(found, sequences, strict=True):
        with torch.inference_mode():
            logits = seeing.module(input_ids=torch.tensor([sequence])).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("sequence", "first"), [([5, 6], 0), ([5], 1), ([5, 6], 2)])
def test_what_has_no_prefix_or_no_token_is_refused(model: LoadedModel, sequence: list[int], first: int) -> None:
    with pytest.raises(ValueError, match="a token before"):
        token_logprobs(model, [sequence], [first], 64)


def test_nothing_to_score_is_nothing(model: LoadedModel) -> None:
    assert token_logprobs(model, [], [], 64) == []
