"""The trainer's model in parts: FSDP2 on ranks that torchrun started, or `accelerate launch`.

    sharding() ─▶ load ─▶ before_optimizer(model) ─▶ TrainStep ─▶ after_optimizer(model, optimizer) ─▶ Trainer

| started by                         | who shards, and as what says            | checkpoints                   |
|------------------------------------|-----------------------------------------|-------------------------------|
| `sluice train` alone               | nobody                                  | whole                         |
| torchrun, or `trainer.ranks`       | `shard_model`, `trainer.fsdp`           | in shards                     |
| the same with `tensor_parallel`    | transformers, as it loads the model     | in shards                     |
| `accelerate launch`, one process   | accelerate, its configuration           | whole                         |
| `accelerate launch`, several       | accelerate, its configuration           | in shards                     |

- Gradients are summed over ranks, not averaged: the loss is divided by numbers of the whole batch (step.py).
- Whole checkpoints of a sharded model are the plain trainer's files: state dicts have full tensors, under the same
  names and indices. Any trainer resumes from any checkpoint.
- accelerate is imported only in a process that it launched.
- A setting that this trainer doesn't support is an error; it's never silently ignored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sluice.consumers.training.model import device_of
from sluice.consumers.training.ranks.group import Ranks
from sluice.consumers.training.ranks.launch import wants_ranks
from sluice.consumers.training.shards import like, whole
from sluice.pipeline.config.types import Config, FsdpConfig
from sluice.pipeline.errors import ConfigError, how_to_install
from sluice.pipeline.logs import get_logger

_LAUNCHED = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # a scheduler may set WORLD_SIZE for other programs, but not this
_START_WAIT_S = 60.0
_GUIDE = "see `sluice help docs training-distributed`"


@dataclass(frozen=True)
class Sharding:
    """What to do with a model, in this order."""

    ranks: Ranks | None  # None: one process
    device: torch.device
    sees: bool  # whether some ranks may have images in a pass, and others none
    mesh: DeviceMesh | None  # over which the model is loaded, a part of each matrix per rank; None: loaded whole
    before_optimizer: Callable[[Any], None]
    after_optimizer: Callable[[Any, torch.optim.Optimizer], None]


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process, itself and for this trainer."""
    return _TORCHRUN in environ and not _by_accelerate(environ)


