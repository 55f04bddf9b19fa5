"""Samples with images at the trainer: each is trained once on its pixels, or dropped by name at nobody else's cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from sluice.consumers.training.handoff import Rollouts
from sluice.consumers.training.images import SampleImages, pixels_of
from sluice.consumers.training.model import load_policy
from sluice.consumers.training.step import TrainStep
from sluice.consumers.training.step_log import read_rollouts, read_steps
from sluice.consumers.training.trainer import Trainer, train
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, ImagesConfig
from sluice.pipeline.errors import DeadlineExceeded, first_cause
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.queue.dead_letters import DeadLetters
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import verify
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import ImageRef, TrainingBatch, TrainingSample, encode
from tests.cut_off import cut_off_at
from tests.pictures import encoded, huge_png
from tests.roles import role_of, run_config
from tests.seen_samples import image_files, processor_of, seen_sample
from tests.tiny_vision_models import save_tiny_qwen3_vl
from tests.tiny_vlms import picture
from tests.trainers import random_sample


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "scans"


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, source: Path, root: Path, **trainer: Any) -> Config:
    return run_config(
        broker,
        keys,
        run_dir,
        model={"path": str(source), "device": "cpu"},
        images=ImagesConfig(roots=(str(root),), fetch_timeout_s=2),
        producer={"samples_per_version": 4, "max_in_flight": 64},
        consumer={"row_tokens": 128},
        trainer={"batch_wait_s": 60, "micro_batch_tokens": 512, **trainer},
    )


async def hand_on(client: Any, keys: Keys, *batches: list[TrainingSample]) -> None:
    for number, samples in enumerate(batches):
        await client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id=str(number), samples=samples))})
        await client.hincrby(keys.counts, "enqueued", len(samples))
        await client.hincrby(keys.counts, "accepted", len(samples))
    await client.hset(keys.source, "exhausted", 1)


def spoiled(config: Config, processor: VisionProcessor, root: Path) -> dict[str, tuple[TrainingSample, str]]:
    """Samples whose images went wrong between decoding and training, and what their letters say."""

    def one(name: str) -> tuple[TrainingSample, Path]:
        (ref,) = image_files(root / name, 1, 3)
        moved = ImageRef(path=f"{name}/{ref.path}", sha256=ref.sha256)
        return seen_sample(name, config, processor, [moved], seed=3), root / name / str(ref.path)

    gone, file = one("gone")
    file.unlink()
    changed, file = one("changed")
    file.write_bytes(encoded(picture(40, 24, seed=77)))
    shrunk, file = one("shrunk")
    file.write_bytes(encoded(picture(16, 16, seed=3)))
    bomb, file = one("bomb")
    file.write_bytes(huge_png())
    cut, file = one("cut")
    file.write_bytes(file.read_bytes()[:-60])

    def unstamped(sample: TrainingSample) -> TrainingSample:
        return replace(sample, images=[replace(ref, sha256=None) for ref in sample.images])

    def restamped(sample: TrainingSample, name: str) -> TrainingSample:
        digest = sha256((root / name / str(sample.images[0].path).partition("/")[2]).read_bytes()).hexdigest()
        return replace(sample, images=[replace(sample.images[0], sha256=digest)])

    few = seen_sample("few", config, processor, image_files(root, 2, 6), seed=6)
    return {
        "gone": (gone, "no such file"),
        "changed": (changed, "sha256"),
        "shrunk": (unstamped(shrunk), "tokens"),
        "bomb": (restamped(bomb, "bomb"), "pixels"),
        "cut": (restamped(cut, "cut"), "image"),
        "few": (replace(few, images=few.images[:1]), "left in the prompt"),
    }


def trained(config: Config) -> Counter[str]:
    lines = read_steps(Path(config.run_dir) / config.run / "trained.jsonl")
    return Counter(seq_id for line in lines for seq_id in line["seq_ids"])


async def test_images_that_went_wrong_drop_their_own_sequences_alone(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, root: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, source, root, keep_rollouts=None)
    processor = processor_of(config)
    bad = spoiled(config, processor, root)
    good = [seen_sample(f"good-{n}", config, processor, image_files(root, n, n), seed=n) for n in (1, 2)]
    await hand_on(client, keys, [sample for sample, _ in bad.values()], [*good, random_sample("text", 12)])
    await train(config)
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.waiting_batches, now.complete) == (3, len(bad), 0, True)
    assert now.reasons == {"dropped:image_failed": len(bad)}
    assert trained(config) == Counter(["good-1:0", "good-2:0", "text:0"])
    letters = {row.letter.seq_id: row.letter async for row in DeadLetters(client, config).rows(dropped=True)}
    for name, (sample, words) in bad.items():
        assert words in letters[sample.seq_id].detail, name
    run = Path(config.run_dir) / config.run
    assert not (run / ".pixels").exists()
    kept = [sample for _, batch in read_rollouts(run / "rollouts") for sample in batch.samples]
    assert [len(sample.images) for sample in kept] == [1, 2, 0], "stored with their references"
    manifest = await WeightsRegistry(client, keys).get(now.latest_version or 0)
    assert manifest is not None
    assert verify(manifest)


CUTS = {
    "before the checkpoint": ("sluice.consumers.training.checkpoint.save", 1),
    "before the ack": ("sluice.consumers.training.session.Session._ack", 2),
}


async def train_here(config: Config) -> None:
    """The trainer, which gives its role back at once however it ends."""
    images = SampleImages.of(config, pixels_of(config))
    assert images is not None
    model = load_policy(Path(config.model.path), config.model)
    step = TrainStep(model, config.trainer, pad_id=256, row_tokens=128, images=images)
    async with role_of(config, "trainer", "trainer") as role, images:
        owner = Ownership(role.client, role.keys, "trainer")
        await owner.acquire(10, role.status.waiting)
        try:
            await Trainer(role, owner, step, Path(config.model.path), images=images).run()
        finally:
            await Scripts(role.client).ask(RoleKey(owner=owner.key), Disown(nonce=owner.nonce))


@pytest.mark.parametrize("place", CUTS)
async def test_a_restart_neither_trains_nor_drops_twice(
    place: str,
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    source: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(broker_config, keys, run_dir, source, root)
    processor = processor_of(config)
    gone, _ = spoiled(config, processor, root)["gone"]
    good = [seen_sample(f"good-{n}", config, processor, image_files(root, n, n), seed=n) for n in (1, 2)]
    await hand_on(client, keys, [good[0], gone, random_sample("a", 9), random_sample("b", 9)], [good[1]])
    await cut_off_at(*CUTS[place], monkeypatch, train_here(config))
    await train_here(config)
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.complete) == (4, 1, True)
    assert trained(config) == Counter(["good-1:0", "a:0", "b:0", "good-2:0"])


async def test_images_that_cannot_be_reached_drop_nothing(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, root: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, source, root)
    good = seen_sample("good", config, processor_of(config), image_files(root, 1, 1), seed=1)
    await hand_on(client, keys, [good, random_sample("text", 12)])
    root.rename(root.with_name("away"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await train_here(config_of(broker_config, keys, run_dir, source, root, batch_wait_s=1))
    ended = first_cause(caught.value)
    assert isinstance(ended, DeadlineExceeded)
    assert "scans is not a directory" in str(ended) or "still fetching" in str(ended)
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.waiting_batches) == (0, 0, 1)
    root.with_name("away").rename(root)
    await train_here(config)
    assert trained(config) == Counter(["good:0", "text:0"])
    assert (await snapshot(client, keys)).dropped == 0


async def test_your_own_loop_gets_the_pixels(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, source: Path, root: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, source, root, external=True)
    processor = processor_of(config)
    gone, _ = spoiled(config, processor, root)["gone"]
    good = [seen_sample(f"good-{n}", config, processor, image_files(root, n, n), seed=n) for n in (1, 2)]
    placeholder = processor.image_token_id
    odd = seen_sample("odd", config, processor, image_files(root, 1, 8), seed=8, response=[65, placeholder, 66])
    await hand_on(client, keys, [*good, gone, odd], [random_sample("text", 12)])

    def loop() -> list[list[str]]:
        given = []
        with Rollouts(config) as rollouts:
            model: Any = AutoModelForImageTextToText.from_pretrained(rollouts.model_path, dtype=torch.float32)
            for batch in rollouts.batches():
                given.append(batch["seq_ids"])
                assert bool(batch["vision"]) is (batch["seq_ids"] != ["text:0"])
                inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
                logits = model(**inputs, **batch["vision"]).logits
                assert logits.shape[:2] == batch["input_ids"].shape
                rollouts.publish(model)
        return given

    assert await asyncio.to_thread(loop) == [["good-1:0", "good-2:0"], ["text:0"]]
    now = await snapshot(client, keys)
    assert (now.trained, now.dropped, now.complete) == (3, 2, True)
    assert now.reasons == {"dropped:image_failed": 2}
