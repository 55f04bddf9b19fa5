"""What a plugin declares, and the check that it fits before anything is decoded; torch-free.

- A plugin says where it works (backends, request types) and which hooks it uses; nothing is tried out.
- Hooks are asked for anew for each sequence: what they return may hold state, and is called for that sequence alone,
  without padding: `input_ids` (1, prompt + generated) int64 and `scores` (1, vocabulary) fp32, as in transformers.
- A logits processor changes what is sampled; the reported logprobs stay those of the untouched logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from pipeline.errors import EngineError

Hook = Literal["stopping_criteria", "logits_processor"]
RequestType = Literal["text", "vlm"]


class GenerationPlugin:
    """Base of plugins; override what `hooks` names, and `clean_text` if the text is to be trimmed."""

    name: ClassVar[str] = ""
    backends: ClassVar[frozenset[str]] = frozenset({"hf", "vllm"})
    request_types: ClassVar[frozenset[RequestType]] = frozenset({"text", "vlm"})
    hooks: ClassVar[frozenset[Hook]] = frozenset()

    def stopping_criteria(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        """`transformers.StoppingCriteria` objects for one sequence; `prompt_len` tokens are the unpadded prompt."""
        return ()

    def logits_processors(self, prompt_len: int, tokenizer: Any) -> Sequence[Any]:
        """`transformers.LogitsProcessor` objects for one sequence."""
        return ()

    def clean_text(self, text: str) -> str:
        """The cleaned text, after stop strings were cut and white space stripped."""
        return text


def check_plugins(
    plugins: Iterable[GenerationPlugin], *, backend: str, hooks: frozenset[Hook], request_type: RequestType
) -> None:
    """Raise EngineError for a plugin that `backend`, which calls `hooks`, or this type of request cannot serve."""
    for plugin in plugins:
        name = plugin.name or type(plugin).__name__
        if backend not in plugin.backends:
            raise EngineError(
                f"plugin {name!r} works on {', '.join(sorted(plugin.backends))}, and the backend is {backend!r}; "
                "choose that backend or leave the plugin out"
            )
        if missing := sorted(plugin.hooks - hooks):
            raise EngineError(
                f"plugin {name!r} needs the hooks {', '.join(missing)}, which the {backend!r} backend does not call; "
                "use the hf backend or leave the plugin out"
            )
        if request_type not in plugin.request_types:
            raise EngineError(
                f"plugin {name!r} is for {', '.join(sorted(plugin.request_types))} requests, and these are "
                f"{request_type}; leave it out"
            )
