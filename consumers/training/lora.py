"""LoRA by peft: adapters are put into the policy, and are all of it that is trained, saved and published.

    TrainStep ─▶ add ─▶ steps ─▶ write: adapter_config.json, adapter_model.safetensors ─▶ checkpoint, version
    checkpoint ─▶ fill            a version's directory ─▶ attach (audit) or merge (export), on a model of its base

- The model's class stays: its linear layers become peft's, which add their adapter's output.
- Linear layers only: experts that transformers fuses into one tensor have none, and keep the base's weights.
- The output layer takes an adapter if it's named and not tied to the embedding; the head in pieces runs it as well.
- peft is imported only where there is an adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sluice.consumers.training.shards import like
from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.config.types import LoraConfig
from sluice.pipeline.errors import ConfigError, WeightsError, how_to_install
from sluice.pipeline.weights.adapter import ADAPTER_FILE, Adapter, tensor_name
from sluice.pipeline.weights.versions import ADAPTER_CONFIG, BASE, base_digest, base_of

_NAME = "default"  # of the adapter, in memory
_DECIDING = ("r", "lora_alpha", "target_modules")  # a checkpoint belongs to one choice of these


def add(model: Any, config: LoraConfig, *, text_only: bool) -> None:
    """Put an adapter of output 0 into the target modules, and freeze all else; raises ConfigError.

    `text_only`: none in a vision tower or its projector.
    """
    found = _targets(model, config, text_only=text_only)
    _put(model, found, r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name)


def has_adapter(model: Any) -> bool:
    return next(_layers(model), None) is not None


def parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Those of the adapter, named as in its file."""
    return {
        tensor_name(name, part): getattr(layer, f"lora_{part}")[_NAME].weight
        for name, layer in _layers(model)
        for part in "AB"
    }


def write(model: Any, base: Path, target: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the two files of a model's adapter; `base`: the directory of the model that it was put into.

    `tensors`: those of `parameters`, if they shall not be read from the model.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or parameters(model)).items()}
    # One entry: safetensors writes several in random order, and equal adapters must have equal digests.
    save_file(tensors, str(target / ADAPTER_FILE), {BASE: base_digest(base)})
    # Sorted: sets have another order in every process, and the digest covers this file.
    (target / ADAPTER_CONFIG).write_text(json.dumps(_settings(model), indent=2, sort_keys=True))


def fill(model: Any, directory: Path, base: Path | None = None) -> None:
    """Load the adapter of a directory into a model that has one; raises ConfigError if it is of another kind.

    `base`: the directory of the model, whose weights must be those that the adapter was trained on.
    """
    has, given = has_adapter(model), (directory / ADAPTER_CONFIG).is_file()
    if has != given:
        raise ConfigError(
            f"{directory}: trained {'with' if given else 'without'} trainer.lora, and this run is "
            f"{'with' if has else 'without'} it; set trainer.lora.rank as it was, or start a run of another name "
            "(--set run=NAME)"
        )
    saved, ours = json.loads((directory / ADAPTER_CONFIG).read_text()), _settings(model)
    for name in _DECIDING:
        if saved.get(name) != ours[name]:
            raise ConfigError(
                f"{directory}: trained with trainer.lora {name} {_short(saved.get(name))}, and this run has "
                f"{_short(ours[name])}; set it as it was, or start a run of another name (--set run=NAME)"
            )
    if base is not None and (of := base_of(directory)) != (its := base_digest(base, of)):
        raise ConfigError(
            f"{directory}: an adapter of the weights {of[:12]}, and {base} has {its[:12]}; set "
            "model.path to the model that the run started from"
        )
    _fill(model, directory)


def attach(model: Any, directory: Path) -> Any:
    """Put the adapter of a version's directory into a model of its base, in place; raises WeightsError."""
    _attach(model, directory)
    return model


def merge(model: Any, directory: Path) -> Any:
    """The same, and merged by peft: a model without adapters."""
    return _attach(model, directory).merge_and_unload()


