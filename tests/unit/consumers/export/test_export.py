"""Exports of stored samples: what is in them, and what is refused with its reason."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.export import files
from sluice.consumers.export.files import columns
from sluice.consumers.export.run import Exported, export_run, full_row, sft_row
from sluice.consumers.groups import Group
from sluice.consumers.history.recorder import Recorder, TrainedRecorder
from sluice.consumers.samples import letter
from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.deadlines import HANG_S
from tests.factories import sequence_result, training_sample
from tests.tiny_tokenizer import tiny_codec


def a_sample(name: str = "j:0", **changes: Any) -> TrainingSample:
    fields = {
        "token_ids": TokenArray([5, 6, 7, 8]),
        "labels": TokenArray([5, 6, 9, 8]),
        "weights": FloatArray([1.0, 0.0, 1.0, 1.0]),
        "prompt_len": 2,
        "logprobs": FloatArray([0.0, 0.0, -1.5, -0.25]),
        "versions": Runs.of([-1, -1, 3, 4]),
        "response_mask": Runs.of([0, 0, 1, 1]),
        "reward": 1.0,
        "metrics": {"rollout/f1": 0.5},
        **changes,
    }
    return training_sample(name, **fields)


def kept(tmp_path: Path, *samples: TrainingSample) -> Path:
    """A run's directory whose trainer kept one step."""
    KeptRollouts(tmp_path / "run/rollouts", None).save(1, samples)
    return tmp_path / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_holds_every_array_at_full_length_and_says_null_for_what_is_not_known(tmp_path: Path) -> None:
    run = kept(tmp_path, a_sample(), a_sample("j:1", advantage=-0.5, proximal_versions=Runs.of([-1, -1, 4, -1])))
    assert export_run(run, "jsonl", tmp_path / "out/all.jsonl", "trained", Config()).sequences == 2
    first, second = lines(tmp_path / "out/all.jsonl")
    assert (first["seq_id"], first["group_id"], first["step"], first["prompt_len"]) == ("j:0", "j", 1, 2)
    assert first["token_ids"] == [5, 6, 7, 8]
    assert first["labels"] == [5, 6, 9, 8]
    assert first["logprobs"] == [0.0, 0.0, -1.5, -0.25]
    assert first["versions"] == [-1, -1, 3, 4]
    assert first["proximal_versions"] == [-1] * 4
    assert second["proximal_versions"] == [-1, -1, 4, -1]
    assert first["proximal_logprobs"] == [0.0] * 4
    assert (first["reward"], first["advantage"], second["advantage"]) == (1.0, None, -0.5)
    assert first["metrics"] == {"rollout/f1": 0.5}
    assert [first[name] for name in ("text", "truth", "worker", "prompt", "target")] == [None] * 5
    assert not list(tmp_path.rglob("*.tmp"))


def test_texts_are_those_of_the_tokens() -> None:
    codec = tiny_codec("words")
    prompt, target = codec.encode("find it"), codec.encode("seven")
    ids = TokenArray([*prompt, *target])
    ones = {"labels": ids, "weights": FloatArray([1.0] * len(ids)), "segments": Runs.of([0] * len(ids))}
    row = full_row(Exported(training_sample("j:0", token_ids=ids, prompt_len=len(prompt), **ones)), codec)
    assert (row["prompt"], row["target"]) == (codec.decode(prompt), codec.decode(target))


@pytest.mark.parametrize("to", ["parquet", "datasets"])
def test_parquet_and_datasets_hold_what_jsonl_holds(to: Any, tmp_path: Path) -> None:
    run = kept(tmp_path, a_sample(), a_sample("j:1", advantage=-0.5))
    export_run(run, "jsonl", tmp_path / "all.jsonl", "trained", Config())
    export_run(run, to, tmp_path / "out", "trained", Config())
    if to == "parquet":
        found = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out").to_pylist()
    else:
        module = pytest.importorskip("datasets")
        found = list(module.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")))
    for row in found:
        row["metrics"] = json.loads(row["metrics"])
    assert found == lines(tmp_path / "all.jsonl")


def test_the_columns_are_those_of_a_row() -> None:
    schema = columns(pytest.importorskip("pyarrow"), sft=False)
    assert set(schema.names) == set(full_row(Exported(a_sample()), None))
    assert len(schema.names) == len(set(schema.names))


def test_labels_of_trl_are_the_truths_and_off_where_the_weight_is_0() -> None:
    """The first token is off as well: no position predicts it."""
    row = sft_row(Exported(a_sample()))
    assert row == {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 9, 8], "attention_mask": [1, 1, 1, 1]}


def test_trl_leaves_out_what_has_no_weight_and_counts_odd_weights(tmp_path: Path) -> None:
    samples = [
        a_sample(),
        a_sample("j:1", weights=FloatArray([1, 0, 0, 0])),
        a_sample("j:2", weights=FloatArray([0, 0, 0.5, 1])),
    ]
    done = export_run(kept(tmp_path, *samples), "trl", tmp_path / "out", "trained", Config())
    assert (done.sequences, done.left_out, done.weighted) == (2, {"no_weight": 1}, 1)
    found = pytest.importorskip("datasets").load_from_disk(str(tmp_path / "out"))
    assert found.column_names == ["input_ids", "labels", "attention_mask"]
    assert found["labels"][1] == [-100, -100, 9, 8]
    with pytest.raises(
        DataError,
        match=r"none of their tokens has .*; --to trl --shape completion exports .*; first: j:1",
    ):
        export_run(
            kept(tmp_path / "b", replace(samples[1], reward=None)), "trl", tmp_path / "none", "trained", Config()
        )
    assert not (tmp_path / "none").exists()


