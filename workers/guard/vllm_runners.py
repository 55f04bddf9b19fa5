"""The guard on vLLM's two model runners, without importing vLLM: rows of V1, slots of Model Runner V2.

vLLM gives no stability promise for these interfaces. A changed one would fail in the middle of a step, or never call
the guard, so `check_interfaces` inspects them before the guard is loaded.

A request ends at its forced id, whoever chose it. An asynchronous scheduler has sent its next step by then: what that
draws is thrown away, and a trigger there says nothing about the request, so it isn't noted.

V1: rows of the batch, and vLLM's own growing lists of output tokens.

- A row begins with the last `offset` tokens of its prompt: those generated before it was resumed.
- vLLM's list is read in `apply`, after an asynchronous scheduler has filled its places.
- A draw for a partial prefill is discarded: the row triggers again when its token counts.

Model Runner V2: slots, and token ids that live on the device.

- A slot's first step reads the tokens generated so far from the device (without prompt tokens, except the `offset` that
  were generated before a resume); every later step reads the one token that was fed.
- Rows in the middle of their prefill are skipped: their draw is discarded.
- Speculative decoding gives a request several rows per step, and is refused at start.
- Reading the fed tokens synchronises with the device once per step.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch

from sluice.pipeline.errors import GuardRefused
from sluice.workers.guard.repeat import RepeatGuard
from sluice.workers.guard.requests import GuardArguments, GuardRequests
from sluice.workers.guard.watch import Watch, force

_V1_METHODS = {
    "update_state": ["self", "batch_update"],
    "apply": ["self", "logits"],
    "is_argmax_invariant": ["self"],
    "validate_params": ["sampling_params"],
    "__init__": ["self", "vllm_config", "device", "is_pin_memory"],
}
_V1_UPDATE = {"batch_size", "removed", "added", "moved"}
_V2_METHODS = {
    "add_request": ["self", "req_idx", "sampling_params"],
    "apply": ["self", "logits", "ctx"],
    "validate_params": ["sampling_params"],
    "__init__": ["self", "vllm_config", "req_states"],
}
_V2_CONTEXT = {"idx_mapping_np", "input_ids", "seq_lens_upper_bound_np"}
_V2_STATE = {"all_token_ids", "prompt_len", "prefill_len"}


def check_interfaces() -> None:
    """Raises GuardRefused if the installed vLLM's interfaces aren't the ones the guard knows."""
    from vllm.v1.sample.logits_processor import interface as v1
    from vllm.v1.worker.gpu.sample.logits_processor import interface as v2

    check_v1(v1)
    check_v2(v2)


def check_v1(module: Any) -> None:
    """The V1 runner's interface. Raises GuardRefused naming what changed."""
    _check_methods("V1", module.LogitsProcessor, _V1_METHODS)
    _check_fields("V1", module.BatchUpdate, _V1_UPDATE)


def check_v2(module: Any) -> None:
    """Model Runner V2's interface. Raises GuardRefused naming what changed."""
    _check_methods("Model Runner V2", module.LogitsProcessor, _V2_METHODS)
    _check_fields("Model Runner V2", module.LogitsContext, _V2_CONTEXT)
    _check_fields("Model Runner V2", module.LogitsProcRequestState, _V2_STATE)


