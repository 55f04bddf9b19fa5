"""The policy in the trainer: load, score a probe, write a model directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor

from pipeline.config.types import ModelConfig
from pipeline.errors import ModelError
from pipeline.weights import MANIFEST

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def load_policy(path: Path, config: ModelConfig) -> torch.nn.Module:
    """The causal LM in fp32 master weights, training mode, on the configured device. Raises ModelError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not path.is_dir():
        raise ModelError(f"{path}: no such model directory; set model.path or --model")
    if not list(path.glob("*.safetensors")):
        raise ModelError(f"{path}: no *.safetensors file; save the model with save_pretrained")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=config.attn_implementation or "sdpa",
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot be loaded ({error})") from error
    return model.to(device_of(config)).train()


def device_of(config: ModelConfig) -> torch.device:
    """`auto` is CUDA where there is one."""
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def probe_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """A fixed prompt of this run: seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (max(2, count),), generator=generator).tolist()


@torch.no_grad()  # not inference mode: FSDP would keep what it gathers in it for training
def probe_score(model: Any, token_ids: list[int]) -> float:
    """Summed fp32 logprob (nats) of tokens 1.. given their prefix."""
    ids = torch.tensor([token_ids], device=model.device)
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids=ids).logits.float()
    model.train(was_training)
    logprobs = logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, ids[0, 1:, None]).sum())


def write_model(model: Any, source: Path, target: Path) -> None:
    """A model directory: weights of `model` (tied tensors once), every other file as in `source`."""
    for file in source.iterdir():
        if file.is_file() and file.name != MANIFEST and not file.name.endswith(_WEIGHTS):
            shutil.copy2(file, target / file.name)
    save_model(model, str(target / "model.safetensors"), metadata={"format": "pt"})
