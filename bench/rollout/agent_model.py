"""A Qwen3 that plays an agent, written by hand: with tools it calls the calculator, turn after turn, and then answers.

- Every token has one successor (see `bench/models.py`); the mark with which the chat template opens an
  assistant's turn says which chain follows. All layers are computed, and add nothing.
- With tools each turn has exactly `TURN_TOKENS` tokens, and the last one is an answer. Without tools it never ends.
- What a turn is parsed to renders as it was sampled, so that no call is a resync.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from sluice.bench.models import cached, write_successors
from sluice.demo.tiny.model import ModelSettings
from sluice.demo.tiny.tokenizer import TURN_END

NUM_TURNS = 3
TURN_TOKENS = 32
CONTEXT = 1024
SETTINGS = ModelSettings(
    hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4, max_positions=CONTEXT, seed=0
)  # that of `bench engine`

_ENDLESS = 256  # tokens until it begins again
_TOOL, _A, _B = "multiply", "37", "46"
_FREE = "<|free|>"
_MARKS = tuple(f"<|turn{turn}|>" for turn in range(NUM_TURNS))

CHAT_TEMPLATE = """\
{%- set ns = namespace(turn=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{{- '<|turn' ~ ns.turn ~ '|>' if tools else '<|free|>' -}}
{%- set ns.turn = ns.turn + 1 -%}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' ~ ('<|turn' ~ ns.turn ~ '|>' if tools else '<|free|>') -}}
{%- endif -%}
"""


def agent_model(home: Path) -> Path:
    """Directory of the model and its tokenizer; made now unless an equal one is there."""
    from sluice.demo.tiny import model, tokenizer

    def save(directory: Path) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        codec = _tokenizer()
        network = model.build_model(SETTINGS, codec, lambda network: _write(network, codec))
        model.save_model(network, codec, directory)

    return cached(home, "agent-model", asdict(SETTINGS), [sys.modules[__name__], model, tokenizer], save)


def prompt_text(number: int, num_words: int) -> str:
    """What a user says; the same number gives the same text, of one token a word."""
    return "".join(_word("q", (number * 31 + place * 7) % _ENDLESS) for place in range(num_words))


def conversation(text: str, num_turns: int) -> list[dict[str, Any]]:
    """What the model is asked after so many turns of a rollout about `text`, all of them calls with their results."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for turn, words in enumerate(chains()[:num_turns]):
        called = {"name": _TOOL, "arguments": {"a": int(_A), "b": int(_B)}}
        calls = [{"id": f"call_{turn}", "type": "function", "function": called}]
        said = "".join(word for word in words if word.startswith(f"t{turn}_"))
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": str(int(_A) * int(_B))})
    return messages


def chains() -> list[list[str]]:
    """Each in words, from its mark to its end; the endless one ends with its first word."""
    from sluice.demo.tools.tokenizer import CALL

    start, arguments, second, end = CALL
    call = [start, _TOOL, arguments, _A, second, _B, end, TURN_END]
    found: list[list[str]] = []
    for turn, mark in enumerate(_MARKS):
        rest = call if turn < NUM_TURNS - 1 else [TURN_END]
        found.append([mark, *(_word(f"t{turn}", place) for place in range(TURN_TOKENS - len(rest))), *rest])
    endless = [_word("e", place) for place in range(_ENDLESS)]
    return [*found, [_FREE, *endless, endless[0]]]


def _word(kind: str, number: int) -> str:
    """One token; its end is no blank, so that text of words survives being stripped."""
    return f"{kind}_{number};"


def _tokenizer() -> Any:
    from sluice.demo.tiny.tokenizer import build_tokenizer

    written = [word for chain in chains() for word in chain[1:] if word != TURN_END]
    chunks = dict.fromkeys([*written, *(_word("q", number) for number in range(_ENDLESS)), "tool\n"])
    plain = (_TOOL, _A, _B)
    tokenizer = build_tokenizer(
        words=plain, chunks=[chunk for chunk in chunks if chunk not in plain], special=(*_MARKS, _FREE)
    )
    tokenizer.model_max_length = CONTEXT
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _write(network: Any, codec: Any) -> None:
    """Under `torch.no_grad`."""
    import torch

    ids = [[token for (token,) in (codec.encode(word, add_special_tokens=False) for word in one)] for one in chains()]
    steps = [step for chain in ids for step in pairwise(chain)]
    network.config.tie_word_embeddings = False
    network.lm_head.weight = torch.nn.Parameter(torch.empty_like(network.lm_head.weight))
    embedding = network.model.embed_tokens.weight
    vectors = torch.nn.functional.normalize(torch.randn(embedding.shape), dim=-1)
    write_successors(network, vectors, dict(steps))
