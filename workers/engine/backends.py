"""Backends by name, and an optional second one (from the configuration) for what the first can't decode.

- The configured backend is the one that runs; nothing changes silently. Every output of the second backend is marked
  (`fallback`), and its start is logged.
- The second backend is loaded at the first request that needs it, with the current weights. If it can't be loaded, it
  refuses its requests with the reason and isn't tried again.
- Both have the same weights. If the second doesn't take new ones, it finishes its sequences under the old weights and
  ends; another one is loaded when needed.
- Every start proves, before serving, that the loaded guard fires. A real decode that repeats one token, under rules
  lowered for the probe, must be ended by it. Then each rule of the run is shown tokens that break it, on the loaded
  instance and with its own thresholds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, get_args

import torch

from sluice.pipeline.config.types import BackendName, ImagesConfig, ModelConfig, RepeatTerminateConfig, WorkerConfig
from sluice.pipeline.errors import EngineError, GuardRefused, ModelError, RequestError, TornWeights, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.adapters import OWN, AdapterRoom
from sluice.workers.engine.contracts import (
    Backend,
    EngineFacts,
    GuardTrial,
    SequenceOutput,
    SequenceRequest,
    WeightsProbe,
)
from sluice.workers.guard.repeat import RepeatTrigger, Rule
from sluice.workers.guard.rules import GuardRules

BACKENDS = get_args(BackendName)


def make_backend(
    model: ModelConfig,
    worker: WorkerConfig,
    repeat_terminate: RepeatTerminateConfig | None = None,
    images: ImagesConfig | None = None,
    room: AdapterRoom | None = None,
    second_copy_gb: float | None = 0.0,
    max_pause_s: float | None = None,
    keep_cache: bool = False,
) -> RoutedBackend:
    """The configured backend with its fallback, not started; both with the repeat guard if it's enabled.

    `images` says how many a prompt may have. `room`: for adapters beside the weights; None: versions that are adapters
    are merged into them. `second_copy_gb` is the hf backend's, `max_pause_s` vLLM's.
    `keep_cache`: running sequences go on over the caches of the weights before.
    """
    if worker.torch_threads:
        torch.set_num_threads(worker.torch_threads)

    def hf() -> Backend:
        from sluice.workers.engine.hf import HfBackend

        return HfBackend(
            model,
            max_batch=worker.max_batch,
            repeat_terminate=repeat_terminate,
            processed_logprobs=worker.logprobs_mode == "processed",
            room=room,
            second_copy_gb=second_copy_gb,
            keep_cache=keep_cache,
            prefix_cache_mb=worker.prefix_cache_mb,
        )

    if worker.backend == "hf":
        return RoutedBackend(hf(), None, repeat_terminate)
    from sluice.workers.engine.vllm import VllmBackend

    vllm = VllmBackend(
        model,
        max_batch=worker.max_batch,
        options=worker.vllm,
        repeat_terminate=repeat_terminate,
        max_images=(images or ImagesConfig()).max_per_prompt,
        room=room,
        max_pause_s=max_pause_s,
    )
    return RoutedBackend(vllm, hf if worker.fallback_backend == "hf" else None, repeat_terminate)


class RoutedBackend:
    """`primary`, plus the backend from `make_fallback` for requests with images if primary takes none."""

    def __init__(
        self,
        primary: Backend,
        make_fallback: Callable[[], Backend] | None = None,
        repeat_terminate: RepeatTerminateConfig | None = None,
    ) -> None:
        self._primary, self._make = primary, make_fallback
        self._guard = repeat_terminate or RepeatTerminateConfig()
        self._fallback: Backend | None = None
        self._leaving: dict[asyncio.Task[None], Backend] = {}  # fallbacks that end with their last sequence
        self._decoding: Counter[Backend] = Counter()  # sequences on each fallback
        self._ended = asyncio.Event()  # set when one of them ends
        self._failed: str | None = None  # why there is no fallback
        self._changing = asyncio.Lock()
        self._waiting: list[tuple[str, asyncio.Event]] = []  # (key, aborted) of requests waiting for the fallback
        self._loaded: dict[str, tuple[Path, int, WeightsProbe | None, int | None]] = {}  # by name of the policy
        self._closed = False

    @property
    def facts(self) -> EngineFacts:
        """The primary backend's."""
        return self._primary.facts

    @property
    def version(self) -> int:
        return self._primary.version

    @property
    def versions(self) -> Mapping[str, int]:
        return self._primary.versions

    @property
    def images_processed(self) -> int:
        """Those of both."""
        return sum(backend.images_processed for backend in self._all())

    async def start(self) -> None:
        """Load the primary backend's model and prove its repeat guard. Raises what both raise."""
        await self._primary.start()
        try:
            await prove_guard(self._primary, self._guard)
        except BaseException:
            await self._primary.close()
            raise

    async def for_images(self) -> Backend:
        """The backend for prompts with images. Raises EngineError if there is none."""
        facts = self._primary.facts
        if facts.supports_vlm:
            return self._primary
        if self._make is None:
            other = ", choose the hf backend, or set fallback_backend: hf" if facts.name != "hf" else ""
            raise EngineError(
                f"the {facts.name} backend does not support images with the model {facts.model}; use a vision-language "
                f"model it can load{other}"
            )
        async with self._changing:
            if self._closed or self._failed is not None:
                raise EngineError(self._failed or "the engine is closed")
            if self._fallback is None:
                self._fallback = await self._start(self._make(), facts)
        return self._fallback

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence; with images, on the backend that takes them."""
        if request.probe_guard is not None:
            raise RequestError(
                f"{request.seq_key}: only the engine sets rules of the repeat guard; leave probe_guard out"
            )
        if not request.images or self._primary.facts.supports_vlm:
            return await self._primary.decode(request)
        waits = (request.seq_key, asyncio.Event())
        self._waiting.append(waits)
        try:
            chosen = await self.for_images()
        except EngineError as error:
            raise RequestError(f"{request.seq_key}: {error}") from error
        finally:
            self._waiting.remove(waits)
        self._decoding[chosen] += 1
        try:
            decoding = asyncio.ensure_future(chosen.decode(request))
            if waits[1].is_set():
                await asyncio.sleep(0)  # it must have started before it can be aborted
                chosen.abort(request.seq_key)
            return replace(await decoding, fallback=self._note(chosen))
        finally:
            self._decoding[chosen] -= 1
            self._ended.set()

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key on both backends, and those waiting for the fallback to load."""
        for key, aborted in self._waiting:
            if key == seq_key:
                aborted.set()
        for backend in self._all():
            backend.abort(seq_key)

    async def load_weights(
        self, directory: Path, version: int, probe: WeightsProbe | None = None, parent: int | None = None
    ) -> None:
        """Replace the weights of both backends."""
        await self._load(OWN, directory, version, probe, parent)

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int = 0,
        probe: WeightsProbe | None = None,
        parent: int | None = None,
    ) -> None:
        """On both backends."""
        await self._load(name, directory, version, probe, parent)

    async def _load(self, name: str, *what: Any) -> None:
        async with self._changing:
            await _load_policy(self._primary, name, *what)
            self._loaded[name] = what
            if self._fallback is None:
                return
            try:
                await _load_policy(self._fallback, name, *what)
            except TornWeights:
                raise
            except (EngineError, WeightsError) as error:
                get_logger().warning("stopping the fallback backend: it refuses the weights", error=str(error))
                fallback, self._fallback = self._fallback, None
                leaving = asyncio.ensure_future(self._close_when_idle(fallback))
                self._leaving[leaving] = fallback
                leaving.add_done_callback(self._leaving.pop)

    async def score(self, token_ids: Sequence[int], adapter: str = OWN) -> float:
        """Scored by the primary backend."""
        return await self._primary.score(token_ids, adapter)

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Tried on the primary backend."""
        return await self._primary.try_guard(token_ids)

    async def close(self) -> None:
        """End both; waits for a fallback that is still loading."""
        self._closed = True
        async with self._changing:
            backends = self._all()
            for task in list(self._leaving):
                task.cancel()
            for backend in reversed(backends):
                await backend.close()

    def progress(self) -> float:
        """The older of the two."""
        return min(backend.progress() for backend in self._all())

    def _all(self) -> list[Backend]:
        return [self._primary, *([self._fallback] if self._fallback else []), *self._leaving.values()]

    async def _close_when_idle(self, fallback: Backend) -> None:
        while self._decoding[fallback]:
            self._ended.clear()
            await self._ended.wait()
        await fallback.close()

    def _note(self, used: Backend) -> dict[str, str]:
        wanted, facts = self._primary.facts.name, used.facts
        reason = f"{wanted} takes no images with this model"
        return {"wanted": wanted, "used": facts.name, "version": facts.engine_version, "reason": reason}

    async def _start(self, fallback: Backend, facts: EngineFacts) -> Backend:
        try:
            await fallback.start()
            await prove_guard(fallback, self._guard)
            if not fallback.facts.supports_vlm:
                raise ModelError(f"{facts.model} is not a vision-language model")
            for name, (directory, version, probe, parent) in self._loaded.items():
                # It starts from the model directory's own weights; the change from those was not measured.
                await _load_policy(fallback, name, directory, version, probe and replace(probe, change=None), parent)
        except (EngineError, ModelError, WeightsError) as error:
            failed = f"neither {facts.name} nor its fallback supports images here: {error}"
            await fallback.close()
            if not isinstance(error, WeightsError):  # the files may be back for the next request
                self._failed = failed
            raise EngineError(failed) from error
        except BaseException:
            await fallback.close()
            raise
        get_logger().warning("fallback backend loaded", wanted=facts.name, used=fallback.facts.name, model=facts.model)
        return fallback


async def _load_policy(
    backend: Backend, name: str, directory: Path, version: int, probe: WeightsProbe | None, parent: int | None
) -> None:
    if name == OWN:
        await backend.load_weights(directory, version, probe, parent)
    else:
        await backend.load_adapter(name, directory, version, probe, parent)


_RUN = 3  # tokens of the guard's probe
_LOWERED = RepeatTerminateConfig(
    enabled=True, min_new_tokens=1, max_consecutive_token_repeats=_RUN, ngram_size=None, max_object_keys=None
)


async def prove_guard(backend: Backend, config: RepeatTerminateConfig) -> None:
    """Raises GuardRefused unless a guard with exactly these rules is active in the started engine."""
    if not config.enabled:
        return
    facts = backend.facts
    where = f"the {facts.name} engine ({facts.engine_version})"
    if not facts.repeat_terminate:
        raise GuardRefused(f"{where}: repeat_terminate is enabled, but no guard is loaded")
    await _prove_decode(backend, where)
    rules = (await backend.try_guard([])).rules
    if rules.config != config:
        raise GuardRefused(f"{where}: the loaded guard has thresholds {rules.config}, but the run asks for {config}")
    proved = [rule for rule in rules.tokens_needed() if await _prove_rule(backend, rules, rule, where)]
    get_logger().info("repeat guard proved", backend=facts.name, decode="ended a loop", rules=",".join(proved))


async def _prove_decode(backend: Backend, where: str) -> None:
    facts = backend.facts
    token = next(token for token in range(facts.vocab_size) if token not in facts.eos_token_ids)
    output = await backend.decode(
        SequenceRequest(
            seq_key="repeat-guard-probe",
            prompt_token_ids=(token,),
            sampling=SamplingParams(temperature=0, max_new_tokens=2 * _RUN),
            allowed_token_ids=(token,),
            probe_guard=GuardRules(_LOWERED),
        )
    )
    wanted = (RepeatTrigger("consecutive", _RUN), [token] * _RUN + [facts.eos_token_ids[0]])
    if (output.trigger, output.token_ids) != wanted:
        raise GuardRefused(
            f"{where}: the repeat guard is loaded but does not fire: {_RUN} equal tokens gave {output.token_ids}, "
            f"{output.finish_reason}; this worker takes no jobs"
        )


async def _prove_rule(backend: Backend, rules: GuardRules, rule: Rule, where: str) -> bool:
    """False (and a warning) for a rule that no sequence of this engine is long enough to trigger."""
    needed, context = rules.tokens_needed()[rule], backend.facts.context_length
    if needed >= context:
        get_logger().warning(
            "a rule of the repeat guard can never fire", rule=rule, tokens_needed=needed, context_length=context
        )
        return False
    tokens = breaking_tokens(rules, rule)
    wanted, trigger = rules.guard().push_all(tokens), (await backend.try_guard(tokens)).trigger
    if trigger is None or trigger != wanted:
        raise GuardRefused(
            f"{where}: {len(tokens)} tokens that trigger rule {rule} give {trigger} on the loaded guard, not {wanted}"
        )
    return True


def breaking_tokens(rules: GuardRules, rule: Rule) -> list[int]:
    """Tokens that trigger this rule at the last one, unless another rule must trigger first."""
    needed = rules.tokens_needed()[rule]
    if rule == "object_keys":
        return _answers(rules, needed)
    keys = () if rules.keys is None else rules.keys.moves
    a, b, c = islice((token for token in count() if token not in keys), 3)
    if rule == "consecutive":
        return [a] * needed
    size = rules.config.ngram_size or 1
    if rule == "any_period":
        size = max(1, size - 1)  # doesn't divide the block length, so `ngram` doesn't see it
    block = [a, b] * (size // 2) + [c] * (size % 2)  # no two neighbours are equal, not even across blocks
    return list(islice(cycle(block), needed))


def _answers(rules: GuardRules, needed: int) -> list[int]:
    """Answers as the model's tokenizer writes them, one after another, up to the token that completes the rule."""
    keys, most = rules.keys, rules.config.max_object_keys
    if keys is None or most is None or not keys.count(keys.answer):
        raise GuardRefused("no answer with an object key was found to test the loaded guard with")
    tokens, matched, counted = list[int](), 0, 0
    answer = cycle(keys.answer)
    while counted < most or len(tokens) < needed:
        tokens.append(next(answer))
        matched, found = keys.step(tokens[-1], matched)
        counted += found
    return tokens
