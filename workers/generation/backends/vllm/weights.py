"""Weights into the running engine, called inside vLLM's workers by `collective_rpc`.

- vLLM's own reload packs linear layers anew; on CPUs it forgets a head that is tied to the embedding, whose packed
  copy stays the old one. That is done here.
- Names, shapes and ties were checked before; what fails here leaves the model torn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from workers.generation.weight_files import open_weights


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any

    def sluice_load_weights(self, directory: str, names: dict[str, str]) -> None:
        """Load each tensor of the directory's safetensors under the name that `names` gives it."""
        with ExitStack() as stack:
            sources = open_weights(Path(directory), stack)

            def tensors() -> Iterator[tuple[str, Any]]:
                for source, name in names.items():
                    yield name, sources[source].get_tensor(source)

            self.model_runner.reload_weights(weights_iterator=tensors())
        self._pack_embeddings()

    def _pack_embeddings(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
