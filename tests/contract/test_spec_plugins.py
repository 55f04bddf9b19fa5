"""Plugins over the real HF backend: explicit, checked before any work, each sequence by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from sluice.pipeline.errors import EngineError, RequestError
from sluice.workers.engine import GenerationEngine, GenerationOptions, GenerationPlugin, ModelLoadConfig
from sluice.workers.engine import TextGenerationRequest as Ask
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.plugins import check_plugins
from sluice.workers.engine.plugins.base import Hook
from tests.contract.engine_fixtures import ragged_prompts, reference_logprobs, request, run

PROMPT = list(b"the abc of it")


class StopAfter(GenerationPlugin):
    """Ends each sequence after `count` tokens of its own."""

    name = "stop_after"
    backends: ClassVar[frozenset[str]] = frozenset({"hf"})
    hooks: ClassVar[frozenset[Hook]] = frozenset({"stopping_criteria"})

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def stopping_criteria(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        plugin = self

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
                plugin.seen.append((prompt_len, tuple(input_ids.shape)))
                return torch.full((1,), input_ids.shape[1] - prompt_len >= plugin.count)

        return [Criterion()]


class Forbid(GenerationPlugin):
    """Never samples some tokens."""

    name = "forbid"
    backends: ClassVar[frozenset[str]] = frozenset({"hf"})
    hooks: ClassVar[frozenset[Hook]] = frozenset({"logits_processor"})

    def __init__(self, token_ids: Sequence[int] | None) -> None:
        self.token_ids = token_ids

    def logits_processors(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        token_ids = self.token_ids

        class Processor(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
                scores[:, slice(None) if token_ids is None else list(token_ids)] = float("-inf")
                return scores

        return [Processor()]


class Shout(GenerationPlugin):
    """Cleans the text only, and so works everywhere."""

    name = "shout"

    def clean_text(self, text: str) -> str:
        return text.upper()


class Broken(GenerationPlugin):
    name = "broken"
    hooks: ClassVar[frozenset[Hook]] = frozenset({"logits_processor"})

    def logits_processors(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        return [self._fail]

    def _fail(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if input_ids.shape[1] > len(PROMPT) + 3:
            raise IndexError("out of luck")
        return scores


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[GenerationEngine]:
    with GenerationEngine(ModelLoadConfig(model_name_or_path=str(model_dir), device="cpu"), torch_threads=1) as running:
        yield running


def test_a_stopping_plugin_ends_its_sequences_and_sees_unpadded_rows(hf: HfBackend) -> None:
    prompts = ragged_prompts(5, seed=4)
    plugin = StopAfter(7)
    stopped = [replace(request(prompt), plugins=(plugin,)) for prompt in prompts]
    free = [request(prompt) for prompt in prompts]
    outputs = run(hf, *stopped, *free)
    for prompt, short, long in zip(prompts, outputs[:5], outputs[5:], strict=True):
        assert (short.finish_reason, short.stop_reason) == ("stop", "stop_after")
        assert short.token_ids == long.token_ids[:7]
        assert long.finish_reason == "length"
        assert [shape for length, shape in plugin.seen if length == len(prompt)][-1] == (1, len(prompt) + 7)


def test_a_logits_processor_changes_the_tokens_and_not_the_logprobs(hf: HfBackend, plain: Any) -> None:
    [free] = run(hf, request(PROMPT))
    banned = free.token_ids[:3]
    changed, untouched = run(hf, replace(request(PROMPT), plugins=(Forbid(banned),)), request(PROMPT))
    assert not set(banned) & set(changed.token_ids)
    assert untouched.token_ids == free.token_ids
    expected = reference_logprobs(plain, PROMPT, changed.token_ids)
    torch.testing.assert_close(torch.tensor(changed.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_a_processor_holds_with_every_kind_of_sampling(hf: HfBackend, sampling: dict[str, Any]) -> None:
    keep = [65, 66, 67]
    banned = [token for token in range(hf.facts.vocab_size) if token not in keep]
    [output] = run(hf, replace(request(PROMPT, 3, **sampling), plugins=(Forbid(banned),)))
    assert set(output.token_ids) <= set(keep)


def test_a_plugin_that_fails_ends_its_own_sequence_and_no_other(hf: HfBackend) -> None:
    import asyncio

    async def both() -> list[Any]:
        bad = (replace(request(PROMPT), plugins=(plugin,)) for plugin in (Broken(), Forbid(None)))
        return await asyncio.gather(hf.decode(request(PROMPT)), *map(hf.decode, bad), return_exceptions=True)

    good, broken, greedy = asyncio.run(both())
    assert good.finish_reason == "length"
    assert isinstance(broken, RequestError)
    assert "plugin 'broken' failed: IndexError('out of luck')" in str(broken)
    assert isinstance(greedy, RequestError)
    assert "it must leave a token to sample" in str(greedy)


def test_resume_shows_a_plugin_the_old_tokens(hf: HfBackend) -> None:

    [free] = run(hf, request(PROMPT))
    old = free.sampled[:4]
    [output] = run(hf, replace(request(PROMPT), so_far=old, plugins=(StopAfter(7),)))
    assert output.token_ids == free.token_ids[:7]


def test_when_plugins_are_absent_baseline_behavior_applies(engine: GenerationEngine) -> None:
    asked = [Ask(prompt_token_ids=tuple(PROMPT))]
    [with_none] = engine.generate_text_batch(asked, GenerationOptions(max_new_tokens=9))
    [shouted] = engine.generate_text_batch(asked, GenerationOptions(max_new_tokens=9), plugins=[Shout()])
    assert shouted.token_ids == with_none.token_ids
    assert shouted.raw_text == with_none.raw_text
    assert shouted.text == with_none.text.upper()


def test_plugin_incompatible_with_the_request_type_is_rejected_before_generation_begins(
    engine: GenerationEngine,
) -> None:
    class OfImages(StopAfter):
        name = "of_images"
        request_types = frozenset({"vlm"})

    plugin = OfImages(1)
    with pytest.raises(EngineError, match="plugin 'of_images' is for vlm requests, but these are text"):
        engine.generate_text_batch([Ask(prompt_token_ids=(1,))], plugins=[plugin])
    assert plugin.seen == []


@pytest.mark.parametrize(
    ("plugin", "says"),
    [(StopAfter(1), "works on hf, but the backend is 'vllm'"), (Broken(), "needs the hooks logits_processor")],
)
def test_plugin_incompatible_with_a_backend_is_a_named_error(plugin: GenerationPlugin, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        check_plugins([plugin], backend="vllm", hooks=frozenset(), request_type="text")
    check_plugins([plugin, Shout()], backend="hf", hooks=frozenset(plugin.hooks), request_type="text")
