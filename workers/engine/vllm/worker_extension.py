"""Methods that `collective_rpc` calls inside vLLM's workers; mixed into vLLM's worker class (`worker_extension_cls`).

- vLLM's own weight reload only logs a layer that got some or none of its weights; here it is an error.
- It repacks linear layers, but on CPUs it misses two: a head tied to the embedding, whose packed copy stays old, and
  experts, whose new weights stay unpacked. Both are fixed here.
- Names, shapes and ties were checked before; a failure here leaves the model torn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sluice.pipeline.errors import TornWeights
from sluice.pipeline.weights.adapter import Adapter
from sluice.workers.engine.weight_files import LoadedAdapter, open_weights
from sluice.workers.guard.requests import GuardRequests
from sluice.workers.guard.vllm import WorkerRepeatTerminate


class WorkerExtension:
    """Loads weights into the model, and queries the loaded repeat guard."""

    model_runner: Any

    def sluice_load_weights(
        self,
        directory: str,
        names: dict[str, str],
        keep_encoded: bool,
        adapter: tuple[str, dict[str, str]] | None = None,
    ) -> int:
        """Load each tensor of the directory's safetensors under its name in `names`.

        `keep_encoded`: the vision part stays the same, so encoded images stay valid; returns how many there are.
        `adapter`: of a version that is one, its directory and what it changes: name in the files -> name in
        transformers' model. It is merged into these tensors.

        Raises TornWeights if a layer wasn't filled, after all layers are usable again.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, runner = self.model_runner.get_model(), self.model_runner
        wanted = _elements(model)
        with ExitStack() as stack:
            sources = open_weights(Path(directory), stack)
            merged, adapted = _merging(adapter, stack)

            def tensors() -> Iterator[tuple[str, Any]]:
                for source, name in names.items():
                    tensor = sources[source].get_tensor(source)
                    yield name, merged(adapted[source], tensor) if source in adapted else tensor

            initialize_layerwise_reload(model)
            try:
                model.load_weights(tensors())
                unfilled = _unfilled(model, wanted)
            finally:
                finalize_layerwise_reload(model, runner.model_config)
        runner.reset_lora_state()
        if not keep_encoded:
            runner.reset_encoder_cache()
        runner.reset_mm_cache()
        self._pack_on_cpu()
        if unfilled:
            first = next(iter(unfilled))
            raise TornWeights(
                f"{directory}: vLLM took {unfilled[first]} of {wanted[first]} elements of {first}, and {len(unfilled)} "
                "layers were not filled; does vLLM know this model's tensor names?"
            )
        return len(runner.encoder_cache or ())

    def sluice_guard_try(self, token_ids: list[int]) -> dict[str, Any] | None:
        """Rules of the loaded guard, and its trigger after these tokens; None where none is loaded.

        It is called after the probe: from now on, requests can't bring their own rules.
        """
        requests = self._sluice_guard()
        if requests is None:
            return None
        requests.started()
        trigger = requests.rules.guard().push_all(token_ids)
        found = None if trigger is None else [trigger.rule, trigger.at_token]
        return {"rules": requests.rules.plain(), "trigger": found}

    def sluice_guard_take(self, key: str) -> list[Any] | None:
        """[rule, at_token] if the guard ended the request of this key."""
        requests = self._sluice_guard()
        trigger = None if requests is None else requests.take(key)
        return None if trigger is None else [trigger.rule, trigger.at_token]

    def sluice_guard_cost(self) -> dict[str, int]:
        """Fields of `GuardCost` since the last call."""
        requests = self._sluice_guard()
        if requests is None:
            return {}
        cost = requests.cost.taken()
        return {name: getattr(cost, name) for name in ("spent_ns", "elapsed_ns", "steps", "tokens")}

    def _pack_on_cpu(self) -> None:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            if isinstance(experts, CPUUnquantizedExperts):
                experts.process_weights_after_loading(module)

    def _sluice_guard(self) -> GuardRequests | None:
        """From the processor that the model runner calls at every step."""
        sampler = getattr(self.model_runner, "sampler", None)
        loaded = list(getattr(sampler, "logits_processors", []))  # Model Runner V2
        if (batch := getattr(self.model_runner, "input_batch", None)) is not None:
            loaded += batch.logitsprocs.all
        return next((one.requests for one in loaded if isinstance(one, WorkerRepeatTerminate)), None)


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
