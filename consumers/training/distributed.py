"""The trainer under `accelerate launch` with an FSDP configuration: one process, FSDP2.

    started_sharded() ─▶ sharding() ─▶ load ─▶ TrainStep ─▶ shard(model, optimizer) ─▶ Trainer

- State dicts of a sharded model and its optimiser are full: plain tensors, under the same names and indices as without
  FSDP. So checkpoints and versions are the same files, and either trainer can resume from the other's.
- accelerate is imported only in a process that it launched.
- A setting that this trainer doesn't support is an error; it's never silently ignored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import Any

import torch

from sluice.consumers.training.model import device_of
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.logs import get_logger

Shard = Callable[[torch.nn.Module, torch.optim.Optimizer], None]
_LAUNCHED = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # a scheduler may set WORLD_SIZE for other programs, but not this
_START_WAIT_S = 60.0
_GUIDE = "see `sluice help docs training-distributed`"


def started_sharded(environ: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process with FSDP; raises ConfigError for an unsupported setup.

    The launcher sets ACCELERATE_MIXED_PRECISION and one of `_LAUNCHED`; for FSDP also ACCELERATE_USE_FSDP and FSDP_*,
    and torchrun's LOCAL_RANK and WORLD_SIZE.
    """
    if "ACCELERATE_MIXED_PRECISION" not in environ or not any(name in environ for name in _LAUNCHED):
        if _TORCHRUN in environ and _number(environ, "WORLD_SIZE") > 1:
            raise ConfigError(
                f"torchrun started {environ['WORLD_SIZE']} trainers, but a run has one; start `sluice train` alone, or "
                f"under `accelerate launch` with num_processes: 1 ({_GUIDE})"
            )
        return False
    if _number(environ, "WORLD_SIZE") > 1:
        raise ConfigError(
            f"accelerate launched {environ['WORLD_SIZE']} processes, but the trainer supports one; set num_processes: "
            f"1 ({_GUIDE})"
        )
    if not _on(environ, "ACCELERATE_USE_FSDP") or "LOCAL_RANK" not in environ:
        raise ConfigError(
            "accelerate launched this trainer without FSDP; set distributed_type: FSDP in its configuration, or start "
            f"`sluice train` without accelerate ({_GUIDE})"
        )
    for refused, instead in _refused(environ):
        if refused:
            raise ConfigError(
                f"accelerate's configuration uses a feature that the trainer does not support; set {instead} ({_GUIDE})"
            )
    return True


def _refused(environ: Mapping[str, str]) -> list[tuple[bool, str]]:
    return [
        (environ.get("FSDP_VERSION", "1") != "2", "fsdp_version: 2 (`accelerate to-fsdp2` converts a file)"),
        (environ["ACCELERATE_MIXED_PRECISION"] not in ("no", "bf16"), 'mixed_precision: "no" or bf16'),
        (environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO", 'dynamo_backend: "no"'),
        (_on(environ, "FSDP_OFFLOAD_PARAMS"), "fsdp_offload_params: false"),
        (_on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"), "no parallelism_config"),
    ]


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true", "yes")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "1")
    return int(value) if value.isdigit() else 1


@contextlib.contextmanager
def sharding(config: ModelConfig) -> Generator[Shard | None]:
    """Hold the process group inside the block; yields a function that shards a model in place, None without FSDP.

    Raises ConfigError for an unsupported setup.
    """
    if not started_sharded(os.environ):
        yield None
        return
    accelerator = _accelerator(device_of(config))
    try:
        yield lambda model, optimizer: _shard(accelerator, model, optimizer)
    finally:
        torch.distributed.destroy_process_group()


def _accelerator(device: torch.device) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
    except ImportError as error:
        raise ConfigError(f"accelerate cannot be imported here ({error}); pip install 'sluice[accelerate]'") from error
    if device.index is not None:
        raise ConfigError(
            f"model.device {device} names one GPU, but accelerate uses the first visible one; set "
            f"model.device: {device.type} and choose with CUDA_VISIBLE_DEVICES ({_GUIDE})"
        )
    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=_START_WAIT_S))
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[waits])
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        # accelerate enables FSDP on accelerators only. Its preparation also works with gloo, so a configuration can be
        # tried without a GPU.
        plugin = FullyShardedDataParallelPlugin()
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state.fsdp_plugin, state.distributed_type = plugin, DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        raise ConfigError(
            f"accelerate does not shard on {device} ({state.distributed_type}); use cuda or cpu ({_GUIDE})"
        )
    return accelerator


def _shard(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = list(model.state_dict())
    try:
        accelerator.prepare(model, optimizer)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"accelerate cannot shard this model with its configuration: {error} ({_GUIDE})") from error
    keep_model_whole(model)
    keep_optimizer_whole(optimizer)
    if list(model.state_dict()) != names:
        raise ConfigError(f"sharding renames the model's tensors, and workers don't know the new names ({_GUIDE})")
    state = accelerator.state
    get_logger().info("sharded", by="FSDP2", backend=state.backend, mixed_precision=state.mixed_precision)


def keep_model_whole(model: torch.nn.Module) -> None:
    """Make `state_dict` return full tensors, tied ones as one, and `load_state_dict` accept them."""
    from torch.distributed.tensor import DTensor

    parts: dict[str, Any] = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, DTensor)}
    first: dict[int, str] = {}
    owner = {name: first.setdefault(id(part), name) for name, part in parts.items()}

    def gather(_module: Any, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        whole = {name: state[name].full_tensor() for name in first.values()}
        state.update({name: whole[owner[name]] for name in parts})

    def spread(_module: Any, state: dict[str, Any], *_: Any) -> None:
        state.update({name: _like(parts[name], value) for name, value in state.items() if name in parts})

    model.register_state_dict_post_hook(gather)
    model.register_load_state_dict_pre_hook(spread)


def keep_optimizer_whole(optimizer: torch.optim.Optimizer) -> None:
    """Make `state_dict` return full tensors, and `load_state_dict` accept them."""

    def gather(_optimizer: Any, tree: dict[str, Any]) -> dict[str, Any]:
        state = {at: {name: whole(value) for name, value in kept.items()} for at, kept in tree["state"].items()}
        return {**tree, "state": state}

    def spread(_optimizer: Any, tree: dict[str, Any]) -> dict[str, Any]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = {
            at: {name: _like(params[at], value) if value.ndim else value for name, value in kept.items()}
            for at, kept in tree["state"].items()
        }
        return {**tree, "state": state}

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(spread)


def whole(tensor: Any) -> Any:
    """The full tensor of a sharded one; any other value unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(part: Any, value: torch.Tensor) -> torch.Tensor:
    """A full tensor with the layout of a sharded part."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(part, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(part.device), part.device_mesh, part.placements)
