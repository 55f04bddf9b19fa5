"""The Hugging Face engine: `contracts.Backend` over a thread that owns the model.

Callers leave requests in an inbox; the thread admits, steps and answers.

| waits | unblocked by |
|---|---|
| a decode request | room in the batch |
| a weight load | the standby thread, where there is room for a second copy of the weights; the end of a step |
| a score | the end of the current step |
| an abort | the end of the current step |
| the thread, when idle | any request, or `stop` |

- Only this thread touches the model and tokenizer; the standby thread has a model of its own.
- Weight loads run one after the other: a version that comes while one is prepared waits until that one is swapped in.
- Cancelling a future removes its sequence within one step.
- An error in the loop ends the thread; every open future and every later call gets it as the cause.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig
from sluice.pipeline.errors import EngineError, RequestError, SluiceError, TornWeights, WeightsError
from sluice.pipeline.images.features import ImageFeatures
from sluice.pipeline.images.processor import VisionInputs, VisionProcessor
from sluice.workers.engine.adapters import OWN, AdapterRoom, Policy, check_whole, checked, is_adapter, may_be_whole
from sluice.workers.engine.constraints import Grammars
from sluice.workers.engine.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe
from sluice.workers.engine.hf.decoder import Decoder, Ended
from sluice.workers.engine.hf.model import LoadedModel, load_model
from sluice.workers.engine.hf.proof import prove
from sluice.workers.engine.hf.rows import Row
from sluice.workers.engine.hf.standby import Load, Standby
from sluice.workers.engine.hf.vision import PreparedImages
from sluice.workers.engine.hf.weights import Weights
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.watch import GuardCost

_STOP_S = 10.0
_Job = tuple[Any, "Future[Any]"]


class HfBackend:
    """One model in one thread, decoding up to `max_batch` sequences at a time.

    Calls may come from any event loop. `version` is the version of the weights in `config.path`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_batch: int = 32,
        version: int = 0,
        repeat_terminate: RepeatTerminateConfig | None = None,
        processed_logprobs: bool = False,
        room: AdapterRoom | None = None,
        second_copy_gb: float | None = 0.0,
        keep_cache: bool = False,
        prefix_cache_mb: int = 0,
    ) -> None:
        """`processed_logprobs`: logprobs at each sequence's own temperature. `room`: for adapters beside the base.
        `second_copy_gb`: of memory (GiB) for new weights beside those that decode; None: what is needed, up to half of
        what is free. `keep_cache`: running sequences go on over the caches of the weights before. `prefix_cache_mb`:
        most (MiB) that is kept of ended sequences for those that go on from them."""
        if max_batch < 1:
            raise EngineError(f"max_batch must be >= 1, got {max_batch}")
        load = partial(
            load_model,
            config,
            repeat_terminate or RepeatTerminateConfig(),
            processed_logprobs=processed_logprobs,
            keeps_cache=keep_cache,
        )
        self._thread = DecodeThread(load, Path(config.path), max_batch, version, room, second_copy_gb, prefix_cache_mb)
        self._facts: EngineFacts | None = None
        self._images: PreparedImages | None = None
        self._started = False

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError before `start` has finished."""
        if self._facts is None:
            raise EngineError("the hf engine is not started; await start() first")
        return self._facts

    @property
    def version(self) -> int:
        return self._thread.versions[OWN]

    @property
    def versions(self) -> Mapping[str, int]:
        return self._thread.versions

    async def start(self) -> None:
        """Load the model. Raises ModelError; EngineError if it was already started."""
        if self._started:
            raise EngineError("the hf engine was already started; create a new backend")
        self._started = True
        self._thread.start()
        facts = await asyncio.wrap_future(self._thread.ready)
        if self._thread.processor is not None:
            self._images = PreparedImages(self._thread.processor)
        self._facts = facts

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence in the running batch. Raises RequestError, WrongVersion or EngineError."""
        thread = self._running()
        async with AsyncExitStack() as held:
            with thread.coming(request.seq_key) as call:
                if thread.grammars is not None:
                    await held.enter_async_context(thread.grammars.prepared(request.sampling.grammar))
                inputs = await held.enter_async_context(self._prepared(request)) if request.images else None
                future = thread.decode(request, inputs, call)
            return await asyncio.wrap_future(future)

    def _prepared(self, request: SequenceRequest) -> AbstractAsyncContextManager[VisionInputs]:
        if self._images is None:
            raise RequestError(
                f"{request.seq_key}: the model {self.facts.model} takes no images; send only text, or use a "
                "vision-language model (model.variant auto or vlm)"
            )
        return self._images.of(request)

    @property
    def images_processed(self) -> int:
        """How many images went through the processor: each once, and not once for every sequence."""
        return 0 if self._thread.processor is None else self._thread.processor.processed

    @property
    def features(self) -> ImageFeatures | None:
        """What the vision tower has computed, and how often; None for a model that takes no images."""
        return self._thread.features

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key; their `decode` returns what they have."""
        self._running().abort(seq_key)

    async def load_weights(
        self, directory: Path, version: int, probe: WeightsProbe | None = None, parent: int | None = None
    ) -> None:
        """Swap the weights between two steps; see `contracts.Backend`. Raises WeightsError or TornWeights."""
        await asyncio.wrap_future(self._running().load(OWN, Path(directory), version, probe, parent))

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int = 0,
        probe: WeightsProbe | None = None,
        parent: int | None = None,
    ) -> None:
        """After the current step; see `contracts.Backend`. Raises WeightsError."""
        await asyncio.wrap_future(self._running().load(name, Path(directory), version, probe, parent))

    async def score(self, token_ids: Sequence[int], adapter: str = OWN) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. . Raises EngineError."""
        return await asyncio.wrap_future(self._running().score(token_ids, adapter))

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Feed the tokens to a fresh guard. Raises EngineError if none is loaded."""
        rules = self._running().guard
        if rules is None:
            raise EngineError("the hf engine has no repeat guard; set repeat_terminate.enabled")
        return GuardTrial(rules, rules.guard().push_all(token_ids))

    async def guard_cost(self) -> GuardCost:
        """Over all steps since the last call."""
        return self._running().guard_cost.taken()

    async def close(self) -> None:
        """End the thread; running sequences get an EngineError."""
        if self._images is not None:
            self._images.close()
        if self._thread.grammars is not None:
            self._thread.grammars.close()
        if self._started:
            await asyncio.to_thread(self._thread.stop)

    def progress(self) -> float:
        """Monotonic seconds of the last step, or now while idle."""
        return self._thread.progress() if self._started else time.monotonic()

    def _running(self) -> DecodeThread:
        if self._facts is None:
            raise EngineError("the hf engine is not started; await start() first")
        return self._thread


@dataclass(slots=True, eq=False)
class Coming:
    """A call whose request isn't in the inbox yet: its grammar is compiled, or its images are prepared."""

    seq_key: str
    aborted: bool = False


