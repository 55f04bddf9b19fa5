"""`sluice replay`: a sequence whose weights changed while it ran, decoded again to the very tokens, or under others."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from sluice.consumers.groups import Group
from sluice.consumers.history.recorder import Recorder, TrainedRecorder
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.cli import main as cli
from sluice.pipeline.config.types import Config, ModelConfig, PolicyConfig, RolloutMatchingConfig, WorkerConfig
from sluice.pipeline.queue import seed_for
from sluice.pipeline.run import provenance
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.messages import NO_LOGPROBS, SamplingParams, SequenceResult, TrainingSample, WeightVersion
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.workers.engine.contracts import SequenceRequest
from tests.contract.engine_fixtures import started
from tests.contract.versions import Versions as Directories
from tests.contract.versions import decode_amid
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=60)
PROMPT = list(b"the abc of it")
TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)
RUN_SEED = 7


@pytest.fixture(scope="module")
def decoded(four_versions: Path) -> SequenceResult:
    """By a real engine whose weights changed twice amid it, beside a neighbour."""
    folders = {number: four_versions / f"v{number:06d}" for number in range(4)}
    # Of these seeds the first whose sequence is long enough for two changes of the weights.
    with started(folders[0], max_batch=4) as backend:
        for index in range(8):
            seeds = [seed_for(RUN_SEED, "r:a", at) for at in (index, index + 100)]
            requests = [SequenceRequest(f"r:a:{seed}", tuple(PROMPT), SAMPLING, seed) for seed in seeds]
            output = decode_amid(backend, Directories(folders, {}), [(3, 1), (9, 2)], requests)[0]
            asyncio.run(backend.load_weights(folders[0], 0))
            if len(set(output.versions)) == 3:
                break
    assert len(set(output.versions)) == 3
    return sequence_result(
        "r:a",
        index,
        16,
        prompt_token_ids=TokenArray(output.prompt_token_ids),
        **output.sampled.columns(),
        finish_reason=output.finish_reason,
        sampling=SAMPLING,
        backend="hf",
        task="exact_answer",
        truth="seven",
        text=output.text,
    )


@pytest.fixture
def run(four_versions: Path, decoded: SequenceResult, tmp_path: Path) -> Path:
    """A run's directory with that sequence in its history."""
    directory = tmp_path / "runs" / "mine"
    shutil.copytree(four_versions, directory / "weights")
    config = Config(
        run="mine",
        run_dir=str(tmp_path / "runs"),
        seed=RUN_SEED,
        model=ModelConfig(path=str(directory / "weights" / "v000000"), device="cpu"),
        worker=WorkerConfig(torch_threads=1),
        policy=PolicyConfig(enabled=True, advantage="reward"),
        rollout_matching=RolloutMatchingConfig(task="exact_answer"),
    )
    provenance.store(config, directory)
    record(config, decoded)
    return directory


def written(recorder: Recorder | TrainedRecorder) -> None:
    async def write() -> None:
        await recorder.flush()
        await recorder.close()

    asyncio.run(write())


def record(config: Config, *results: SequenceResult) -> list[TrainingSample]:
    recorder, handed_on = Recorder(config, 0), list[TrainingSample]()
    context = TaskContext(tiny_codec("bytes"), config.rollout_matching, policy=config.policy)
    for result in results:
        group = Group(result.group_id, 1, {(0, 0): replace(result, index=0, group_size=1)}, ["1000-0"])
        samples, letters = Sampler(TASK, context, config.consumer).samples_of(group)
        group.members[0, 0] = result
        recorder.note(group, samples, letters)
        handed_on += samples
    written(recorder)
    return handed_on


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", *map(str, arguments)])
    return int(ended.value.code or 0)


