"""The engines that are compared, each with one call: sequences in, their new tokens out.

- A side's process loads its engine, decodes one token, answers `{}` and warms up; then it serves rounds.
- Wall seconds run from the first request to the last token; nothing is loaded or prepared within them.
- On CUDA the settings of continuous batching are its own defaults. On a CPU the defaults fill nine tenths of the memory
  with cache, so pages are as many as the sequences need, and at most 16 requests run together: its `sdpa` attention
  there is one product of all running requests with all their contexts, so 128 at once are slower than 16 after each
  other. Also tried on a CPU, once each on a busy machine, and about as fast or slower: 8 and 32 requests together, no
  limit, `paged|eager` attention, pages of 16 and 256 tokens, batches of 256 and 1024 tokens, no block sharing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sluice.bench.child import Parent
from sluice.bench.models import ENDLESS_CONTEXT
from sluice.bench.processes import enforce_eager
from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions
from sluice.pipeline.errors import EngineError, SluiceError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceRequest

SHORTEST, LONGEST = 8, 512  # new tokens
PROMPT_IDS = 256  # the byte tokens
_PROMPT = (16, 64)  # tokens
_WARM_UP = 1_000_000  # a round number that no round has
_POLL_S = 1.0
_TOGETHER, _PAGE, _BATCH_TOKENS = 16, 32, 2048  # requests, tokens, tokens; of continuous batching on a CPU


@dataclass(frozen=True)
class Ask:
    """One sequence to decode."""

    prompt: tuple[int, ...]
    num_new_tokens: int


def num_new_tokens(count: int, longest: int = LONGEST) -> list[int]:
    """`count` lengths, evenly from SHORTEST to `longest`, in a fixed random order."""
    span = max(count - 1, 1)
    lengths = [SHORTEST + index * (longest - SHORTEST) // span for index in range(count)]
    random.Random(count).shuffle(lengths)
    return lengths


def asks(number: int, count: int, *, longest: int = LONGEST) -> list[Ask]:
    """The sequences of round `number`: random prompts, so no engine gains by a prefix cache, and exact lengths."""
    chance = random.Random(number)
    return [
        Ask(tuple(chance.randrange(PROMPT_IDS) for _ in range(chance.randint(*_PROMPT))), length)
        for length in num_new_tokens(count, longest)
    ]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One side of one round: wall and processor seconds, peak MB so far, new tokens of each sequence."""

    seconds: float
    cpu_s: float
    peak_mb: float
    tokens: list[list[int]]

    @property
    def tok_s(self) -> float:
        """Useful tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    def check(self, side: str, asks: Sequence[Ask]) -> None:
        """Raise SluiceError unless every sequence has its length: no ratio would be fair."""
        got = [len(tokens) for tokens in self.tokens]
        wrong = [index for index, ask in enumerate(asks) if got[index : index + 1] != [ask.num_new_tokens]]
        if wrong or len(got) != len(asks):
            raise SluiceError(
                f"{side} decoded {len(got)} of {len(asks)} sequences, {len(wrong)} of them not to their length"
            )


async def serve_side(parent: Parent, name: str, model: str, threads: int, max_batch: int) -> None:
    """A side's process: each request is the (number, count, longest) of a round, answered with a Sample."""
    import torch

    torch.set_num_threads(threads)
    side = await _make_side(name, Path(model), max_batch)
    await side.run([Ask((1, 2, 3), 1)])
    parent.tell({})
    await side.run(asks(_WARM_UP, min(max_batch, 8), longest=16))
    async for number, count, longest in parent.requests(tuple[int, int, int]):
        work = asks(number, count, longest=longest)
        started, used = time.perf_counter(), cpu_s()
        tokens = await side.run(work)
        seconds, used = time.perf_counter() - started, cpu_s() - used
        parent.tell(Sample(seconds, used, _peak_mb(), tokens))
    await side.close()


class Side(Protocol):
    """An engine, loaded. `run` gives the new tokens of each sequence."""

    async def run(self, asks: Sequence[Ask]) -> list[list[int]]: ...

    async def close(self) -> None: ...


async def _make_side(name: str, model: Path, max_batch: int) -> Side:
    """Each imports what it needs and no more."""
    settings = ModelConfig(path=str(model), dtype="float32")
    if name == "padded":
        return Padded(model)
    if name == "continuous":
        return Continuous(model, max_batch)
    if name == "vllm_bare":
        return BareVllm(model, max_batch)
    if name == "vllm":
        from sluice.workers.engine.vllm import VllmBackend

        options = VllmEngineOptions(enforce_eager=enforce_eager())
        ours: Backend = VllmBackend(settings, max_batch=max_batch, options=options)
    else:
        from sluice.workers.engine.hf import HfBackend

        ours = HfBackend(settings, max_batch=max_batch)
    await ours.start()
    return Ours(ours)