class DecodeThread:
    """Start it once; `ready` resolves to the engine's facts, or to the error that prevented loading."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        directory: Path,
        max_batch: int,
        version: int,
        room: AdapterRoom | None = None,
        second_copy_gb: float | None = 0.0,
        prefix_cache_mb: int = 0,
    ) -> None:
        """`load` returns the model with the weights of `directory`, which are `version`; it may raise ModelError."""
        self.ready: Future[EngineFacts] = Future()
        self.versions = {OWN: version}  # replaced, never changed: other threads read it
        self.processor: VisionProcessor | None = None  # set once the model is loaded, if it takes images
        self.features: ImageFeatures | None = None  # likewise
        self.guard: GuardRules | None = None  # likewise, if the guard is on
        self.grammars: Grammars | None = None  # set once the model is loaded
        self.guard_cost = GuardCost()
        self._load_model, self._directory = load, directory
        self._max_batch, self._room, self._second_copy_gb = max_batch, room, second_copy_gb
        self._prefix_bytes = prefix_cache_mb << 20
        self._wake = threading.Condition()
        self._joins: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._scores: deque[_Job] = deque()
        self._coming: set[Coming] = set()
        self._aborted: set[Future[Any]] = set()
        self._open: dict[Future[Any], str] = {}  # all unanswered ones, and the sequence's key
        self._futures: dict[int, Future[Any]] = {}  # id(row) -> its future
        self._stopping = False
        self._ended: EngineError | None = None
        self._weights: Weights | None = None
        self._standby: Standby | None = None
        self._idle = self._loading = False
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sluice-hf-decode", daemon=True)

    def start(self) -> None:
        """Start loading the model."""
        self._thread.start()

    @contextmanager
    def coming(self, seq_key: str) -> Iterator[Coming]:
        """A call that ends by `decode`; an abort in between counts from then on."""
        call = Coming(seq_key)
        with self._wake:
            self._coming.add(call)
        try:
            yield call
        finally:
            with self._wake:
                self._coming.discard(call)

    def decode(
        self, request: SequenceRequest, vision: VisionInputs | None = None, call: Coming | None = None
    ) -> Future[SequenceOutput]:
        """Queue one sequence, with its prepared images if it has some; cancel the future to abort it."""
        with self._wake:
            future = self._submit(self._joins, (request, vision), request.seq_key)
            if call is not None and call.aborted:
                self._aborted.add(future)
            return future

    def load(
        self, name: str, directory: Path, version: int, probe: WeightsProbe | None, parent: int | None
    ) -> Future[None]:
        """Queue a load for the policy or an adapter."""
        return self._submit(self._loads, (name, Load(directory, version, probe, parent)))

    def score(self, token_ids: Sequence[int], adapter: str = OWN) -> Future[float]:
        return self._submit(self._scores, (tuple(token_ids), adapter))

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key with what they have; an unknown key is no error."""
        with self._wake:
            for call in self._coming:
                call.aborted = call.aborted or call.seq_key == seq_key
            self._aborted.update(future for future, key in self._open.copy().items() if key == seq_key)
            self._wake.notify()

    def progress(self) -> float:
        """Monotonic seconds of the last step; now while idle or in a weight load, which has its own limit."""
        return time.monotonic() if self._idle or self._loading else self._progress

    def stop(self) -> None:
        """End the thread after the current step; a hung thread is abandoned after `_STOP_S`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _submit(self, queue: deque[_Job], what: Any, seq_key: str = "") -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            if self._ended is not None:
                raise EngineError(str(self._ended)) from self._ended
            self._open[future] = seq_key
            future.add_done_callback(self._open.pop)
            queue.append((what, future))
            self._wake.notify()
        return future

    def _run(self) -> None:
        cause: Exception | None = None
        try:
            with torch.inference_mode():
                model = self._load_model()
                prove(model)
                decoder = Decoder(model, self.versions[OWN], self.guard_cost, self._prefix_bytes)
                self.processor, self.guard = decoder.model.vision, decoder.model.guard
                model = decoder.model
                self.grammars = model.grammars
                self._weights = Weights(model, self._directory, self._second_copy_gb)
                self.features = model.features
                self.ready.set_result(decoder.model.facts)
                while self._wait(decoder):
                    self._serve(decoder)
        except Exception as error:
            cause = error
        finally:
            self._end(cause)

    def _wait(self, decoder: Decoder) -> bool:
        """Block while idle; False when asked to stop."""
        with self._wake:
            while not (
                self._stopping
                or decoder.rows
                or self._joins
                or (self._loads and self._standby is None)
                or (self._standby is not None and self._standby.waits)
                or self._scores
                or self._aborted
            ):
                self._idle = True
                self._wake.wait()
            self._progress = time.monotonic()
            self._idle = False
            return not self._stopping

    def _serve(self, decoder: Decoder) -> None:
        self._drop_cancelled(decoder)
        self._end_aborted(decoder)
        self._change_weights(decoder)
        while self._scores:
            self._score(decoder, *self._scores.popleft())
        self._answer(decoder.join(self._admitted(decoder)))
        if decoder.rows:
            self._answer(decoder.step())

    def _drop_cancelled(self, decoder: Decoder) -> None:
        dropped = [row for row in decoder.rows if self._futures[id(row)].cancelled()]
        decoder.drop(dropped)
        for row in dropped:
            del self._futures[id(row)]

    def _end_aborted(self, decoder: Decoder) -> None:
        """Answer aborted sequences, running or waiting, with what they have."""
        with self._wake:
            aborted, self._aborted = self._aborted, set()
            if not aborted:
                return
            waiting = [job for job in self._joins if job[1] in aborted]
            stay = [job for job in self._joins if job[1] not in aborted]
            self._joins.clear()
            self._joins.extend(stay)
        running = [row for row in decoder.rows if self._futures[id(row)] in aborted]
        decoder.drop(running)
        for row in [*running, *self._rows_of(decoder, waiting)]:
            if row.finish_reason is None:
                row.end("cancelled")
            self._answer([(row, None)])

    def _admitted(self, decoder: Decoder) -> list[Row]:
        """Waiting requests that fit the batch, as rows; requests that need no step are answered here."""
        rows: list[Row] = []
        while self._joins and (room := self._max_batch - len(decoder.rows) - len(rows)) > 0:
            jobs = [self._joins.popleft() for _ in range(min(room, len(self._joins)))]
            for row in self._rows_of(decoder, jobs):
                if row.finish_reason is not None:
                    self._answer([(row, None)])
                else:
                    rows.append(row)
        return rows

    def _rows_of(self, decoder: Decoder, jobs: Sequence[_Job]) -> list[Row]:
        """One row per request; a bad request is answered with its error."""
        rows: list[Row] = []
        for (request, vision), future in jobs:
            if future.cancelled():
                continue
            try:
                if self._weights is not None and self._weights.torn is not None:
                    raise TornWeights(str(self._weights.torn))
                model = decoder.model
                decoder.policies.of(request.adapter, request.seq_key)
                row = Row(request, model.tokenizer, model.facts, vision, model.guard, model.grammars)
            except SluiceError as error:
                _fail(future, error)
                continue
            except Exception as error:  # from the tokenizer or a plugin: fails this request, not the engine
                _fail(future, RequestError(f"{request.seq_key}: cannot be decoded: {error!r}"), error)
                continue
            self._futures[id(row)] = future
            rows.append(row)
        return rows

    def _answer(self, ended: Sequence[Ended]) -> None:
        for row, error in ended:
            future = self._futures.pop(id(row))
            if error is not None:
                _fail(future, error)
            else:
                _resolve(future, row.output())

    def _change_weights(self, decoder: Decoder) -> None:
        """Everything that is due for new weights between two steps."""
        while self._standby is not None or self._loads:
            if self._standby is not None and not self._swap(decoder, self._standby):
                return
            if not self._loads:
                return
            (name, load), future = self._loads.popleft()
            if future.cancelled():
                continue
            self._loading = True
            self._begin_load(decoder, name, load, future)
            self._progress, self._loading = time.monotonic(), False

    def _begin_load(self, decoder: Decoder, name: str, load: Load, future: Future[None]) -> None:
        weights, beside = self._weights, name != OWN or self._room is not None  # the weights themselves stay
        assert weights is not None
        if beside or not weights.has_second():
            self._load(decoder, name, load, future)
            return
        try:
            before = weights.before(load.probe)
        except WeightsError as error:
            _fail(future, error)
            return
        prepare = partial(weights.prepare, load.directory, load.probe, before)
        self._standby = Standby(prepare, future, load, self._notify)

    def _swap(self, decoder: Decoder, standby: Standby) -> bool:
        """Whether the standby is done with, one way or another."""
        load = standby.load
        if standby.future.cancelled():
            standby.stop()
        if standby.asks:
            standby.answer(decoder.contexts(load.version, load.parent))
        if not standby.ended:
            return False
        self._standby = None
        if standby.future.cancelled():
            return True
        if isinstance(standby.error, WeightsError):
            _fail(standby.future, standby.error)
        elif standby.error is not None:
            raise standby.error
        else:
            assert standby.model is not None
            assert self._weights is not None
            self._loading = True
            self._weights.exchange(load.directory, load.probe)
            self.versions = {**self.versions, OWN: load.version}
            self._answer(decoder.swap(load.version, load.parent, standby.model, standby.slices))
            self._progress, self._loading = time.monotonic(), False
            _resolve(standby.future, None)
        return True

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _load(self, decoder: Decoder, name: str, load: Load, future: Future[None]) -> None:
        """In place: nothing decodes meanwhile."""
        assert self._weights is not None
        try:
            if name != OWN or self._room is not None:
                self._load_adapter(decoder, name, load.directory, Policy(load.version, load.parent), load.probe)
                _resolve(future, None)
                return
            self._weights.load(load.directory, load.probe)
        except WeightsError as error:
            if isinstance(error, TornWeights):
                self._fail_rows(decoder, error)
            _fail(future, error)
            return
        self.versions = {**self.versions, OWN: load.version}
        self._answer(decoder.swap(load.version, load.parent))
        _resolve(future, None)

    def _load_adapter(
        self, decoder: Decoder, name: str, directory: Path, policy: Policy, probe: WeightsProbe | None
    ) -> None:
        """`policy` is that of the name from now on, with the directory's adapter. Raises WeightsError."""
        adapters, before = decoder.model.adapters, None
        if may_be_whole(name) and not is_adapter(directory):
            check_whole(directory, self._directory)  # the base itself: no adapter
        else:
            policy = replace(
                policy, lora=adapters.load(checked(directory, self._directory, self._room, decoder.policies, name))
            )
        try:
            if probe is not None:
                if name in self.versions:
                    before = decoder.score(probe.token_ids, decoder.policies.of(name).lora)
                if refusal := probe.refusal(directory, before, decoder.score(probe.token_ids, policy.lora)):
                    raise WeightsError(refusal)
        except RequestError as error:
            adapters.drop(policy.lora)
            raise WeightsError(f"this engine cannot score the probe of {directory}: {error}") from error
        except WeightsError:
            adapters.drop(policy.lora)
            raise
        ended, old = decoder.switch(name, policy)
        adapters.drop(None if old is None else old.lora)
        self.versions = decoder.policies.versions()
        self._answer(ended)

    def _fail_rows(self, decoder: Decoder, error: TornWeights) -> None:
        rows = list(decoder.rows)
        decoder.drop(rows)
        for row in rows:
            _fail(self._futures.pop(id(row)), TornWeights(str(error)), error)

    def _score(self, decoder: Decoder, what: tuple[tuple[int, ...], str], future: Future[float]) -> None:
        token_ids, adapter = what
        try:
            _resolve(future, decoder.score(token_ids, decoder.policies.of(adapter, "score").lora))
        except SluiceError as error:
            _fail(future, error)

    def _end(self, cause: Exception | None) -> None:
        """Never dies silently: every open and later caller gets the cause."""
        if not self.ready.done():
            self.ready.set_exception(cause or EngineError("the engine was closed while loading"))
        if self._standby is not None:
            self._standby.stop()
            self._standby.join(_STOP_S / 2)
        what = "the hf engine is closed" if cause is None else f"the hf engine failed: {cause!r}"
        with self._wake:
            self._ended = EngineError(what)
            self._ended.__cause__ = cause
            self._idle = False
        for future in self._open.copy():
            _fail(future, EngineError(what), cause)


def _resolve(future: Future[Any], value: Any) -> None:
    try:
        future.set_result(value)
    except InvalidStateError:
        return  # cancelled in the meantime: nobody waits for it


def _fail(future: Future[Any], error: Exception, cause: Exception | None = None) -> None:
    if cause is not None:
        error.__cause__ = cause
    try:
        future.set_exception(error)
    except InvalidStateError:
        return  # cancelled in the meantime: nobody waits for it
