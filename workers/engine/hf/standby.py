"""A version beside the one that decodes: its weights in a second module, and the running rows' caches under it.

    decode thread    step ─ step ─ step ─ step ─ step ─ step ─ step ─┬─ swap ─ step (v + 1)
                           rows ↓        ↓ their new tokens ↓        │
    standby thread   load ─ probe ─ prefill in slices ─ extend ─ extend ─ ready

- Nothing that decodes is touched before the new weights are proved; a version that is refused costs no token.
- Until the swap all rows go on under the old weights. Every round processes what they have sampled since the one
  before, so the swap has a few tokens a row left to do, and exchanges the module and the caches between two tokens.
- A cache is computed by one version alone. The passes that fill it score the tokens of the version before.
- A row that came too late for a slice is prefilled at the swap.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from sluice.pipeline.errors import EngineError
from sluice.pipeline.logs import get_logger
from sluice.workers.engine.contracts import WeightsProbe
from sluice.workers.engine.hf.adapters import Adapters
from sluice.workers.engine.hf.cache import PrefillCache
from sluice.workers.engine.hf.model import LoadedModel
from sluice.workers.engine.hf.passes import chosen, forward_scored, groups_by_length, left_padded
from sluice.workers.engine.hf.rows import Row
from sluice.workers.engine.weight_files import tied

SLICE_TOKENS = 4096
"""Padded tokens of one pass: on a GPU a decode step may wait behind one."""
_ROUNDS = 8
_FEW = 4  # tokens a row: what the swap may have left to do
_LOOK_S = 0.5
_GIB = 1 << 30


class Context(NamedTuple):
    """A running row between two steps."""

    row: Row
    token_ids: list[int]  # prompt and generated; a decode cache holds all but the newest
    first: int  # index in `token_ids` of the first token to score; their length: none


class Slice:
    """Rows that are prefilled together; all of them get one token a step, so they stay aligned."""

    def __init__(self, model: LoadedModel, contexts: Sequence[Context]) -> None:
        """One pass over everything but the newest tokens."""
        self.rows = [context.row for context in contexts]
        self.cache = PrefillCache(model.module.config)
        self._temperatures = [row.logprob_temperature for row in self.rows]
        ids = [context.token_ids[:-1] for context in contexts]
        self._lengths = [len(each) for each in ids]
        padded = left_padded(model, ids, self.rows[0].pad_token_id)
        self._width = padded[0].shape[1]  # columns cached
        begins = (self._width - len(context.token_ids) + 1 + context.first for context in contexts)
        self._begin = min(self._width, *begins)  # the newest tokens are scored even where none is asked for
        first = self._begin if self._begin < self._width else None
        self._logits, scores = forward_scored(model, *padded, self.cache, first, self._temperatures)
        self._scores = [scores]  # of the columns from `_begin` on

    def behind(self, contexts: Mapping[int, Context]) -> int:
        """Tokens a row that a cache doesn't hold yet, or 0 if none of its rows runs any more."""
        return max((len(one.token_ids) - 1 - length for _, one, length in self._running(contexts)), default=0)

    def extend(self, model: LoadedModel, contexts: Mapping[int, Context]) -> None:
        """Take what the rows have sampled since; a row that left is fed padding, also beyond the context."""
        count = self.behind(contexts)
        if not count:
            return
        device = self._logits.device
        new = [[0] * count for _ in self.rows]
        for index, one, length in self._running(contexts):
            new[index] = one.token_ids[length:-1]
        inputs, lengths = torch.tensor(new, device=device), torch.tensor(self._lengths, device=device).unsqueeze(1)
        mask = torch.arange(self._width + count, device=device) >= self._width - lengths
        # Learned positions end with the context; those of rows that run are below.
        positions = (lengths + torch.arange(count, device=device)).clamp_(max=model.facts.context_length - 1)
        self._scores.append(chosen(self._logits.unsqueeze(1), inputs[:, :1], self._temperatures))
        rest = 1 if count > 1 else None
        self._logits, scores = forward_scored(model, inputs, mask, positions, self.cache, rest, self._temperatures)
        self._scores.append(scores)
        self._lengths = [length + count for length in self._lengths]
        self._width += count

    def score(self, contexts: Mapping[int, Context], version: int, parent: int | None) -> dict[int, EngineError | None]:
        """Once it is extended to the end: give the rows their scores. Row's index -> its error, of those that run."""
        running = list(self._running(contexts))
        newest = torch.zeros(len(self.rows), 1, dtype=torch.int64, device=self._logits.device)
        for index, one, _ in running:
            newest[index] = one.token_ids[-1]
        last = chosen(self._logits.unsqueeze(1), newest, self._temperatures)
        scores = torch.cat([*self._scores, last], dim=1).tolist()
        found: dict[int, EngineError | None] = {}
        for index, (row, _, _), length in running:
            token_0 = self._width - length + len(row.prompt) - self._begin
            unscored = row.unscored(version, parent)
            try:
                row.score(version, unscored, [scores[index][token_0 + at] for at in unscored])
                found[index] = None
            except EngineError as error:
                found[index] = error
        return found

    def _running(self, contexts: Mapping[int, Context]) -> Iterator[tuple[int, Context, int]]:
        """(index, context, tokens cached) of the rows that still run."""
        for index, (row, length) in enumerate(zip(self.rows, self._lengths, strict=True)):
            if (one := contexts.get(id(row))) is not None:
                yield index, one, length


