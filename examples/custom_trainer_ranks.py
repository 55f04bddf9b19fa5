"""The same loop on several processes, which share one model (PyTorch's FSDP2):

    sluice run -c my.yaml --set trainer.external=true &
    torchrun --nproc-per-node 2 examples/custom_trainer_ranks.py my.yaml

Every rank makes the same calls. Each gets its share of a batch; `publish` gathers the weights.
"""

import sys

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from sluice import Rollouts

distributed.init_process_group("gloo")  # "cpu:gloo,cuda:nccl", with a GPU each
ranks = distributed.get_world_size()

with Rollouts(sys.argv[1]) as rollouts:
    model = AutoModelForCausalLM.from_pretrained(rollouts.model_path, dtype=torch.float32)
    mesh = init_device_mesh(model.device.type, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in rollouts.batches():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")  # 0 where -100
        loss = (losses * batch["weights"][:, 1:]).sum() / max(batch["totals"]["weight"], 1e-8)  # of all ranks
        (loss * ranks).backward()  # FSDP takes the mean of the ranks' gradients
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(loss := loss.detach())
        version = rollouts.publish(model, metrics={"train/loss": loss.item()})
        if distributed.get_rank() == 0:
            print(f"version {version}: {batch['totals']['samples']} samples, loss {loss.item():.4f}", flush=True)

distributed.destroy_process_group()
