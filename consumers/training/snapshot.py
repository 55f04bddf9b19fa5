"""The weights of one step as a version's files, made while the next step runs.

    the trainer:     step ─▶ Snapshot ─▶ forward, backward ─▶ (copied?) optimiser's update
                                │                                 ▲
    another thread:             └──▶ copy and cast ───────────────┘──▶ score the probe, write and hash ─▶ a version

- The trainer waits for the copy alone, and only where it would change the weights: passes read them too.
- Tensors are cast to `weights.dtype` as they are copied; the model's own stay as they are. What transformers keeps in
  float32 in a half-precision model stays in float32.
- The probe is scored in float32 under what is published. A second model without tensors of its own does it, which gets
  those of the copy one layer at a time. Of a model in parts, all ranks round theirs, score and go back, before the
  next step.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.consumers.training.model import copy_settings, probe_score, write_weights
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.weights.versions import Ahead
from sluice.pipeline.wire.messages import Shard


class Memory:
    """The copy's tensors, which the next snapshot fills again: a host that gives new pages slowly gives them once."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """They are the caller's until it gives them back."""
        found, self._tensors = self._tensors, {}
        return found

    def give(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors


class Snapshot:
    """Of a whole model; one that has an adapter has none."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        score: Callable[[Mapping[str, Tensor]], float],
        *,
        tensors: Mapping[str, Tensor] | None = None,
        wait_s: float = 600.0,
        memory: Memory | None = None,
    ) -> None:
        """`score`: the probe's, under the tensors of a copy; `tensors`: the state dict, if this process has parts of
        the model only; `wait_s`: for a copy that another thread makes; `memory`: for it, from and for other snapshots.
        """
        self._model, self._dtype, self._score, self._wait_s = model, dtype, score, wait_s
        self._memory = memory or Memory()
        live = model.state_dict(keep_vars=True) if tensors is None else tensors
        self._live: dict[str, Tensor] = {name: tensor.detach() for name, tensor in live.items()}
        self._copied: dict[str, Tensor] | None = None
        self._copying = threading.Lock()

    def copy(self) -> None:
        """Return once nothing of it is the model's any more: any thread may begin, the others wait.

        Raises DeadlineExceeded.
        """
        if not self._copying.acquire(timeout=self._wait_s):
            raise DeadlineExceeded(f"the weights were not copied to the host's memory within {self._wait_s:.0f} s")
        try:
            if self._copied is None:
                self._copied = _copies(self._live, self._dtype, kept_in_float32(self._model), self._memory.take())
                self._live = {}
        finally:
            self._copying.release()

    def write(self, source: Path, target: Path, ahead: Ahead | None = None) -> tuple[dict[str, Shard], float]:
        """Fill a model directory, every other file as in `source`; size and digest of its files, the probe's score.

        Call it once. `ahead`: as `Carrier.ahead` gives it.
        """
        self.copy()
        copied = self._copied
        assert copied is not None
        with ThreadPoolExecutor(1, thread_name_prefix="probe") as pool, ahead or contextlib.nullcontext() as watch:
            scoring = pool.submit(self._score, copied)
            shards = write_weights(self._model, copied, target, watch)
            copy_settings(source, target)
            score = scoring.result()
        self._memory.give(copied)
        return shards, score


def _copies(
    live: Mapping[str, Tensor], dtype: torch.dtype, in_float32: Callable[[str], bool], into: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """On the CPU, in tensors of `into` where they fit; names of one tensor have one copy."""
    found: dict[str, Tensor] = {}
    made: dict[tuple[Any, ...], Tensor] = {}
    for name, tensor in live.items():
        wanted = dtype if tensor.dtype == torch.float32 and not in_float32(name) else tensor.dtype
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), wanted)
        if tensor.numel() == 0 or same not in made:
            old = into.get(name)
            fits = old is not None and old.dtype == wanted and old.shape == tensor.shape and old.numel() > 0
            made[same] = old.copy_(tensor) if fits and old is not None else tensor.to("cpu", wanted, copy=True)
        found[name] = made[same]
    return found


def kept_in_float32(model: Any) -> Callable[[str], bool]:
    """Whether a tensor of this name stays in float32 where transformers loads the model in half precision."""
    kinds = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    names = {name for kind in kinds for name in getattr(model, kind, None) or ()}
    if not names:
        return lambda name: False
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in sorted(names)))
    return lambda name: pattern.search(name) is not None


