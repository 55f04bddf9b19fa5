"""The trainer's rows give the logprobs of plain passes, for every architecture of the matrix, or it does not start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Qwen2_5_VLForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sluice.bench.truth.architectures import ARCHITECTURES, WINDOW, save
from sluice.bench.truth.check import TOLERANCE, table
from sluice.consumers.training.forward import Layout, TrainerForward
from sluice.consumers.training.model import load_policy, random_rates
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import ModelConfig, TrainerConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.images.processor import joined_tensors
from sluice.pipeline.wire.messages import TrainingSample
from tests.faulty_models import save_faulty
from tests.seen_samples import image_files, processor_of, seeing_config, seen_sample, taken
from tests.tiny_vlms import save_tiny_qwen_vl
from tests.trainers import random_sample

ENGINE_PAGE = Path(__file__).parents[3] / "docs/engine.md"
LENGTHS = (3 * WINDOW, 5, WINDOW + 3, 2, WINDOW, 40, 9)


def policy(directory: Path, **options: Any) -> Any:
    torch.set_num_threads(1)
    return load_policy(directory, ModelConfig(path=str(directory), device="cpu", **options))


def forward(model: Any, row_tokens: int = 64) -> TrainerForward:
    return TrainerForward(model, pad_id=256, row_tokens=row_tokens, micro_batch_tokens=256)


def samples() -> list[TrainingSample]:
    return [random_sample(f"s{at}", length) for at, length in enumerate(LENGTHS)]


@torch.no_grad()
def plain_scores(model: Any, token_ids: list[int]) -> torch.Tensor:
    model.eval()
    ids = torch.tensor([token_ids])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None]).squeeze(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_of_rows_are_those_of_plain_passes(tmp_path: Path, name: str) -> None:
    model = policy(save(name, tmp_path))
    step = TrainStep(model, TrainerConfig(micro_batch_tokens=256), pad_id=256, row_tokens=64)
    batch = samples()
    scores = step.score(batch)
    worst = max(
        float((torch.tensor(found[1:]) - plain_scores(model, list(sample.token_ids))).abs().max())
        for sample, found in zip(batch, scores, strict=True)
    )
    proof = step.prove()
    assert worst <= TOLERANCE, proof
    assert proof.in_pieces
    row = table({name: {"decoding": "served", "trained_in": str(proof.layout)}}).splitlines()[-1]
    assert row in ENGINE_PAGE.read_text(), "the table is stale; write it anew with `sluice bench truth --table`"


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3.5", "Llama4", "GPT-2"])
def test_the_gradient_of_rows_is_that_of_plain_passes(tmp_path: Path, name: str) -> None:
    model = policy(save(name, tmp_path))
    batch = samples()
    step = TrainStep(model, TrainerConfig(learning_rate=0.0, max_grad_norm=1e9), pad_id=256, row_tokens=64)
    norm = step.run(batch, 1)["train/grad_norm"]
    total = sum(sum(sample.weights) for sample in batch)
    model.zero_grad()
    for sample in batch:
        ids, weights = torch.tensor([list(sample.token_ids)]), torch.tensor(list(sample.weights))[1:]
        losses = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        ((losses * weights).sum() / total).backward()
    plain = math.sqrt(sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None))
    assert norm == pytest.approx(plain, rel=1e-3)


def test_samples_are_packed_where_the_proof_allows_it_and_apart_elsewhere(tmp_path: Path) -> None:
    windowed = forward(policy(save("Gemma3", tmp_path / "a")))
    hybrid = forward(policy(save("LFM2", tmp_path / "b")))
    assert windowed.prove().layout is Layout.packed
    assert max(len(rows.places) / len(rows.input_ids) for rows in windowed.micro_batches(samples())) > 1
    proof = hybrid.prove()
    assert proof.layout is Layout.single
    assert proof.differences[Layout.packed] > 1  # a convolution that looks across the border
    rows = list(hybrid.micro_batches(samples()))
    assert sorted(place.sample for each in rows for place in each.places) == list(range(len(LENGTHS)))
    assert all(len(each.places) == len(each.input_ids) for each in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_tokens", [32, 1024, 4096])
@pytest.mark.parametrize("experts", [0, 8])
def test_a_window_that_is_lost_is_refused_with_the_difference(
    tmp_path: Path, dtype: torch.dtype, row_tokens: int, experts: int
) -> None:
    """However long the row, in which few tokens lie beyond the window, and though routed tokens may be off."""
    model = policy(save_faulty("window dropped in rows", tmp_path), trust_remote_code=True).to(dtype)
    model.config.num_local_experts = experts
    with pytest.raises(ModelError, match=r"FaultyForCausalLM.*packed rows: off by \d.*single rows: off by \d") as found:
        forward(model, row_tokens).prove()
    assert found.value.exit_code == 5


@pytest.mark.parametrize("fault", ["samples mixed", "samples mixed where a pass has several rows"])
@pytest.mark.parametrize("row_tokens", [16, 64, 1024])
def test_samples_that_mix_are_not_packed(tmp_path: Path, fault: str, row_tokens: int) -> None:
    proof = forward(policy(save_faulty(fault, tmp_path), trust_remote_code=True), row_tokens).prove()
    expected = Layout.single if fault == "samples mixed" else Layout.bounded
    assert (proof.layout, proof.differences[Layout.packed] > 0.1) == (expected, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_held_to_its_own_noise(tmp_path: Path, dtype: torch.dtype) -> None:
    proof = forward(policy(save("Mistral (window)", tmp_path)).to(dtype)).prove()
    assert (proof.layout, TOLERANCE < proof.tolerance < 1) == (Layout.packed, True)


def test_a_model_with_states_is_not_packed_where_half_precision_could_hide_a_leak(tmp_path: Path) -> None:
    proof = forward(policy(save("Falcon-H1", tmp_path)).to(torch.bfloat16)).prove()
    assert (proof.layout, list(proof.differences)) == (Layout.single, [Layout.single])


def test_a_model_whose_code_fails_on_rows_says_so(tmp_path: Path) -> None:
    model = policy(save_faulty("fails", tmp_path), trust_remote_code=True)
    with pytest.raises(ModelError, match="FaultyForCausalLM"):
        forward(model).prove()


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3.5", "Llama4", "GPT-2"])
def test_batches_of_the_hand_off_are_proved_with_their_mask(tmp_path: Path, name: str) -> None:
    assert forward(policy(save(name, tmp_path))).prove([Layout.padded]).layout is Layout.padded


def test_a_model_that_gets_batches_with_a_mask_wrong_is_refused(tmp_path: Path) -> None:
    model = policy(save_faulty("window dropped with a mask", tmp_path), trust_remote_code=True)
    with pytest.raises(ModelError, match=r"padded rows: off by \d"):
        forward(model).prove([Layout.padded])


def by_lengths(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention that is told by cumulative lengths alone where a sample ends, as variable-length kernels are."""
    ends = kwargs.get("cu_seq_lens_q")
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if ends is not None:
        numbers = torch.bucketize(torch.arange(length), ends[1:], right=True)
        mask &= numbers[:, None] == numbers[None, :]
    return sdpa_attention_forward(module, query, key, value, mask[None, None], **kwargs)