class Ours:
    """One of our backends, by the one call that a worker makes for each sequence."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        requests = [
            SequenceRequest(str(at), ask.prompt, SamplingParams(temperature=0.0, max_new_tokens=ask.num_new_tokens))
            for at, ask in enumerate(asks)
        ]
        return [output.token_ids for output in await asyncio.gather(*map(self._backend.decode, requests))]

    async def close(self) -> None:
        await self._backend.close()


class Padded:
    """transformers' `generate`: all sequences in one left-padded batch, which runs until its longest has ended.

    Its rows cannot end on their own count: each is cut to its length afterwards, so only useful tokens count.
    """

    def __init__(self, model: Path) -> None:
        self._module = _load_module(model)

    async def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        import torch

        pad, width = self._module.config.pad_token_id, max(len(ask.prompt) for ask in asks)
        rows = torch.tensor([[pad] * (width - len(ask.prompt)) + list(ask.prompt) for ask in asks])
        starts = torch.tensor([width - len(ask.prompt) for ask in asks])
        mask = (torch.arange(width) >= starts.unsqueeze(1)).long()
        found = self._module.generate(
            rows.to(self._module.device),
            attention_mask=mask.to(self._module.device),
            max_new_tokens=max(ask.num_new_tokens for ask in asks),
            do_sample=False,
        )
        new = found[:, width:].tolist()
        return [tokens[: ask.num_new_tokens] for tokens, ask in zip(new, asks, strict=True)]

    async def close(self) -> None:
        """Nothing to end."""


class Continuous:
    """transformers' continuous batching, with a length for each request; one manager lives through all rounds."""

    def __init__(self, model: Path, most: int) -> None:
        """`most`: sequences that are asked for at a time."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        module = _load_module(model)
        ids = {"eos_token_id": module.config.eos_token_id, "pad_token_id": module.config.pad_token_id}
        together = min(most, _TOGETHER)
        on_cpu: Any = {
            "page_size": _PAGE,
            "num_blocks": together * ENDLESS_CONTEXT // _PAGE,
            "max_batch_tokens": _BATCH_TOKENS,
            "max_requests_per_batch": together,
        }
        self._manager: Any = module.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=LONGEST, **ids),
            continuous_batching_config=ContinuousBatchingConfig(**(on_cpu if module.device.type == "cpu" else {})),
        )
        self._manager.warmup()
        self._manager.start()

    async def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Raises EngineError."""
        names = [self._manager.add_request(list(ask.prompt), max_new_tokens=ask.num_new_tokens) for ask in asks]
        found: dict[str, list[int]] = {}
        while len(found) < len(asks):
            result = self._manager.get_result(timeout=_POLL_S)
            if result is None and not self._manager.is_running():
                raise EngineError("transformers' continuous batching ended before its requests did; see its log")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise EngineError(f"transformers' continuous batching failed a request: {result.error}")
            found[result.request_id] = list(result.generated_tokens)
        return [found[name] for name in names]

    async def close(self) -> None:
        self._manager.stop(block=True, timeout=5.0, hard_stop=True)


class BareVllm:
    """`vllm.LLM.generate` alone, with the options that our backend gets, token ids in and out."""

    def __init__(self, model: Path, max_batch: int) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            str(model),
            dtype="float32",
            max_num_seqs=max_batch,
            enforce_eager=enforce_eager(),
            skip_tokenizer_init=True,
            generation_config="vllm",
        )

    async def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        from vllm import SamplingParams as VllmSampling

        prompts: Any = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        params = [
            VllmSampling(temperature=0.0, max_tokens=ask.num_new_tokens, ignore_eos=True, detokenize=False)
            for ask in asks
        ]
        found: Any = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    async def close(self) -> None:
        """The engine ends with the process."""


def _load_module(model: Path) -> Any:
    """As a user loads it: float32, `sdpa` attention."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return loaded.to(device).eval()


def cpu_s() -> float:
    """Processor seconds of this process and those it started (user and system); 0 where there is no /proc."""
    fields = [stat.rpartition(")")[2].split() for stat in _proc("stat")]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _peak_mb() -> float:
    """Most memory held: on CUDA the allocator's peak, else the sum of peak resident sizes; MB of 10^6 bytes."""
    import torch

    if torch.cuda.is_available() and (used := torch.cuda.max_memory_allocated()):
        return used / 1e6
    lines = [line for status in _proc("status") for line in status.splitlines() if line.startswith("VmHWM:")]
    return sum(int(line.split()[1]) for line in lines) * 1024 / 1e6


def _proc(name: str) -> Iterator[str]:
    """The file of this name of this process and of each that it started."""
    waiting = ["self"]
    while waiting:
        process = Path("/proc", waiting.pop())
        with contextlib.suppress(OSError):  # ended meanwhile
            yield (process / name).read_text()
            for children in process.glob("task/*/children"):
                waiting += children.read_text().split()
