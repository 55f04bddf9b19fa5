"""The policy in the trainer: load, score a probe, write a model directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.weights.versions import MANIFEST

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def load_policy(path: Path, config: ModelConfig, *, dropout: bool = False) -> torch.nn.Module:
    """The model of a directory in fp32 master weights, training mode, on the configured device. Raises ModelError.

    A model with a vision part is loaded as what it is, so that its versions are whole. `dropout`: keep the rates of
    its config.json; otherwise all are 0, and two passes over the same tokens give the same numbers.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: no such model directory; set model.path or --model")
    if not list(path.glob("*.safetensors")):
        raise ModelError(f"{path}: no *.safetensors file; save the model with save_pretrained")
    try:
        model = read_model(path, config, dropout=dropout)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be loaded ({error})") from error
    return model.to(device_of(config)).train()


def read_model(path: Path, config: ModelConfig, *, dropout: bool = False) -> Any:
    """The same on the CPU, with transformers' own errors; ValueError where the files do not fill the model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    code = config.trust_remote_code
    settings: Any = AutoConfig.from_pretrained(path, trust_remote_code=code)
    if not dropout:
        for part, name, _ in list(random_rates(settings)):
            setattr(part, name, 0.0)
    kind = AutoModelForImageTextToText if _has_vision(settings) else AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(
        path,
        config=settings,
        dtype=torch.float32,
        attn_implementation=config.attn_implementation,
        trust_remote_code=code,
        output_loading_info=True,
    )
    model, report = loaded
    bad = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if bad:
        raise ValueError(f"the weights do not fill the model, e.g. {bad[0]}; export it again")
    model.generation_config = GenerationConfig()  # nothing is generated here, and saving refuses odd ones
    if not dropout:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model


def random_rates(config: Any) -> Iterator[tuple[Any, str, float]]:
    """(configuration, key, rate) of what is random in a training pass: dropouts of all parts, noise of routers."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in vars(part).items() if part is not None else ():
            is_rate = "drop" in name or name.endswith("jitter_noise")
            if is_rate and type(value) in (int, float) and value > 0:
                yield part, name, float(value)


def _has_vision(config: Any) -> bool:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    known = known or "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    return known and getattr(config, "vision_config", None) is not None


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
    """A model directory: the weights of `model` in the hub's layout, every other file as in `source`.

    transformers holds some layers in other shapes than their checkpoints (experts in one tensor); its own saving turns
    them back, so that every engine reads them.
    """
    with tempfile.TemporaryDirectory(dir=target) as saved:
        # Given whole: the model may be sharded.
        model.save_pretrained(saved, state_dict=model.state_dict())
        for file in Path(saved).iterdir():
            if file.name.endswith(_WEIGHTS):
                file.rename(target / file.name)
    for file in source.iterdir():
        if file.is_file() and file.name != MANIFEST and not file.name.endswith(_WEIGHTS):
            shutil.copy2(file, target / file.name)
