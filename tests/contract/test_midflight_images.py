"""New weights amid sequences with an image: a plain transformers pass with the same picture is the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.engine.prompts import Prompts
from tests.contract.engine_fixtures import started
from tests.contract.versions import TOLERANCE, Updates, Versions
from tests.contract.vlm_plain import PlainVlm, Shown
from tests.tiny_vlms import picture, save_tiny_llava, save_tiny_qwen_vl

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]


def assert_seen_right(output: SequenceOutput, plain: list[PlainVlm], prompt: Sequence[int], shown: Shown) -> None:
    """Every number is that of a plain pass over prompt, images and tokens; all but the last version's are scored."""
    by_version = [model.logprobs(prompt, shown, output.token_ids).tolist() for model in plain]
    assert output.sampled.proximal_versions == [v + 1 if v < max(output.versions) else -1 for v in output.versions]
    for at, version in enumerate(output.versions):
        under = max(version, output.sampled.proximal_versions[at])
        assert output.logprobs[at] == pytest.approx(by_version[version][at], abs=TOLERANCE)
        assert output.sampled.proximal_logprobs[at] == pytest.approx(by_version[under][at], abs=TOLERANCE)


@pytest.mark.parametrize("save", [save_tiny_llava, save_tiny_qwen_vl])
def test_the_image_is_seen_again_under_the_new_weights(tmp_path: Path, save: Callable[..., Path]) -> None:
    directories = [save(tmp_path / f"v{version}", seed=version) for version in range(3)]
    plain = [PlainVlm(directory) for directory in directories]
    prompt = Prompts(ModelConfig(path=str(directories[0]))).vlm(MESSAGES)
    requests = [
        SequenceRequest(
            f"s{seed}",
            tuple(prompt),
            SamplingParams(max_new_tokens=40),
            seed,
            (picture(40, 30, seed),),
            eos_token_ids=(),
        )
        for seed in range(3)
    ]
    versions = Versions(dict(enumerate(directories)), {})
    with started(directories[0]) as backend:
        outputs = asyncio.run(Updates(backend, versions, [(1, 1), (6, 2)]).decode(requests))
    assert set(outputs[0].versions) == {0, 1, 2}
    for seed, output in enumerate(outputs):
        assert_seen_right(output, plain, prompt, picture(40, 30, seed))
