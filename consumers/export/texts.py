"""Exports of rewarded sequences as text, in the shapes that TRL's trainers take.

| shape | a row | for |
|---|---|---|
| completion | prompt, completion, reward | SFT on chosen answers |
| preference | prompt, chosen, rejected, and their rewards | DPO: best and worst answer of a group |
| unpaired | prompt, completion, label | KTO: whether the answer is better than its group |

- A text can't say which of its tokens were sampled: sequences with tool output between turns are left out.
- Of a group whose rewards are all equal nothing is better than the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Literal

from sluice.consumers.tasks.task import TextCodec
from sluice.pipeline.wire.messages import TrainingSample

TextShape = Literal["completion", "preference", "unpaired"]
Row = dict[str, Any]
Left = tuple[str, TrainingSample]
"""A rule of LEFT_OUT, and the sequence."""

LEFT_OUT = {
    "no_reward": "no reward",
    "no_contrast": "groups whose answers are equally good",
    "tool_output": "text between turns that the model didn't write; --to datasets exports it with its mask",
    "has_images": "images; --shape tokens exports them where they have weights, --to datasets always",
}


class TextShapes:
    """Rows of one export; `reread` counts texts that are tokenised to other ids than those sampled."""

    def __init__(self, shape: TextShape, codec: TextCodec) -> None:
        self._shape, self._codec, self.reread = shape, codec, 0

    def rows(self, samples: Iterable[TrainingSample]) -> Iterator[Row | Left]:
        """Rows, and what gives none. The samples of a group follow each other."""
        for _, group in groupby(samples, key=lambda sample: sample.group_id):
            usable: list[TrainingSample] = []
            for sample in group:
                if rule := _obstacle(sample):
                    yield rule, sample
                else:
                    usable.append(sample)
            if usable:
                yield from self._of_group(usable)

    def _of_group(self, samples: list[TrainingSample]) -> Iterator[Row | Left]:
        if self._shape == "preference":
            ranked = sorted(samples, key=_reward)
            worst, best = ranked[0], ranked[-1]
            if _reward(best) == _reward(worst):
                yield "no_contrast", samples[0]
                return
            prompt, chosen = self._texts(best)
            _, rejected = self._texts(worst)
            rewards = {"chosen_reward": _reward(best), "rejected_reward": _reward(worst)}
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, **rewards}
            return
        for sample in samples:
            better = _reward(sample) if sample.advantage is None else sample.advantage
            if self._shape == "unpaired" and better == 0:
                yield "no_contrast", sample
                continue
            prompt, completion = self._texts(sample)
            told: Row = {"label": better > 0} if self._shape == "unpaired" else {"reward": _reward(sample)}
            yield {"prompt": prompt, "completion": completion, **told}

    def _texts(self, sample: TrainingSample) -> tuple[str, str]:
        """Prompt and completion, special tokens spelled out."""
        ids, at = list(sample.token_ids), sample.prompt_len
        prompt, completion = self._codec.decode(ids[:at]), self._codec.decode(ids[at:])
        self.reread += self._codec.encode(prompt) + self._codec.encode(completion) != ids
        return prompt, completion


def text_columns(arrow: Any, shape: TextShape) -> Any:
    """The schema of the rows; `arrow` is the module pyarrow."""
    text, number = arrow.string(), arrow.float64()
    told = {
        "completion": [("completion", text), ("reward", number)],
        "preference": [("chosen", text), ("rejected", text), ("chosen_reward", number), ("rejected_reward", number)],
        "unpaired": [("completion", text), ("label", arrow.bool_())],
    }
    return arrow.schema([("prompt", text), *told[shape]])


def _obstacle(sample: TrainingSample) -> str:
    if sample.reward is None:
        return "no_reward"
    if sample.images:
        return "has_images"
    runs = [was_sampled for was_sampled, _ in groupby(sample.sampled.was_sampled[sample.prompt_len :])]
    return "tool_output" if runs.count(True) > 1 else ""


def _reward(sample: TrainingSample) -> float:
    return sample.reward or 0.0
