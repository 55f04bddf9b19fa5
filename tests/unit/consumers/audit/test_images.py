"""Sequences with images are audited with the images themselves; one that is gone leaves its sequence unchecked."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from sluice.consumers.audit.audit import audit_run
from sluice.consumers.audit.recompute import Pixels, Recomputed
from sluice.consumers.audit.stored import read_sequences
from sluice.consumers.training.images import SampleImages
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.config.types import Config
from sluice.pipeline.images.processor import VisionInputs
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.messages import TrainingSample, WeightVersion
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.seen_samples import image_files, processor_of, seeing_config, seen_sample, written_placeholder
from tests.tiny_vision_models import pictures, save_tiny_qwen3_vl

VERSIONS = 2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    for version in range(VERSIONS):
        source = save_tiny_qwen3_vl(directory / f"model{version}", seed=version)
        write_version(source, directory / "weights", WeightVersion(version=version, path="", digest=""))
    return directory / "weights"


def stamped(sample: TrainingSample, inputs: VisionInputs, weights: Path) -> TrainingSample:
    """With the logprobs of version 0, scored under version 1, of transformers' own passes."""
    length, start = len(sample.token_ids), sample.prompt_len
    given: dict[str, Any] = {name: torch.from_numpy(values) for name, values in inputs.tensors.items()}
    given["mm_token_type_ids"] = torch.tensor([[*inputs.token_types[0].tolist(), *[0] * (length - start)]])
    ids, tables = torch.tensor([list(sample.token_ids)]), []
    for version in range(VERSIONS):
        model: Any = AutoModelForImageTextToText.from_pretrained(weights / f"v{version:06d}", dtype=torch.float32)
        with torch.inference_mode():
            logprobs = model.eval()(input_ids=ids, **given).logits[0, :-1].log_softmax(-1)
        tables.append([0.0, *logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist()])
    sampled = [at >= start for at in range(length)]
    behaviour, proximal = ([table[at] if sampled[at] else 0.0 for at in range(length)] for table in tables)
    return replace(
        sample,
        logprobs=FloatArray(behaviour),
        versions=Runs.of([0 if on else -1 for on in sampled]),
        proximal_logprobs=FloatArray(proximal),
        proximal_versions=Runs.of([1 if on else -1 for on in sampled]),
        response_mask=Runs.of([int(on) for on in sampled]),
    )


@pytest.fixture
def run(weights: Path, tmp_path: Path) -> tuple[Path, Config, list[TrainingSample]]:
    """Sequences with one image, with two, and one more, in two steps; the second step uses an id of the first again."""
    root, directory = tmp_path / "scans", tmp_path / "runs" / "seen"
    config = seeing_config(weights / "v000000", root, run="seen", run_dir=str(tmp_path / "runs"))
    processor = processor_of(config)
    samples: list[TrainingSample] = []
    for count, seed in ((1, 1), (2, 2), (1, 3)):
        sample = seen_sample(f"s{seed}", config, processor, image_files(root, count, seed), seed=seed)
        prompt = processor.prepare(list(sample.token_ids[: sample.prompt_len]), pictures(count, seed))
        samples.append(stamped(sample, prompt, weights))
    directory.mkdir(parents=True)
    (directory / "weights").symlink_to(weights)
    kept = KeptRollouts(directory / "rollouts", None)
    kept.save(1, samples[:2])
    kept.save(2, [replace(samples[2], seq_id=samples[0].seq_id)])
    return directory, config, samples


def test_every_token_of_a_sequence_with_images_is_checked(
    run: tuple[Path, Config, list[TrainingSample]], tmp_path: Path
) -> None:
    directory, config, samples = run
    found = audit_run(directory, config, tolerance=1e-4)
    tokens = sum(len(one.token_ids) - one.prompt_len for one in samples)
    assert (found.tokens, found.right, found.wrong, found.unchecked) == (tokens, tokens, 0, 0)
    assert "images" not in {each.what for each in found.not_checked}
    assert found.told_apart == tokens
    assert written_placeholder(config) in samples[0].token_ids


def test_an_image_that_is_gone_or_changed_leaves_its_own_sequence_unchecked(
    run: tuple[Path, Config, list[TrainingSample]], tmp_path: Path
) -> None:
    directory, config, samples = run
    (tmp_path / "scans" / str(samples[0].images[0].path)).unlink()
    other = tmp_path / "scans" / str(samples[1].images[1].path)
    pictures(1, 50)[0].save(other)
    found = audit_run(directory, config, tolerance=1e-4)
    assert [(each.what, each.sequences) for each in found.not_checked if each.what == "images"] == [("images", 2)]
    right = len(samples[2].token_ids) - samples[2].prompt_len
    assert (found.right, found.wrong) == (right, 0)


def test_a_sequence_that_was_decoded_from_another_image_is_wrong(
    run: tuple[Path, Config, list[TrainingSample]], tmp_path: Path
) -> None:
    """Its reference has no digest, so only the numbers can tell."""
    directory, config, samples = run
    kept = KeptRollouts(directory / "rollouts", None)
    kept.save(1, [replace(samples[0], images=[replace(ref, sha256=None) for ref in samples[0].images]), samples[1]])
    pictures(1, 50)[0].save(tmp_path / "scans" / str(samples[0].images[0].path))
    found = audit_run(directory, config, tolerance=1e-4)
    assert found.wrong == len(samples[0].token_ids) - samples[0].prompt_len
    assert set(kind for kind, count in found.faults.items() if count) == {"behaviour", "proximal"}


def test_images_of_a_few_sequences_are_on_disk_at_a_time(
    run: tuple[Path, Config, list[TrainingSample]], tmp_path: Path
) -> None:
    """Of twenty sequences with an image each; one of them is gone, and named once however often it is asked for."""
    directory, config, _ = run
    processor, root = processor_of(config), tmp_path / "scans"
    many = [seen_sample(f"m{at}", config, processor, image_files(root, 1, 100 + at), seed=100 + at) for at in range(20)]
    KeptRollouts(directory / "rollouts", None).save(3, many)
    stored = list(read_sequences(directory / "rollouts", "3"))
    (root / str(many[4].images[0].path)).unlink()
    pairs = [(one, Recomputed.empty(len(one.token_ids))) for one in stored]
    made = SampleImages.of(config, tmp_path / "pixels")
    with closing(Pixels(made, 60.0)) as pixels:
        for _ in range(2):
            most, names = 0, list[str]()
            for one, _ in pixels.served(pairs):
                assert len(pixels.inputs(one).token_ids) == len(one.token_ids)
                most = max(most, len(list((tmp_path / "pixels").glob("*/*"))))
                names.append(one.name)
            assert names == [one.name for one in stored if one.seq_id != "m4:0"]
            assert most == 8
            assert not list((tmp_path / "pixels").glob("*/*"))
        assert pixels.gone == {"step 3, m4:0"}
    assert not (tmp_path / "pixels").exists()