def _check_methods(runner: str, kind: type, wanted: dict[str, list[str]]) -> None:
    for name, parameters in wanted.items():
        method = getattr(kind, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != parameters:
            raise _moved(runner, f"{kind.__name__}.{name} takes {found}, but the guard expects {parameters}")
    known = {*wanted, "apply_staged_writes"}
    if more := sorted(getattr(kind, "__abstractmethods__", frozenset()) - known):
        raise _moved(runner, f"{kind.__name__} requires the methods {', '.join(more)}, which the guard does not have")


def _check_fields(runner: str, kind: type, wanted: set[str]) -> None:
    found = {field.name for field in dataclasses.fields(kind)}
    if missing := sorted(wanted - found):
        raise _moved(runner, f"{kind.__name__} has no {', '.join(missing)}")


def _moved(runner: str, what: str) -> GuardRefused:
    import vllm

    return GuardRefused(
        f"vLLM {vllm.__version__}: its interface for logits processors ({runner}) is not the one that the repeat guard "
        f"was written for: {what}; install the vLLM that this release names, or set repeat_terminate.enabled to false"
    )


class V1Rows:
    """Follows `BatchUpdate`s; `requests` holds rules and arguments."""

    def __init__(self, requests: GuardRequests, swap: Any) -> None:
        """`swap`: vLLM's `MoveDirectionality.SWAP`."""
        self._requests, self._swap = requests, swap
        self._rows: dict[int, tuple[Watch, str]] = {}

    def update_state(self, batch_update: Any) -> None:
        """Rows removed, added and moved, in this order."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, sampling, prompt, generated in batch_update.added:
            rows[index] = self._watched(sampling, prompt or [], generated)
        for source, target, direction in batch_update.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if direction == self._swap and replaced is not None:
                rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Takes float32 logits (rows, vocab); rows that end now are left with one finite entry."""
        began, forced = time.perf_counter_ns(), dict[int, int]()
        for index, (watch, key) in self._rows.items():
            if (trigger := watch.look()) is not None:
                forced[index] = watch.forced
                if not watch.ended:
                    self._requests.note(key, trigger)
        if forced:
            force(logits, forced)
        self._requests.cost.step(began, len(self._rows))
        return logits

    def _watched(self, sampling: Any, prompt: Sequence[int], generated: list[int]) -> tuple[Watch, str]:
        guard, asked = self._requests.begin(sampling)
        if asked.offset:
            guard.push_all(prompt[-asked.offset :])
        return Watch(guard, generated, asked.forced), asked.key


class _Slot:
    """One request; `seen`: its tokens read so far, including the prompt; None before its first step."""

    __slots__ = ("asked", "ended", "guard", "sampling", "seen")

    def __init__(self, sampling: Any, guard: RepeatGuard, asked: GuardArguments) -> None:
        self.sampling, self.guard, self.asked = sampling, guard, asked
        self.seen: int | None = None
        self.ended = False  # the forced id was read


class V2Slots:
    """Follows request slots; `requests` holds rules and arguments, `state` is vLLM's `LogitsProcRequestState`."""

    def __init__(self, requests: GuardRequests, state: Any) -> None:
        self._requests, self._state = requests, state
        self._slots: dict[int, _Slot] = {}

    def add_request(self, slot: int, sampling: Any) -> bool:
        """A request takes the slot; any earlier one is gone."""
        self._slots[slot] = _Slot(sampling, *self._requests.begin(sampling))
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Takes float32 logits (rows, vocab), one row per place of the batch; rows that end now are forced."""
        began, forced = time.perf_counter_ns(), dict[int, int]()
        places = ctx.idx_mapping_np.tolist()
        visible = ctx.seq_lens_upper_bound_np.tolist()
        fed = ctx.input_ids.tolist()
        for row, number in enumerate(places):
            slot = self._slots.get(number)
            if slot is None or visible[row] < int(self._state.prefill_len.np[number]):
                continue
            self._read(slot, number, visible[row], fed[row])
            if (trigger := slot.guard.trigger) is not None:
                forced[row] = slot.asked.forced
                if not slot.ended:
                    self._requests.note(slot.asked.key, trigger)
        if forced:
            force(logits, forced)
        self._requests.cost.step(began, len(places))
        return logits

    def _read(self, slot: _Slot, number: int, visible: int, fed: int) -> None:
        if slot.seen == visible:
            return
        if slot.seen is not None and visible == slot.seen + 1:
            slot.guard.push(fed)
            slot.ended = slot.ended or fed == slot.asked.forced
        else:
            if slot.seen is not None:  # a step was missed: read everything again
                slot.guard, slot.asked = self._requests.begin(slot.sampling)
            begin = int(self._state.prompt_len.np[number])
            start = max(0, begin - slot.asked.offset)
            tokens = self._state.all_token_ids.gpu[number, start:visible].tolist()
            slot.guard.push_all(tokens)
            slot.ended = slot.asked.forced in tokens[begin - start :]
        slot.seen = visible
