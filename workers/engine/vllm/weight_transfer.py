"""vLLM's weight transfer from safetensors files, on disk or in shared memory: the engine `sluice`.

    start_weight_update ─▶ update_weights({directory, names, adapter}) ─▶ finish_weight_update(version)

- One `update_weights` brings all tensors. Files in memory (/dev/shm) are mapped, not read.
- vLLM's own weight reload only logs a layer that got some or none of its weights; here it is an error.
- It repacks linear layers, but on CPUs it misses two: a head tied to the embedding, whose packed copy stays old, and
  experts, whose new weights stay unpacked. Both are fixed here.
- Names, shapes and ties were checked before; a failure here leaves the model torn.

This module imports vLLM; `register_weight_transfer` names it, and vLLM imports it in its workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from sluice.pipeline.errors import TornWeights
from sluice.pipeline.weights.adapter import Adapter
from sluice.workers.engine.weight_files import LoadedAdapter, open_weights


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """There is nothing to set up: every update names its files."""


@dataclass
class Files(WeightTransferUpdateInfo):
    """Which tensors of a directory's safetensors to load, and under which names."""

    directory: str
    names: dict[str, str]  # name in the files -> name by which vLLM loads it
    adapter: tuple[str, dict[str, str]] | None = None
    """Of a version that is one: its directory, and what it changes: name in the files -> name in transformers' model.
    It is merged into these tensors."""


class FilesEngine(WeightTransferEngine[NoInitInfo, Files]):
    """Loads a version's tensors from its files."""

    init_info_cls = NoInitInfo
    update_info_cls = Files
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: an update begins and ends in `update_weights`, so a failed one can't leave it open."""

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own also waits for an accelerator, which raises where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Files) -> None:
        """Raises TornWeights if a layer wasn't filled, after all layers are usable again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        wanted = _elements(self.model)
        with ExitStack() as stack:
            sources = open_weights(Path(update_info.directory), stack)
            merged, adapted = _merging(update_info.adapter, stack)

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                for source, name in update_info.names.items():
                    tensor = sources[source].get_tensor(source)
                    yield name, merged(adapted[source], tensor) if source in adapted else tensor

            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(tensors())  # type: ignore[operator]
                unfilled = _unfilled(self.model, wanted)
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
        _pack_on_cpu(self.model)
        if unfilled:
            first = next(iter(unfilled))
            raise TornWeights(
                f"{update_info.directory}: vLLM took {unfilled[first]} of {wanted[first]} elements of {first}, and "
                f"{len(unfilled)} layers were not filled; does vLLM know this model's tensor names?"
            )


def _pack_on_cpu(model: Any) -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


def _merging(adapter: tuple[str, dict[str, str]] | None, stack: ExitStack) -> tuple[Any, dict[str, str]]:
    """(what merges a tensor, the names that it is for)."""
    found = None if adapter is None else Adapter.of(Path(adapter[0]))
    if adapter is None or found is None:
        return None, {}
    return LoadedAdapter(found.directory, found, stack).merged, adapter[1]


def _elements(model: Any) -> dict[str, int]:
    """Layer -> number of elements a load must bring: its own parameters, without padding and second names."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    owners = Counter(id(one) for layer in model.modules() for one in layer.parameters(recurse=False))
    counted: set[int] = set()
    found: dict[str, int] = {}
    for name, layer in model.named_modules():
        own = [one for one in layer.parameters(recurse=False) if id(one) not in counted]
        counted.update(id(one) for one in own if owners[id(one)] > 1)
        total = sum(one.numel() for one in own)
        if own and isinstance(layer, VocabParallelEmbedding):
            shard = layer.shard_indices
            rows = shard.num_org_elements + shard.num_added_elements
            total = total * rows // layer.num_embeddings_per_partition
        if total:
            found[name] = total
    return found


def _unfilled(model: Any, wanted: dict[str, int]) -> dict[str, int]:
    """Layers that got fewer elements than they have -> how many they got; call it before vLLM ends the load.

    A layer that is already full has been processed and no longer counts.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found: dict[str, int] = {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not is_deferred_attention_layer(layer) and info.load_numel < wanted.get(name, 0):
            found[name] = info.load_numel
    return found
