"""A small fast tokenizer whose borders fall where the pipeline's token labels need them.

- Byte-level, so any text round-trips; digit words and the integers 0-999 are one token each.
- A split in front of the vocabulary keeps every value apart from the quotes, commas and brackets around it,
  so no token ever holds both structure and value.
- A whole pre-token that is in the vocabulary is that token (`ignore_merges`), so no merge is needed.
- Patch tokens and ChatML marks are special: they never arise from ordinary text by merging.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from demo.digits.patches import NUM_PATCHES, patch_token
from demo.digits.scenes import WORDS

TURN_START, TURN_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

STRUCTURE = ('{"object_', '": {"desc": "', '", "bbox_2d": [', ", ", "]}", ', "object_', "}")
"""The chunks of the answer literal between its values."""

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


def _escape(literal: str) -> str:
    """A literal inside an Oniguruma pattern."""
    return "".join(f"\\{char}" if char in '{}[]"|.()*+?^$' else char for char in literal)


def _split_pattern() -> str:
    """Known chunks first (longest first), then runs of up to three digits, letters, single others."""
    chunks = sorted((*STRUCTURE, *_ROLES), key=len, reverse=True)
    return "|".join([*map(_escape, chunks), _ORDINARY])


def _byte_level(text: str) -> str:
    """The spelling of a text in the byte-level alphabet."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def _vocabulary() -> dict[str, int]:
    """Bytes, integers 0-999, digit words, structure chunks and role names, in this order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    values = [*(str(number) for number in range(1000)), *WORDS, *STRUCTURE, *_ROLES]
    entries = dict.fromkeys([*alphabet, *map(_byte_level, values)])
    return {entry: index for index, entry in enumerate(entries)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the digits task, with its chat template; `save_pretrained` writes all of it."""
    core = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_split_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END, *map(patch_token, range(NUM_PATCHES))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer files so that `AutoTokenizer.from_pretrained(directory)` finds them."""
    build_tokenizer().save_pretrained(directory)
