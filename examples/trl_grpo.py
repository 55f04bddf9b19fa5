r"""TRL's GRPOTrainer on the rollouts of a live run, in lockstep with it:

    sluice run -c configs/rewards.yaml --model ./my-model --data prompts.jsonl --reward my_reward.py:score \
      --set trainer.external=true --set producer.max_staleness=0 &
    python examples/trl_grpo.py .sluice/runs/rewards
"""

import sys

import torch
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from sluice import Rollouts
from sluice.consumers.adapters.trl import GRPORollouts

cuda = torch.cuda.is_available()
with Rollouts(sys.argv[1]) as rollouts:
    run, producer = GRPORollouts(rollouts), rollouts.config.producer
    args = GRPOConfig(
        output_dir="trl", max_steps=10_000, learning_rate=1e-6, logging_steps=1, report_to="none", save_strategy="no",
        per_device_train_batch_size=producer.samples_per_version, num_generations=producer.group_size,
        temperature=rollouts.config.sampling.temperature, bf16=cuda, use_cpu=not cuda,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(rollouts.model_path), reward_funcs=run.reward, args=args, train_dataset=run.prompts,
        rollout_func=run, callbacks=[run],
    )  # fmt: skip
    trainer.train()
