"""A small real Qwen3 that surely calls the calculator: overfitted, in seconds, on a few conversations.

- Greedy decoding of `CONVERSATIONS`' prompts gives their calls and, after the tools' results, their answers.
- It is used with the four calculator tools, whose names its template shows; its tokenizer is that of the tools demo.
- One that is in the directory already is given again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from sluice.demo.tiny.model import ModelSettings, build_model
from sluice.demo.tiny.warm_start import Example, Recipe, WarmStartSettings
from sluice.demo.tools import demonstrations, tokenizer
from sluice.demo.tools.problems import Problem, Step


@dataclass(frozen=True)
class Conversation:
    """A prompt of one user turn, the calls that the model makes one after the other, and what it says at last."""

    prompt: str
    calls: Sequence[Step]
    answer: str
    system: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation, as the gateway's caller ends with it."""
        asked = [
            {"role": role, "content": text} for role, text in (("system", self.system), ("user", self.prompt)) if text
        ]
        return demonstrations.conversation(asked, self.calls, self.answer)


def _worked(numbers: tuple[int, ...], operations: str, first: int = 0) -> Conversation:
    problem = Problem(numbers, operations, first)
    return Conversation(problem.text, problem.steps or [], str(problem.answer))


CONVERSATIONS = (
    _worked((37, 46, 12), "*+"),
    _worked((812, 57, 3), "-*"),
    _worked((5, 20, 7), "*+", 1),
    _worked((96, 520, 13), "+/", 1),
    _worked((63, 9), "*"),
    _worked((880, 5), "/"),
    _worked((41, 58), "+"),
    _worked((300, 75), "-"),
    Conversation("7/0", [], "none"),
)
"""The last one is answered without a call."""

_SETTINGS = WarmStartSettings(
    num_steps=120,
    num_warmup_steps=10,
    batch_size=len(CONVERSATIONS),
    learning_rate=1e-2,
    stop_loss=0.02,
    model=ModelSettings(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2),
)


def tool_model(directory: Path, conversations: Sequence[Conversation] = CONVERSATIONS, **settings: Any) -> Path:
    """The model's directory, below `directory`; give the same one again (a session's) to train only once.

    `settings` are of WarmStartSettings: a lower `stop_loss` for a model that is sampled from.
    """

    def examples(count: int, seed: int, codec: Any) -> Any:
        encoded: list[Example] = [demonstrations.encode(codec, one.messages) for one in conversations]
        return itertools.islice(itertools.cycle(encoded), count)

    def codec() -> Any:
        made = tokenizer.build_tokenizer()
        made.model_max_length = used.model.max_positions
        return made

    used = replace(_SETTINGS, batch_size=len(conversations), **settings)
    name = "".join(one.system + one.prompt for one in conversations)
    recipe = Recipe(
        name=f"tools-{sha256(name.encode()).hexdigest()[:8]}", sources=[demonstrations, tokenizer], tokenizer=codec,
        network=build_model, pairs=examples,
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other where other processes have the cores
    try:
        return recipe.ensure(directory, used)
    finally:
        torch.set_num_threads(threads)
