"""The vLLM engine: `contracts.Backend` over an event loop in its own thread.

vLLM's client blocks while it starts and is tied to one loop; meanwhile, the worker's loop must send heartbeats.

Loading new weights into a running core, or the old ones back, with everything paused:

score the probe (old weights) ─▶ load ─▶ reset caches ─▶ score the probe ─▶ new version
                                   └─ fails ─▶ the same with the old ones ─▶ old version, or torn

vLLM's cache of encoded images is left as it is if the files of both versions have the same vision part.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sluice.pipeline.config.types import ImagesConfig, ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.errors import ConfigError, EngineError, RequestError, TornWeights, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.adapter import Adapter
from sluice.pipeline.weights.versions import ADAPTER_CONFIG
from sluice.workers.engine.adapters import OWN, AdapterRoom, Policy, check_whole, checked, is_adapter, may_be_whole
from sluice.workers.engine.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe
from sluice.workers.engine.vllm.sequences import Sequences
from sluice.workers.engine.vllm.startup import EngineLog, StartedEngine, start_engine
from sluice.workers.engine.weight_files import is_zero
from sluice.workers.guard.watch import GuardCost

_STOP_S = 15.0
_CORE_STOP_S = 5.0
_PROOF_TOKENS = 9
_Result = TypeVar("_Result")


class VllmBackend:
    """One vLLM engine, decoding up to `max_batch` sequences at a time.

    Calls may come from any event loop. `version` is the version of the weights in `model.path`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        max_batch: int = 32,
        options: VllmEngineOptions | None = None,
        version: int = 0,
        repeat_terminate: RepeatTerminateConfig | None = None,
        max_images: int = ImagesConfig().max_per_prompt,
        room: AdapterRoom | None = None,
        max_pause_s: float | None = None,
    ) -> None:
        """`max_images` of one prompt. `room`: for adapters beside the weights. `max_pause_s`: after new weights,
        sequences are prefilled in slices of about that time, with tokens in between; None: all at once."""
        if max_batch < 1:
            raise EngineError(f"max_batch must be >= 1, got {max_batch}")
        guard = repeat_terminate or RepeatTerminateConfig()
        options = options or VllmEngineOptions()
        self._engine = Engine(model, options, max_batch, version, guard, max_images, room, max_pause_s)
        self._thread: LoopThread | None = None
        self._closed = False

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError before `start` has finished."""
        return self._engine.facts

    @property
    def version(self) -> int:
        return self._engine.versions[OWN]

    @property
    def versions(self) -> Mapping[str, int]:
        return self._engine.versions

    async def start(self) -> None:
        """Load the model. Raises ModelError, ConfigError or EngineError (also if it was already started)."""
        if self._thread is not None or self._closed:
            raise EngineError("the vllm engine was already started; create a new backend")
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("worker.backend is vllm, and vLLM is not installed: `make setup`, or the extra `vllm`")
        self._thread = LoopThread("sluice-vllm")
        try:
            await asyncio.wrap_future(self._thread.submit(self._engine.start()))
        except BaseException:
            await self.close()
            raise

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence in the running batch. Raises RequestError, WrongVersion or EngineError."""
        return await self._do(lambda engine: engine.sequences.decode(request))

    @property
    def images_processed(self) -> int:
        """How many images went through the processor: once for every prompt, and not for every sequence of a group."""
        return self._engine.images_processed

    @property
    def images_kept(self) -> int:
        """How many encoded images the latest load of weights kept, as its vision part was the same."""
        return self._engine.images_kept

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key; their `decode` returns what they have."""
        self._running().submit(self._engine.sequences.abort(seq_key))

    async def load_weights(
        self, directory: Path, version: int, probe: WeightsProbe | None = None, parent: int | None = None
    ) -> None:
        """Swap the weights between two tokens; see `contracts.Backend`. Raises WeightsError or TornWeights."""
        await self._do(lambda engine: engine.load_weights(Path(directory), version, probe, parent))

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int = 0,
        probe: WeightsProbe | None = None,
        parent: int | None = None,
    ) -> None:
        """Beside the weights; see `contracts.Backend`. Raises WeightsError."""
        policy = Policy(version, parent)
        await self._do(lambda engine: engine.load_adapter(name, Path(directory), policy, probe))

    async def score(self, token_ids: Sequence[int], adapter: str = OWN) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. . Raises EngineError."""
        return await self._do(lambda engine: engine.sequences.score(token_ids, adapter))

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Feed the tokens to a fresh guard in the core. Raises EngineError if none is loaded."""
        return await self._do(lambda engine: engine.sequences.guard.attempt(token_ids))

    async def guard_cost(self) -> GuardCost:
        """Over all steps of the core since the last call."""
        return await self._do(lambda engine: engine.sequences.guard.cost())

    async def close(self) -> None:
        """End the engine and its processes; running sequences get an EngineError."""
        if self._closed:
            return
        self._closed = True
        thread = self._thread
        if thread is not None:
            closing = asyncio.wrap_future(thread.submit(self._engine.close()))
            await asyncio.wait([closing], timeout=_STOP_S)
            await asyncio.to_thread(thread.stop, _STOP_S)
            if closing.done() and not closing.cancelled():
                closing.result()

    def progress(self) -> float:
        """Monotonic seconds of the last output, or now while idle."""
        return self._engine.progress() if self._thread is not None else time.monotonic()

    async def _do(self, work: Callable[[Engine], Coroutine[Any, Any, _Result]]) -> _Result:
        return await asyncio.wrap_future(self._running().submit(self._engine.tracked(work)))

    def _running(self) -> LoopThread:
        if self._closed:
            raise EngineError("the vllm engine is closed")
        if self._thread is None or not self._engine.started:
            raise EngineError("the vllm engine is not started; await start() first")
        return self._thread


class Engine:
    """Its coroutines run on one loop; `facts`, `version`, `started` and `progress` may be read from any thread."""

    def __init__(
        self,
        model: ModelConfig,
        options: VllmEngineOptions,
        max_batch: int,
        version: int,
        repeat_terminate: RepeatTerminateConfig,
        max_images: int,
        room: AdapterRoom | None,
        max_pause_s: float | None,
    ) -> None:
        self._max_pause_s = max_pause_s
        self._settings = (model, options, max_batch, repeat_terminate, max_images)
        self._room, self._taken = room, frozenset[str]()  # layers that can have adapters
        self._loading = asyncio.Lock()
        self._num_adapters = 0  # since the start
        self._log: EngineLog | None = None
        self.versions = {OWN: version}  # replaced, never changed: other threads read it
        self._engine: StartedEngine | None = None
        self._sequences: Sequences | None = None
        self._weights: CoreWeights | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def started(self) -> bool:
        """Whether `start` has succeeded."""
        return self._sequences is not None

    @property
    def sequences(self) -> Sequences:
        """Raises EngineError before `start` has finished."""
        if self._sequences is None:
            raise EngineError("the vllm engine is not started; await start() first")
        return self._sequences

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError before `start` has finished."""
        if self._engine is None:
            raise EngineError("the vllm engine is not started; await start() first")
        return self._engine.facts

    @property
    def images_processed(self) -> int:
        """See `VllmBackend`."""
        vision = None if self._engine is None else self._engine.vision
        return 0 if vision is None else vision.processed.processed

    @property
    def images_kept(self) -> int:
        """See `VllmBackend`."""
        return 0 if self._weights is None else self._weights.images_kept

    async def start(self) -> None:
        """Blocks this loop until the model is loaded. Raises ModelError, ConfigError or EngineError."""
        self._log = EngineLog()
        self._engine = start_engine(*self._settings, self._log, room=self._room)
        sequences = Sequences(self._engine, self.versions[OWN], self._why_dead, self._max_pause_s)
        # vLLM asks its core once; after that, requests are sent without waiting.
        await sequences.or_dead(self._engine.llm.get_supported_tasks())
        await sequences.or_dead(self._engine.llm.update_weight_version(str(self.versions[OWN])))
        directory = Path(self._settings[0].path)
        if self._room is not None:
            layers = await sequences.or_dead(self._engine.llm.collective_rpc("sluice_adapted_layers"))
            self._taken = frozenset(layers[0])
        vision = self._engine.vision  # its files may be replaced later, so their digest is taken now
        digest = await asyncio.to_thread(self._engine.checkpoint.vision_digest, directory) if vision else ""
        self._weights = CoreWeights(self._engine, directory, sequences, digest)
        self._sequences = sequences

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None, parent: int | None) -> None:
        """See `contracts.Backend`."""
        assert self._weights is not None
        policy = Policy(version, parent)
        if self._room is not None:
            await self.load_adapter(OWN, directory, policy, probe)
            return
        async with self._loading:  # from the first await on, or a later version may overtake an earlier one
            files = await self._weights.checked(directory)
            begun = time.monotonic()
            async with self.sequences.paused():
                await self._weights.load(directory, files, probe, version)
                self.sequences.loaded = version
                self.sequences.policies.put(OWN, policy)
                self.versions = self.sequences.policies.versions()
            paused_s = time.monotonic() - begun
        if self._max_pause_s is not None and paused_s > self._max_pause_s:
            get_logger().warning("loading alone took longer than weights.max_pause_s", seconds=round(paused_s, 3))

    async def load_adapter(self, name: str, directory: Path, policy: Policy, probe: WeightsProbe | None) -> None:
        """`policy` is that of the name from now on, with the directory's adapter. Nothing is paused: vLLM loads it
        between two steps, and the sequences of the name are sent again. Raises WeightsError."""
        async with self._loading:
            lora = await asyncio.to_thread(self._checked, name, directory)
            if lora is not None:
                policy = replace(policy, lora=await self._add(name, lora, policy.version))
            try:
                await self._prove(name, directory, policy, probe)
            except BaseException:
                await self._remove(policy)
                raise
            switching = asyncio.create_task(self._switch(name, policy))
            try:
                await asyncio.shield(switching)  # sequences are sampled under it from here on, whoever leaves
            except asyncio.CancelledError:
                if self._closing:
                    switching.cancel()
                await asyncio.wait([switching])
                raise

    async def _switch(self, name: str, policy: Policy) -> None:
        """Decode this name's sequences under this policy: running ones are taken out of the core and sent again."""
        before = self.sequences.policies.put(name, policy)
        self.versions = self.sequences.policies.versions()
        if before is not None:
            await self.sequences.leave(before)
            await self._remove(before)

    def _checked(self, name: str, directory: Path) -> Adapter | None:
        """None: the base itself."""
        assert self._engine is not None
        base = Path(self._settings[0].path)
        if may_be_whole(name) and not is_adapter(directory):
            check_whole(directory, base)
            return None
        found = checked(directory, base, self._room, self.sequences.policies, name)
        self._engine.checkpoint.check_beside(found, self._taken)
        return found

    async def _add(self, name: str, found: Adapter, version: int) -> Any:
        """vLLM's handle. Its number and name are new, so no cache of another adapter or version has its key."""
        from vllm.lora.request import LoRARequest

        assert self._engine is not None
        self._num_adapters += 1
        number = self._num_adapters
        lora = LoRARequest(f"{name or 'policy'}-v{version}-{number}", number, str(found.directory))
        try:
            await self.sequences.or_dead(self._engine.llm.add_lora(lora))
        except EngineError:
            raise
        except Exception as error:  # vLLM passes a worker's error on as a bare Exception
            raise WeightsError(f"{found.directory}: vLLM can't load this adapter: {error}") from error
        return lora

    async def _remove(self, policy: Policy) -> None:
        if policy.lora is not None and self._engine is not None:
            await self.sequences.or_dead(self._engine.llm.remove_lora(policy.lora.lora_int_id))

    async def _prove(self, name: str, directory: Path, policy: Policy, probe: WeightsProbe | None) -> None:
        """Raises WeightsError if the adapter doesn't score as the trainer measured, or changes nothing."""
        sequences = self.sequences
        try:
            if probe is not None:
                before = None
                if name in self.versions:
                    before = await sequences.score(probe.token_ids, name)
                if refusal := probe.refusal(directory, before, await sequences.score_under(policy, probe.token_ids)):
                    raise WeightsError(refusal)
            elif policy.lora is not None and not await asyncio.to_thread(is_zero, directory):
                tokens = list(range(1, min(_PROOF_TOKENS, self.facts.vocab_size)))
                alone = await sequences.score_under(Policy(policy.version), tokens)
                if not abs(await sequences.score_under(policy, tokens) - alone) > 0:
                    raise WeightsError(f"{directory}: its adapter changes nothing in vLLM; use worker.backend hf")
        except RequestError as error:
            raise WeightsError(f"this engine cannot score the probe of {directory}: {error}") from error

    async def tracked(self, work: Callable[[Engine], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run it so that `close` can end it with an EngineError; its caller ends it by cancelling.

        Not a separate task: an abort that follows immediately must find the sequence.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work(self)
        except asyncio.CancelledError:
            if self._closing:
                raise EngineError("the vllm engine is closed") from None
            raise
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """End the core; every waiting caller gets an EngineError."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._sequences is not None:
            self._sequences.close()
        if self._engine is not None:
            self._engine.llm.shutdown(timeout=_CORE_STOP_S)
        if self._log is not None:
            self._log.close()

    def progress(self) -> float:
        """Monotonic seconds of the last output, or now while idle or starting."""
        return time.monotonic() if self._sequences is None else self._sequences.progress()

    def _why_dead(self) -> str:
        """The likely reason why the core died."""
        if self._closing:
            return "the vllm engine is closed"
        assert self._engine is not None
        assert self._log is not None
        manager = self._engine.llm.engine_core.resources.engine_manager
        codes = [process.exitcode for process in manager.processes if process.exitcode]
        ended = [f"signal {-code}" if code < 0 else f"exit code {code}" for code in codes]
        cause = self._log.last_cause() or "no reason given"
        return f"the vllm engine core died ({', '.join(ended) or 'no exit code'}): {cause}"


@dataclass(frozen=True)
class CheckedFiles:
    """What the core is told to load."""

    directory: Path  # of whole weights: the version's, or its base's
    names: dict[str, str]  # name in the files -> name for vLLM
    vision_digest: str  # "" if the engine takes no images
    adapter: tuple[str, dict[str, str]] | None = None  # of a version that is one: directory, names (Checkpoint.adapted)


class CoreWeights:
    """Tracks which directory the core's weights come from."""

    def __init__(self, engine: StartedEngine, directory: Path, sequences: Sequences, vision_digest: str) -> None:
        """`vision_digest`: of the directory's vision part; "" if the engine takes no images."""
        self._engine, self._directory, self._sequences = engine, directory, sequences
        self._vision_digest = vision_digest
        self._base = directory  # of versions that are adapters
        self._scored: tuple[tuple[int, ...], float] | None = None  # tokens of a probe, and their score as it is now
        self.images_kept = 0

    async def checked(self, directory: Path) -> CheckedFiles:
        """Raises WeightsError for files that don't fill the model exactly."""
        return await asyncio.to_thread(self._checked, directory)

    def _checked(self, directory: Path) -> CheckedFiles:
        """Beside the steps, like the reading of the files into the page cache, from where the core takes them."""
        checkpoint, adapter, files = self._engine.checkpoint, None, directory
        if (directory / ADAPTER_CONFIG).is_file():
            files, adapter = self._base, (str(directory), checkpoint.adapted(self._base, directory))
        names = checkpoint.names_for(files)
        for file in files.glob("*.safetensors"):
            _read_ahead(file)
        return CheckedFiles(files, names, checkpoint.vision_digest(files) if self._vision_digest else "", adapter)

    async def load(self, directory: Path, files: CheckedFiles, probe: WeightsProbe | None, version: int) -> None:
        """`files` are from `checked`.

        Raises WeightsError if the old weights are in place, TornWeights if neither are."""
        score, whole = self._sequences.score_in_pause, self._sequences.torn is None
        before = await self._before(probe) if whole else None
        self._scored = None
        self._sequences.torn = TornWeights(f"loading {directory} was interrupted; load a version again")
        try:
            same = files.vision_digest != "" and files.vision_digest == self._vision_digest
            await self._copy(files, version, keep_encoded=whole and same)
            after = None if probe is None else await score(probe.token_ids)
            if probe is not None and after is not None and (refusal := probe.refusal(directory, before, after)):
                raise TornWeights(refusal)
        except TornWeights as error:
            await self._restore(error, probe, before, whole=whole)
            raise WeightsError(f"{error}; the weights of {self._directory} were restored") from error
        self._directory, self._vision_digest, self._sequences.torn = directory, files.vision_digest, None
        self._scored = None if probe is None or after is None else (probe.token_ids, after)

    async def _before(self, probe: WeightsProbe | None) -> float | None:
        if probe is not None and self._scored is not None and self._scored[0] == probe.token_ids:
            return self._scored[1]  # the weights are the same since
        try:
            return None if probe is None else await self._sequences.score_in_pause(probe.token_ids)
        except RequestError as error:
            raise WeightsError(f"this engine cannot score the probe of the new weights: {error}") from error

    async def _restore(
        self, cause: TornWeights, probe: WeightsProbe | None, before: float | None, *, whole: bool
    ) -> None:
        torn: TornWeights | None = None if whole else cause
        try:
            if whole:
                files = await self.checked(self._directory)
                self._vision_digest = files.vision_digest
                await self._copy(files, self._sequences.loaded, keep_encoded=False)
        except WeightsError as error:
            torn = TornWeights(f"{cause}; the old weights cannot be restored either: {error}")
        if torn is None and probe is not None and before is not None:
            score = await self._sequences.score_in_pause(probe.token_ids)
            if not abs(score - before) <= probe.tolerance:
                torn = TornWeights(f"{cause}; after restoring, {self._directory} scores {score:.4f}, not {before:.4f}")
        self._sequences.torn = torn
        if torn is not None:
            raise torn

    async def _copy(self, files: CheckedFiles, version: int, *, keep_encoded: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, or_dead, directory = self._engine.llm, self._sequences.or_dead, files.directory
        update = {"directory": str(directory), "names": files.names, "adapter": files.adapter}
        try:
            await or_dead(llm.start_weight_update())
            await or_dead(llm.update_weights(WeightTransferUpdateRequest(update)))
            await or_dead(llm.finish_weight_update(str(version)))
            counts: list[int] = await or_dead(llm.collective_rpc("sluice_forget", args=(keep_encoded,)))
            self.images_kept = max(counts) if keep_encoded else 0
            # Anything computed with other weights must not be read.
            forgotten = await or_dead(llm.reset_prefix_cache(reset_connector=True))
            if not keep_encoded:
                await or_dead(llm.reset_encoder_cache())
        except Exception as error:  # vLLM passes a worker's error on as a bare Exception
            if isinstance(error, EngineError):
                raise
            raise TornWeights(f"{directory}: loading the weights failed halfway: {error}") from error
        if not forgotten:
            raise TornWeights(f"{directory}: vLLM still has cache entries computed with other weights")


def _read_ahead(file: Path) -> None:
    """A hint: if it fails, so does the load, with the reason."""
    with contextlib.suppress(OSError, AttributeError), file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


class LoopThread:
    """Runs coroutines until `stop`; may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start it, in call order. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, timeout_s: float) -> bool:
        """End the loop and everything it runs; False if the thread hangs."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
