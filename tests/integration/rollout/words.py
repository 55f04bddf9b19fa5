"""A tokenizer of one token per word, and a tool that says three words: for examples that can be counted by hand."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.producers.agents.tools import tool

WORDS = "a b c d e f g h i j k l m n o p"
TEMPLATE = "{%- for message in messages -%}{{- message.content + ' ' -}}{%- endfor -%}"


def save_words_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Path:
    """Its template gives the contents and nothing else; no token ends a turn."""
    core = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(["<unk>", *WORDS.split()])}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


@tool
def three_words() -> str:
    """Say three words."""
    return "k l m"
