"""A small fast tokenizer with token boundaries where a task needs them.

- Byte-level, so any text round-trips; a task names the words and the chunks of text that are one token each.
- A split before the vocabulary lookup separates every value from the quotes, commas and brackets around it,
  so no token contains both structure and value.
- A whole pre-token that is in the vocabulary is that token (`ignore_merges`), so no merge is needed.
- ChatML marks, and a task's special tokens, never come from ordinary text by merging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TURN_START, TURN_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

_ROLES = ("system\n", "user\n", "assistant\n")
_ORDINARY = r"[0-9]{1,3}|\p{L}+|[^0-9\p{L}]"

CHAT_TEMPLATE = """\
{#- ChatML. `enable_thinking` is accepted and has no effect: this model never thinks aloud. -#}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer(
    *, words: Iterable[str] = (), chunks: Sequence[str] = (), special: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer with its chat template; `save_pretrained` writes all of it.

    `words` (runs of letters, or up to three digits) and `chunks` (any text) are one token each, besides the 256 bytes.
    """
    chunks = (*chunks, *_ROLES)
    core = Tokenizer(models.BPE(vocab=_vocabulary((*words, *chunks)), merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_split_pattern(chunks)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END, *special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _escape(literal: str) -> str:
    """A literal escaped for an Oniguruma pattern."""
    return "".join(f"\\{char}" if char in '{}[]"|.()*+?^$' else char for char in literal)


def _split_pattern(chunks: Sequence[str]) -> str:
    """Known chunks first (longest first), then runs of up to three digits, letters, other single characters."""
    return "|".join([*map(_escape, sorted(chunks, key=len, reverse=True)), _ORDINARY])


def _byte_level(text: str) -> str:
    """A text spelled in the byte-level alphabet."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def _vocabulary(values: Iterable[str]) -> dict[str, int]:
    """Bytes, then the values, in this order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = dict.fromkeys([*alphabet, *map(_byte_level, values)])
    return {entry: index for index, entry in enumerate(entries)}