def _attach(model: Any, directory: Path) -> Any:
    found = Adapter.of(directory)
    if found is None:
        raise WeightsError(f"{directory}: no adapter")
    if lacking := sorted(found.shapes.keys() - dict(model.named_modules()).keys()):
        raise WeightsError(f"{directory}: {type(model).__name__} has no {lacking[0]}, which the adapter belongs to")
    tuner = _put(model, found.shapes, r=found.rank, lora_alpha=found.scale * found.rank)
    model.eval()
    _fill(model, directory)
    return tuner


def _put(model: Any, modules: Iterable[str], **options: Any) -> Any:
    """peft's tuner around the model, whose layers of these names have an adapter."""
    # A pattern: of names in a list, peft takes every module whose name ends like one.
    pattern = "|".join(map(re.escape, modules))
    return _peft().LoraModel(model, _peft().LoraConfig(**options, target_modules=pattern, bias="none"), _NAME)


def _fill(model: Any, directory: Path) -> None:
    try:
        tensors = load_file(str(directory / ADAPTER_FILE))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{directory}: its adapter cannot be read ({error})") from error
    targets = parameters(model)
    if odd := sorted(tensors.keys() ^ targets.keys()):
        raise WeightsError(f"{directory}: {odd[0]} is in the adapter or in the model, and not in both")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != targets[name].shape:
                raise WeightsError(f"{directory}: {name} has shape {tuple(tensor.shape)}, not that of the model")
            targets[name].copy_(like(targets[name], tensor))


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules that have an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer") and _NAME in module.lora_A:
            yield name, module


def _settings(model: Any) -> dict[str, Any]:
    """peft's configuration, in types that JSON has."""
    settings = model.peft_config[_NAME].to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    plain |= {"target_modules": sorted(name for name, _ in _layers(model))}
    plain |= {"task_type": "CAUSAL_LM", "inference_mode": True}
    return json.loads(json.dumps(plain, default=str))


def _targets(model: Any, config: LoraConfig, *, text_only: bool) -> list[str]:
    """Full names of the linear layers that are adapted."""
    head = model.get_output_embeddings()
    text = _text_part(model) if text_only else model
    inside = {id(module) for module in text.modules()} | {id(head)}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linear = {name: module for name, module in linear.items() if id(module) in inside}
    if config.target_modules == "all-linear":
        found = [name for name, module in linear.items() if module is not head]
        if not found:
            raise ConfigError(f"trainer.lora: {type(model).__name__} has no torch.nn.Linear layer to adapt")
        return found
    found = dict[str, None]()
    for wanted in config.target_modules:
        its = [name for name in linear if name == wanted or name.endswith(f".{wanted}")]
        if not its:
            raise ConfigError(f"trainer.lora.target_modules: {_no_such(model, wanted, linear)}")
        found |= dict.fromkeys(its)
    tied = model.get_input_embeddings()
    if any(linear[name] is head for name in found) and head.weight is getattr(tied, "weight", None):
        raise ConfigError(
            "trainer.lora.target_modules: the output layer is tied to the embedding, and an adapter would change both "
            "when it is merged; leave it out"
        )
    return list(found)


def _text_part(model: Any) -> Any:
    """All of a model without vision."""
    return model if getattr(model.config, "vision_config", None) is None else model.get_decoder()


def _no_such(model: Any, wanted: str, linear: dict[str, Any]) -> str:
    others = {name: module for name, module in model.named_modules() if name.split(".")[-1] == wanted.split(".")[-1]}
    if others:
        name, module = next(iter(others.items()))
        return f"{name} is a {type(module).__name__}, and only torch.nn.Linear layers of what is trained take adapters"
    names = sorted({name.rpartition(".")[2] for name in linear})
    near = nearest(wanted, names)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"
    return f"no module is called {wanted!r}; {hint}"


def _short(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return ", ".join(value[:3]) + (f", … ({len(value)})" if len(value) > 3 else "")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"LoRA needs peft, which can't be imported ({error}); {how_to_install('lora')}") from error
    return peft
