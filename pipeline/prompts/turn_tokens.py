"""What a new call adds to the tokens of a conversation: one rule for both ends of an agent's rollout.

    known: |── prompt ──|── sampled ──|      next call: |── known ──|── added, mask 0 ──| ─▶ sampled …

- Sampled tokens are never re-tokenised: the known ids stay unchanged, whatever the template makes of them.
- If the template renders the known part identically, the rest is added: len(template(messages)) - len(known).
- If not (white space, the JSON of a tool call, stripped thoughts), it is a resync: the rendered suffix after the
  sampled turn is added, found by counting the terminators up to the end of that turn.
- Every image part is one placeholder here; the engine expands it, and only it knows to how many tokens. So `known` is
  what the engine was given, not what it reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.admission import image_parts
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions, check_token_ids, conversation, render
from sluice.pipeline.wire.messages import Message


class TemplateDrift(RequestError):
    """The template gives no suffix after the sampled turn: what it adds depends on earlier messages."""


@dataclass(frozen=True, slots=True)
class Added:
    """Token ids after the known ones, and whether the sampled turn now renders differently."""

    token_ids: list[int]
    resynced: bool = False


@dataclass(frozen=True, slots=True)
class Renderer:
    """A tokenizer, its turn terminators, its template options, and the ids that stand for an image."""

    tokenizer: Any
    terminators: Collection[int]
    options: ChatTemplateOptions = field(default_factory=ChatTemplateOptions)
    placeholders: Mapping[int, str] = field(default_factory=dict[int, str])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages with the generation prompt, shape (prompt_len,). Raises RequestError, ModelError."""
        token_ids = self._rendered(messages)
        self._check(token_ids, messages)
        return token_ids

    def added(self, messages: Sequence[Message], *, at: int, known: Sequence[int]) -> Added:
        """The ids after the `known` ones, which end with the sampled turn `messages[at]`.

        Raises TemplateDrift if the template has no such suffix, RequestError if it rejects the messages, ModelError.
        """
        self._check_known(known, messages[: at + 1])
        whole = self._rendered(messages)
        if whole[: len(known)] == list(known):
            added = Added(whole[len(known) :])
        else:
            terminated = known[-1] in self.terminators if known else False
            added = Added(self._suffix(whole, messages, at, terminated), resynced=True)
        self._check(added.token_ids, messages[at + 1 :])
        return added

    def _check_known(self, known: Sequence[int], messages: Sequence[Message]) -> None:
        """Raise RequestError if the policy has sampled a placeholder: no engine can expand a prompt that holds it."""
        held = [token for token in known if token in self.placeholders]
        if len(held) > len(image_parts(messages)):
            raise RequestError(
                f"the model itself wrote an image placeholder ({self.placeholders[held[-1]]}) in an earlier turn, so "
                "no turn can follow; finish the rollout"
            )

    def _check(self, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Raise RequestError unless the ids have one placeholder for each image part of these messages."""
        num_images = len(image_parts(messages))
        if not num_images:
            check_token_ids(token_ids, self.placeholders)
            return
        if not self.placeholders:
            raise RequestError(f"the messages have {num_images} images, and this model takes none; take them out")
        found = sum(token in self.placeholders for token in token_ids)
        if found != num_images:
            raise RequestError(
                f"{num_images} image parts became {found} image placeholders: a text holds one, or the chat template "
                "does not show every part; take it out of the text, or use a template that shows images there"
            )

    def _rendered(self, messages: Sequence[Message], options: ChatTemplateOptions | None = None) -> list[int]:
        has_images = bool(image_parts(messages))
        token_ids = render(self.tokenizer, conversation(messages), options or self.options, images=has_images)
        return [*self._missing_bos(messages, token_ids), *token_ids] if has_images else token_ids

    def _missing_bos(self, messages: Sequence[Message], token_ids: Sequence[int]) -> list[int]:
        """The first token where a processor would write it: its templates leave it to the tokenizer.

        A conversation keeps the form of its first prompt: it is added only if that one has an image.
        """
        asked = list(takewhile(lambda message: message.get("role") != "assistant", messages))
        bos = self.tokenizer.bos_token_id
        if bos is None or token_ids[:1] == [bos] or not image_parts(asked):
            return []
        return [bos] if self.tokenizer.encode("")[:1] == [bos] else []

    def _suffix(self, whole: list[int], messages: Sequence[Message], at: int, terminated: bool) -> list[int]:
        turn = self._rendered(messages[: at + 1], replace(self.options, add_generation_prompt=False))
        before = self._count(self._rendered(messages[:at])) if at else 0
        ends = self._count(turn)
        if ends > before:
            place = [place for place, token in enumerate(whole) if token in self.terminators][ends - 1 : ends]
            if place:
                return whole[place[0] + 1 if terminated else place[0] :]
        elif whole[: len(turn)] == turn:
            return whole[len(turn) :]
        raise TemplateDrift(
            f"message {at}: the chat template renders it differently once others follow, so the new tokens are "
            "unknown; use a template that only appends"
        )

    def _count(self, token_ids: Sequence[int]) -> int:
        return sum(token in self.terminators for token in token_ids)
