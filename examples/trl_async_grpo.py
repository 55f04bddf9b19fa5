r"""TRL's AsyncGRPOTrainer on the rollouts of a live run:

    sluice run -c configs/rewards.yaml --model ./my-model --data prompts.jsonl --reward my_reward.py:score \
      --set trainer.external=true &
    python examples/trl_async_grpo.py .sluice/runs/rewards

Killed and started again, it goes on from the run's newest version; what that holds never comes again.
"""

import sys

import torch
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from sluice import Rollouts
from sluice.consumers.adapters.trl import AsyncGRPORollouts

cuda = torch.cuda.is_available()
with Rollouts(sys.argv[1]) as rollouts:
    run = AsyncGRPORollouts(rollouts)
    args = AsyncGRPOConfig(
        output_dir="trl", max_steps=10_000, learning_rate=1e-6, token_budget=0, weight_sync_steps=1, logging_steps=1,
        per_device_train_batch_size=rollouts.config.producer.samples_per_version, report_to="none", save_strategy="no",
        temperature=run.temperature, bf16=cuda, use_cpu=not cuda,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        str(rollouts.model_path), args=args, train_dataset=run.prompts,
        rollout_worker=run, weight_transfer=run, callbacks=[run],
    )  # fmt: skip
    trainer.train()
