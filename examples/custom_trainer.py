"""A training loop of your own on live rollouts; killed at any moment and started again, it goes on:

    sluice run -c my.yaml --set trainer.external=true &
    python examples/custom_trainer.py my.yaml

The weights of the newest version are its checkpoint; what they hold never comes again.
"""

import sys

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from sluice import Rollouts

with Rollouts(sys.argv[1]) as rollouts:
    model = AutoModelForCausalLM.from_pretrained(rollouts.model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in rollouts.batches():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")  # 0 where -100
        weights = batch["weights"][:, 1:]
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        version = rollouts.publish(model, metrics={"train/loss": loss.item()})
        print(f"version {version}: {len(batch['seq_ids'])} samples, loss {loss.item():.4f}", flush=True)