def started_sharded(environ: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process with FSDP; raises ConfigError for an unsupported setup.

    The launcher sets ACCELERATE_MIXED_PRECISION and one of `_LAUNCHED`; for FSDP also ACCELERATE_USE_FSDP and FSDP_*,
    and torchrun's LOCAL_RANK and WORLD_SIZE.
    """
    if not _by_accelerate(environ):
        return False
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


def passes_in_half(config: Config, environ: Mapping[str, str]) -> bool:
    """Whether fp32 weights are passed in bf16, also for a version's probe."""
    by_accelerate = _by_accelerate(environ) and environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    return by_accelerate or config.trainer.fsdp.mixed_precision == "bf16"


def _by_accelerate(environ: Mapping[str, str]) -> bool:
    return "ACCELERATE_MIXED_PRECISION" in environ and any(name in environ for name in _LAUNCHED)


def _refused(environ: Mapping[str, str]) -> list[tuple[bool, str]]:
    return [
        (environ.get("FSDP_VERSION", "1") != "2", "fsdp_version: 2 (`accelerate to-fsdp2` converts a file)"),
        (environ["ACCELERATE_MIXED_PRECISION"] not in ("no", "bf16"), 'mixed_precision: "no" or bf16'),
        (environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO", 'dynamo_backend: "no"'),
        (_on(environ, "FSDP_OFFLOAD_PARAMS"), "fsdp_offload_params: false"),
        (
            _on(environ, "FSDP_CPU_RAM_EFFICIENT_LOADING") and _number(environ, "WORLD_SIZE") > 1,
            "fsdp_cpu_ram_efficient_loading: false, or num_processes: 1",
        ),
        (_on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"), "no parallelism_config"),
    ]


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true", "yes")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "1")
    return int(value) if value.isdigit() else 1


@contextlib.contextmanager
def sharding(config: Config) -> Generator[Sharding | None]:
    """Hold the process group inside the block; yields None for a model in one piece.

    Raises ConfigError for an unsupported setup.
    """
    environ = os.environ
    size = _number(environ, "WORLD_SIZE")
    by_accelerate = started_sharded(environ)
    if not by_accelerate and not (started_by_torchrun(environ) and (size > 1 or wants_ranks(config))):
        yield None
        return
    if size > 1:
        _refuse_on_ranks(config, size)
    if by_accelerate and config.trainer.fsdp != FsdpConfig():
        raise ConfigError(f"accelerate's own configuration says how to shard; leave trainer.fsdp out ({_GUIDE})")
    if by_accelerate and config.trainer.tensor_parallel > 1:
        raise ConfigError(
            f"trainer.tensor_parallel isn't supported under accelerate; start torchrun instead ({_GUIDE})"
        )
    try:
        yield _by_its_plugin(config, size) if by_accelerate else _by_torch(config)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _refuse_on_ranks(config: Config, size: int) -> None:
    trainer = config.trainer
    for refused, instead in (
        (trainer.ranks not in (1, size), f"trainer.ranks: {size}, as many as were started"),
        (trainer.dropout, "trainer.dropout: false, since checkpoints hold the random state of one rank"),
        (trainer.lora.dropout > 0, "trainer.lora.dropout: 0, for the same reason"),
        (trainer.claim_gpu, "trainer.claim_gpu: false, since it claims one GPU"),
        (trainer.optimizer != "adamw", "trainer.optimizer: adamw"),
        (torch.device(config.model.device if config.model.device != "auto" else "cpu").index is not None,
         "model.device: cuda, and choose with CUDA_VISIBLE_DEVICES"),
    ):  # fmt: skip
        if refused:
            raise ConfigError(f"not supported on {size} ranks; set {instead} ({_GUIDE})")


def _by_torch(config: Config) -> Sharding:
    device = device_of(config.model)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.trainer.rank_timeout_s)
    distributed.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=timeout)
    ranks = Ranks(config.trainer.rank_timeout_s)

    def after(_model: Any, optimizer: torch.optim.Optimizer) -> None:
        accept_whole_moments(optimizer)

    if (shared := config.trainer.tensor_parallel) > 1:
        if ranks.size != shared:
            raise ConfigError(
                f"trainer.tensor_parallel {shared} needs as many ranks, and {ranks.size} were started; set "
                f"trainer.ranks to {shared} ({_GUIDE})"
            )
        mesh = init_device_mesh(device.type, (shared,), mesh_dim_names=("tp",))
        return Sharding(ranks, device, False, mesh, accept_split_model, after)
    return Sharding(ranks, device, True, None, lambda model: shard_model(model, config.trainer.fsdp), after)


def _by_its_plugin(config: Config, size: int) -> Sharding:
    device = device_of(config.model)
    accelerator = _accelerator(device, config.trainer.rank_timeout_s if size > 1 else _START_WAIT_S)
    ranks = Ranks(config.trainer.rank_timeout_s) if size > 1 else None
    return Sharding(
        ranks,
        accelerator.device,
        ranks is None,
        None,
        lambda _model: None,
        lambda model, optimizer: _shard(accelerator, model, optimizer, keep_whole=ranks is None),
    )


def accept_split_model(model: Any) -> None:
    """As `accept_whole_model`, of one that was loaded over a mesh. Raises ConfigError if a part isn't known as one."""
    parts = model.state_dict(keep_vars=True)
    with torch.device("meta"):
        plain = type(model)(model.config).state_dict()
    unknown = sorted(name for name, part in parts.items() if part.shape != plain[name].shape)
    if unknown or not any(isinstance(part, DTensor) for part in parts.values()):
        why = f"its plan splits {unknown[0]} in a way of its own" if unknown else "transformers has no plan for it"
        raise ConfigError(f"trainer.tensor_parallel: {type(model).__name__} can't be split, {why}; set it to 1")
    accept_whole_model(model)
    get_logger().info("sharded", by="tensor parallel", ranks=distributed.get_world_size())


def shard_model(model: Any, options: FsdpConfig) -> None:
    """Shard a transformers model over the default process group, a layer at a time; before it gets an optimiser."""
    device = model.device.type
    if options.cpu_offload and device == "cpu":
        raise ConfigError("trainer.fsdp.cpu_offload: the model is on the CPU already; set it to false")
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    names = list(model.state_dict())
    half = options.mixed_precision == "bf16"
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device, (distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # A vision tower is in the model's own group, which every pass gathers: one without images doesn't call its layers.
    text = model if getattr(model.config, "vision_config", None) is None else model.get_decoder()
    layers = [module for module in text.modules() if type(module).__name__ in kinds]
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    _sum_gradients(model)
    accept_whole_model(model)
    if list(model.state_dict()) != names:
        raise ConfigError(f"sharding renames the model's tensors, and workers don't know the new names ({_GUIDE})")
    get_logger().info(
        "sharded", by="FSDP2", ranks=distributed.get_world_size(), layers=len(layers), backend=distributed.get_backend()
    )


def _sum_gradients(model: Any) -> None:
    """Ranks may use different parameters of a layer in a pass; the ones without a gradient then count as 0."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_reduce_scatter_unused_params(True, recurse=False)


def _accelerator(device: torch.device, timeout_s: float) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
    except ImportError as error:
        raise ConfigError(f"accelerate cannot be imported here ({error}); {how_to_install('accelerate')}") from error
    if device.index is not None:
        raise ConfigError(
            f"model.device {device} names one GPU, but accelerate uses the first visible one; set "
            f"model.device: {device.type} and choose with CUDA_VISIBLE_DEVICES ({_GUIDE})"
        )
    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
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


def _shard(accelerator: Any, model: Any, optimizer: torch.optim.Optimizer, *, keep_whole: bool) -> None:
    names = list(model.state_dict())
    try:
        accelerator.prepare(model, optimizer)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"accelerate cannot shard this model with its configuration: {error} ({_GUIDE})") from error
    _sum_gradients(model)
    if keep_whole:
        keep_model_whole(model)
        keep_optimizer_whole(optimizer)
    else:
        accept_whole_model(model)
        accept_whole_moments(optimizer)
    if list(model.state_dict()) != names:
        raise ConfigError(f"sharding renames the model's tensors, and workers don't know the new names ({_GUIDE})")
    state = accelerator.state
    get_logger().info("sharded", by="FSDP2", backend=state.backend, mixed_precision=state.mixed_precision)


def keep_model_whole(model: torch.nn.Module) -> None:
    """Make `state_dict` return full tensors, tied ones as one, and `load_state_dict` accept them."""
    parts: dict[str, Any] = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, DTensor)}
    first: dict[int, str] = {}
    owner = {name: first.setdefault(id(part), name) for name, part in parts.items()}

    def gather(_module: Any, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        whole = {name: state[name].full_tensor() for name in first.values()}
        state.update({name: whole[owner[name]] for name in parts})

    accept_whole_model(model)
    model.register_state_dict_post_hook(gather)


def accept_whole_model(model: torch.nn.Module) -> None:
    """Make `load_state_dict` accept full tensors."""
    parts: dict[str, Any] = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, DTensor)}

    def spread(_module: Any, state: dict[str, Any], *_: Any) -> None:
        state.update({name: like(parts[name], value) for name, value in state.items() if name in parts})

    model.register_load_state_dict_pre_hook(spread)


def keep_optimizer_whole(optimizer: torch.optim.Optimizer) -> None:
    """Make `state_dict` return full tensors, and `load_state_dict` accept them."""

    def gather(_optimizer: Any, tree: dict[str, Any]) -> dict[str, Any]:
        state = {at: {name: whole(value) for name, value in kept.items()} for at, kept in tree["state"].items()}
        return {**tree, "state": state}

    accept_whole_moments(optimizer)
    optimizer.register_state_dict_post_hook(gather)


def accept_whole_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make `load_state_dict` accept full tensors."""

    def spread(_optimizer: Any, tree: dict[str, Any]) -> dict[str, Any]:
        params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
        state = {
            at: {name: like(params[at], value) if value.ndim else value for name, value in kept.items()}
            for at, kept in tree["state"].items()
            if at in params  # PyTorch's Distributed Checkpoint numbers them by name, and has parts already
        }
        return {**tree, "state": {**tree["state"], **state}}

    optimizer.register_load_state_dict_pre_hook(spread)
