"""What the trainer's recorder writes, and that a failure ends it for good."""

from __future__ import annotations

import random
from pathlib import Path

from msgspec.structs import replace

from sluice.consumers.history.files import TRAINER, history_directory
from sluice.consumers.history.reader import Files
from sluice.consumers.history.recorder import TrainedRecorder
from sluice.consumers.history.records import SequenceDetail, SequenceRow, Trained
from sluice.consumers.samples import letter
from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.config.types import Config, ConsumerConfig, HistoryConfig
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.factories import training_sample

SAMPLE = training_sample(
    "a:0",
    proximal_logprobs=FloatArray([0, -1, -2, -3]),
    proximal_versions=Runs.of([-1, 4, 4, 4]),
    response_mask=Runs.of([0, 1, 1, 0]),
    left_out=Runs.of([LeftOut.no, LeftOut.no, LeftOut.no, LeftOut.stale]),
)


async def test_what_is_trained_and_what_is_dropped_before_it(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path))
    recorder = TrainedRecorder(config)
    recorder.note(3, 5, [SAMPLE], [letter("b:0", "stale", "too old")])
    assert not history_directory(config).exists()  # not before the step is safe
    await recorder.flush()
    await recorder.close()
    files = Files(history_directory(config))
    found = files.trained(["a:0", "b:0"])
    files.close()
    assert found["a:0"] == Trained(
        seq_id="a:0",
        step=3,
        version=5,
        state="trained",
        proximal_logprobs=SAMPLE.proximal_logprobs,
        proximal_versions=SAMPLE.proximal_versions,
        response_mask=SAMPLE.response_mask,
        left_out=SAMPLE.left_out,
    )
    assert found["b:0"] == Trained(seq_id="b:0", step=3, version=5, state="dropped", reason="stale")


def test_a_sample_as_trained_has_the_trainers_masks() -> None:
    handed_on = training_sample("a:0", weights=FloatArray([0, 0, 1, 1]), response_mask=Runs.of([0, 1, 1, 1]))
    row = SequenceRow(seq_id="a:0", job_id="a", index=0, group_size=1, state="handed_on", at=0.0)
    record = Trained(seq_id="a:0", step=3, version=5, state="trained")
    masks = {"response_mask": SAMPLE.response_mask, "left_out": SAMPLE.left_out}
    detail = SequenceDetail(row=row, sample=handed_on, trained=replace(record, **masks))
    wanted = replace(handed_on, **masks, weights=FloatArray([0, 0, 1, 0]))
    assert detail.as_trained == wanted, "nor is a stale token in the cross-entropy"
    for other in (None, record):  # of an older release
        assert replace(detail, trained=other).as_trained == handed_on
    longer = training_sample("a:0", 5)
    assert replace(detail, sample=longer).as_trained == longer, "another attempt's"
    assert replace(detail, sample=None).as_trained is None


def test_a_sample_as_trained_has_the_trainers_proximal_logprobs() -> None:
    handed_on = training_sample("a:0")
    row = SequenceRow(seq_id="a:0", job_id="a", index=0, group_size=1, state="handed_on", at=0.0)
    scores = {"proximal_logprobs": SAMPLE.proximal_logprobs, "proximal_versions": SAMPLE.proximal_versions}
    detail = SequenceDetail(
        row=row, sample=handed_on, trained=Trained(seq_id="a:0", step=3, version=5, state="trained", **scores)
    )
    assert detail.as_trained == replace(handed_on, **scores)
    longer = training_sample("a:0", 5)
    assert replace(detail, sample=longer).as_trained == longer, "another attempt's"


async def test_the_trainers_file_may_hold_what_all_consumers_may(tmp_path: Path) -> None:
    limits = HistoryConfig(max_mb=1)
    config = Config(run_dir=str(tmp_path), history=limits, consumer=ConsumerConfig(count=3))
    recorder, rng = TrainedRecorder(config), random.Random(7)
    names = [f"g{number}:0" for number in range(6)]
    for name in names:  # 2.4 MB of noise
        recorder.note(1, 0, [], [letter(name, rng.randbytes(400_000).hex(), "")])
        await recorder.flush()
    await recorder.close()
    assert (history_directory(config) / TRAINER).stat().st_size > 2 << 20
    files = Files(history_directory(config))
    assert sorted(files.trained(names)) == names
    files.close()


async def test_after_a_failure_nothing_more_is_tried(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path))
    path = history_directory(config) / TRAINER
    path.mkdir(parents=True)  # a folder where the file should be
    recorder = TrainedRecorder(config)
    recorder.note(1, 0, [SAMPLE], [])
    await recorder.flush()
    path.rmdir()
    recorder.note(2, 1, [SAMPLE], [])
    await recorder.flush()
    await recorder.close()
    assert list(history_directory(config).iterdir()) == []
