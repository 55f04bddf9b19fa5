"""Images of the samples in hand: prepared once, held in files, freed with their last sample."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from sluice.consumers.training.images import SampleImages
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError, DeadlineExceeded, TaskError
from sluice.pipeline.images.processor import ProcessedImage, VisionInputs, VisionProcessor, joined_tensors
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.roles import eventually
from tests.seen_samples import image_files, seen_sample
from tests.tiny_vision_models import pictures
from tests.trainers import random_sample


async def test_a_group_shares_one_copy_which_goes_with_its_last_member(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    refs, directory = image_files(tmp_path / "scans", 2), tmp_path / "pixels"
    group = [seen_sample(f"g{at}", config, processor, refs) for at in range(4)]
    async with SampleImages(config, processor, directory) as images:
        processed = processor.processed
        assert await images.take([*group, random_sample("text", 9)], 30) == {}
        assert await images.take(group[:1], 30) == {}, "taken before"
        assert processor.processed - processed == 2, "each picture once, not once per member"
        inputs = images.inputs(group[3])
        assert inputs is not None
        expected = processor.match(list(group[3].token_ids), pictures(2))
        assert {name: values.tolist() for name, values in inputs.tensors.items()} == {
            name: values.tolist() for name, values in expected.tensors.items()
        }
        assert inputs.token_types.tolist() == expected.token_types.tolist()
        assert images.cost(group[0]) == int(expected.tensors["image_grid_thw"].prod(-1).sum())
        assert (images.inputs(random_sample("text", 9)), images.cost(random_sample("text", 9))) == (None, 0)
        images.forget([one.seq_id for one in group[:3]])
        assert images.inputs(group[3]) is not None
        assert len(list(directory.glob("*/*"))) == 2, "a directory for each picture"
        images.forget([group[3].seq_id])
        assert len(list(directory.glob("*/*"))) == 2, "not deleted by the event loop itself"
        await eventually(lambda: asyncio.to_thread(lambda: not list(directory.glob("*/*"))), "the files are deleted")
        with pytest.raises(TaskError, match="was not taken, or is finished"):
            images.inputs(group[3])
    assert not directory.exists()


async def test_failures_name_the_sequence_and_the_cause_and_cost_nobody_else_anything(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    refs = image_files(tmp_path / "scans", 2)
    good = seen_sample("good", config, processor, refs)
    gone = replace(good, seq_id="gone:0", images=[refs[0], replace(refs[1], path="none.png")])
    changed = replace(good, seq_id="changed:0", images=[replace(refs[0], sha256="0" * 64), refs[1]])
    swapped = replace(good, seq_id="swapped:0", images=refs[::-1])
    async with SampleImages(config, processor, tmp_path / "pixels") as images:
        failed = await images.take([gone, good, changed, swapped], 30)
        assert set(failed) == {"gone:0", "changed:0"} | ({"swapped:0"} & set(failed))
        assert "none.png" in failed["gone:0"]
        assert "sha256" in failed["changed:0"]
        assert images.inputs(good) is not None


async def test_a_replaced_trainer_harms_no_file_of_its_successor(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    refs, directory = image_files(tmp_path / "scans", 2), tmp_path / "pixels"
    one, two = (seen_sample(f"s{at}", config, processor, [ref]) for at, ref in enumerate(refs))
    async with SampleImages(config, processor, directory) as paused:
        assert await paused.take([one], 30) == {}
        async with SampleImages(config, processor, directory) as successor:
            with pytest.raises(FileNotFoundError):
                paused.inputs(one)
            assert await successor.take([two], 30) == {}
            taken = successor.inputs(two)
            assert taken is not None
            paused.forget([one.seq_id])
            assert await paused.take([one], 30) == {}, "one that doesn't know it yet"
            await paused.close()
            still = successor.inputs(two)
            assert still is not None
            assert {name: values.tolist() for name, values in still.tensors.items()} == {
                name: values.tolist() for name, values in taken.tensors.items()
            }
    assert not directory.exists()


async def test_pixels_that_could_not_be_written_are_written_by_the_next_try(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    one, directory = seen_sample("one", config, processor, image_files(tmp_path / "scans", 1)), tmp_path / "pixels"
    async with SampleImages(config, processor, directory) as images:
        directory.write_bytes(b"")
        with pytest.raises(DataError, match="cannot be written"):
            await images.take([one], 30)
        directory.unlink()
        assert await images.take([one], 30) == {}
        assert images.inputs(one) is not None


async def test_images_of_several_turns_are_found_between_what_the_policy_wrote(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    """A tool answers with the second image, after the policy wrote an image's placeholder itself."""
    refs, token = image_files(tmp_path / "scans", 2), processor.image_token_id
    turns = [list(processor.prepare([65, token, 66], [image]).token_ids) for image in pictures(2)]
    ids = [*turns[0], 70, token, 71, *turns[1], token, 72]
    versions = [-1] * len(turns[0]) + [0] * 3 + [-1] * len(turns[1]) + [1, 1]
    one = seen_sample("one", config, processor, [], images=refs, token_ids=TokenArray(ids), labels=TokenArray(ids),
                      weights=FloatArray([0.0] * len(ids)), segments=Runs.of([0] * len(ids)),
                      versions=Runs.of(versions), response_mask=Runs.of([int(by >= 0) for by in versions]),
                      logprobs=FloatArray([0.0] * len(ids)), prompt_len=len(turns[0]))  # fmt: skip
    async with SampleImages(config, processor, tmp_path / "pixels") as images:
        assert await images.take([one], 30) == {}
        inputs = images.inputs(one)
        assert inputs is not None
        assert (len(inputs.images), images.written(one)) == (2, 2)
        assert inputs.token_types[0].tolist() == [
            int(i == token and by < 0) for i, by in zip(ids, versions, strict=True)
        ]


