"""A training loop of one's own (the example) beside a real `sluice run`, killed in the middle; exports of that run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.consumers.training.losses import weighted_cross_entropy
from sluice.consumers.training.row_logits import RowLogits
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.snapshot import Snapshot
from tests.e2e.fixtures import text_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack

EXAMPLE = Path(__file__).parents[2] / "examples/custom_trainer.py"
AHEAD = 24  # sequences: as far as the producer may be ahead of the loop


@dataclass
class Ended:
    """A run whose first training loop was killed, and whose second one went on."""

    stack: Stack
    held: Snapshot  # when the first was killed
    run: Process
    second: Process


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, broker_config: BrokerConfig, model_dir: Path) -> Iterator[Ended]:
    directory = tmp_path_factory.mktemp("custom")
    stack = Stack(directory, broker_config.url, model_dir, text_rows(48), "exact_answer")
    saved = directory / "prompts"
    pytest.importorskip("datasets").Dataset.from_list(stack.rows).save_to_disk(str(saved))
    stack.configure(trainer={"external": True}, data={"path": str(saved)})
    try:
        run = stack.start("run")
        now = stack.wait(lambda now: now.enqueued == AHEAD and now.alive("producer"), "the producer to be ahead")
        [producer] = now.alive("producer")
        os.kill(producer.pid, signal.SIGSTOP)  # the first loop can't come to the end of the run
        first = loop(stack)
        stack.wait(lambda now: (now.latest_version or 0) >= 2, "two versions of the first loop")
        first.kill()
        held = stack.snapshot()
        os.kill(producer.pid, signal.SIGCONT)
        second = loop(stack)
        assert run.wait() == 0, stack.report(stack.snapshot())
        assert second.wait() == 0, second.tail()
        yield Ended(stack, held, run, second)
    finally:
        stack.close()


def loop(stack: Stack) -> Process:
    return stack.spawn([sys.executable, str(EXAMPLE), str(stack.config_file)], name="custom-trainer")


def test_a_training_loop_that_is_killed_goes_on_and_the_run_completes(ended: Ended) -> None:
    stack, held, now = ended.stack, ended.held, ended.stack.snapshot()
    assert 0 < held.trained < 48
    assert (now.enqueued, now.trained + now.dead + now.dropped, now.state) == (48, 48, "finished")
    made = [int(number) for number in re.findall(r"^version (\d+):", ended.second.text(), re.MULTILINE)]
    assert made == list(range(made[0], (now.latest_version or 0) + 1))
    assert made[0] > (held.latest_version or 0), "it went on from the newest version"
    assert not [seq_id for seq_id, count in Counter(stack.trained()).items() if count > 1]
    assert len(stack.trained()) == now.trained
    stack.assert_streams_empty()
    assert f"complete: enqueued 48, trained {now.trained}" in ended.run.text()
    wait_gone(stack.mark)


def test_the_example_is_as_short_as_the_documentation_says() -> None:
    body = EXAMPLE.read_text(encoding="utf-8").split('"""')[2].strip().splitlines()
    assert len(body) <= 30


def test_the_run_is_exported_with_all_that_is_known(ended: Ended) -> None:
    stack, out = ended.stack, ended.stack.directory / "all.jsonl"
    done = stack.sluice("export", str(stack.run_dir), "--to", "jsonl", "--out", str(out))
    assert done.wait() == 0, done.tail()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["seq_id"] for row in rows) == sorted(stack.trained())
    assert f"{len(rows)} sequences in {out}" in done.text()
    asked = {f"say {row['id']}": row["truth"] for row in stack.rows}
    for row in rows:
        [said] = [text for text in asked if f"user\n{text}<|im_end|>" in row["prompt"]]
        assert row["truth"] == asked[said]
        assert row["target"] in (row["truth"] + "<|im_end|>", row["text"], row["text"] + "<|im_end|>")
        assert row["step"] == row["version"] + 1, "this loop publishes after every step"
        sampled = [version for version in row["versions"] if version >= 0]
        assert all(version <= row["version"] for version in sampled)
        size = len(row["token_ids"])
        assert {len(row[name]) for name in ("labels", "weights", "logprobs", "response_mask", "segments")} == {size}
    again = stack.sluice("export", str(stack.run_dir), "--to", "jsonl", "--out", str(out))
    again.expendable = True
    assert again.wait() == 3
    assert "exists; name another, or delete it" in again.text()


def test_trl_trains_on_an_export_with_our_own_loss(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real step of the real SFTTrainer; its loss is our cross-entropy of the same samples."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    stack, out = ended.stack, tmp_path / "sft"
    done = stack.sluice("export", "-c", str(stack.config_file), "--to", "trl", "--out", str(out))
    assert done.wait() == 0, done.tail()
    rows = datasets.load_from_disk(str(out))
    assert len(rows) == len(stack.trained())
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(stack.tree["model"]["path"], dtype=torch.float32)
    want = our_loss(model, rows[:8])
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=1,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(stack.tree["model"]["path"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=rows.select(range(8)), processing_class=tokenizer
    )
    trainer.train()
    [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(want, abs=1e-4)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


@torch.no_grad()
def our_loss(model: Any, rows: dict[str, list[list[int]]]) -> float:
    """The trainer's cross-entropy, of one sample after the other."""
    total = count = 0.0
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        logits, target = model(input_ids=torch.tensor([ids])).logits, torch.tensor([labels])
        found = weighted_cross_entropy(RowLogits(logits), target, (target != -100).float())
        total, count = total + float(found.sum), count + float(found.total)
    return total / count
