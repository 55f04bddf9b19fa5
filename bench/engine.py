"""How fast the engines decode, each in its own process, on the same sequences, round by round.

                ┌▶ hf                our loop over transformers ─┐
Plan ─▶ asks ───┼▶ padded            model.generate             ─┤
                ├▶ continuous        transformers' own batching ─┼─ Sample ─▶ fields
                └▶ vllm, vllm_bare   our backend, vllm.LLM      ─┘

- While one side decodes, the others' processes are stopped (SIGSTOP). Start-up seconds run from process start to the
  first decoded token, including imports; then it warms up.
- Greedy float32 tokens must be the same on every side, near-ties apart; otherwise the run fails.
- Wall seconds run from the first request to the last token; nothing is loaded or prepared within them.
- On CUDA continuous batching has its own default settings. On a CPU the defaults fill nine tenths of the memory with
  cache, so there are only as many pages as the sequences need, and at most 16 requests run together: its `sdpa`
  attention is one product of all running requests with all their contexts, so 128 at once are slower than 16.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from sluice.bench.engines import greedy, make_engine, random_ids
from sluice.bench.harness import HOME, BenchPlan, by_count, play, ratios, say, spread
from sluice.bench.models import ENDLESS_CONTEXT, endless_model
from sluice.bench.processes import Fleet, Parent, cpu_s, enforce_eager, engine_environment, memory_bytes
from sluice.pipeline.errors import EngineError, SluiceError

Run = Callable[[Sequence["Ask"]], Awaitable[list[list[int]]]]
"""A loaded engine: sequences in, the new tokens of each out."""

SHORTEST, LONGEST = 8, 512  # new tokens
_PROMPT = (16, 64)  # tokens
_WARM_UP = 1_000_000  # a round number no real round has
_POLL_S = 1.0
_TOGETHER, _PAGE, _BATCH_TOKENS = 16, 32, 2048  # requests, tokens, tokens; of continuous batching on a CPU
EQUAL_FLOOR = 0.9
RATIOS = {
    "hf_vs_padded": ("hf", "padded"),
    "hf_vs_continuous": ("hf", "continuous"),
    "vllm_efficiency": ("vllm", "vllm_bare"),
}
"""By field: our side, and the peer that it is compared with."""


class Ask(NamedTuple):
    prompt: tuple[int, ...]
    num_new_tokens: int


def num_new_tokens(count: int, longest: int = LONGEST) -> list[int]:
    """`count` lengths, evenly from SHORTEST to `longest`, in a fixed random order."""
    span = max(count - 1, 1)
    lengths = [SHORTEST + index * (longest - SHORTEST) // span for index in range(count)]
    random.Random(count).shuffle(lengths)
    return lengths


def asks(number: int, count: int, *, longest: int = LONGEST) -> list[Ask]:
    """The sequences of round `number`: random prompts, so no engine gains from a prefix cache, and exact lengths."""
    chance, lengths = random.Random(number), num_new_tokens(count, longest)
    return [Ask(tuple(random_ids(chance, chance.randint(*_PROMPT))), length) for length in lengths]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One side of one round: wall and CPU seconds, peak MB so far, new tokens of each sequence."""

    seconds: float
    cpu_s: float
    peak_mb: float
    tokens: list[list[int]]

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    def check(self, side: str, asks: Sequence[Ask]) -> None:
        """Raise SluiceError unless every sequence has its length: no ratio would be fair."""
        got = [len(tokens) for tokens in self.tokens]
        wrong = [index for index, ask in enumerate(asks) if got[index : index + 1] != [ask.num_new_tokens]]
        if wrong or len(got) != len(asks):
            decoded = f"{side} decoded {len(got)} of {len(asks)} sequences"
            raise SluiceError(f"{decoded}, {len(wrong)} of them with the wrong length")


Round = Mapping[str, Sample]
"""The samples of all sides over the same sequences."""


class Plan(BenchPlan, frozen=True, kw_only=True):
    """`rounds` of every count of sequences; by default fewer of many, which take longer and vary less."""

    counts: tuple[int, ...] = (32, 128)
    rounds: int | None = None
    threads: int = 1
    longest: int = LONGEST  # new tokens of the longest sequence
    vllm: bool = True

    QUICK = {"rounds": 1, "longest": 64}
    BOUNDS = {"longest": (SHORTEST, LONGEST)}  # which the context is made for

    @property
    def rounds_of(self) -> dict[int, int]:
        return {count: self.rounds or (3 if count <= 64 else 1) for count in sorted(set(self.counts))}

    @property
    def sides(self) -> tuple[str, ...]:
        """In the order of the first round."""
        return ("hf", "padded", "continuous", *(() if self.why_no_vllm else ("vllm", "vllm_bare")))