def test_kernels_that_want_boundaries_get_them(tmp_path: Path) -> None:
    AttentionInterface.register("by_lengths", by_lengths)
    AttentionMaskInterface.register("by_lengths", lambda **_: None)
    proof = forward(policy(save("Llama", tmp_path), attn_implementation="by_lengths")).prove()
    assert proof.layout is Layout.bounded
    assert proof.differences[Layout.packed] > 0.1


def test_dropout_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    directory = save("GPT-2", tmp_path)
    model, ids = policy(directory), torch.arange(30).unsqueeze(0)
    assert model.training
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert list(random_rates(model.config)) == []
    kept = load_policy(directory, ModelConfig(path=str(directory), device="cpu"), dropout=True).train()
    assert not torch.equal(kept(input_ids=ids).logits, kept(input_ids=ids).logits)  # type: ignore[operator]
    assert forward(kept).prove().layout is Layout.packed  # proved without it


class Noting(dict[str, np.ndarray]):
    """Tensors that note which of them are read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        super().__init__(tensors)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.append(name)
        return super().__getitem__(name)


def test_positions_are_found_without_the_pixels(tmp_path: Path) -> None:
    source = save_tiny_qwen_vl(tmp_path / "qwen")
    config = seeing_config(source, tmp_path / "scans")
    refs, processor = image_files(tmp_path / "scans", 2), processor_of(config)
    shown = [seen_sample(f"s{at}", config, processor, refs[: at + 1]) for at in range(2)]
    images = taken(config, tmp_path / "pixels", shown)
    trained = TrainerForward(policy(source), pad_id=256, row_tokens=1024, micro_batch_tokens=2048, images=images)
    assert trained.prove().layout is Layout.packed
    [packed] = trained.micro_batches(shown)
    seen = {
        at: replace(inputs, images=tuple(replace(one, tensors=Noting(one.tensors)) for one in inputs.images))
        for at, inputs in packed.vision.items()
    }
    noting = [cast(Noting, one.tensors) for inputs in seen.values() for one in inputs.images]
    joined_tensors(list(seen.values()))
    once = [tensors.read.count("pixel_values") for tensors in noting]
    trained.logits(replace(packed, vision=seen))
    assert [tensors.read.count("pixel_values") for tensors in noting] == [2 * count for count in once]


class Doubling(Qwen2_5_VLForConditionalGeneration):
    """Gives other logits with features than with pixels."""

    def forward(self, mm_token_type_ids: Any = None, mm_encoder_outputs: Any = None, **given: Any) -> Any:
        if mm_encoder_outputs is not None:
            mm_encoder_outputs["image"].pooler_output = [2 * one for one in mm_encoder_outputs["image"].pooler_output]
        given |= {"mm_token_type_ids": mm_token_type_ids, "mm_encoder_outputs": mm_encoder_outputs}
        return super().forward(**given)


@pytest.mark.parametrize(("kind", "passes"), [(Qwen2_5_VLForConditionalGeneration, 2), (Doubling, 6)])
def test_features_are_reused_if_the_proof_holds_with_them(tmp_path: Path, kind: Any, passes: int) -> None:
    source = save_tiny_qwen_vl(tmp_path / "qwen")
    config = seeing_config(source, tmp_path / "scans")
    refs, processor = image_files(tmp_path / "scans", 2), processor_of(config)
    shown = [seen_sample(f"s{at}", config, processor, refs[: 1 + at % 2]) for at in range(4)]
    images = taken(config, tmp_path / "pixels", shown)
    loaded = policy(source)
    model = kind(loaded.config)
    model.load_state_dict(loaded.state_dict())
    step = TrainStep(model, TrainerConfig(micro_batch_tokens=256), pad_id=256, row_tokens=64, images=images)
    assert step.prove().layout is Layout.packed
    assert step.features is not None
    assert step.features.reuses is (kind is not Doubling)
    before = step.features.computed
    step.run(shown, 1)
    assert step.features.computed - before == passes