async def test_what_takes_too_long_is_no_fault_of_the_image(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    good = seen_sample("good", config, processor, image_files(tmp_path / "scans", 1))
    async with SampleImages(config, processor, tmp_path / "pixels") as images:
        with pytest.raises(DeadlineExceeded, match=r"of 1 of 1 sequences were not ready after 0 s.*good"):
            await images.take([good], 0.0)
        assert await images.take([good], 30) == {}, "a later try may succeed"


async def test_images_on_a_mount_that_is_away_are_tried_again(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    refs, away = image_files(tmp_path / "scans", 2), tmp_path / "away"
    good = seen_sample("good", config, processor, refs)
    spoiled = replace(good, seq_id="spoiled:0", images=[refs[0], replace(refs[1], sha256="0")])
    (tmp_path / "scans").rename(away)
    async with SampleImages(config, processor, tmp_path / "pixels") as images:
        taking = asyncio.create_task(images.take([good, spoiled], 60))
        await eventually(lambda: asyncio.sleep(0, bool(images.trouble)), "the first try failed")
        assert "scans is not a directory" in images.trouble
        away.rename(tmp_path / "scans")
        failed = await taking
        assert list(failed) == ["spoiled:0"]
        assert "64 hexadecimal digits" in failed["spoiled:0"]
        assert images.inputs(good) is not None


async def test_whoever_has_no_patience_is_told_at_once(
    config: Config, processor: VisionProcessor, tmp_path: Path
) -> None:
    good = seen_sample("good", config, processor, image_files(tmp_path / "scans", 1))
    (tmp_path / "scans").rename(tmp_path / "away")
    async with SampleImages(config, processor, tmp_path / "pixels") as images:
        failed = await images.take([good], 60, patient=False)
        assert "scans is not a directory" in failed[good.seq_id]


def test_images_of_several_samples_are_joined_in_order() -> None:
    def inputs(*shape: int, value: float) -> VisionInputs:
        tensors = {"pixel_values": np.full(shape, value), "pixel_attention_mask": np.ones((*shape[:2], *shape[3:]))}
        return VisionInputs((), np.zeros((1, 0), dtype=np.int64), (ProcessedImage((), (), (0, 0), tensors),), ())

    joined = joined_tensors([inputs(1, 2, 3, 4, 4, value=1.0), inputs(1, 1, 3, 2, 6, value=2.0)])
    assert joined["pixel_values"].shape == (1, 3, 3, 4, 6)
    assert joined["pixel_values"][0, :2, :, :, :4].min() == 1.0
    assert joined["pixel_values"][0, 2, :, :2].min() == 2.0
    assert joined["pixel_attention_mask"].shape == (1, 3, 4, 6)
    assert joined["pixel_attention_mask"][0, 2, 2:].max() == 0.0
