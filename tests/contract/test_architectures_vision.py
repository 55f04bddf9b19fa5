"""Every family with images: the trainer's rows give the logprobs of plain passes, and those that the engine stamped."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sluice.consumers.training.forward import Layout, TrainerForward
from sluice.consumers.training.images import token_type_names
from sluice.consumers.training.model import load_policy, probe_score, write_model
from sluice.consumers.training.policy.proximal import fill, plan
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import Config, ModelConfig, PolicyConfig, TrainerConfig
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor, joined_tensors
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import GeometryTarget, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs
from sluice.workers.engine.contracts import WeightsProbe
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import request, run
from tests.seen_samples import (
    RESPONSE,
    image_files,
    processor_of,
    prompt_ids,
    seeing_config,
    seen_sample,
    taken,
    written_placeholder,
)
from tests.tiny_vision_models import FAMILIES, pictures
from tests.trainers import random_sample

TOLERANCE = 1e-4
COUNTS = (1, 2, 4)
PROBE = tuple(b"of the windows")


@pytest.fixture(params=list(FAMILIES), scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def config(source: Path, tmp_path: Path) -> Config:
    return seeing_config(source, tmp_path / "scans")


@pytest.fixture
def processor(config: Config) -> VisionProcessor:
    return processor_of(config)


def policy_of(source: Path) -> Any:
    torch.set_num_threads(1)
    return load_policy(source, ModelConfig(path=str(source), device="cpu"))


@pytest.fixture
def calm(source: Path, tmp_path: Path) -> Path:
    """The same model with half as wide matrices: rounding of saturated attention stays below the tolerance."""
    model, directory = policy_of(source), tmp_path / "calm"
    directory.mkdir()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    write_model(model, source, directory)
    return directory


def step_of(
    model: Any, images: Any, row_tokens: int = 256, policy: PolicyConfig | None = None, **options: Any
) -> TrainStep:
    return TrainStep(
        model,
        TrainerConfig(micro_batch_tokens=1024, **options),
        pad_id=256,
        row_tokens=row_tokens,
        coord_ids=range(97, 107),
        policy=policy or PolicyConfig(),
        images=images,
    )


def samples_of(config: Config, processor: VisionProcessor, root: Path) -> list[TrainingSample]:
    """With 1, 2 and 4 images, with none, and one whose policy wrote a placeholder itself."""
    found = [
        seen_sample(f"seen-{count}", config, processor, image_files(root, count, count), seed=count) for count in COUNTS
    ]
    response = [*RESPONSE[:5], written_placeholder(config), *RESPONSE[5:]]
    odd = seen_sample("odd", config, processor, image_files(root, 1, 9), seed=9, response=response)
    return [*found, random_sample("text", 23), odd, random_sample("short", 5)]


def plain_scores(model: Any, token_ids: list[int], inputs: VisionInputs | None, odd: int | None = None) -> torch.Tensor:
    """Logprobs of a sequence alone; with gradient if it is on. `odd`: a token that the policy wrote."""
    ids = torch.tensor([token_ids])
    given: dict[str, Any] = {}
    if inputs is not None:
        given = {name: torch.from_numpy(values) for name, values in joined_tensors([inputs]).items()}
        given |= dict.fromkeys(token_type_names(model), torch.from_numpy(inputs.token_types))
    if odd is None or inputs is None:
        return _chosen(model(input_ids=ids, use_cache=False, **given).logits, ids)
    written = (ids == odd) & (torch.from_numpy(inputs.token_types) == 0)
    restore = model.get_input_embeddings().register_forward_pre_hook(
        lambda _m, args: (args[0].masked_fill(written, odd),)
    )
    try:
        return _chosen(model(input_ids=ids.masked_fill(written, 0), use_cache=False, **given).logits, ids)
    finally:
        restore.remove()


def _chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def test_scores_of_rows_are_those_of_plain_passes(
    source: Path, config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    samples = samples_of(config, processor, tmp_path / "scans")
    images = taken(config, tmp_path / "pixels", samples)
    model = policy_of(source)
    step = step_of(model, images)
    scores = step.score(samples)
    model.eval()
    with torch.no_grad():
        for sample, found in zip(samples, scores, strict=True):
            ids, odd = list(sample.token_ids), written_placeholder(config)
            plain = plain_scores(model, ids, images.inputs(sample), odd)
            torch.testing.assert_close(torch.tensor(found[1:]), plain, atol=TOLERANCE, rtol=0, msg=sample.seq_id)
    assert sum(images.written(sample) for sample in samples if sample.images) == 1
    print(source.name, step.prove())


def test_pixels_decide(source: Path, config: Config, processor: VisionProcessor, tmp_path: Path) -> None:
    """The same tokens with other pictures of the same size have other logprobs."""
    root = tmp_path / "scans"
    one = seen_sample("one", config, processor, image_files(root, 2, 1), seed=1)
    other = replace(one, seq_id="other:0", images=image_files(root, 2, 5))
    images = taken(config, tmp_path / "pixels", [one, other])
    first, second = step_of(policy_of(source), images).score([one, other])
    assert np.abs(np.array(first) - np.array(second))[one.prompt_len :].max() > 0.01


def test_every_loss_is_the_same_however_samples_are_laid_out(
    calm: Path, config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    """Cross-entropy, box regression and policy loss of packed rows, and of rows of one sample each."""
    options = PolicyConfig(enabled=True)
    samples: list[TrainingSample] = []
    for at, sample in enumerate(samples_of(config, processor, tmp_path / "scans")):
        if sample.images:
            start = sample.prompt_len
            target = GeometryTarget(positions=(start + 1, start + 2, start + 4, start + 6), box=(10, 20, 300, 400))
            made = plan(replace(sample, advantage=(-1.0) ** at), Line([0]), options, own_version=0)
            filled = fill(made, [], {}, options).sample
            assert filled is not None
            sample = replace(filled, geometry=[target])
        samples.append(sample)
    images = taken(config, tmp_path / "pixels", samples)
    records = [
        step_of(policy_of(calm), images, row_tokens, policy=options, learning_rate=0.0).run(samples, 1, version=0)
        for row_tokens in (256, 1)
    ]
    for name in ("train/loss", "train/geometry_loss", "policy/loss", "train/grad_norm", "policy/tokens"):
        assert records[0][name] == pytest.approx(records[1][name], rel=1e-3), name
    assert min(abs(records[0][name]) for name in ("train/loss", "train/geometry_loss", "policy/loss")) > 0


def test_the_proof_leaves_out_what_the_context_does_not_hold(calm: Path, config: Config, tmp_path: Path) -> None:
    images = taken(config, tmp_path / "pixels", [])
    model = policy_of(calm)
    model.config.get_text_config().max_position_embeddings = 40
    forward = TrainerForward(model, pad_id=256, row_tokens=32, micro_batch_tokens=64, images=images)
    assert forward.prove().layout in (Layout.packed, Layout.single)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_gradient_of_rows_is_that_of_plain_passes(
    source: Path, config: Config, processor: VisionProcessor, tmp_path: Path, frozen: bool
) -> None:
    samples = samples_of(config, processor, tmp_path / "scans")
    images = taken(config, tmp_path / "pixels", samples)
    model = policy_of(source)
    step = step_of(model, images, learning_rate=0.0, max_grad_norm=1e9, freeze_vision=frozen)
    norm = step.run(samples, 1)["train/grad_norm"]
    total = sum(sum(sample.weights) for sample in samples)
    model.zero_grad()
    for sample in samples:
        odd = written_placeholder(config)
        scores = plain_scores(model, list(sample.token_ids), images.inputs(sample), odd)
        (-(scores * torch.tensor(list(sample.weights))[1:]).sum() / total).backward()
    plain = math.sqrt(sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None))
    assert norm == pytest.approx(plain, rel=1e-3)
    text = {id(each) for each in model.get_decoder().parameters()}
    text |= {id(each) for each in model.get_output_embeddings().parameters()}
    grown = [name for name, each in model.named_parameters() if each.grad is not None and id(each) not in text]
    assert bool(grown) is not frozen, grown


def test_a_frozen_tower_sees_each_picture_once_and_the_gradient_is_the_same(
    source: Path, config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    """Whatever shows it: a group, several micro-batches and steps, until other weights are loaded."""
    samples = samples_of(config, processor, tmp_path / "scans")
    group = [replace(sample, seq_id=f"{number}-{sample.seq_id}") for number in range(2) for sample in samples]
    images = taken(config, tmp_path / "pixels", group)
    gradients: list[dict[str, torch.Tensor]] = []
    for reuses in (True, False):
        model = policy_of(source)
        step = step_of(model, images, learning_rate=0.0, max_grad_norm=1e9)
        step.prove()
        features = step.features
        assert features is not None
        assert features.reuses, "this family can"
        if not reuses:
            features.give_up("to compare with")
        before, found = features.computed, gradients_of(model)
        step.run(group, 1)
        step.score(group)
        gradients.append(found)
        if not reuses:
            assert features.computed - before == 32
            continue
        assert (features.computed - before, features.num_bytes > 0) == (8, True)
        model.load_state_dict(model.state_dict())
        step.score(group[:1])
        assert features.computed - before == 9, "loaded weights may be others"
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=0, atol=1e-3 * float(gradient.norm()), msg=name)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Filled in by the next backward passes: the sum of each parameter's, by name."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        return lambda parameter: found.update({name: parameter.grad.clone()})

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note(name))
    return found


def test_a_vision_tower_that_is_trained_runs_in_every_pass(
    source: Path, config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    refs = image_files(tmp_path / "scans", 1)
    group = [seen_sample(f"s{number}", config, processor, refs) for number in range(3)]
    images = taken(config, tmp_path / "pixels", group)
    step = step_of(policy_of(source), images, freeze_vision=False)
    step.prove()
    features = step.features
    assert features is not None
    before = features.computed
    step.run(group, 1)
    assert (features.computed - before, features.reused) == (3, 0)


def test_batches_of_the_hand_off_are_proved_with_their_mask(
    source: Path, config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    images = taken(config, tmp_path / "pixels", [])
    forward = TrainerForward(policy_of(source), pad_id=256, row_tokens=64, micro_batch_tokens=256, images=images)
    assert forward.prove([Layout.padded]).layout is Layout.padded


@pytest.fixture
def backend(calm: Path) -> Iterator[HfBackend]:
    running = HfBackend(ModelConfig(path=str(calm), device="cpu"), max_batch=4)
    asyncio.run(running.start())
    yield running
    asyncio.run(running.close())


def test_decoded_logprobs_are_the_trainers_before_and_after_an_update(
    calm: Path, config: Config, processor: VisionProcessor, tmp_path: Path, backend: HfBackend
) -> None:
    refs = {count: image_files(tmp_path / "scans", count, count) for count in COUNTS}
    asked = [
        dataclasses.replace(
            request(prompt_ids(processor, count), seed=count, max_new_tokens=24, temperature=1.0),
            seq_key=f"s{count}",
            images=tuple(pictures(count, count)),
        )
        for count in COUNTS
    ]
    model, versions = policy_of(calm), tmp_path / "weights"
    for version in (0, 1):
        samples: list[TrainingSample] = []
        outputs = run(backend, *asked)
        for count, output in zip(COUNTS, outputs, strict=True):
            sample = seen_sample(
                f"{version}-{count}", config, processor, refs[count], seed=count, response=output.token_ids
            )
            assert list(sample.token_ids)[: sample.prompt_len] == list(output.prompt_token_ids), "expanded alike"
            behaviour = FloatArray([0.0] * sample.prompt_len + list(output.logprobs))
            versions_of = Runs.of([-1] * sample.prompt_len + [version] * len(output.token_ids))
            samples.append(replace(sample, logprobs=behaviour, versions=versions_of, advantage=1.0))
        images = taken(config, tmp_path / f"pixels-{version}", samples)
        step = step_of(model, images, learning_rate=1e-3, policy=PolicyConfig(enabled=True))
        for sample, scores, output in zip(samples, step.score(samples), outputs, strict=True):
            found = torch.tensor(scores[sample.prompt_len :])
            torch.testing.assert_close(found, torch.tensor(output.logprobs), atol=TOLERANCE, rtol=0, msg=sample.seq_id)
        policy, line = PolicyConfig(enabled=True), Line.consecutive(version)
        plans = [plan(sample, line, policy, own_version=version) for sample in samples]
        ready = [fill(each, [], {}, PolicyConfig()) for each in plans]
        record = step.run([each.sample for each in ready if each.sample is not None], 1, version=version)
        assert record["policy/engine_logprob_gap_max"] < TOLERANCE
        assert record["policy/tokens"] == sum(len(output.token_ids) for output in outputs)
        if version == 0:
            directory = versions / "v000001"
            directory.mkdir(parents=True)
            write_model(model, calm, directory)
            probe = WeightsProbe(PROBE, probe_score(model, list(PROBE)), tolerance=1e-3)
            asyncio.run(backend.load_weights(directory, 1, probe))
