"""The optimiser by name, and the learning rate of each step.

trainer.optimizer ─▶ make_optimizer ─▶ step ─▶ checkpoint (with its name: another one can't continue from it)
trainer.schedule  ─▶ learning_rate(step)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from sluice.pipeline.config.types import TrainerConfig
from sluice.pipeline.errors import ConfigError


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for all else: embeddings, the head, norms, biases.

    Muon (Jordan et al., 2024) orthogonalises a matrix's momentum; its updates are scaled to the size of AdamW's (Liu et
    al., 2025, "Muon is Scalable for LLM Training"), so one learning rate and weight decay serve both.
    """

    def __init__(
        self,
        matrices: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Both work on this one's groups and state, which are what is changed, saved and loaded."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters with a gradient."""
        if closure is not None:
            raise NotImplementedError("no closure: the gradients are those of a whole batch")
        self._muon.step()
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


_NAMES = {"AdamW": "adamw", "MuonWithAdamW": "muon", "AdamW8bit": "adamw_8bit"}


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Its name in the configuration; of any other, its class."""
    kind = type(optimizer).__name__
    return _NAMES.get(kind, kind)


def make_optimizer(model: Any, config: TrainerConfig) -> torch.optim.Optimizer:
    """Over all parameters of a transformers model; of one with adapters, over theirs. Raises ConfigError."""
    parameters = [each for each in model.parameters() if each.requires_grad or not config.lora.enabled]
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        is_part = {hasattr(each, "full_tensor") for each in parameters}
        # torch's fused update takes no mixture of whole tensors and parts.
        options |= {"foreach": False} if len(is_part) > 1 else {"fused": True}
        return torch.optim.AdamW(parameters, **options)
    if config.optimizer == "adamw_8bit":
        return _adamw_8bit()(parameters, **options)
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"trainer.optimizer muon needs torch >= 2.9, this is {torch.__version__}; set it to adamw")
    head = model.get_output_embeddings()
    ends = {id(param) for module in model.modules() if isinstance(module, torch.nn.Embedding)
            for param in module.parameters()}  # fmt: skip
    ends |= set() if head is None else {id(param) for param in head.parameters()}
    matrices = [param for param in parameters if param.ndim == 2 and id(param) not in ends]
    if not matrices:
        raise ConfigError("trainer.optimizer muon: this model's layers have no matrices; set it to adamw")
    inner = {id(param) for param in matrices}
    others = [param for param in parameters if id(param) not in inner]
    return MuonWithAdamW(matrices, others, **options)


def _adamw_8bit() -> Any:
    """Moments of 8 bits in blocks of their own scale (Dettmers et al., 2022); small tensors keep float32."""
    try:
        return import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"trainer.optimizer adamw_8bit needs bitsandbytes, which can't be imported ({error}); `pip install "
            "bitsandbytes`, or set it to adamw"
        ) from error


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Of a step, the first is 1: linear warm-up, then the schedule down to the floor, which holds behind its end.

    As in transformers' schedules, the last scheduled step is still above the floor: each of them trains.
    """
    warm = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
    last = schedule_end(config)
    if config.schedule == "constant" or step <= config.warmup_steps or last is None:
        return warm
    done = min(1.0, (step - 1 - config.warmup_steps) / max(1, last - config.warmup_steps))
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left


def schedule_end(config: TrainerConfig) -> int | None:
    """The last step above the floor; None if nothing says."""
    if config.schedule_steps is not None:
        return config.schedule_steps
    return None if config.max_versions is None else config.max_versions * config.publish_every
