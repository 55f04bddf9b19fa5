"""Pulls new weight versions into a worker's engine, between two tokens of the running sequences.

A version is verified (digest, names, shapes, dtypes) before the engine is touched. After the load, the engine must
match the probe score that the trainer wrote into the manifest. If a check or the probe fails, the old version keeps
serving; if it can't be loaded back either, the worker ends. The version the engine started with must match its probe
too: an engine that computes this architecture differently from the trainer ends at start. After a pinned version the
newest one is loaded again, or, if that is refused, the one that the pinned one replaced.

The adapters that a worker serves beside the policy are loaded and proved before its first job:

    worker.adapters: {name: directory} ─▶ verify ─▶ Backend.load_adapter ─▶ jobs that name it, versions[i] = 0

A directory is one that peft wrote, or a version of a run. A version's manifest has digests and a probe score, which the
engine must match. Without one, `hf` compares each layer with the merged one, and vLLM must at least give another score
than without the adapter.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import msgspec

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ModelError, TornWeights, WeightsError, WeightsGone
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role
from sluice.pipeline.telemetry.spans import version_spans
from sluice.pipeline.weights.carriers import Carrier, carrier_of
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import MANIFEST, named_base, read_manifest, verify
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.tokens import Runs
from sluice.workers.engine.adapters import AdapterRoom
from sluice.workers.engine.contracts import Backend, WeightsProbe

_AGAIN = 5  # times weights.store_timeout_s, for which no job is claimed
_HALF_LENIENCE = 4  # half precision alone must not end a worker; the wrong model would be off by much more


class WeightsWatch:
    """Compares the registry with the engine."""

    def __init__(self, role: Role, backend: Backend, carrier: Carrier | None = None) -> None:
        """`carrier`: by default that of the run's configuration."""
        self._registry = WeightsRegistry(role.client, role.keys)
        self._role, self._backend, self._tell = role, backend, role.status.fact
        self._config: Config = role.config
        self._carrier = carrier or carrier_of(role.config, role.status.fact)
        self._in_use: WeightVersion | None = None  # of the carrier's; None: the model's own directory
        self._fetched: int | None = None  # the version that was asked for last, once its files were whole here
        self._refused: dict[int, float] = {}  # version -> when it's asked for again (monotonic seconds; inf: never)
        self._replaced: int | None = None  # by a pinned one; it serves on where the newest is refused
        self._latest: int | None = None
        self._is_proved = False  # the loaded weights score as the trainer measured
        self._behind: tuple[int, float] | None = None  # newest loaded version, seconds from its publication

    def saw(self, latest: int | None) -> None:
        """Record the registry's newest version, as reported by the last claim."""
        if latest != self._latest:
            self._refused.clear()  # the run may come back to one, with whole files
        self._latest = latest

    def close(self) -> None:
        """Let go of the versions that were pulled; the engine may go on with what it has loaded."""
        self._carrier.close()

    async def look(self) -> None:
        """Ask for the newest version before the first claim, so a worker that starts late starts there."""
        self.saw(await self._registry.latest())

    def newer(self) -> int | None:
        """The version number the engine should move to, or None; a lower one if a kill undid later steps."""
        loaded, now = self._backend.version, time.monotonic()
        if loaded == self._latest:
            self._replaced = None
        for version in (self._latest, self._replaced):
            if version is not None and now > self._refused.get(version, -math.inf):
                return None if version == loaded else version
        return None

    async def prove(self) -> bool:
        """Check the engine against the probe of the version it started with, once that is published.

        False if that version is retired, so that nothing tells whether these are its weights, and a newer one is there
        to be loaded. Raises ModelError if the scores differ.
        """
        version = self._backend.version
        if self._is_proved or self._latest is None or self._latest < version:
            return True
        manifest, facts = await self._registry.get(version), self._backend.facts
        if manifest is None:
            return await self._registry.get(self._latest) is None
        self._is_proved = True
        probe = probe_of(manifest, facts.dtype, self._config.weights.probe_tolerance)
        if probe is None:
            return True
        async with asyncio.timeout(self._config.weights.load_timeout_s):
            found = await self._backend.score(probe.token_ids)
        if refusal := probe.refusal(Path(manifest.path), None, found):
            if facts.dtype != "float32" and abs(found - probe.score) <= _HALF_LENIENCE * probe.tolerance:
                get_logger().warning("the engine's probe score is off", found=refusal, dtype=facts.dtype)
                return True
            raise ModelError(
                f"{refusal}: the {facts.name} engine ({facts.engine_version}, {facts.dtype}) computes weights "
                f"v{version} differently from the trainer, so its logprobs would belong to no policy; use the other "
                "backend (worker.backend), or raise weights.probe_tolerance if its precision is the cause"
            )
        return True

    async def pull(self, version: int) -> bool:
        """Load a version; False if it was refused and the old one stays. Raises TornWeights if neither can serve."""
        try:
            behind_s = await self._load(version)
        except TornWeights:
            raise  # the process ends; its successor loads a whole version
        except WeightsGone:
            if version == self._replaced:
                self._replaced = None
            return False  # retired in the meantime: there is a newer one
        except WeightsError as error:
            # No newer version may come, so this one is wanted still; but what whole files hold stays what it is.
            pause_s = math.inf if self._fetched == version else _AGAIN * self._config.weights.store_timeout_s
            self._refused[version] = time.monotonic() + pause_s
            self._tell(refused_version=version)
            get_logger().error("new weights refused; keeping the old version", version=version, error=str(error))
            return False
        self._behind, self._replaced = (version, behind_s), None
        return True

    async def pin(self, version: int) -> None:
        """Load the version that a job asks for, whatever the newest is.

        Raises WeightsGone; WeightsError if this worker can't load it now, and the old one stays; TornWeights as `pull`.
        """
        before = self._backend.version
        await self._load(version)
        self._behind = None
        self._replaced = before if self._replaced is None else self._replaced

    async def is_gone(self, version: int) -> bool:
        """Whether it was published, and can't be loaded any more."""
        return self._latest is not None and version < self._latest and await self._registry.get(version) is None

    def behind_s(self, versions: Runs) -> float | None:
        """From the publication of the newest loaded version to its first token here; None if none of these is of it."""
        if self._behind is None or all(version != self._behind[0] for version, _ in versions.runs):
            return None
        return max(0.0, self._behind[1])

    async def _load(self, version: int) -> float:
        """Seconds since its publication. Raises WeightsError, WeightsGone, TornWeights."""
        limit_s = self._config.weights.load_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                behind_s, spent = await self._fetch_and_load(version)
        except TimeoutError as error:
            raise TornWeights(
                f"weights v{version} were not loaded within {limit_s:.0f} s; is the disk slow or not mounted? Raise "
                "weights.load_timeout_s if loading takes longer"
            ) from error
        self._is_proved = True
        get_logger().info("weights loaded", version=version, behind_s=behind_s, **spent)
        return behind_s

    async def _fetch_and_load(self, version: int) -> tuple[float, dict[str, float]]:
        """Seconds since its publication, and those of the parts for the log."""
        started = time.monotonic()
        manifest = await self._registry.get(version)
        if manifest is None:
            raise WeightsGone(f"weights v{version} aren't registered: retired, or never published")
        backend, tolerance, began = self._backend, self._config.weights.probe_tolerance, time.time()
        probe = probe_of(manifest, backend.facts.dtype, tolerance, backend.version)
        self._fetched = None
        directory = await asyncio.to_thread(self._carrier.fetch, manifest)
        self._fetched, fetched = version, time.monotonic()
        try:
            await backend.load_weights(directory, version, probe, manifest.parent)
        except WeightsError:
            await asyncio.to_thread(self._carrier.keep, self._in_use)  # a refused version takes no room
            raise
        self._in_use = manifest
        spent = {"fetch_s": round(fetched - started, 3), "load_s": round(time.monotonic() - fetched, 3)}
        behind_s = round(self._role.status.broker_time() - manifest.published_at, 3) if manifest.published_at else 0.0
        self._role.tracing.send(version_spans("load", manifest, self._role.name, began, time.time()))
        await asyncio.to_thread(self._carrier.keep, manifest)
        return behind_s, spent


