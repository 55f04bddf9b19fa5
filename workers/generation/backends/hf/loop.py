"""The decode loop's steps, without threads: rows join, step together, and leave.

- Rows of the batch, of the cache and of the sampling table have one order.
- A row's first token comes from its prefill; a row that ends there never enters the batch.
- Equal contexts that join together are prefilled once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from pipeline.errors import EngineError
from workers.generation.backends.hf.cache import DecodeCache
from workers.generation.backends.hf.model import LoadedModel
from workers.generation.backends.hf.rows import Row
from workers.generation.backends.hf.sampler import SamplingTable, sample

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass; bounds its memory."""


class Decoder:
    """The running batch. Used from one thread, under `torch.inference_mode`."""

    def __init__(self, model: LoadedModel, version: int) -> None:
        self.model = model
        self.version = version
        self.rows: list[Row] = []
        self._device = torch.device(model.facts.device)
        self._cache = DecodeCache(self._device)
        self._table: SamplingTable | None = None
        self._last = torch.zeros(0, dtype=torch.int64, device=self._device)  # (rows,): newest tokens

    def join(self, rows: Sequence[Row]) -> list[tuple[Row, EngineError | None]]:
        """Prefill new rows and add them; those that ended at once, with the error that ended them if any."""
        ended: list[tuple[Row, EngineError | None]] = []
        last: list[int] = []
        for group in _prefill_groups(rows):
            ended += self._prefill(group, last)
        if last:
            self._last = torch.cat([self._last, torch.tensor(last, device=self._device)])
            self._table = self._table_of(self.rows)
        return ended

    def step(self) -> list[tuple[Row, EngineError | None]]:
        """One token for every running row; the rows that ended, already taken out."""
        if self._table is None:
            self._table = self._table_of(self.rows)
        mask, positions = self._cache.open_step()
        logits = self._forward(self._last.unsqueeze(1), mask, positions, self._cache)
        self._cache.close_step()
        tokens, logprobs = sample(logits, self._table)
        self._last = tokens
        self._table.advance(tokens)
        pairs = zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ended = [
            (index, row, error)
            for index, (row, token, logprob) in enumerate(pairs)
            for error in [self._push(row, token, logprob)]
            if error is not None or row.finish_reason is not None
        ]
        if ended:
            self._remove([index for index, _, _ in ended])
        return [(row, error) for _, row, error in ended]

    def drop(self, rows: Sequence[Row]) -> None:
        """Take running rows out; their tokens so far stay with them."""
        gone = set(map(id, rows))
        leaving = [index for index, row in enumerate(self.rows) if id(row) in gone]
        if leaving:
            self._remove(leaving)

    def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. given their prefix."""
        inputs = torch.tensor([list(token_ids)], device=self._device)
        logits = self.model.module(input_ids=inputs, use_cache=False).logits[0, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(1, inputs[0, 1:, None]).double().sum().item()

    def _prefill(self, rows: Sequence[Row], last: list[int]) -> list[tuple[Row, EngineError | None]]:
        unique: dict[tuple[int, ...], int] = {}
        pick = [unique.setdefault(tuple(row.context), len(unique)) for row in rows]
        inputs, mask = self._left_padded(list(unique))
        cache = DynamicCache()
        positions = (mask.cumsum(dim=-1) - 1).clamp_(min=0)
        logits = self._forward(inputs, mask, positions, cache)[torch.tensor(pick, device=self._device)]
        tokens, logprobs = sample(logits, self._table_of(rows))
        ended: list[tuple[Row, EngineError | None]] = []
        stay: list[int] = []
        lengths = [len(row.context) for row in rows]
        for index, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            error = self._push(rows[index], token, logprob)
            if error is not None or rows[index].finish_reason is not None:
                ended.append((rows[index], error))
            else:
                stay.append(index)
                last.append(token)
        if stay:
            self._cache.admit(cache, [pick[index] for index in stay], [lengths[index] for index in stay])
            self.rows += [rows[index] for index in stay]
        return ended

    def _push(self, row: Row, token: int, logprob: float) -> EngineError | None:
        try:
            row.push(token, logprob, self.version)
        except EngineError as error:
            return error
        return None

    def _remove(self, leaving: Sequence[int]) -> None:
        moves = self._cache.drop(leaving)
        remaining = len(self.rows) - len(leaving)
        for source, target in moves:
            self.rows[target] = self.rows[source]
            self._last[target] = self._last[source]
        del self.rows[remaining:]
        self._last = self._last[:remaining]
        self._table = None

    def _forward(
        self,
        inputs: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DecodeCache | DynamicCache,
    ) -> torch.Tensor:
        """float32 logits of the last position, (rows, vocab)."""
        output = self.model.module(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **self.model.last_logits_only,
        )
        return output.logits[:, -1].float()

    def _left_padded(self, contexts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, mask), both (rows, longest)."""
        width = max(map(len, contexts))
        pad = self.model.pad_token_id
        padded = [[pad] * (width - len(context)) + list(context) for context in contexts]
        starts = torch.tensor([width - len(context) for context in contexts], device=self._device)
        mask = torch.arange(width, device=self._device) >= starts.unsqueeze(1)
        return torch.tensor(padded, device=self._device), mask

    def _table_of(self, rows: Sequence[Row]) -> SamplingTable:
        return SamplingTable.of(
            [row.request.sampling for row in rows],
            [row.request.seed for row in rows],
            [(row.prompt, row.tokens) for row in rows],
            self.model.facts.vocab_size,
            self._device,
        )


def _prefill_groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of like length together, at most PREFILL_TOKENS padded tokens a group (or one row)."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.context), reverse=True):
        if group and len(group[0].context) * (len(group) + 1) > PREFILL_TOKENS:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
