"""The models benchmarks decode with, created once: in the demo's shape, random and endless, or with written loops.

- `demo_model`, `pictures_model`: the demo's Qwen3 and Qwen3-VL, random: sequences end only at their token limit.
- `endless_model`: 3 million random parameters whose greedy tokens are the same on every engine and never end.
- `looping_model`: every token has one successor, see `Chains`: a third of the loops repeat one token, the periods of
  the others are spread evenly over 2 to 64.
- `agent_model`: every token has one successor as well; the mark with which the chat template opens an assistant's turn
  says which chain follows. With tools each turn has exactly `TURN_TOKENS` tokens and calls the calculator; the last one
  answers. Without tools it never ends. What a turn is parsed to renders as it was sampled, so no call is a resync.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ENDLESS_CONTEXT, LOOPING_CONTEXT = 1024, 4096  # tokens
LEAD, HEALTHY = 256, 512  # tokens of the chain that leads into a loop, and of the one that ends
PERIODS = (*[1] * 8, *(2 + round(number * 62 / 15) for number in range(16)))
SHARPNESS = 30.0
"""The logit of a written successor; the others stay below half of it."""

_SPECIALS = ("<|pad|>", "<|end|>")
_ENDLESS = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": ENDLESS_CONTEXT, "initializer_range": 0.3,
}  # fmt: skip
_LOOPING = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": LOOPING_CONTEXT,
}  # fmt: skip

NUM_TURNS, TURN_TOKENS = 3, 32  # of the agent
_AGENT = {
    "hidden_size": 256, "intermediate_size": 768, "num_heads": 8, "num_kv_heads": 4, "max_positions": ENDLESS_CONTEXT,
}  # fmt: skip
_LARGE_AGENT = {
    "hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 16, "num_kv_heads": 8,
    "max_positions": 2 * ENDLESS_CONTEXT,
}  # fmt: skip
_AGAIN = 256  # tokens until it repeats
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


def cached(home: Path, name: str, parameters: Any, modules: Sequence[ModuleType], save: Callable[[Path], Any]) -> Path:
    """The directory `save` writes; written now unless an equal one exists."""
    from sluice.demo.tiny import cache

    libraries = {library: version(library) for library in ("torch", "transformers", "tokenizers")}
    target = home / f"{name}-{cache.content_key(parameters, modules, libraries)}"
    if not target.is_dir():
        with cache.written_aside(target) as aside:
            save(aside)
    return target.resolve()


def demo_model(home: Path) -> Path:
    from sluice.demo.digits import model, tokenizer

    return _random(home, "model", model.ModelSettings(), model, tokenizer, model.save_model)


def pictures_model(home: Path) -> Path:
    from sluice.demo.pictures import model, processor

    settings = model.ModelSettings(max_positions=1024)
    return _random(home, "pictures-model", settings, model, processor, processor.save_model)


def _random(home: Path, name: str, settings: Any, model: Any, codecs: Any, save_model: Callable[..., Any]) -> Path:
    """A model of the demo, from its modules."""
    from sluice.demo.tiny import model as shape
    from sluice.demo.tiny import tokenizer as words

    def save(directory: Path) -> None:
        codec = codecs.build_tokenizer()
        save_model(model.build_model(settings, codec), codec, directory)

    return cached(home, name, asdict(settings), [model, codecs, shape, words], save)


def endless_model(home: Path) -> Path:
    """Weights are wide, so the two best logits are far apart. Head size 32, which vLLM's CPU attention supports.

    Special tokens have a zero row in the (tied) embedding, so their logit is 0 and never the best.
    """

    def unsay_specials(model: Any) -> None:
        model.get_input_embeddings().weight[-len(_SPECIALS) :] = 0

    def save(directory: Path) -> None:
        signs = string.ascii_lowercase + string.digits
        pairs = [(left, right) for left in signs for right in signs]
        words = [left + right for left, right in pairs]
        tokenizer = byte_tokenizer(_SPECIALS, ENDLESS_CONTEXT, after=words, merges=pairs)
        _save_qwen3(directory, tokenizer, _ENDLESS, tied=True, edit=unsay_specials)

    return cached(home, "engine-model", _ENDLESS, [sys.modules[__name__]], save)


def looping_model(home: Path) -> Path:
    """Embeddings are random unit vectors; attention and feed-forward are computed and add nothing."""

    def save(directory: Path) -> None:
        import torch
        from tokenizers import Regex, pre_tokenizers

        chains = Chains.make()
        before = [*(word(token) for token in range(chains.healthy.stop)), *_SPECIALS]
        tokenizer = byte_tokenizer(_SPECIALS, LOOPING_CONTEXT, before=before)
        split = pre_tokenizers.Split(Regex("w[0-9]{5}"), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
        tokenizer.chat_template = "{{- messages[-1].content -}}"

        def write(model: Any) -> None:
            size = model.model.embed_tokens.weight.shape
            write_successors(model, torch.nn.functional.normalize(torch.randn(size), dim=-1), chains.successor)

        _save_qwen3(directory, tokenizer, _LOOPING, tied=False, edit=write)

    return cached(home, "loop-model", _LOOPING, [sys.modules[__name__]], save)


class Chains(NamedTuple):
    """Token ids: `loops` as (lead, loop), the chain that ends, and who follows whom (the last id is the end)."""

    loops: tuple[tuple[range, range], ...]
    healthy: range
    successor: dict[int, int]

    @classmethod
    def make(cls) -> Chains:
        """Always the same; ids number the words of the vocabulary from 0."""
        at, loops, successor = 0, list[tuple[range, range]](), dict[int, int]()
        for period in PERIODS:
            lead, loop = range(at, at + LEAD), range(at + LEAD, at + LEAD + period)
            successor |= {token: token + 1 for token in (*lead, *loop)} | {loop[-1]: loop[0]}
            loops.append((lead, loop))
            at = loop.stop
        healthy = range(at, at + HEALTHY)
        end = healthy.stop + 1  # after the padding
        successor |= {token: token + 1 for token in healthy} | {healthy[-1]: end, end: end}
        return cls(tuple(loops), healthy, successor)

    @property
    def end(self) -> int:
        return self.healthy.stop + 1

    def continuation(self, token: int, count: int) -> list[int]:
        return follow(self.successor, self.end, token, count)


def word(token: int) -> str:
    return f"w{token:05}"


def follow(successor: Mapping[int, int], end: int, token: int, count: int) -> list[int]:
    """At most `count` tokens after `token`, up to and including the end of sequence."""
    tokens: list[int] = []
    while len(tokens) < count and token != end:
        token = successor[token]
        tokens.append(token)
    return tokens


def write_successors(model: Any, vectors: Any, successor: Mapping[int, int], sharpness: float = SHARPNESS) -> None:
    """Make the logits of each token's successor `sharpness`, in a Qwen3, whatever comes before it.

    `vectors` float (vocab, hidden): embeddings of length 1, near to orthogonal. Under `torch.no_grad`.
    """
    import torch

    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(vectors)
    head = torch.zeros_like(vectors)
    head.index_add_(0, torch.tensor(list(successor.values())), vectors[torch.tensor(list(successor))])
    model.lm_head.weight.copy_(head * (sharpness / vectors.shape[1] ** 0.5))  # the last norm scales by sqrt


def byte_tokenizer(
    specials: Sequence[str], context: int, *, before: Sequence[str] = (), after: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> Any:  # fmt: skip
    """256 bytes, with words before or after them; of the special tokens the first is padding and the last the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet()), *after]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=bool(before)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=specials[-1], pad_token=specials[0], clean_up_tokenization_spaces=False,
        model_max_length=context,
    )  # fmt: skip


