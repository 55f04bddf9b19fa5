"""TRL's DPO, KTO and SFT trainers take what `sluice export --to trl --shape …` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from sluice.consumers.export.run import Shape, export_run
from sluice.consumers.training.step_log import KeptRollouts
from sluice.pipeline.config.types import Config, ModelConfig
from tests.tiny_models import save_tiny_model
from tests.unit.consumers.export.test_export_texts import SAMPLES


@pytest.mark.parametrize("shape", ["preference", "unpaired", "completion"])
def test_a_trainer_takes_its_shape(shape: Shape, tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl")
    from datasets import Dataset, load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = save_tiny_model(tmp_path / "model", tied=True, groups=1)
    KeptRollouts(tmp_path / "run/rollouts", None).save(1, SAMPLES[:3])
    config = Config(model=ModelConfig(path=str(path)))
    export_run(tmp_path / "run", "trl", tmp_path / "rows", "trained", config, shape=shape)
    name = {"preference": "DPO", "unpaired": "KTO", "completion": "SFT"}[shape]
    options = getattr(trl, f"{name}Config")(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = getattr(trl, f"{name}Trainer")(
        AutoModelForCausalLM.from_pretrained(path),
        args=options,
        train_dataset=cast(Dataset, load_from_disk(str(tmp_path / "rows"))).repeat(4),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    assert trainer.train().training_loss > 0