async def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`hf_vs_padded`, `hf_vs_continuous`, `vllm_efficiency`: our rate over the peer's, by count of sequences, null if
    the peer didn't run. `by_cpu`: the same by CPU time. `tok_s`: useful tokens per second of each side. `peak_mb`: peak
    memory of the side's processes (on CUDA: of the allocator). `startup_s`: from the start of the process to its first
    token.
    """
    fleets, startup_s = dict[str, Fleet](), dict[str, float]()
    env = {**engine_environment(plan.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    model = endless_model(HOME)

    async def one(side: str, number: int) -> Sample:
        with fleets[side].running():
            (sample,) = await fleets[side].ask((number, count, plan.longest), Sample)
        sample.check(side, asks(number, count, longest=plan.longest))
        return sample

    async with contextlib.AsyncExitStack() as scope:
        for side in plan.sides:
            started, arguments = time.perf_counter(), [side, str(model), plan.threads, max(plan.counts)]
            fleet = Fleet.of_children(side, home, serve_side, arguments, env=env)
            fleets[side] = await scope.enter_async_context(fleet)
            startup_s[side] = time.perf_counter() - started
            fleets[side].pause()
            say(f"{side} started in {startup_s[side]:.1f} s")
        rounds = dict[int, list[dict[str, Sample]]]()
        for count, wanted in plan.rounds_of.items():
            show, what = (lambda sample: f"{sample.tok_s:.0f} tok/s"), f"{count} sequences, round"
            rounds[count] = await play(wanted, plan.sides, one, show=show, what=what)
    return {**fields(plan, rounds), "startup_s": startup_s, **_conditions(), "model": model.name}


def fields(plan: Plan, rounds: Mapping[int, Sequence[Round]]) -> dict[str, Any]:
    """The results of the rounds. Raises SluiceError if the sides decoded different tokens."""
    peers = {name: pair for name, pair in RATIOS.items() if pair[1] in plan.sides}
    every = [each for of_count in rounds.values() for each in of_count]
    equal = {peer: tokens_equal(every, ours, peer) for ours, peer in peers.values()}
    check_equal(equal, EQUAL_FLOOR)
    rates = {side: by_count(rounds, lambda each, side=side: [one[side].tok_s for one in each]) for side in plan.sides}
    by_cpu = dict[str, Any]()  # steadier than wall time on a busy machine
    for name, (us, peer) in peers.items():
        rates[name] = by_count(rounds, lambda each, us=us, peer=peer: ratios(each, us, peer, lambda one: one.tok_s))
        cpu = by_count(rounds, lambda each, us=us, peer=peer: ratios(each, peer, us, lambda one: one.cpu_s))
        by_cpu[name] = by_count(cpu, median)
    medians = {name: by_count(by, median) for name, by in rates.items()}
    return {
        **{name: medians.get(name) for name in RATIOS},
        "by_cpu": by_cpu,
        "tok_s": {side: medians[side] for side in plan.sides},
        "spread": {name: by_count(by, _spread) for name, by in rates.items()},
        "tokens_equal": equal,
        "peak_mb": {side: max(each[side].peak_mb for each in every) for side in plan.sides},
        "tokens": by_count(rounds, lambda each: sum(map(len, each[0]["hf"].tokens))),
        "rounds": by_count(rounds, len),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    least, most = spread(values)
    return {"median": median(values), "min": least, "max": most}


def tokens_equal(rounds: Sequence[Round], ours: str, peer: str) -> float:
    pairs = [pair for each in rounds for pair in zip(each[ours].tokens, each[peer].tokens, strict=True)]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def check_equal(shares: Mapping[str, float], floor: float) -> None:
    """Raise SluiceError for a peer whose tokens differ in more sequences than near-ties of float32 explain."""
    if bad := ", ".join(f"{peer} {share:.2f}" for peer, share in shares.items() if share < floor):
        why = "the engines compute different results, so ratios would be unfair"
        raise SluiceError(f"share of sequences with equal greedy tokens below {floor}: {bad}; {why}")


def _conditions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


async def serve_side(parent: Parent, name: str, model: str, threads: int, max_batch: int) -> None:
    """A side's process: each request is the (number, count, longest) of a round, answered with a Sample."""
    import torch

    torch.set_num_threads(threads)
    run = await _SIDES[name](Path(model), max_batch)
    await run([Ask((1, 2, 3), 1)])
    parent.tell("ready")
    await run(asks(_WARM_UP, min(max_batch, 8), longest=16))
    async for number, count, longest in parent.requests(tuple[int, int, int]):
        work = asks(number, count, longest=longest)
        started, used = time.perf_counter(), cpu_s()
        tokens = await run(work)
        seconds, used = time.perf_counter() - started, cpu_s() - used
        peak = (torch.cuda.is_available() and torch.cuda.max_memory_allocated()) or memory_bytes("VmHWM")
        parent.tell(Sample(seconds, used, peak / 1e6, tokens))