def _save_qwen3(
    directory: Path, tokenizer: Any, settings: Mapping[str, Any], *, tied: bool, edit: Callable[[Any], None]
) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    more: Any = {"bos_token_id": None, "tie_word_embeddings": tied, "dtype": "float32", **settings, **ids}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **more)).float()
        edit(model)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def agent_model(home: Path, *, large: bool = False) -> Path:
    """Directory of the model and its tokenizer; created now unless an equal one exists.

    `large`: 26 million parameters instead of 3, and twice the context.
    """
    from transformers.utils import logging

    from sluice.demo.tiny import model, tokenizer

    settings = model.ModelSettings(**(_LARGE_AGENT if large else _AGENT))

    def save(directory: Path) -> None:
        logging.disable_progress_bar()
        codec = _tokenizer(settings.max_positions)
        model.save_model(model.build_model(settings, codec, lambda made: _write(made, codec)), codec, directory)

    return cached(
        home,
        "agent-model-large" if large else "agent-model",
        asdict(settings),
        [sys.modules[__name__], model, tokenizer],
        save,
    )


def prompt_text(number: int, num_words: int) -> str:
    """A user message; the same number gives the same text, one token per word; others differ from its second on."""
    step = 7 + 2 * (number // _AGAIN)
    return "".join(_word("q", (number * 31 + place * step) % _AGAIN) for place in range(num_words))


def conversation(text: str, num_turns: int) -> list[dict[str, Any]]:
    """The messages after that many turns of a rollout about `text`, each turn a call with its result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for turn, words in enumerate(chains()[:num_turns]):
        called = {"name": _TOOL, "arguments": {"a": int(_A), "b": int(_B)}}
        calls = [{"id": f"call_{turn}", "type": "function", "function": called}]
        said = "".join(word for word in words if word.startswith(f"t{turn}_"))
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": str(int(_A) * int(_B))})
    return messages


def chains() -> list[list[str]]:
    """All chains in words, from mark to end; the endless one ends with its first word."""
    from sluice.demo.tiny.tokenizer import TURN_END
    from sluice.demo.tools.tokenizer import CALL

    start, arguments, second, end = CALL
    call = [start, _TOOL, arguments, _A, second, _B, end, TURN_END]
    found: list[list[str]] = []
    for turn, mark in enumerate(_MARKS):
        rest = call if turn < NUM_TURNS - 1 else [TURN_END]
        found.append([mark, *(_word(f"t{turn}", place) for place in range(TURN_TOKENS - len(rest))), *rest])
    endless = [_word("e", place) for place in range(_AGAIN)]
    return [*found, [_FREE, *endless, endless[0]]]


def _word(kind: str, number: int) -> str:
    """One token; it doesn't end in a blank, so text of words survives stripping."""
    return f"{kind}_{number};"


def _tokenizer(context: int) -> Any:
    from sluice.demo.tiny.tokenizer import TURN_END, build_tokenizer

    written = [word for chain in chains() for word in chain[1:] if word != TURN_END]
    chunks = dict.fromkeys([*written, *(_word("q", number) for number in range(_AGAIN)), "tool\n"])
    plain = (_TOOL, _A, _B)
    chosen = [chunk for chunk in chunks if chunk not in plain]
    tokenizer = build_tokenizer(words=plain, chunks=chosen, special=(*_MARKS, _FREE))
    tokenizer.model_max_length = context
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