class Load(NamedTuple):
    """What `Backend.load_weights` was asked for."""

    directory: Path
    version: int
    probe: WeightsProbe | None
    parent: int | None


class Standby:
    """Prepares one version in a thread of its own; used from the decode thread, which answers when it `waits`."""

    def __init__(
        self, prepare: Callable[[], LoadedModel], future: Future[None], load: Load, wake: Callable[[], None]
    ) -> None:
        """`prepare` loads and proves the weights; `future` is its caller's; `wake` is called when it `waits`."""
        self.future, self.load = future, load
        self.model: LoadedModel | None = None  # proved, or None while it isn't
        self.slices: list[Slice] = []
        self.error: Exception | None = None
        self.ended = False
        self._prepare, self._wake = prepare, wake
        self._asks = self._stopped = False
        self._answers: queue.SimpleQueue[dict[int, Context]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sluice-hf-standby", daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Whether the decode thread has something to do for it."""
        return self._asks or self.ended

    @property
    def asks(self) -> bool:
        """Whether it wants to know the running rows: call `answer`."""
        return self._asks

    def answer(self, contexts: dict[int, Context]) -> None:
        """The running rows between two steps, by id."""
        self._asks = False
        self._answers.put(contexts)

    def stop(self) -> None:
        """Give up at the next chance; it has `ended` then."""
        self._stopped = True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                model = self._prepare()
                try:
                    if not model.facts.keeps_cache:
                        self._prefill(model)
                except torch.OutOfMemoryError as error:  # the caches have no room: the swap prefills
                    self.slices = []
                    get_logger().warning("no room for the caches of new weights; rows wait", error=str(error))
                self.model = model
        except Exception as error:  # the decode thread raises it, or tells the caller
            self.error = error
        finally:
            self.ended = True
            self._wake()

    def _prefill(self, model: LoadedModel) -> None:
        for _ in range(_ROUNDS):
            contexts = self._rows()
            known = {id(row) for part in self.slices for row in part.rows}
            new = [one for key, one in contexts.items() if key not in known and one.row.vision is None]
            behind = max((part.behind(contexts) for part in self.slices), default=0)
            if self._stopped or (not new and behind <= _FEW):
                return
            for part in self.slices:
                part.extend(model, contexts)
            for group in groups_by_length([len(one.token_ids) for one in new], SLICE_TOKENS):
                if self._stopped:
                    return
                self.slices.append(Slice(model, [new[index] for index in group]))

    def _rows(self) -> dict[int, Context]:
        self._asks = True
        self._wake()
        while not self._stopped:
            try:
                return self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
        return {}


def second_model(model: LoadedModel, limit_gb: float | None) -> LoadedModel | None:
    """A module like this one with tensors of its own, or None and a log line that says why there is none.

    `limit_gb` bounds its memory; None: it may take half of what is free, 0: there is none.
    """
    own = model.module.state_dict(keep_vars=True)
    need = sum(own[names[0]].nbytes for names in tied(own))
    device = torch.device(model.facts.device)
    room = _free_bytes(device) / 2 if limit_gb is None else limit_gb * _GIB
    why = ""
    if model.vision is not None:
        why = "the model takes images"
    elif getattr(model.module, "hf_device_map", None):
        why = "model.device_map spreads the model"
    elif need > room:
        why = f"it needs {need / _GIB:.2f} GiB, and there is room for {room / _GIB:.2f} (weights.second_copy_gb)"
    else:
        try:
            module = copy.deepcopy(model.module)
            if sorted(tied(module.state_dict(keep_vars=True))) == sorted(tied(own)):
                inner = getattr(module, "model", None)
                rope_index = getattr(inner, "get_rope_index", None)
                return replace(model, module=module, adapters=Adapters(module), rope_index=rope_index)
            why = "its copy ties other tensors"
        except (RuntimeError, TypeError, copy.Error) as error:
            why = f"the model can't be copied: {error}"
    if limit_gb != 0:
        get_logger().warning("no second copy of the weights: decoding stops while new ones load", cause=why)
    return None


def _free_bytes(device: torch.device) -> float:
    """Of the device, or of this host and its container; 0 if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0.0
    return min(free, _left_in_group())


def _left_in_group(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes left of the memory limit of this container; infinite if it has none."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return float((root / limit).read_text()) - float((root / used).read_text())
        except (OSError, ValueError):  # no such version of cgroups here, or "max"
            continue
    return float("inf")
