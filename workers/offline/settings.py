"""The settings of one `sluice generate`, including plugins, checked before anything is read or loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from sluice.pipeline.config import load_config
from sluice.pipeline.config.suggest import did_you_mean
from sluice.pipeline.config.types import (
    BackendName,
    ImagesConfig,
    ModelConfig,
    RepeatTerminateConfig,
    VllmEngineOptions,
)
from sluice.pipeline.errors import ConfigError, EngineError, RequestError
from sluice.pipeline.user_modules import load_object
from sluice.workers.engine.plugins import GenerationPlugin, check_plugins
from sluice.workers.engine.plugins.base import Hook, RequestType
from sluice.workers.engine.requests import GenerationOptions
from sluice.workers.offline.answers import MAX_N

STANDARD = "-"  # input or output
_GUARD = "rollout_matching.repeat_terminate"
_SETTABLE = ("model.", "worker.vllm.", f"{_GUARD}.", "images.")
_OF_THE_QUEUE = {"model.path", "images.store", "images.store_mb"}
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")
KNOWN = {
    "balanced_json": "sluice.workers.engine.plugins.json_objects:BalancedJsonStop",
    "duplicate_objects": "sluice.workers.engine.plugins.json_objects:DuplicateObjectSuppression",
}
_HOOKS: dict[str, frozenset[Hook]] = {"hf": frozenset({"stopping_criteria", "logits_processor"}), "vllm": frozenset()}


class GenerateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the command."""

    source: str
    out: str
    model: ModelConfig
    options: GenerationOptions
    vllm: VllmEngineOptions = VllmEngineOptions()
    repeat_terminate: RepeatTerminateConfig = RepeatTerminateConfig()
    images: ImagesConfig = ImagesConfig()
    backend: BackendName = "hf"
    fallback_backend: Literal["hf"] | None = None
    n: int = 1  # sequences per prompt
    enable_thinking: bool = False
    plugins: tuple[str, ...] = ()
    max_batch: int = 32
    torch_threads: int = 0
    fields: Literal["minimal", "all"] = "all"
    on_malformed: Literal["stop", "skip"] = "stop"
    restart: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.n <= MAX_N, f"--n must be in 1..{MAX_N}, got {self.n}"),
            (self.max_batch >= 1, f"--max-batch must be >= 1, got {self.max_batch}"),
            (self.torch_threads >= 0, f"--torch-threads must be >= 0, got {self.torch_threads}"),
            (not (self.as_json and self.to_stdout), "--json and --out - both use standard output; choose one"),
            (self.to_stdout or Path(self.out).parent.is_dir(), f"{Path(self.out).parent}: no such directory (--out)"),
            (self.to_stdout or not Path(self.out).is_dir(), f"{self.out} is a directory; --out must name a file"),
            (
                self.to_stdout or Path(self.out).suffix in _SUFFIXES,
                f"--out {self.out}: the suffix selects the format; use one of {', '.join(_SUFFIXES)}, or -",
            ),
            (self.to_stdout or not _same_file(self.source, self.out), "--in and --out are the same file"),
            (self.fallback_backend is None or self.backend == "vllm", "--fallback-backend needs --backend vllm"),
            (
                not (self.repeat_terminate.enabled and self.options.eos_token_ids == ()),
                "--ignore-eos leaves no end-of-sequence id, which repeat_terminate needs to end loops; choose one of "
                "them",
            ),
        )
        for holds, problem in checks:
            if not holds:
                raise ConfigError(problem)

    @property
    def to_stdout(self) -> bool:
        """No file is written, so the run can't be resumed."""
        return self.out == STANDARD

    def identity(self) -> dict[str, Any]:
        """Everything that determines the answers besides input and model; plain values, name → value."""
        model = {key: value for key, value in msgspec.to_builtins(self.model).items() if key != "path"}
        names = ("backend", "fallback_backend", "n", "enable_thinking", "plugins", "fields", "on_malformed")
        chosen = {name: msgspec.to_builtins(getattr(self, name)) for name in names}
        vllm = {"vllm": msgspec.to_builtins(self.vllm)} if self.backend == "vllm" else {}
        guard = (
            {"repeat_terminate": msgspec.to_builtins(self.repeat_terminate)} if self.repeat_terminate.enabled else {}
        )
        images = {} if self.images == ImagesConfig() else {"images": msgspec.to_builtins(self.images)}
        return {**msgspec.to_builtins(self.options), **chosen, **model, **vllm, **guard, **images}


def make_settings(
    *, options: Mapping[str, Any], model: Mapping[str, Any], overrides: Sequence[str] = (), **given: Any
) -> GenerateSettings:
    """Settings from the command's arguments; None in `model` means not given. Raises ConfigError."""
    config = load_config(None, overrides, environ={})
    for item in overrides:
        key = item.partition("=")[0].strip()
        if not (key == _GUARD or key.startswith(_SETTABLE)) or key in _OF_THE_QUEUE:
            raise ConfigError(
                f"--set {item}: no effect here; generate only takes model.*, worker.vllm.*, {_GUARD}.* and images.* "
                "without its store"
            )
    chosen = {key: value for key, value in model.items() if value is not None}
    try:
        asked = GenerationOptions(**options)
    except RequestError as error:
        raise ConfigError(str(error)) from error
    return GenerateSettings(
        model=msgspec.structs.replace(config.model, **chosen),
        options=asked,
        vllm=config.worker.vllm,
        repeat_terminate=config.rollout_matching.repeat_terminate,
        images=config.images,
        **given,
    )


def _same_file(source: str, out: str) -> bool:
    return Path(source).exists() and Path(out).exists() and Path(source).samefile(out)


def make_plugins(names: Iterable[str]) -> list[GenerationPlugin]:
    """One plugin per name, made without arguments. Raises ConfigError."""
    return [_make(name) for name in names]


def check_fit(plugins: Iterable[GenerationPlugin], *, backend: str, request_types: Iterable[RequestType]) -> None:
    """Raise ConfigError for a plugin that these requests or the (not yet loaded) backend can't serve."""
    plugins = tuple(plugins)
    for request_type in request_types:
        try:
            check_plugins(plugins, backend=backend, hooks=_HOOKS[backend], request_type=request_type)
        except EngineError as error:
            raise ConfigError(f"--plugin: {error}") from error


def _make(name: str) -> GenerationPlugin:
    module_name, colon, class_name = KNOWN.get(name, name).partition(":")
    if not (module_name and colon and class_name):
        known = did_you_mean(name, list(KNOWN))
        raise ConfigError(f"--plugin {name}: unknown; {known} Name your own as package.module:Class")
    found = load_object(KNOWN.get(name, name), f"--plugin {name}")
    if not (isinstance(found, type) and issubclass(found, GenerationPlugin)):
        raise ConfigError(f"--plugin {name}: {module_name!r} has no GenerationPlugin class {class_name!r}")
    try:
        return found()
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"--plugin {name}: cannot be constructed without arguments ({type(error).__name__}: {error}); give them "
            "defaults"
        ) from error
