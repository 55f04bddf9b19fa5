"""TRL on what `sluice export --to trl` writes of a run with images: the tokens that were trained, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sluice.consumers.export.run import export_run
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.images.processor import load_processor
from tests.seen_samples import image_files, processor_of, seeing_config, taught_sample
from tests.tiny_vision_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_the_collator_of_trl_makes_the_tokens_and_labels_that_were_trained(family: str, tmp_path: Path) -> None:
    datasets, sft = pytest.importorskip("datasets"), pytest.importorskip("trl.trainer.sft_trainer")
    model = FAMILIES[family](tmp_path / "model")
    config = seeing_config(model, tmp_path / "scans")
    ours, refs = processor_of(config), image_files(tmp_path / "scans", 2)
    samples = [taught_sample("one", config, ours, refs[:1]), taught_sample("two", config, ours, refs)]
    KeptRollouts(tmp_path / "run/rollouts", None).save(1, samples)
    done = export_run(tmp_path / "run", "trl", tmp_path / "sft", "trained", config)
    assert (done.sequences, done.reread) == (2, 0)
    rows = datasets.load_from_disk(str(tmp_path / "sft"))
    processor = load_processor(str(model), transformers)
    collator = sft.DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    batch = collator([dict(row) for row in rows])
    for at, sample in enumerate(samples):
        on = batch["attention_mask"][at] == 1
        assert batch["input_ids"][at][on].tolist() == list(sample.token_ids)
        want = [label if weight else -100 for label, weight in zip(sample.labels, sample.weights, strict=True)]
        assert batch["labels"][at][on].tolist() == want
    if family == "qwen3_vl":
        assert one_step(model, processor, rows, tmp_path / "trl") > 0


def one_step(model: Path, processor: Any, rows: Any, out: Path) -> float:
    """The loss of a real SFTTrainer's step."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    arguments = SFTConfig(
        output_dir=str(out),
        max_steps=1,
        per_device_train_batch_size=2,
        logging_steps=1,
        max_length=None,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    whole = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    trainer = SFTTrainer(model=whole, args=arguments, train_dataset=rows, processing_class=processor)
    trainer.train()
    [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return loss