async def _ours(name: str, model: Path, max_batch: int) -> Run:
    """One of our backends, with the one call that workers make per sequence."""
    backend = make_engine(name, model, max_batch)
    await backend.start()

    async def run(asks: Sequence[Ask]) -> list[list[int]]:
        requests = (greedy(at, ask.prompt, ask.num_new_tokens) for at, ask in enumerate(asks))
        return [output.token_ids for output in await asyncio.gather(*map(backend.decode, requests))]

    return run


async def _padded(model: Path, _: int) -> Run:
    """transformers' `generate`: all sequences in one left-padded batch, which runs until its longest has ended.

    Rows can't end at their own lengths, so each is cut to its length afterwards: only useful tokens count.
    """
    import torch

    module = _load_module(model)

    async def run(asks: Sequence[Ask]) -> list[list[int]]:
        pad, width = module.config.pad_token_id, max(len(ask.prompt) for ask in asks)
        rows = torch.tensor([[pad] * (width - len(ask.prompt)) + list(ask.prompt) for ask in asks])
        starts = torch.tensor([width - len(ask.prompt) for ask in asks])
        mask = (torch.arange(width) >= starts.unsqueeze(1)).long().to(module.device)
        most = max(ask.num_new_tokens for ask in asks)
        found = module.generate(rows.to(module.device), attention_mask=mask, max_new_tokens=most, do_sample=False)
        new = found[:, width:].tolist()
        return [tokens[: ask.num_new_tokens] for tokens, ask in zip(new, asks, strict=True)]

    return run


async def _continuous(model: Path, most: int) -> Run:
    """transformers' continuous batching, with a length per request; one manager for all rounds."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module = _load_module(model)
    ids = {"eos_token_id": module.config.eos_token_id, "pad_token_id": module.config.pad_token_id}
    together = min(most, _TOGETHER)
    on_cpu: Any = {
        "page_size": _PAGE, "num_blocks": together * ENDLESS_CONTEXT // _PAGE, "max_batch_tokens": _BATCH_TOKENS,
        "max_requests_per_batch": together,
    }  # fmt: skip
    manager: Any = module.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=LONGEST, **ids),
        continuous_batching_config=ContinuousBatchingConfig(**(on_cpu if module.device.type == "cpu" else {})),
    )
    manager.warmup()
    manager.start()

    async def run(asks: Sequence[Ask]) -> list[list[int]]:
        """Raises EngineError."""
        names = [manager.add_request(list(ask.prompt), max_new_tokens=ask.num_new_tokens) for ask in asks]
        found: dict[str, list[int]] = {}
        while len(found) < len(asks):
            result = manager.get_result(timeout=_POLL_S)
            if result is None and not manager.is_running():
                raise EngineError("transformers' continuous batching ended before its requests did; see its log")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise EngineError(f"transformers' continuous batching failed a request: {result.error}")
            found[result.request_id] = list(result.generated_tokens)
        return [found[name] for name in names]

    return run


async def _bare_vllm(model: Path, max_batch: int) -> Run:
    """`vllm.LLM.generate` alone, with our backend's options, token ids in and out."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    llm: Any = LLM(
        str(model), dtype="float32", max_num_seqs=max_batch, enforce_eager=enforce_eager(), skip_tokenizer_init=True,
        generation_config="vllm",
    )  # fmt: skip

    async def run(asks: Sequence[Ask]) -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        given = partial(VllmSampling, temperature=0.0, ignore_eos=True, detokenize=False)
        params = [given(max_tokens=ask.num_new_tokens) for ask in asks]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    return run


_SIDES: dict[str, Callable[[Path, int], Awaitable[Run]]] = {
    "hf": partial(_ours, "hf"),
    "vllm": partial(_ours, "vllm"),
    "padded": _padded,
    "continuous": _continuous,
    "vllm_bare": _bare_vllm,
}


def _load_module(model: Path) -> Any:
    """As a user loads it: float32, `sdpa` attention."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return loaded.to(device).eval()
