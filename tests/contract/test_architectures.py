"""The matrix of architectures: decoded, trained, published and loaded again, each number that of a plain pass.

`sluice bench truth` does the same with more and longer sequences.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

from sluice.bench.truth.architectures import ARCHITECTURES, save
from sluice.bench.truth.check import Sizes, check, hf_backend, plain_logprobs
from sluice.consumers.training.model import load_policy, probe_score, write_model
from sluice.pipeline.config.types import Config, ModelConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.weights.versions import tensor_table
from sluice.workers.engine.contracts import WeightsProbe
from sluice.workers.engine.hf import HfBackend, passes
from sluice.workers.engine.hf.model import load_model
from sluice.workers.engine.hf.passes import token_logprobs
from sluice.workers.scorer.model import VersionedModel
from tests.command import call
from tests.contract.engine_fixtures import request as ask
from tests.contract.engine_fixtures import run
from tests.faulty_models import save_faulty

SIZES = Sizes(prompts=4, alone=0, longest_prompt=20, new_tokens=6, row_tokens=64)
PROMPT = list(b"of the windows and states")
ENGINE_PAGE = Path(__file__).parents[2] / "docs/engine.md"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_number_is_that_of_transformers_own_passes(tmp_path: Path, name: str) -> None:
    found = check(name, tmp_path, SIZES, train=False)  # its training rows: tests/unit/consumers/test_forward.py
    assert found.reasons == []
    assert found.wrong == 0, found
    assert found.checked >= 12
    assert f"| {name} | served |" in ENGINE_PAGE.read_text()


def test_the_table_of_the_docs_has_no_row_of_its_own() -> None:
    rows = re.findall(r"^\| (.+?) \| (?:served|refused)", ENGINE_PAGE.read_text(), re.MULTILINE)
    assert rows == list(ARCHITECTURES)


CONVERTED = (
    "Qwen3-MoE", "Qwen3-Next", "Llama4", "Mixtral", "GLM4-MoE", "GPT-2", "DeepSeek-V3", "GPT-OSS", "Qwen2.5-VL",
    "Qwen3.5 (multimodal)", "Gemma3 (multimodal)", "Llama4 (multimodal)",
)  # fmt: skip
"""Those whose checkpoints differ most from their modules."""


@pytest.mark.parametrize("name", CONVERTED)
def test_a_published_version_is_a_checkpoint_of_the_same_layout_and_loads_again(tmp_path: Path, name: str) -> None:
    source = save(name, tmp_path / "source")
    policy = load_policy(source, ModelConfig(path=str(source), device="cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    version = tmp_path / "v000001"
    version.mkdir()
    write_model(policy, source, version)
    assert tensor_table(version) == tensor_table(source)
    assert {file.name for file in version.iterdir()} == {file.name for file in source.iterdir()}
    again = load_policy(version, ModelConfig(path=str(version), device="cpu")).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in policy.state_dict().items())
    backend = hf_backend(source, 2)
    asyncio.run(backend.start())
    try:
        probe = WeightsProbe(tuple(PROMPT), probe_score(policy, PROMPT), tolerance=1e-3)
        asyncio.run(backend.load_weights(version, 1, probe))
        output = run(backend, ask(PROMPT, max_new_tokens=4))[0]
    finally:
        asyncio.run(backend.close())
    expected = plain_logprobs(policy.eval(), [*PROMPT, *output.token_ids])[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next", "LFM2", "Granite-hybrid", "Falcon-H1", "Gemma3"])
@pytest.mark.parametrize("held", [1, 600, 5000])
def test_scores_are_the_same_however_small_the_pieces_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, held: int
) -> None:
    """A column alone would let padding into the states of layers that keep one."""
    model = load_model(ModelConfig(path=str(save(name, tmp_path)), device="cpu"))
    monkeypatch.setattr(passes, "SCORED_LOGITS", held)
    sequences = [[(7 * at + row) % 256 for at in range(length)] for row, length in enumerate((40, 23, 9, 3))]
    scores = token_logprobs(model, sequences, [1] * len(sequences), 10_000)
    for ids, found in zip(sequences, scores, strict=True):
        torch.testing.assert_close(torch.tensor(found), plain_logprobs(model.module, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["window dropped with a cache", "fails"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_decoded_wrongly_does_not_start(tmp_path: Path, fault: str, dtype: str) -> None:
    directory = str(save_faulty(fault, tmp_path))
    config = ModelConfig(path=directory, trust_remote_code=True, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"FaultyForCausalLM.*nats|FaultyForCausalLM cannot be decoded"):
        asyncio.run(HfBackend(config).start())


def test_a_scorer_of_such_a_model_does_not_start(tmp_path: Path) -> None:
    model = ModelConfig(path=str(save_faulty("window dropped with a cache", tmp_path)), trust_remote_code=True)
    with pytest.raises(ModelError, match="does not give the logprobs of plain passes"):
        VersionedModel(Config(model=model))


def test_a_command_ends_with_exit_code_5_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_faulty("window dropped with a cache", tmp_path / "model")
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "of the windows"}\n')
    files = ("--model", str(directory), "--in", str(prompts), "--out", str(answers))
    assert call("generate", *files, "--set", "model.trust_remote_code=true") == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "FaultyForCausalLM" in said
    assert "does not give the logprobs of plain passes" in said
    assert not answers.exists()
