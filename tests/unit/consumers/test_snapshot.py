"""A version's files are those of the step that made it, whatever the next step does meanwhile."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice.consumers.training.learner import Learner
from sluice.consumers.training.model import _write_file, load_policy, probe_score, write_model
from sluice.consumers.training.snapshot import Memory, Shadow, Snapshot, rounded
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import DeadlineExceeded, WeightsError
from sluice.pipeline.weights.versions import shards_of, tensor_table
from tests.deadlines import HANG_S
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of

SAMPLES = [random_sample("a", 20), random_sample("b", 11)]
PROBE = list(b"the abc of it")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def learner_of(step: TrainStep, source: Path) -> Learner:
    return Learner(step, source, ModelConfig(path=str(source), device="cpu"))


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_files_are_those_of_before_the_next_step(tmp_path: Path, source: Path, dtype: str) -> None:
    step = train_step(source, learning_rate=1e-2)
    learner = learner_of(step, source)
    learner.run(SAMPLES, 1)
    before = weights_of(step)
    fill = learner.snapshot(dtype, PROBE)
    learner.run(SAMPLES, 2)
    assert not same(before, weights_of(step))
    shards, score = fill(tmp_path)
    found = loaded(tmp_path).state_dict()
    kind = getattr(torch, dtype)
    assert all(torch.equal(found[name], value.to(kind).float()) for name, value in before.items())
    assert {kind for kind, _ in tensor_table(tmp_path).values()} == {"F32" if dtype == "float32" else "BF16"}
    assert score == pytest.approx(probe_score(loaded(tmp_path), PROBE), abs=1e-4)
    assert shards == shards_of(tmp_path), "as they were written"
    assert learner.stalled_s() > 0
    assert learner.stalled_s() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_snapshot_changes_nothing_of_the_training(tmp_path: Path, source: Path, dtype: str) -> None:
    one, other = train_step(source, learning_rate=1e-2), train_step(source, learning_rate=1e-2)
    learner = learner_of(one, source)
    for number in range(1, 4):
        fill = learner.snapshot(dtype, PROBE)
        writing = threading.Thread(target=fill, args=(tmp_path,))
        writing.start()
        assert learner.run(SAMPLES, number) == other.run(SAMPLES, number)
        writing.join(HANG_S)
    assert same(weights_of(one), weights_of(other))


def test_equal_weights_are_equal_files_and_safetensors_own_read_them(tmp_path: Path, source: Path) -> None:
    step = train_step(source)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_model(step.model, source, tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    tensors = load_file(str(tmp_path / "a" / "model.safetensors"))
    save_file(tensors, str(tmp_path / "own"), {"format": "pt"})
    assert tensor_table(tmp_path / "a").keys() == tensors.keys()
    assert (tmp_path / "own").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()


def test_large_weights_are_several_files_with_an_index(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.consumers.training.model._SHARD_BYTES", 30_000)
    step = train_step(source)
    learner = learner_of(step, source)
    shards, _ = learner.snapshot("float32", PROBE)(tmp_path)
    assert len(shards) > 2
    assert shards == shards_of(tmp_path)
    found = loaded(tmp_path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights_of(step).items())


def test_an_update_waits_for_the_copy_and_not_for_ever(source: Path) -> None:
    step = train_step(source)
    found = Snapshot(step.model, torch.float32, lambda _: 0.0, wait_s=0.1)
    began, go = threading.Event(), threading.Event()

    class Slow(dict[str, torch.Tensor]):
        def items(self) -> Any:
            began.set()
            go.wait(HANG_S)
            return super().items()

    found._live = Slow(found._live)
    copying = threading.Thread(target=found.copy)
    copying.start()
    assert began.wait(HANG_S)
    with pytest.raises(DeadlineExceeded, match="not copied to the host's memory within"):
        found.copy()
    go.set()
    copying.join(HANG_S)
    found.copy()


def test_the_shadow_scores_what_it_is_given_and_keeps_nothing(source: Path) -> None:
    model = load_policy(source, ModelConfig(device="cpu"))
    shadow, own = Shadow(model), model.state_dict()
    assert shadow.score(own, PROBE) == probe_score(model, PROBE)
    half: Mapping[str, torch.Tensor] = {name: value.to(torch.bfloat16) for name, value in own.items()}
    scored = shadow.score(half, PROBE)
    with rounded(model, torch.bfloat16):
        assert probe_score(model, PROBE) == scored
    assert scored != probe_score(model, PROBE)
    assert same(own, model.state_dict())
    assert {one.device.type for one in shadow._model.parameters()} == {"meta"}
    assert model.training


def test_large_layers_are_scored_in_blocks(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.consumers.training.snapshot._BLOCK", 5000)
    model = load_policy(source, ModelConfig(device="cpu"))
    shadow, own = Shadow(model), model.state_dict()
    assert own["lm_head.weight"].numel() > 2 * 5000, "several blocks"
    with rounded(model, torch.bfloat16):
        wanted = probe_score(model, PROBE)
    half = {name: value.to(torch.bfloat16) for name, value in own.items()}
    assert shadow.score(half, PROBE) == pytest.approx(wanted, abs=1e-4)
    assert shadow.score(own, PROBE) == pytest.approx(probe_score(model, PROBE), abs=1e-4)


def test_a_full_disk_is_the_error(source: Path) -> None:
    model = load_policy(source, ModelConfig(device="cpu"))
    with pytest.raises(OSError, match="No space left on device"):
        _write_file(Path("/dev/full"), model.state_dict(), None)


def test_a_write_that_fails_midway_leaves_no_version(tmp_path: Path, source: Path) -> None:
    """The kernel's limit on a file's size cuts the write short, in a process of its own."""
    script = (
        "import resource, signal, sys\nfrom pathlib import Path\n"
        "from sluice.consumers.training.learner import Learner\n"
        "from sluice.pipeline.config.types import ModelConfig\n"
        "from tests.trainers import train_step\n"
        "source, target = map(Path, sys.argv[1:])\n"
        "fill = Learner(train_step(source), source, ModelConfig(device='cpu')).snapshot('bfloat16', [1, 2, 3])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n    fill(target)\nexcept OSError as error:\n    print(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(tmp_path)], capture_output=True, check=True, timeout=HANG_S
    )
    assert int(done.stdout) == errno.EFBIG
    assert (tmp_path / "model.safetensors").stat().st_size == 10_000
    with pytest.raises(WeightsError, match="truncated"):
        tensor_table(tmp_path)


def test_snapshots_take_turns_with_one_memory(tmp_path: Path, source: Path) -> None:
    """One that isn't written yet keeps its own."""
    step = train_step(source, learning_rate=1e-2)
    memory = Memory()

    def snapshot() -> Snapshot:
        return Snapshot(step.model, torch.bfloat16, lambda _: 0.0, memory=memory)

    def write(one: Snapshot, name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        one.write(source, tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    def now() -> dict[str, Any]:
        return {name: value.bfloat16() for name, value in weights_of(step).items()}

    def places() -> set[int]:
        found = memory.take()
        memory.give(found)
        return {value.data_ptr() for value in found.values()}

    write(snapshot(), "first")
    used = places()
    step.run(SAMPLES, 1)
    second, wanted = snapshot(), now()
    second.copy()
    step.run(SAMPLES, 2)
    third, newest = snapshot(), now()
    third.copy()
    assert used
    found = write(second, "second")
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert places() == used, "the second one filled what the first one had"
    found = write(third, "third")
    assert all(torch.equal(found[name], newest[name]) for name in found)
