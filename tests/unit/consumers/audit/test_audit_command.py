"""`sluice audit`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.cli import main as cli
from sluice.pipeline.wire.messages import TrainingBatch, decode, encode
from sluice.pipeline.wire.tokens import Runs
from tests.deadlines import HANG_S
from tests.unit.consumers.audit.stored_run import MARKED, PROMPT, TOKENS, change


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", *map(str, arguments), "--set", "model.device=cpu"])
    return int(ended.value.code or 0)


def damage(run: Path) -> None:
    def edit(arrays: dict[str, list[Any]]) -> None:
        arrays["logprobs"][PROMPT] += 0.5

    change(run, "two", edit)


def test_the_real_command_prints_one_object(run: Path) -> None:
    damage(run)
    where = ["-c", str(run.parent / "c.yaml")]
    Path(where[1]).write_text(f"run_dir: {run.parent}\nmodel: {{device: cpu}}\n")
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "audit", "mine", "--json", *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env={**os.environ})
    found = json.loads(done.stdout)
    assert (done.returncode, found["wrong"], found["right"]) == (1, 1, TOKENS - MARKED - 1), done.stderr
    assert (found["tokens"], found["marked"], found["max_error"]) == (TOKENS, MARKED, pytest.approx(0.5, abs=1e-4))
    assert found["versions_per_sequence"] == {"1": 3, "2": 2, "3": 1}
    assert found["worst"][0]["seq_id"] == "two"


def test_people_see_shares_and_the_worst_tokens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run) == 0
    said = capsys.readouterr().out
    assert "wrong          0   0.0 %" in said
    assert "right         16  72.7 %" in said
    assert [line.split() for line in said.splitlines()[-3:]] == [["1", "3"], ["2", "2"], ["3", "1"]]
    damage(run)
    assert call(run) == 1
    said = capsys.readouterr().out
    assert "the worst 1 of 1 wrong tokens" in said
    assert f"behaviour  3     two       {PROMPT}  " in said
    assert "sluice help docs audit" in said, "the stored configuration does not say that the engines were fp32"
    assert call(run, "--set", "model.dtype=float32") == 1
    assert "sluice help docs audit" not in capsys.readouterr().out


def test_what_was_not_checked_is_said_in_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "weights" / "v000000")
    assert call(run) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "not checked" in said
    assert "9 4 a version that their logprobs need no longer exists" in said
    assert "22 6 against what was handed to the trainer: these sequences are not in the history" in said
    assert call(run, "--json") == 0
    kinds = json.loads(capsys.readouterr().out)["not_checked"]
    assert {"what": "version_gone", "sequences": 4, "tokens": 9} in kinds


def test_an_advantage_of_a_sequence_without_trained_tokens_fails_the_check(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mask of the whole sequence was cleared, as stale: no token is wrong, the number is."""
    file = run / "rollouts/step-000003.msgpack"
    batch = decode(TrainingBatch, file.read_bytes())
    fields: dict[str, Any] = {"index": 0, "group_rewards": 1, "reward": 1.0, "advantage": 5.0}
    [one, *others] = batch.samples
    why = Runs.of(LeftOut.stale if version >= 0 else LeftOut.no for version in one.versions)
    one = replace(one, left_out=why, response_mask=Runs.of([0] * len(one.token_ids)), **fields)
    file.write_bytes(encode(replace(batch, samples=[one, *others])))
    assert call(run) == 1
    assert "advantages of sequences: 0 right, 1 wrong, 0 not checked" in capsys.readouterr().out


def test_retired_versions_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "weights" / "v000000")
    assert call(run) == 0
    assert "no longer available: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda run: shutil.rmtree(run), 3, "no run"),
        (lambda run: shutil.rmtree(run / "rollouts"), 3, "trainer.keep_rollouts"),
        (lambda run: (run / "rollouts/step-000004.msgpack").write_bytes(b"\x00"), 3, "step-000004.msgpack"),
        (lambda run: shutil.rmtree(run / "weights"), 6, "weights.retention"),
        (lambda run: (run / "weights/v000001/manifest.json").unlink(), 6, "v000001"),
        (
            lambda run: _flip_last_byte(run / "weights/v000001/model.safetensors"),
            6,
            "version 1: model.safetensors: digest",
        ),
        (lambda run: (run / "weights/v000001").rename(run / "weights/v000003") and _swap(run), 6, "renamed"),
        (lambda run: (run / "weights/v000001/config.json").write_text("{}"), 5, "cannot be loaded"),
        (lambda run: (run / "config.resolved.yaml").write_text("nonsense: 1"), 2, "nonsense"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    run: Path, spoil: Any, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run)
    assert call(run) == code
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def _flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def _swap(run: Path) -> None:
    shutil.copytree(run / "weights/v000002", run / "weights/v000001")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--tolerance", "0"), "--tolerance"),
        (("--tolerance", "nan"), "--tolerance"),
        (("--limit", "0"), "--limit"),
        (("--steps", "a:b"), "--steps"),
    ],
)
def test_options_without_sense_are_refused(
    run: Path, option: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run, *option) == 2
    assert words in capsys.readouterr().err


def test_steps_that_are_not_there_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "--steps", "7") == 3
    assert "it has steps 3 to 4" in capsys.readouterr().err


def test_a_token_outside_the_vocabulary_is_no_crash(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in range(3):
        shutil.rmtree(run / "weights" / f"v{version:06d}")
    _smaller_model(run)
    assert call(run) == 3
    assert "vocabulary of 100" in capsys.readouterr().err


def _smaller_model(run: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sluice.pipeline.weights.versions import write_version
    from sluice.pipeline.wire.messages import WeightVersion

    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=100, num_hidden_layers=1, head_dim=8, **sizes))
    model.save_pretrained(run / "small")
    write_version(run / "small", run / "weights", WeightVersion(version=0, path="", digest=""))


REMOTE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class RemoteConfig(Qwen3Config):
    model_type = "sluice_test_remote"

class RemoteForCausalLM(Qwen3ForCausalLM):
    config_class = RemoteConfig
"""


def test_code_of_the_model_runs_only_where_the_run_allowed_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in range(3):
        directory = run / "weights" / f"v{version:06d}"
        (directory / "modeling_remote.py").write_text(REMOTE)
        config = json.loads((directory / "config.json").read_text()) | {"model_type": "sluice_test_remote"}
        names = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
        config["auto_map"] = {auto: f"modeling_remote.{name}" for auto, name in names.items()}
        (directory / "config.json").write_text(json.dumps(config))
    assert call(run) == 5
    assert "trust_remote_code" in capsys.readouterr().err
    (run / "config.resolved.yaml").write_text("model: {trust_remote_code: true}\n")
    assert call(run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["right"] == TOKENS - MARKED