def replayed(run: Path, capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    assert call("r:a", "--run", run, "--json", *arguments) == code
    return json.loads(capsys.readouterr().out)


def test_it_is_decoded_again_to_the_very_tokens(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replayed(run, capsys)
    assert found["decoded"] == list(decoded.token_ids)
    assert (found["is_same"], found["first_difference"], found["versions"]) == (True, None, [0, 1, 2])
    assert found["finish_reason_again"] == decoded.finish_reason
    assert found["max_difference"] < 1e-4
    assert [one["version"] for one in found["tokens"]] == decoded.versions.expand()
    assert all(one["trained"] in (True, None) for one in found["tokens"])
    assert found["replay_s"] > 0
    assert found["trace"]["seq_id"] == decoded.seq_id


def test_the_masks_are_those_of_the_step(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = PolicyConfig(enabled=True, advantage="reward")
    matching = RolloutMatchingConfig(task="exact_answer")
    config = Config(run="mine", run_dir=str(run.parent), policy=policy, rollout_matching=matching)
    [sample] = record(config, decoded)
    on, start = sample.response_mask.expand(), sample.prompt_len
    mask, codes = [*on[: start + 2], *[0] * (len(on) - start - 2)], [LeftOut.no] * (start + 2)
    codes += [LeftOut.missing] * (len(on) - start - 2)
    recorder = TrainedRecorder(config)
    recorder.note(1, 3, [replace(sample, response_mask=Runs.of(mask), left_out=Runs.of(codes))], [])
    written(recorder)
    tokens = replayed(run, capsys)["tokens"]
    assert [one["trained"] for one in tokens] == [True] * 2 + [False] * (len(tokens) - 2)
    assert [one["left_out"] for one in tokens] == [""] * 2 + ["missing"] * (len(tokens) - 2)


def test_another_version_is_seen_token_by_token(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replayed(run, capsys, "--version", 3)
    at = found["first_difference"]
    assert found["under"] == 3
    assert found["is_same"] is False
    assert found["decoded"][:at] == list(decoded.token_ids)[:at]
    assert found["decoded"][at] != decoded.token_ids[at]
    assert found["max_difference"] > 0.1  # other weights
    same = replayed(run, capsys, "--version", 0)  # those that began it
    first = decoded.versions.runs[0][1]
    assert same["decoded"][:first] == list(decoded.token_ids)[:first]
    assert call("r:a", "--run", run, "--version", 3, "--tokens", 5) == 0
    said = capsys.readouterr().out
    assert f"the first difference is at token {at}" in said
    assert "more; --tokens shows more of them" in said


def test_a_version_that_is_gone_is_named_with_the_key_that_keeps_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "weights" / "v000001")
    assert call("r:a", "--run", run) == 3
    said = capsys.readouterr().err
    assert "version 1 is gone, and sampled this sequence" in said
    assert "weights.retention" in said
    assert call("r:a", "--run", run, "--version", 9) == 3
    assert "version 9 is gone" in capsys.readouterr().err


def test_a_number_that_is_wrong_shows(run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(run="mine", run_dir=str(run.parent), rollout_matching=RolloutMatchingConfig(task="exact_answer"))
    wrong = list(decoded.token_ids)
    wrong[4] = (wrong[4] + 1) % 200
    record(config, replace(decoded, seq_id="r:b:0", group_id="r:b", token_ids=TokenArray(wrong)))
    assert call("r:b:0", "--run", run) == 1
    assert "the first difference is at token" in capsys.readouterr().out


def test_what_cannot_be_decoded_again_is_compared_and_says_why(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(run="mine", run_dir=str(run.parent), rollout_matching=RolloutMatchingConfig(task="exact_answer"))
    record(config, replace(decoded, seq_id="talk", group_id="talk", rollout_id="talk", turn=2))
    assert call("talk", "--run", run) == 0
    said = capsys.readouterr().out
    assert "not decoded again (an agent's rollout" in said
    assert "teacher-forced under the recorded versions; logprobs differ by at most" in said
    assert call("nobody", "--run", run) == 3
    assert "no finished sequence 'nobody'" in capsys.readouterr().err


def as_rollout(run: Path, decoded: SequenceResult, **changes: Any) -> None:
    """In the history as an agent's, which no engine decodes again."""
    config = Config(run="mine", run_dir=str(run.parent), rollout_matching=RolloutMatchingConfig(task="exact_answer"))
    record(config, replace(decoded, seq_id="talk", group_id="talk", rollout_id="talk", turn=2, **changes))


@pytest.mark.parametrize("stored", [math.nan, -math.inf])
def test_a_stored_logprob_that_is_no_number_is_a_difference(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str], stored: float
) -> None:
    logprobs = list(decoded.logprobs)
    logprobs[4] = stored
    as_rollout(run, decoded, logprobs=FloatArray(logprobs))
    assert call("talk", "--run", run, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["at"] for one in found["tokens"] if one["not_finite"]] == [4]
    assert found["max_difference"] < 1e-4, "of the others"
    assert call("talk", "--run", run) == 1
    assert "1 has a logprob that is NaN or infinite" in capsys.readouterr().out
    assert call("talk", "--run", run, "--version", 3) == 0


def test_a_version_that_gives_no_numbers_is_a_difference(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run / "weights" / "v000001"
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    source.rename(run / "broken")
    write_version(run / "broken", run / "weights", WeightVersion(version=1, path="", digest=""))
    as_rollout(run, decoded)
    assert call("talk", "--run", run, "--json") == 1
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert [one["not_finite"] for one in tokens] == [version == 1 for version in decoded.versions.expand()]


@pytest.mark.parametrize("asked", [0, 4])
def test_tokens_whose_logprobs_nobody_asked_for_have_nothing_to_compare(
    run: Path, decoded: SequenceResult, capsys: pytest.CaptureFixture[str], asked: int
) -> None:
    """All of them, or those of some turns: then NaN stands beside the others."""
    logprobs = [*decoded.logprobs[:asked], *[math.nan] * (len(decoded.token_ids) - asked)] if asked else []
    as_rollout(run, decoded, logprobs=FloatArray(logprobs), logprobs_mode=NO_LOGPROBS)
    assert call("talk", "--run", run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["max_difference"] is None) == (asked == 0)
    assert not any(one["not_finite"] for one in found["tokens"])


def test_its_time_is_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["trace", "r:a", "--run", str(run)])
    said = capsys.readouterr().out
    assert "stage" in said
    assert "from the queue to the trainer" in said
