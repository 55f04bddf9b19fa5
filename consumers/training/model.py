"""The policy in the trainer: load it, score a probe, write a model directory, stage a given model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from xxhash import xxh3_128

from sluice.consumers.training import lora
from sluice.pipeline.config.types import Config, ModelConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.files import synced_meanwhile
from sluice.pipeline.weights.versions import MANIFEST, Watch, tensor_table
from sluice.pipeline.wire.messages import Shard

HANDOFF_FILE = "handoff.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SHARD_BYTES = 4 << 30  # of a file; more than one are written, hashed and fetched at the same time
_WRITERS, _BLOCK = 4, 4 << 20
_NOT_COPIED = (MANIFEST, HANDOFF_FILE)  # files of a version, not of its model


def load_policy(
    path: Path, config: ModelConfig, *, dropout: bool = False, mesh: DeviceMesh | None = None
) -> torch.nn.Module:
    """Load a model directory: fp32 master weights, training mode, on the configured device. Raises ModelError.

    A model with a vision part is loaded in full, so that its versions are complete. `dropout`: keep the rates in its
    config.json; otherwise all are 0, and two passes over the same tokens give the same numbers. `mesh`: the ranks that
    load a part of each matrix, by transformers' plan for the model.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: no such model directory; set model.path or --model")
    if not list(path.glob("*.safetensors")):
        raise ModelError(f"{path}: no *.safetensors file; save the model with save_pretrained")
    try:
        model = read_model(path, config, dropout=dropout, mesh=mesh)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be loaded ({error})") from error
    return model.to(device_of(config)).train()


def read_model(path: Path, config: ModelConfig, *, dropout: bool = False, mesh: DeviceMesh | None = None) -> Any:
    """The same on the CPU, with transformers' own errors; ValueError if the files don't fill the model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    code = config.trust_remote_code
    settings: Any = AutoConfig.from_pretrained(path, trust_remote_code=code)
    if not dropout:
        for part, name, _ in list(random_rates(settings)):
            setattr(part, name, 0.0)
    kind = AutoModelForImageTextToText if _has_vision(settings) else AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(
        path,
        config=settings,
        dtype=torch.float32,
        attn_implementation=config.attn_implementation,
        trust_remote_code=code,
        output_loading_info=True,
        **({} if mesh is None else {"tp_plan": "auto", "device_mesh": mesh}),
    )
    model, report = loaded
    bad = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if bad:
        raise ValueError(f"the weights are incomplete, e.g. {bad[0]}; export them again")
    model.generation_config = GenerationConfig()  # nothing is generated here, and saving refuses odd ones
    if not dropout:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model


def model_class(path: Path, config: ModelConfig) -> Any:
    """transformers' class of a model that takes images; a class without types if it has none of its own."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedModel

    settings: Any = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return mapping.get(type(settings), PreTrainedModel)


def freeze_vision(model: Any) -> None:
    """No gradient for anything but the text model, its embeddings and its head; a model without vision is unchanged.

    Raises ModelError if the text model can't be told apart.
    """
    if getattr(model.config, "vision_config", None) is None:
        return
    text = model.get_decoder()
    if text is model or text is model.base_model:
        raise ModelError(
            f"{type(model).__name__}: its text model cannot be told from its vision tower; set trainer.freeze_vision "
            "to false to train all of it"
        )
    parts = (text, model.get_input_embeddings(), model.get_output_embeddings())
    trained = {parameter for part in parts if part is not None for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


def random_rates(config: Any) -> Iterator[tuple[Any, str, float]]:
    """(configuration, key, rate) of everything random in a training pass: dropouts of all parts, router noise."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in vars(part).items() if part is not None else ():
            is_rate = "drop" in name or name.endswith("jitter_noise")
            if is_rate and type(value) in (int, float) and value > 0:
                yield part, name, float(value)


def _has_vision(config: Any) -> bool:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    known = known or "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    return known and getattr(config, "vision_config", None) is not None


def device_of(config: ModelConfig) -> torch.device:
    """`auto` is CUDA if available."""
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def published_dtype(config: Config) -> str:
    """Of the files of a version, unless it is an adapter: `weights.dtype`."""
    if config.weights.dtype != "auto":
        return config.weights.dtype
    if config.trainer.lora.enabled or config.model.dtype in ("float32", "float16"):  # bfloat16 has other values
        return "float32"
    return "bfloat16" if config.model.dtype == "bfloat16" or device_of(config.model).type == "cuda" else "float32"


def probe_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """A fixed prompt for this run: seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (max(2, count),), generator=generator).tolist()


@torch.no_grad()  # not inference mode: FSDP would keep the tensors it gathers in it for training
def probe_score(model: Any, token_ids: list[int], device: torch.device | None = None) -> float:
    """Sum of the fp32 logprobs (nats) of tokens 1.. given their prefix; `device`: by default where the model says."""
    ids = torch.tensor([token_ids], device=device or model.device)
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids=ids).logits.float()
    model.train(was_training)
    logprobs = logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, ids[0, 1:, None]).sum())


