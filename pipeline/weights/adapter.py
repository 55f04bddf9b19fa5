"""A LoRA adapter as a version: peft's two files, and how they change a model's weights.

    adapter_config.json          rank, alpha, target modules
    adapter_model.safetensors    A [rank, in] and B [out, rank] of each module; its header names the base by digest

A version with an adapter is merged into the base as it is loaded, W = W_base + alpha / rank · B·A in float32, or kept
beside it (`worker.lora: requests`), as the trainer does. Both give the same numbers up to rounding; probes check that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.pipeline.errors import MessageError, WeightsError
from sluice.pipeline.weights.versions import ADAPTER_CONFIG, base_digest, named_base, tensor_table
from sluice.pipeline.wire.codec import read_json

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
_PREFIX = "base_model.model."  # peft's, before each module's name


class _Settings(msgspec.Struct):
    """How an adapter's product is scaled."""

    r: int
    lora_alpha: float


# peft's other fields. One that isn't here must be empty: most of them change the product, or the base's weights.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "peft_type": ("LORA",),
    # Where training began; the others (pissa, olora, corda, loftq, lora_ga) change the base's weights to fit.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),
}
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",  # read by an initialisation alone, as those of eva, loftq and lora_ga
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",  # counts where use_qalora is set
        "revision",
        "target_modules",  # the file's tensors say it
        "task_type",
    }
)


@dataclass(frozen=True)
class Adapter:
    """The adapter of a directory, by the names of the modules in memory."""

    directory: Path
    rank: int
    scale: float
    shapes: Mapping[str, tuple[int, int]]  # module -> (out, in) of its weight

    @classmethod
    def of(cls, directory: Path) -> Adapter | None:
        """None for a whole model. Raises WeightsError for files that aren't those of a plain LoRA adapter."""
        file = directory / ADAPTER_CONFIG
        if not file.is_file():
            return None
        try:
            settings = read_json(file.read_bytes(), dict[str, Any], "it")
            found = msgspec.convert(settings, _Settings)
        except (OSError, MessageError, msgspec.MsgspecError) as error:
            raise WeightsError(f"{file}: cannot be used ({error})") from error
        for name in sorted(settings.keys() - _Settings.__struct_fields__ - _HARMLESS):
            if settings[name] and settings[name] not in _PLAIN.get(name, ()):
                raise WeightsError(f"{file}: {name} {settings[name]}: only plain LoRA adapters can be merged")
        if found.r < 1:
            raise WeightsError(f"{file}: r must be at least 1, got {found.r}")
        return cls(directory, found.r, found.lora_alpha / found.r, _shapes(directory, found.r))

    def factors(self, module: str, get: Callable[[str], Any]) -> tuple[Any, Any]:
        """(A [rank, in], scale · B [out, rank]) of a module, float32; `get` reads a tensor of the adapter's file."""
        down, up = (get(tensor_name(module, part)).float() for part in "AB")
        return down, self.scale * up

    def merged(self, module: str, weight: Any, get: Callable[[str], Any]) -> Any:
        """The weight of a module [out, in] with its adapter, float32."""
        down, up = self.factors(module, get)
        return weight.float() + up @ down

    def check_base(self, base: Path) -> None:
        """Raises WeightsError if the adapter's file names other weights than those of the directory `base`.

        Files from elsewhere name none; then shapes are all that can be checked.
        """
        wanted = named_base(self.directory)
        if wanted and (found := base_digest(base, wanted)) != wanted:
            raise WeightsError(
                f"{self.directory}: an adapter of the weights {wanted[:12]}, and {base} has {found[:12]}; give the "
                "model that it was trained on (model.path)"
            )


def tensor_name(module: str, part: str) -> str:
    """In the adapter's file; `part` is A or B."""
    return f"{_PREFIX}{module}.lora_{part}.weight"


def _shapes(directory: Path, rank: int) -> dict[str, tuple[int, int]]:
    table = {name: shape for name, (_, shape) in tensor_table(directory).items()}
    modules = sorted(name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") for name in table if ".lora_A." in name)
    shapes: dict[str, tuple[int, int]] = {}
    for module in modules:
        down, up = table.pop(tensor_name(module, "A"), ()), table.pop(tensor_name(module, "B"), ())
        if len(down) != 2 or len(up) != 2 or down[0] != rank or up[1] != rank:
            raise WeightsError(f"{directory}: the adapter of {module} has shapes {down} and {up}, and rank {rank}")
        shapes[module] = up[0], down[1]
    if table or not shapes:
        raise WeightsError(f"{directory}: {next(iter(table), 'nothing')} is no part of a LoRA adapter of linear layers")
    return shapes
