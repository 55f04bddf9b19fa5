"""The card of an exported data set: `datasets` reads it, and every number in it is the run's."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from sluice.consumers.export.card import COLUMNS
from sluice.consumers.export.files import columns
from sluice.consumers.export.run import export_run
from sluice.consumers.groups import Group
from sluice.consumers.history.recorder import Recorder
from sluice.consumers.samples import letter
from sluice.pipeline.config.types import Config, DataConfig, ModelConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.wire.messages import FinishReason
from sluice.pipeline.wire.tokens import Runs
from tests.factories import sequence_result
from tests.unit.consumers.export.test_export import a_sample, kept

CONFIG = Config(model=ModelConfig(path="/elsewhere/of/mine/tiny"), data=DataConfig(path="/elsewhere/prompts.jsonl"))


def header_and_text(out: Path) -> tuple[dict[str, Any], str]:
    _, header, text = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_datasets_reads_the_directory_with_its_card(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    run = kept(tmp_path, a_sample(), a_sample("j:1", reward=0.0, metrics={"rollout/f1": 1.0}), a_sample("j:2"))
    export_run(run, "datasets", tmp_path / "out", "trained", CONFIG, license="apache-2.0")
    found = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert list(found) == ["train"]
    assert found["train"]["seq_id"] == ["j:0", "j:1", "j:2"]
    header, text = header_and_text(tmp_path / "out")
    assert header["license"] == "apache-2.0"
    assert header["task_categories"] == ["text-generation"]
    assert header["size_categories"] == ["n<1K"]
    assert [one["name"] for one in header["dataset_info"]["features"]] == found["train"].column_names
    assert "| `reward` | 0.6667 | 3 |" in text
    assert "Rewards lie between 0.0000 and 1.0000." in text
    assert "| `rollout/f1` | 0.6667 | 3 |" in text
    assert "| weights that sampled | 2: version 3 to 4 |" in text
    assert "| steps that trained | 1: step 1 |" in text
    assert "| tokens | 12, of which the policy sampled 6 |" in text
    assert "| `token_ids` | `list of int32` |" in text
    assert "sluice export run --to datasets --license apache-2.0 --out out" in text
    assert "elsewhere" not in text, "of paths only the last part is told"
    assert "the run kept no history" in text
    assert "`apache-2.0`, chosen at export." in text
    assert "`tiny`" in text
    assert "`prompts.jsonl`" in text


async def test_endings_versions_and_the_configuration_are_those_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    run, config = tmp_path / "run", replace(CONFIG, run_dir=str(tmp_path), run="run")
    endings: tuple[FinishReason, ...] = ("error", "stop", "length", "length")
    results = [sequence_result("j", at, 4, finish_reason=ending) for at, ending in enumerate(endings)]
    recorder = Recorder(config, 0)
    group = Group("j", 4, {(one.index, 0): one for one in results})
    recorder.note(group, [a_sample(one.seq_id) for one in results[1:]], [letter("j:0", "no_truth", "")])
    await recorder.flush()
    await recorder.close()
    (run / "config.resolved.yaml").write_text("run: run\n")
    (run / "versions.json").write_text(json.dumps({"sluice": "0.1.0", "torch": "2.0", "other": "1"}))
    export_run(run, "datasets", tmp_path / "out", "handed-on", CONFIG)
    header, text = header_and_text(tmp_path / "out")
    assert "handed to the trainer" not in text
    assert "license" not in header
    assert "name it as `license` in the header" in " ".join(text.split())
    assert "| stop | 1 | 33.3% |" in text
    assert "| length | 2 | 66.7% |" in text
    assert "- dropped on the way to the trainer: 1; " in text
    assert hashlib.sha256(b"run: run\n").hexdigest() in text
    assert "| software | sluice 0.1.0, torch 2.0 |" in text
    assert "| steps that trained | not known |" in text
    assert "sluice export run --to datasets --source handed-on --out out" in text


def test_tokens_that_a_step_left_out_count_as_sampled(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    run = kept(tmp_path, a_sample(response_mask=Runs.of([0, 0, 0, 1])))
    export_run(run, "datasets", tmp_path / "out", "trained", CONFIG)
    _, text = header_and_text(tmp_path / "out")
    assert "| tokens | 4, of which the policy sampled 2 |" in text


def test_every_column_is_explained() -> None:
    arrow = pytest.importorskip("pyarrow")
    assert set(columns(arrow, sft=False, images="copies").names) == set(COLUMNS)
    page = (Path(__file__).parents[4] / "docs/handoff.md").read_text()
    assert set(COLUMNS) <= set(re.findall(r"`(\w+)`", page))


def test_a_licence_needs_a_card(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--license mit is for --to datasets"):
        export_run(kept(tmp_path, a_sample()), "parquet", tmp_path / "out", "trained", Config(), license="mit")