def write_model(model: Any, source: Path, target: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a model directory: the weights of `model` in the hub's layout, every other file as in `source`.

    `tensors`: those of `own_tensors`, whole, if this process has parts of the model only, or the model may change. Of a
    model with an adapter, the adapter alone: the rest is `source`.
    """
    if lora.has_adapter(model):
        lora.write(model, source, target, tensors)
        return
    # The full state dict: the model may be sharded.
    write_weights(model, model.state_dict() if tensors is None else tensors, target)
    copy_settings(source, target)


def own_tensors(model: Any) -> dict[str, Any]:
    """What `write_model` writes of a model: its state dict, or its adapter's parameters; tied ones are one object."""
    return dict(lora.parameters(model)) if lora.has_adapter(model) else model.state_dict(keep_vars=True)


def write_weights(
    model: Any, tensors: Mapping[str, Tensor], target: Path, watch: Watch | None = None
) -> dict[str, Shard]:
    """Write a state dict of `model` as safetensors files in the hub's layout; their sizes and digests.

    `watch`: for tensors in the host's memory, which all of a file's bytes then take at once.

    transformers holds some layers in other shapes than their checkpoints (experts in one tensor); they are converted
    back as its own saving does, so every engine can read them. The files aren't written by safetensors: it holds the
    interpreter's lock meanwhile, and the trainer may be at work beside it.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: tensor.detach() for name, tensor in tensors.items() if name not in ignored}
    kept = revert_weight_conversion(model, remove_tied_weights_from_state_dict(kept, model))
    split = split_torch_state_dict_into_shards(
        kept, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD_BYTES
    )
    parts = {file: {name: kept[name] for name in names} for file, names in split.filename_to_tensors.items()}
    with ThreadPoolExecutor(min(len(parts), _WRITERS), thread_name_prefix="weights") as pool:
        made = pool.map(lambda file: _write_file(target / file, parts[file], watch), parts)
        shards = dict(zip(parts, made, strict=True))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return shards


def _write_file(file: Path, tensors: Mapping[str, Tensor], watch: Watch | None) -> Shard:
    """One durable safetensors file, hashed as it is written: equal tensors make equal bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, end = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0])), 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    head, digest = memoryview(len(raw).to_bytes(8, "little") + raw), xxh3_128()
    pieces = chain([head], (_bytes_of(tensor) for _, tensor in ordered))
    if watch is not None:
        pieces = list(pieces)
        watch(file.name, pieces)
    with file.open("wb", buffering=0) as stream, synced_meanwhile(stream.fileno()) as wrote:
        for left in pieces:
            while left:  # a write may be short
                block = left[:_BLOCK]
                written = stream.write(block)
                digest.update(block[:written])
                left = left[written:]
                wrote(written)
    return Shard(8 + len(raw) + end, digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def copy_settings(source: Path, target: Path) -> None:
    """Every file of a model directory but the weights."""
    _copy(source, target, but=_WEIGHTS)


def stage(model: Any, source: Path, root: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write `model` to a staging directory in `root` and return it; the caller deletes it.

    `model` has `save_pretrained` (transformers), or is the directory of a saved model. `tensors`: its state dict, if
    it's sharded. Raises ModelError for anything else, and for tensors that the run's model, `source`, doesn't have.
    """
    with staging(root) as aside:
        if tensors is None:
            _save_in(aside, model)
        else:
            write_model(model, source, aside, tensors)
        _check(aside, source)
        copy_settings(source, aside)
        return aside


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A directory in `root` for a version's files. It stays after the block, unless that raises."""
    # What a killed process leaves is deleted by the next publish.
    aside = root / f".v-staged.{secrets.token_hex(8)}.tmp"
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _save_in(aside: Path, model: Any) -> None:
    if isinstance(model, str | os.PathLike):
        if not Path(model).is_dir():
            raise ModelError(f"{model}: no such directory; give a model, or a directory written by save_pretrained")
        _copy(Path(model), aside)
    elif hasattr(model, "save_pretrained"):
        try:
            model.save_pretrained(aside)
        except ValueError as error:  # from its generation_config, for one
            raise ModelError(f"the model cannot be saved: {error}") from error
    else:
        raise ModelError(f"a {type(model).__name__} has no save_pretrained; give the transformers model itself")


def probe_of(model: Any, tokens: list[int]) -> float | None:
    """The score that workers check a version against; None unless the model is float32 and computes in it.

    Raises ModelError if the score isn't finite, whatever it is computed in.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not callable(model):
        return None
    computed: set[torch.dtype] = set()

    def note(_: Any, given: tuple[Tensor, ...], logits: Tensor) -> None:
        computed.update(each.dtype for each in (*given, logits))

    # At the head: mixed precision keeps float32 parameters, and casts what the model returns back to float32.
    with head.register_forward_hook(note):
        score = probe_score(model, tokens)
    if not math.isfinite(score):
        raise ModelError(
            f"not published: the probe's score is {score}, so the weights aren't finite, or overflow; look for a step "
            "whose loss or gradient wasn't finite (a sum divided by 0), and start again from the newest version"
        )
    return score if model.dtype == torch.float32 and computed == {torch.float32} else None


def _copy(directory: Path, target: Path, but: tuple[str, ...] = ()) -> None:
    """Existing files in the target are kept."""
    for file in _files(directory):
        if not (target / file.name).exists() and not file.name.endswith(but):
            shutil.copy2(file, target / file.name)


def _files(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.iterdir()) if file.is_file() and file.name not in _NOT_COPIED]


def _check(directory: Path, source: Path) -> None:
    """Workers would refuse other tensors, each on its own and only in its log."""
    shapes = {name: shape for name, (_, shape) in tensor_table(source).items()}
    found = {name: shape for name, (_, shape) in tensor_table(directory).items()}
    odd = sorted(name for name, shape in found.items() if shapes.get(name) != shape)
    if odd:
        raise ModelError(
            f"not published: {len(odd)} tensors differ from {source}, e.g. {odd[0]} {list(found[odd[0]])}; give "
            "the whole model, without wrappers, adapters merged"
        )
