r"""Preference to a group's best: a training loop of your own that takes the best and the worst answer to each prompt.

    sluice run -c configs/rewards.yaml --model ./my-model --data prompts.jsonl --reward my_rewards.py:score \
      --set trainer.external=true &
    python examples/prefer_best.py .sluice/runs/rewards

The loss is that of DPO. Its reference is the policy that sampled the answers, whose logprobs every batch has, so no
second model is loaded.
"""

import sys

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from sluice import Rollouts
from sluice.consumers.training.handoff import Batch

BETA = 0.1


def pairs(batch: Batch) -> tuple[list[int], list[int]]:
    """Positions of the best and the worst of each group whose rewards differ."""
    groups: dict[str, list[int]] = {}
    for at, group in enumerate(batch["group_ids"]):
        groups.setdefault(group, []).append(at)
    ranked = [sorted(members, key=lambda at: float(batch["rewards"][at])) for members in groups.values()]
    told = [members for members in ranked if batch["rewards"][members[-1]] > batch["rewards"][members[0]]]
    return [members[-1] for members in told], [members[0] for members in told]


def preference_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """-log sigmoid(beta * (gain of the best - gain of the worst)), a mean over the groups; 0 without any."""
    best, worst = pairs(batch)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    scaled = logits / batch["temperatures"][:, None, None]
    logprobs = -F.cross_entropy(scaled.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    gains = ((logprobs - batch["logprobs"][:, 1:]) * batch["response_mask"][:, 1:]).sum(1)
    if not best:
        return gains.sum() * 0
    return -F.logsigmoid(BETA * (gains[best] - gains[worst])).mean()


def main(run: str) -> None:
    with Rollouts(run) as rollouts:
        model = AutoModelForCausalLM.from_pretrained(rollouts.model_path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for batch in rollouts.batches():
            loss = preference_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            count = len(pairs(batch)[0])
            version = rollouts.publish(model, metrics={"train/loss": loss.item(), "custom/pairs": float(count)})
            print(f"version {version}: {count} pairs, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