def test_a_parquet_file_is_written_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_TOKENS", 8)
    run = kept(tmp_path, *(a_sample(f"j:{at}") for at in range(5)))
    export_run(run, "parquet", tmp_path / "out.parquet", "trained", Config())
    assert pytest.importorskip("pyarrow.parquet").ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    run = kept(tmp_path, a_sample(reward=math.nan))
    export_run(run, "jsonl", tmp_path / "all.jsonl", "trained", Config())
    assert lines(tmp_path / "all.jsonl")[0]["reward"] is None


def test_nothing_is_written_over_and_nothing_left_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(DataError, match=r"out\.jsonl exists; name another"):
        export_run(kept(tmp_path, a_sample()), "jsonl", out, "trained", Config())
    assert out.read_text() == "mine"
    (tmp_path / "run/rollouts/step-000002.msgpack").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"step-000002\.msgpack: cannot be read"):
        export_run(tmp_path / "run", "datasets", tmp_path / "whole", "trained", Config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "run"]


KILLED = """
import os, signal, sys
from pathlib import Path

from sluice.consumers.export.files import aside, write

pid, os.getpid = os.getpid(), lambda: 7  # each container begins to count anew


def rows():
    yield {}
    os.kill(pid, signal.SIGKILL)


with aside(Path(sys.argv[2])) as path:
    write(sys.argv[1], rows(), path)
"""


@pytest.mark.parametrize("to", ["datasets", "trl"])
def test_one_that_was_killed_stops_no_other_of_its_pid(
    to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, to, str(out)], timeout=HANG_S, check=False, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    monkeypatch.setattr(os, "getpid", lambda: 7)
    run = kept(tmp_path, a_sample())
    assert export_run(run, to, out, "trained", Config()).sequences == 1
    assert out.is_dir()


def test_a_run_without_sequences_says_why(tmp_path: Path) -> None:
    for kind in ("trained", "handed-on"):
        with pytest.raises(DataError, match=r"nothing to export; it has no history; run with history\.enabled"):
            export_run(tmp_path, "jsonl", tmp_path / "out", kind, Config())


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    for words, said in (
        (["nosuch", "--to", "jsonl"], "no run 'nosuch'"),
        (["nosuch", "--to", "csv"], "csv"),
    ):
        command = [sys.executable, "-m", "sluice.pipeline.cli.main", "export", *words, "--out", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path)
        assert done.returncode != 0
        assert said in done.stdout + done.stderr


async def history(run: Path, config: Config) -> None:
    """One group: trained with a newer score and without a stale token, dropped by the trainer, not trained yet."""
    results = [sequence_result("j", index, 3, text=f"said {index}", truth={"a": [index]}) for index in range(3)]
    samples = [a_sample(result.seq_id) for result in results]
    group = Group("j", 3, {(result.index, 0): result for result in results})
    recorder, trained = Recorder(config, 0), TrainedRecorder(config)
    recorder.note(group, samples, [])
    await recorder.flush()
    seen = replace(
        samples[0],
        proximal_logprobs=FloatArray([0, 0, -1.0, 0]),
        proximal_versions=Runs.of([-1, -1, 4, -1]),
        response_mask=Runs.of([0, 0, 0, 1]),
        left_out=Runs.of([LeftOut.no, LeftOut.no, LeftOut.stale, LeftOut.no]),
    )
    trained.note(7, 5, [seen], [letter("j:1", "stale", "")])
    await trained.flush()
    for each in (recorder, trained):
        await each.close()


async def test_the_history_says_what_was_trained_and_what_was_handed_on(tmp_path: Path) -> None:
    config = Config(run="run", run_dir=str(tmp_path))
    run = tmp_path / "run"
    await history(run, config)
    export_run(run, "jsonl", tmp_path / "trained.jsonl", "trained", Config())
    [row] = lines(tmp_path / "trained.jsonl")
    assert (row["seq_id"], row["step"], row["version"], row["text"], row["truth"]) == (
        "j:0",
        7,
        5,
        "said 0",
        {"a": [0]},
    )
    assert (row["proximal_versions"], row["proximal_logprobs"]) == ([-1, -1, 4, -1], [0, 0, -1.0, 0])
    assert (row["response_mask"], row["weights"]) == ([0, 0, 0, 1], [1.0, 0.0, 0.0, 1.0])
    assert row["sampling"]["temperature"] == 1.0
    export_run(run, "jsonl", tmp_path / "all.jsonl", "handed-on", Config())
    assert [(row["seq_id"], row["step"]) for row in lines(tmp_path / "all.jsonl")] == [
        ("j:0", 7),
        ("j:1", 7),
        ("j:2", None),
    ]
    export_run(run, "trl", tmp_path / "sft", "trained", Config())
    [row] = pytest.importorskip("datasets").load_from_disk(str(tmp_path / "sft")).to_list()
    assert row["labels"] == [-100, -100, -100, 8], "no label for a token that the step didn't train"


async def test_what_was_not_trained_yet_is_offered(tmp_path: Path) -> None:
    config = Config(run="run", run_dir=str(tmp_path))
    await history(tmp_path / "run", config)
    (tmp_path / "run/history/trainer.sqlite").unlink()
    with pytest.raises(DataError, match="3 sequences were handed on and none has been trained yet; --source handed-on"):
        export_run(tmp_path / "run", "jsonl", tmp_path / "out", "trained", Config())
