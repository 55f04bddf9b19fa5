"""The decode loop's steps, without threads: rows join, step together, and leave.

- Rows of the batch, of the cache and of the sampling table have one order.
- A row's first token comes from its prefill; a row that ends there never enters the batch.
- New weights: every running row is prefilled anew, as no cache may outlive its weights.
- A row whose token cannot be taken (NaN, a plugin that fails) leaves with its error; the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.errors import EngineError, RequestError
from workers.generation.backends.hf.cache import DecodeCache
from workers.generation.backends.hf.model import LoadedModel
from workers.generation.backends.hf.passes import forward
from workers.generation.backends.hf.prefill import prefill, prefill_groups
from workers.generation.backends.hf.rows import Row
from workers.generation.backends.hf.sampler import SamplingTable, sample
from workers.generation.limits import check_token_ids
from workers.guard.hf import triggered
from workers.guard.rows import force
from workers.guard.watch import GuardCost

Ended = tuple[Row, EngineError | None]
"""A row that is out, and the error that ended it if any."""


class Decoder:
    """The running batch. Used from one thread, under `torch.inference_mode`."""

    def __init__(self, model: LoadedModel, version: int, guard_cost: GuardCost | None = None) -> None:
        self.model = model
        self.version = version
        self.rows: list[Row] = []
        self._device = torch.device(model.facts.device)
        self._guard_cost = guard_cost or GuardCost()
        self._cache = DecodeCache(self._device)
        self._table: SamplingTable | None = None
        self._last = torch.zeros(0, dtype=torch.int64, device=self._device)  # (rows,): newest tokens

    def join(self, rows: Sequence[Row]) -> list[Ended]:
        """Prefill new rows and add them; those that ended at once, with the error that ended them if any."""
        ended: list[Ended] = []
        last: list[int] = []
        for group in prefill_groups(rows):
            ended += self._prefill(group, last)
        if last:
            self._last = torch.cat([self._last, torch.tensor(last, device=self._device)])
            self._table = self._table_of(self.rows)
        return ended

    def step(self) -> list[Ended]:
        """One token for every running row; the rows that ended, already taken out."""
        if self._table is None:
            self._table = self._table_of(self.rows)
        mask, positions = self._cache.open_step()
        logits = forward(self.model, self._last.unsqueeze(1), mask, positions, self._cache)[:, -1]
        self._cache.close_step()
        tokens, errors = self._sample(self.rows, logits, self._table)
        self._last = tokens
        self._table.advance(tokens)
        leaving = [index for index, row in enumerate(self.rows) if row.finish_reason or index in errors]
        ended = [(self.rows[index], errors.get(index)) for index in leaving]
        if leaving:
            self._remove(leaving)
        return ended

    def drop(self, rows: Sequence[Row]) -> None:
        """Take running rows out; their tokens so far stay with them."""
        gone = set(map(id, rows))
        leaving = [index for index, row in enumerate(self.rows) if id(row) in gone]
        if leaving:
            self._remove(leaving)

    def swap(self, version: int) -> list[Ended]:
        """The model's weights are those of `version` by now: prefill all running rows; those that ended at once."""
        rows, self.rows = self.rows, []
        self.version = version
        self._cache, self._table = DecodeCache(self._device), None
        self._last = self._last[:0]
        return self.join(rows)

    def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. given their prefix. Raises RequestError."""
        if len(token_ids) < 2:
            raise RequestError(f"a score needs at least 2 tokens, got {len(token_ids)}")
        check_token_ids("score", token_ids, self.model.facts.vocab_size)
        inputs = torch.tensor([list(token_ids)], device=self._device)
        logits = self.model.module(input_ids=inputs, use_cache=False).logits[0, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(1, inputs[0, 1:, None]).double().sum().item()

    def _prefill(self, rows: Sequence[Row], last: list[int]) -> list[Ended]:
        done, errors = prefill(self.model, rows, self.version)
        rows = [row for index, row in enumerate(rows) if index not in errors]
        ended: list[Ended] = [*errors.values()]
        if done is None or not rows:
            return ended
        pick = [index for number, index in enumerate(done.pick) if number not in errors]
        logits = done.logits[torch.tensor(pick, device=done.logits.device)]
        tokens, failed = self._sample(rows, logits, self._table_of(rows))
        stay = [index for index, row in enumerate(rows) if index not in failed and row.finish_reason is None]
        if stay:
            lengths = [len(rows[index].prompt) + len(rows[index].tokens) - 1 for index in stay]
            self._cache.admit(done.cache, [pick[index] for index in stay], lengths, done.offset)
            self.rows += [rows[index] for index in stay]
            drawn = tokens.tolist()
            last += [drawn[index] for index in stay]
        gone = set(range(len(rows))) - set(stay)
        return ended + [(rows[index], failed.get(index)) for index in sorted(gone)]

    def _sample(
        self, rows: Sequence[Row], logits: torch.Tensor, table: SamplingTable
    ) -> tuple[torch.Tensor, dict[int, EngineError]]:
        """One token for each row, taken by it: (tokens (rows,), errors by index)."""
        errors: dict[int, EngineError] = {}
        allowed = self._allowed(rows, logits, errors)
        loops = triggered(rows, self._guard_cost) if self.model.guard else {}
        if loops:
            ends = {index: rows[index].eos[0] for index in loops}
            allowed = force(logits.clone() if allowed is None else allowed, ends)
        tokens, logprobs = sample(logits, table, allowed)
        for index, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if index in errors:
                continue
            try:
                if index in loops:
                    row.end_loop(loops[index])
                else:
                    row.accept(token, logprob, self.version, logits[index])
            except EngineError as error:
                errors[index] = error
        return tokens, errors

    def _allowed(
        self, rows: Sequence[Row], logits: torch.Tensor, errors: dict[int, EngineError]
    ) -> torch.Tensor | None:
        """The logits as the rows' plugins and requests change them, or None where none does."""
        changed = [index for index, row in enumerate(rows) if row.hooks is not None or row.request.allowed_token_ids]
        if not changed:
            return None
        allowed = logits.clone()
        for index in changed:
            row = rows[index]
            if only := list(row.request.allowed_token_ids):
                allowed[index] = float("-inf")
                allowed[index, only] = logits[index, only]
            if row.hooks is None:
                continue
            try:
                allowed[index] = row.hooks.process(allowed[index])
            except EngineError as error:
                errors[index] = error
        return allowed

    def _remove(self, leaving: Sequence[int]) -> None:
        moves = self._cache.drop(leaving)
        remaining = len(self.rows) - len(leaving)
        for source, target in moves:
            self.rows[target] = self.rows[source]
            self._last[target] = self._last[source]
        del self.rows[remaining:]
        self._last = self._last[:remaining]
        self._table = None

    def _table_of(self, rows: Sequence[Row]) -> SamplingTable:
        return SamplingTable.of(
            [row.request.sampling for row in rows],
            [row.request.seed for row in rows],
            [(row.prompt, row.tokens) for row in rows],
            self.model.facts.vocab_size,
            self._device,
            processed=self.model.facts.logprobs_mode == "processed_logprobs",
        )
