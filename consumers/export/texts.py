"""Exports of rewarded sequences as text, in the shapes that TRL's trainers take.

| shape | a row | for |
|---|---|---|
| completion | prompt, completion, reward | SFT on chosen answers |
| preference | prompt, chosen, rejected, and their rewards | DPO: best and worst answer of a group to one prompt |
| unpaired | prompt, completion, label | KTO: whether the answer is better than its group |

- A text can't say which of its tokens were sampled: sequences with tool output between turns are left out.
- A reward is of what was sampled. Where a task put other text in its place, such as the truth, the worker's result has
  the answer; without the result, the sequence is left out. An end that a guard forced or a task added may stay.
- Of a group whose rewards are all equal nothing is better than the rest.
- Branches of a forked rollout may have different prompts, and only answers to the same one are compared: a group can
  have a pair for each. Of branches with the same prompt the first counts, which is the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, Literal, NamedTuple

from sluice.consumers.tasks.task import TextCodec
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample
from sluice.pipeline.wire.sampled_tokens import SampledTokens

TextShape = Literal["completion", "preference", "unpaired"]
Row = dict[str, Any]
Left = tuple[str, TrainingSample]
"""A rule of LEFT_OUT, and the sequence."""

LEFT_OUT = {
    "no_reward": "no reward",
    "no_contrast": "groups whose answers are equally good",
    "other_prompt": "branches of a rollout: no other rollout of their group has their prompt, or a newer branch has it",
    "tool_output": "text between turns that the model didn't write; --to datasets exports it with its mask",
    "not_sampled": "text that the model didn't write, such as the truth in place of its answer; a run with "
    "history.enabled has the answer, and exports it",
    "has_images": "images; --shape tokens exports them where they have weights, --to datasets always",
}


class _Answer(NamedTuple):
    """The tokens that a sequence's reward is of."""

    sample: TrainingSample
    prompt: list[int]
    completion: SampledTokens

    @property
    def reward(self) -> float:
        return self.sample.reward or 0.0


class TextShapes:
    """Rows of one export; `reread` counts texts that are tokenised to other ids than those sampled."""

    def __init__(self, shape: TextShape, codec: TextCodec) -> None:
        self._shape, self._codec, self.reread = shape, codec, 0

    def rows(self, found: Iterable[tuple[TrainingSample, SequenceResult | None]]) -> Iterator[Row | Left]:
        """Rows, and what gives none. The samples of a group follow each other; None: the result isn't known."""
        for _, group in groupby(found, key=lambda one: one[0].group_id):
            usable: list[_Answer] = []
            for sample, result in group:
                tokens, at = sample.sampled, sample.prompt_len
                answer = _Answer(sample, tokens.token_ids[:at], tokens[at:])
                rule = self._obstacle(answer)
                if rule == "not_sampled" and result is not None:
                    answer = _Answer(sample, list(result.prompt_token_ids), result.sampled)
                    rule = self._obstacle(answer)
                if rule:
                    yield rule, sample
                else:
                    usable.append(answer)
            yield from self._pairs(usable) if self._shape == "preference" else self._singles(usable)

    def _obstacle(self, answer: _Answer) -> str:
        if answer.sample.reward is None:
            return "no_reward"
        if answer.sample.images:
            return "has_images"
        ids, was_sampled = answer.completion.token_ids, answer.completion.was_sampled
        if [sampled for sampled, _ in groupby(was_sampled)].count(True) > 1:
            return "tool_output"
        others = {token for token, sampled in zip(ids, was_sampled, strict=True) if not sampled}
        # A guard forces an end of turn, and a task adds the one that a cut answer lacks.
        return "" if others <= set(self._codec.eos_token_ids) else "not_sampled"

    def _pairs(self, answers: list[_Answer]) -> Iterator[Row | Left]:
        prompts: dict[tuple[int, ...], dict[int | str, _Answer]] = {}
        for answer in answers:
            sample, rivals = answer.sample, prompts.setdefault(tuple(answer.prompt), {})
            if rivals.setdefault(sample.seq_id if sample.index < 0 else sample.index, answer) is not answer:
                yield "other_prompt", sample
        for rivals in prompts.values():
            ranked = sorted(rivals.values(), key=lambda answer: answer.reward)
            worst, best = ranked[0], ranked[-1]
            if best.reward == worst.reward:
                is_alone = len(rivals) == 1 and len(prompts) > 1
                yield "other_prompt" if is_alone else "no_contrast", worst.sample
                continue
            prompt, chosen = self._texts(best)
            _, rejected = self._texts(worst)
            rewards = {"chosen_reward": best.reward, "rejected_reward": worst.reward}
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, **rewards}

    def _singles(self, answers: list[_Answer]) -> Iterator[Row | Left]:
        for answer in answers:
            is_better = _is_better(answer, answers)
            if self._shape == "unpaired" and is_better is None:
                yield "no_contrast", answer.sample
                continue
            prompt, completion = self._texts(answer)
            told: Row = {"label": is_better} if self._shape == "unpaired" else {"reward": answer.reward}
            yield {"prompt": prompt, "completion": completion, **told}

    def _texts(self, answer: _Answer) -> tuple[str, str]:
        """Prompt and completion, special tokens spelled out."""
        ids = answer.completion.token_ids
        prompt, completion = self._codec.decode(answer.prompt), self._codec.decode(ids)
        self.reread += self._codec.encode(prompt) + self._codec.encode(completion) != [*answer.prompt, *ids]
        return prompt, completion


def _is_better(answer: _Answer, group: Sequence[_Answer]) -> bool | None:
    """Than its group; None: as good. Without an advantage the rewards decide, and whether a lone answer has one."""
    advantage, rewards = answer.sample.advantage, [one.reward for one in group]
    if advantage is None and len(group) == 1:
        return answer.reward > 0
    if advantage is None:
        advantage = 0.0 if min(rewards) == max(rewards) else answer.reward - fmean(rewards)
    return advantage > 0 if advantage else None


def text_columns(arrow: Any, shape: TextShape) -> Any:
    """The schema of the rows; `arrow` is the module pyarrow."""
    text, number = arrow.string(), arrow.float64()
    told = {
        "completion": [("completion", text), ("reward", number)],
        "preference": [("chosen", text), ("rejected", text), ("chosen_reward", number), ("rejected_reward", number)],
        "unpaired": [("completion", text), ("label", arrow.bool_())],
    }
    return arrow.schema([("prompt", text), *told[shape]])
