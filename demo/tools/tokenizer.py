"""The tokenizer of the tools task: ChatML with tools, and tool calls as Hermes models write them.

    <tool_call>\n{"name": "multiply", "arguments": {"a": 37, "b": 46}}\n</tool_call>

- A parsed call renders exactly as the model writes it, so a rollout's tokens and its messages agree.
- The fixed pieces of a call are one token each, and ordinary text: decoding without special tokens keeps them.
- Of the tools only the names are rendered, in alphabetical order; without tools, nothing.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from sluice.demo.tiny import tokenizer as tiny
from sluice.demo.tools.problems import TOOL_OF

CALL = ('<tool_call>\n{"name": "', '", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>")
"""The pieces of a call around its values."""

_TOOL_ROLE = "tool\n"
_SHOWN = "Tools: "

CHAT_TEMPLATE = """\
{#- ChatML with tools. `enable_thinking` is accepted and has no effect: this model never thinks aloud. -#}
{%- if tools -%}
{{- '<|im_start|>system\\nTools: ' + (tools | map(attribute='function.name') | sort | join(' ')) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template; `save_pretrained` writes all of it."""
    words = [*(str(number) for number in range(1000)), *TOOL_OF.values()]
    tokenizer = tiny.build_tokenizer(words=words, chunks=(*CALL, _TOOL_ROLE, _SHOWN))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def call_text(tool: str, a: int | str, b: int | str) -> str:
    """A call as the model writes it."""
    start, arguments, second, end = CALL
    return f"{start}{tool}{arguments}{a}{second}{b}{end}"