class Shadow:
    """A model's modules with no tensors but buffers that are in no file."""

    def __init__(self, model: Any) -> None:
        """Made of a model that isn't running."""
        self._device = model.device
        empty = {id(one): torch.nn.Parameter(torch.empty_like(one, device="meta"), False) for one in model.parameters()}
        self._model: Any = copy.deepcopy(model, empty).eval()
        layers: set[str] = set(getattr(model, "_no_split_modules", None) or ())
        self._room: _Room = {}
        for module in _units(self._model, layers):
            in_blocks = _IN_BLOCKS.get(type(module))
            if in_blocks is not None:
                module.forward = partial(in_blocks, module, self._device)
                continue
            inner = list(module.modules()) if type(module).__name__ in layers else [module]
            lent = _Lent(inner, self._device, self._room)
            module.register_forward_pre_hook(lent.put)
            module.register_forward_hook(lent.take_back, always_call=True)

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> float:
        """As `probe_score`, under a state dict of any float type."""
        try:
            for name, tensor in tensors.items():
                owner, leaf = self._owner(name)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
                else:
                    owner._buffers[leaf] = tensor.to(self._device)
            return probe_score(self._model, list(token_ids), device=self._device)
        finally:
            self._room.clear()
            for name, tensor in tensors.items():  # frees the copy
                owner, leaf = self._owner(name)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = torch.nn.Parameter(torch.empty_like(tensor, device="meta"), False)

    def _owner(self, name: str) -> tuple[Any, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf


_Room = dict[torch.Size, list[Tensor]]
"""Float32 tensors that nobody uses: layers have the same shapes, and new pages cost more than a cast."""


class _Lent:
    """Hooks that give modules their parameters in float32, on the model's device, for the time of one forward pass."""

    def __init__(self, modules: Iterable[Any], device: torch.device, room: _Room) -> None:
        self._owners = [module for module in modules if module._parameters]
        self._device, self._own, self._room = device, list[dict[str, Any]](), room
        self._used: list[Tensor] = []

    def put(self, *_: Any) -> None:
        self._own = [dict(module._parameters) for module in self._owners]
        for module in self._owners:
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = torch.nn.Parameter(self._lent(value), requires_grad=False)

    def take_back(self, *_: Any) -> None:
        for module, own in zip(self._owners, self._own, strict=True):
            module._parameters.update(own)
        for one in self._used:
            self._room.setdefault(one.shape, []).append(one)
        self._own, self._used = [], []

    def _lent(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dtype == torch.float32:
            return value.to(self._device)
        free = self._room.get(value.shape)
        made = free.pop() if free else torch.empty(value.shape, dtype=torch.float32, device=self._device)
        self._used.append(made)
        return made.copy_(value)


def _embedded(module: torch.nn.Embedding, device: torch.device, ids: Tensor) -> Tensor:
    """The rows that are used, in float32."""
    rows = torch.nn.Embedding.forward(module, ids.to(module.weight.device))
    return rows.to(device, torch.float32)


def _multiplied(module: torch.nn.Linear, device: torch.device, values: Tensor) -> Tensor:
    """A linear layer whose weights are in float32 one block of rows at a time."""
    found: list[Tensor] = []
    count = max(1, _BLOCK // module.in_features)
    room = torch.empty(count, module.in_features, dtype=torch.float32, device=device)
    for block in module.weight.split(count):
        weight = block if block.dtype == torch.float32 else room[: len(block)].copy_(block)
        found.append(torch.nn.functional.linear(values, weight.to(device)))
    made = torch.cat(found, dim=-1)
    return made if module.bias is None else made + module.bias.to(device, torch.float32)


_IN_BLOCKS: dict[type, Callable[..., Tensor]] = {torch.nn.Embedding: _embedded, torch.nn.Linear: _multiplied}
"""Outside of the layers: embedding and head are the largest tensors by far, and often half of the pass in float32."""
_BLOCK = 1 << 22  # values


def _units(module: Any, layers: set[str]) -> Generator[Any]:
    """Layers as a whole, as code of a layer may read its parts' weights; elsewhere whatever has parameters itself."""
    if type(module).__name__ in layers or (module._parameters and next(module.children(), None) is None):
        yield module
        return
    if module._parameters:
        yield module
    for child in module.children():
        yield from _units(child, layers)


@contextlib.contextmanager
def rounded(model: Any, dtype: torch.dtype) -> Generator[None]:
    """The model's own float32 parameters as a version of this dtype has them; afterwards they are as before."""
    if dtype == torch.float32:
        yield
        return
    in_float32 = kept_in_float32(model)
    chosen = [one for name, one in model.named_parameters() if one.dtype == torch.float32 and not in_float32(name)]
    with torch.no_grad():
        before = [one.detach().clone() for one in chosen]
        try:
            for one in chosen:
                one.copy_(one.to(dtype))
            yield
        finally:
            for one, own in zip(chosen, before, strict=True):
                one.copy_(own)
