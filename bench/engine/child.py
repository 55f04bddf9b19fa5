"""One side in a process of its own: `python -m sluice.bench.engine.child SIDE MODEL THREADS MAX_BATCH`.

- It loads its engine, decodes one token, answers `{}` and warms up; then each line `NUMBER COUNT LONGEST` on stdin
  is a round, answered with a Sample. Between rounds it blocks on stdin.
- Answers go to the stdout it was started with; whatever libraries print goes to its log.
- Wall seconds run from the first request to the last token; nothing is loaded or prepared within them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from sluice.bench.engine.load import Ask, asks
from sluice.bench.engine.stats import Sample
from sluice.bench.engine.usage import cpu_s, peak_mb

_WARM_UP = 1_000_000  # a round number that no round has


class Side(Protocol):
    """An engine, loaded."""

    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The new tokens of each sequence."""
        ...

    def close(self) -> None:
        """End it."""
        ...


def make_side(name: str, model: Path, max_batch: int) -> Side:
    """The side of this name; each imports what it needs and no more."""
    if name == "padded":
        from sluice.bench.engine.padded import Padded

        return Padded(model)
    if name == "continuous":
        from sluice.bench.engine.continuous import Continuous

        return Continuous(model, max_batch)
    if name == "vllm_bare":
        from sluice.bench.engine.bare_vllm import BareVllm

        return BareVllm(model, max_batch)
    from sluice.bench.engine.ours import Ours, hf_backend, vllm_backend

    return Ours((vllm_backend if name == "vllm" else hf_backend)(model, max_batch))


def _serve(name: str, model: Path, threads: int, max_batch: int, answers: IO[bytes]) -> None:
    import torch

    def answer(what: Any) -> None:
        answers.write(msgspec.json.encode(what) + b"\n")
        answers.flush()

    torch.set_num_threads(threads)
    side = make_side(name, model, max_batch)
    side.run([Ask((1, 2, 3), 1)])
    answer({})
    side.run(asks(_WARM_UP, min(max_batch, 8), longest=16))
    while line := sys.stdin.readline():
        number, count, longest = map(int, line.split())
        work = asks(number, count, longest=longest)
        started, used = time.perf_counter(), cpu_s()
        tokens = side.run(work)
        seconds, used = time.perf_counter() - started, cpu_s() - used
        answer(Sample(seconds, used, peak_mb(), tokens))
    side.close()


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _name, _model, _threads, _max_batch = sys.argv[1:]
    _serve(_name, Path(_model), int(_threads), int(_max_batch), _answers)