_HALF_PRECISION = 10  # bf16 rounds at 2^-8: the demo model's probe differs by up to 0.17 nats from fp32
_CHANGE = 2e-5  # nats a token in fp32: the rounding that remains in the difference of two scores


def probe_of(manifest: WeightVersion, dtype: str, tolerance: float, loaded: int | None = None) -> WeightsProbe | None:
    """The score required of a model of this dtype, within `tolerance` nats a token in fp32; None if unmeasured.

    `loaded`: the version the model has now; None if unknown.
    """
    tokens = tuple(manifest.probe_token_ids)
    if manifest.probe_score is None or len(tokens) < 2:
        return None
    exact = dtype == "float32"
    change = None
    if exact and loaded is not None and loaded == manifest.previous and manifest.previous_score is not None:
        change = manifest.probe_score - manifest.previous_score
    within = tolerance * len(tokens) * (1 if exact else _HALF_PRECISION)
    return WeightsProbe(tokens, manifest.probe_score, within, change, _CHANGE * len(tokens))


def room_of(config: Config) -> AdapterRoom | None:
    """What the engine must have room for; None if it merges. Raises ModelError."""
    try:
        return AdapterRoom.of(config.worker, config.trainer.lora)
    except WeightsError as error:
        raise ModelError(f"worker.adapters: {error}") from error


async def load_adapters(config: Config, backend: Backend) -> None:
    """Those of the configuration. Raises ModelError for one that can't be served."""
    limit_s = config.weights.load_timeout_s
    for name, directory in config.worker.adapters.items():
        try:
            async with asyncio.timeout(limit_s):
                probe = await asyncio.to_thread(_probe, config, Path(directory), backend.facts.dtype)
                await backend.load_adapter(name, Path(directory), 0, probe)
        except TimeoutError as error:
            raise ModelError(
                f"worker.adapters.{name}: not loaded within {limit_s:.0f} s; is the disk slow or not mounted? Raise "
                "weights.load_timeout_s if loading takes longer"
            ) from error
        except WeightsError as error:
            raise ModelError(f"worker.adapters.{name}: {error}") from error
        get_logger().info("adapter loaded", name=name, directory=directory, proved=probe is not None)


def _probe(config: Config, directory: Path, dtype: str) -> WeightsProbe | None:
    """None if nothing was measured. Raises WeightsError for a damaged version."""
    if not (directory / MANIFEST).is_file():
        if not named_base(directory):
            get_logger().warning("nothing says which weights this adapter was trained on", directory=str(directory))
        return None
    manifest = msgspec.structs.replace(read_manifest(directory), path=str(directory))
    verify(manifest, Path(config.model.path))
    return probe_of(manifest, dtype, config.weights.probe_tolerance)
