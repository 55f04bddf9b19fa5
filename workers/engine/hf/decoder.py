"""The steps of the decode loop, without threads: rows join, step together, and leave.

- Rows of the batch, the cache and the sampling table have the same order.
- A row's first token comes from its prefill; a row that ends there never enters the batch, nor does one that may not
  begin under its policy's version.
- Equal contexts are prefilled once. A prompt with images is prefilled alone.
- A prompt that begins with a kept sequence (cache.py) is prefilled from there on.
- New weights: every running row is prefilled again, because a cache must not outlive its weights, at the swap or before
  it (`standby`). The same pass scores the tokens sampled under the previous version: their proximal logprobs.
- Where the user accepts stale caches (`EngineFacts.keeps_cache`), running rows go on over theirs instead, unscored.
- A new version of one adapter does that to its own rows alone: a row's version, cache and passes are its policy's.
- A row that can't take its token (NaN, a failing plugin) leaves with its error; the others continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sluice.pipeline.errors import EngineError, RequestError
from sluice.pipeline.wire.sampled_tokens import Place, Ranked
from sluice.workers.engine.adapters import OWN, Policies, Policy
from sluice.workers.engine.constraints import NO_TOKEN
from sluice.workers.engine.contracts import WrongVersion, check_start
from sluice.workers.engine.hf.adapters import Lora
from sluice.workers.engine.hf.cache import DecodeCache, PrefillCache, Prefix, PrefixCache
from sluice.workers.engine.hf.model import LoadedModel
from sluice.workers.engine.hf.passes import (
    forward,
    forward_scored,
    groups_by_length,
    left_padded,
    prompt_ranked,
    summed_logprob,
)
from sluice.workers.engine.hf.rows import Row
from sluice.workers.engine.hf.standby import Context, Slice
from sluice.workers.engine.hf.vision import prefill_image
from sluice.workers.engine.sampling import SamplingTable, places_of, sample
from sluice.workers.guard.watch import GuardCost, force, triggered

Ended = tuple[Row, EngineError | None]
"""A row that is out, and the error that ended it if any."""
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass; bounds its memory."""
Errors = dict[int, tuple[Row, EngineError]]
"""Rows of the group that failed, by index."""
Pasts = Mapping[int, tuple[Prefix, int]]
"""By row id: a kept sequence, and how many of its tokens the row's prompt begins with."""
_NO_PASTS: Pasts = {}
_ALIKE_TOKENS = 64
_Scores = list[list[float]]


class Decoder:
    """The running batch. Used from one thread, under `torch.inference_mode`."""

    def __init__(
        self, model: LoadedModel, version: int, guard_cost: GuardCost | None = None, prefix_bytes: int = 0
    ) -> None:
        """`prefix_bytes`: most that is kept of sequences that ended, for those that go on from them."""
        self.model = model
        self.prefixes = PrefixCache(prefix_bytes)
        self.policies = Policies(version)
        self.rows: list[Row] = []
        self._device = torch.device(model.facts.device)
        self._guard_cost = guard_cost or GuardCost()
        self._cache = DecodeCache(self._device)
        self._table: SamplingTable | None = None
        self._last = torch.zeros(0, dtype=torch.int64, device=self._device)  # (rows,): newest tokens

    def join(self, rows: Sequence[Row]) -> list[Ended]:
        """Prefill new rows and add them; returns those that ended at once, with their error if any."""
        rows, ended = self._startable(rows)
        last: list[int] = []
        pasts = self._pasts(rows)
        for group in prefill_groups(rows, pasts):
            ended += self._prefill(group, last, pasts)
        if last:
            self._last = torch.cat([self._last, torch.tensor(last, device=self._device)])
            self._table = self._table_of(self.rows)
        return ended

    def step(self) -> list[Ended]:
        """Decode one token for every running row; returns the rows that ended, already removed."""
        if self._table is None:
            self._table = self._table_of(self.rows)
        mask, positions = self._cache.open_step()
        with self.model.adapters.rows([_policy(row).lora for row in self.rows]):
            logits = forward(self.model, self._last.unsqueeze(1), mask, positions, self._cache)[:, -1]
        self._cache.close_step()
        tokens, errors = self._sample(self.rows, logits, self._table)
        self._last = tokens
        self._table.advance(tokens)
        leaving = [index for index, row in enumerate(self.rows) if row.finish_reason or index in errors]
        ended = [(self.rows[index], errors.get(index)) for index in leaving]
        if leaving:
            self._keep(index for index in leaving if index not in errors)
            self._remove(leaving)
        return ended

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove running rows; they keep their tokens."""
        gone = set(map(id, rows))
        leaving = [index for index, row in enumerate(self.rows) if id(row) in gone]
        if leaving:
            self._remove(leaving)

    def contexts(self, version: int, parent: int | None) -> dict[int, Context]:
        """The running rows by id, and what of them is to be scored under `version`."""
        found: dict[int, Context] = {}
        for row in self.rows:
            ids, unscored = row.context, row.unscored(version, parent)
            found[id(row)] = Context(row, ids, len(row.prompt) + unscored[0] if unscored else len(ids))
        return found

    def swap(
        self, version: int, parent: int | None = None, model: LoadedModel | None = None, slices: Sequence[Slice] = ()
    ) -> list[Ended]:
        """Go on with the weights of `version`; returns rows that ended at once.

        `parent`: the version that `version` was published from; None: the number before. `model` has its weights; None:
        the model in use, which has changed. `slices` hold running rows that were prefilled under them; all others are
        prefilled now.
        """
        if self.model.facts.keeps_cache:
            self.model = model or self.model
            self.switch(OWN, Policy(version, parent))
            return []
        contexts = self.contexts(version, parent) if slices else {}
        rows, self.rows = self.rows, []
        self.model = model or self.model
        self.policies.put(OWN, Policy(version, parent))
        self.prefixes.forget()
        self._cache.empty(max((len(row.prompt) + len(row.tokens) for row in rows), default=0))
        self._table, self._last = None, self._last[:0]
        ended = [one for part in slices for one in self._take(part, contexts)]
        taken = {id(row) for part in slices for row in part.rows}
        return ended + self.join([row for row in rows if id(row) not in taken])

    def switch(self, name: str, policy: Policy) -> tuple[list[Ended], Policy | None]:
        """Prefill the rows of this name under its new policy; returns rows that ended at once, and the old policy."""
        rows = [row for row in self.rows if row.request.adapter == name]
        before = self.policies.put(name, policy)
        if before is not None:
            self.prefixes.forget(before)
        if self.model.facts.keeps_cache:
            for row in rows:
                row.policy = policy
            return [], before
        self.drop(rows)
        return self.join(rows), before

    def score(self, token_ids: Sequence[int], lora: Lora | None = None) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. given their prefix. Raises RequestError."""
        with self.model.adapters.rows([lora]):
            return summed_logprob(self.model, token_ids)

    def _startable(self, rows: Sequence[Row]) -> tuple[list[Row], list[Ended]]:
        """Rows that their policies may begin or continue, and the others with their errors."""
        found: list[Row] = []
        others: list[Ended] = []
        for row in rows:
            try:
                if not row.tokens:
                    check_start(row.request, self.policies.of(row.request.adapter).version)
                found.append(row)
            except WrongVersion as error:
                others.append((row, error))
        return found, others

    def _take(self, part: Slice, contexts: Mapping[int, Context]) -> list[Ended]:
        """Add the slice's rows that still run, with their caches; returns those that failed."""
        part.extend(self.model, contexts)
        policy = self.policies.of(OWN)
        scored = part.score(contexts, policy.version, policy.parent)
        stay = [index for index, error in scored.items() if error is None]
        if stay:
            known = [contexts[id(part.rows[index])] for index in stay]
            self._cache.admit(part.cache, stay, [len(one.token_ids) - 1 for one in known])
            for one in known:
                one.row.policy = policy
            self.rows += [one.row for one in known]
            newest = torch.tensor([one.token_ids[-1] for one in known], device=self._device)
            self._last = torch.cat([self._last, newest])
        return [(part.rows[index], error) for index, error in scored.items() if error is not None]

    def _keep(self, leaving: Iterable[int]) -> None:
        """Keep what rows that ended have cached, where another sequence may go on from them."""
        for index in leaving:
            row = self.rows[index]
            wanted = self.prefixes.max_bytes and row.request.goes_on and row.vision is None
            # A row that went on over a swap without a prefill has keys of the weights before.
            stale = self.model.facts.keeps_cache and {*row.sampled.versions} != {_policy(row).version}
            if wanted and not stale and self._cache.is_attention:
                layers, length = self._cache.row(index)
                self.prefixes.keep(row.context[:length], layers, _policy(row))

    def _pasts(self, rows: Sequence[Row]) -> Pasts:
        """By row id, what is kept of its prompt. The last token is always prefilled: its logits are sampled from."""
        pasts: dict[int, tuple[Prefix, int]] = {}
        for row in rows if len(self.prefixes) else ():
            wanted = row.request.goes_on and row.vision is None
            if wanted and not row.tokens:  # tokens so far are scored, which needs their logits
                found = self.prefixes.longest(row.prompt[:-1], self.policies.of(row.request.adapter))
                if found is not None:
                    pasts[id(row)] = found
        return pasts

    def _prefill(self, rows: Sequence[Row], last: list[int], pasts: Pasts) -> list[Ended]:
        done, errors = prefill(self.model, rows, self.policies, pasts)
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
        """Sample one token per row and push it to the row: (tokens (rows,), errors by index)."""
        errors: dict[int, EngineError] = {}
        allowed = self._allowed(rows, logits, errors)
        loops = triggered(rows, self._guard_cost) if self.model.guard else {}
        if loops:
            ends = {index: rows[index].eos[0] for index in loops}
            allowed = force(logits.clone() if allowed is None else allowed, ends)
        tokens, logprobs = sample(logits, table, allowed)
        places = _places(rows, logits, tokens)
        for index, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if index in errors:
                continue
            try:
                if index in loops:
                    row.end_loop(loops[index])
                else:
                    row.accept(token, logprob, _policy(row).version, logits[index], places.get(index))
            except EngineError as error:
                errors[index] = error
        return tokens, errors

    def _allowed(
        self, rows: Sequence[Row], logits: torch.Tensor, errors: dict[int, EngineError]
    ) -> torch.Tensor | None:
        """The logits as changed by the rows' plugins and requests, or None if unchanged."""
        changed = [
            index
            for index, row in enumerate(rows)
            if row.hooks is not None or row.request.allowed_token_ids or row.narrowed is not None
        ]
        if not changed:
            return None
        allowed = logits.clone()
        for index in changed:
            row = rows[index]
            if only := list(row.request.allowed_token_ids):
                allowed[index] = float("-inf")
                allowed[index, only] = logits[index, only]
            try:
                if row.narrowed is not None and not row.narrowed.narrow(allowed[index]):
                    raise RequestError(NO_TOKEN)
                if row.hooks is not None:
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
        if not remaining:  # where a row lies in the buffers may change its bits: one alone depends on none before it
            self._cache = DecodeCache(self._device)

    def _table_of(self, rows: Sequence[Row]) -> SamplingTable:
        return SamplingTable.of(
            [row.request.sampling for row in rows],
            [row.request.seed for row in rows],
            [(row.prompt, row.tokens) for row in rows],
            self.model.facts.vocab_size,
            self._device,
            processed=self.model.facts.logprobs_mode == "processed_logprobs",
        )


@dataclass(slots=True)
class Prefilled:
    """Result of one pass; row i of the group is row `pick[i]` of it."""

    cache: PrefillCache
    logits: torch.Tensor  # float32 (contexts, vocab), after the last token
    offset: int  # next position - length
    pick: list[int]


def prefill(
    model: LoadedModel, rows: Sequence[Row], policies: Policies, pasts: Pasts = _NO_PASTS
) -> tuple[Prefilled | None, Errors]:
    """Prefill one group of `prefill_groups`, each row under its policy; the rows receive their scores.

    `pasts` were computed under these policies. None if every row has an error.
    """
    for row in rows:
        row.policy = policies.of(row.request.adapter)
    unscored = [row.unscored(_policy(row).version, _policy(row).parent) for row in rows]
    try:
        if rows[0].vision:
            done, scores, begin = _image_pass(model, rows, unscored)
        elif id(rows[0]) in pasts:
            done, scores, begin = _pass_on(model, rows, pasts), [], []
        else:
            done, scores, begin = _pass(model, rows, unscored)
    except RequestError as error:
        return None, {index: (row, error) for index, row in enumerate(rows)}
    errors: Errors = {}
    for index, (row, tokens) in enumerate(zip(rows, unscored, strict=True)):
        try:
            if row.wants_prompt:
                row.prompt_ranked = _prompt_ranked(model, row)
            if tokens:
                given, start = scores[done.pick[index]], begin[index]
                row.score(_policy(row).version, tokens, [given[start + token] for token in tokens])
        except EngineError as error:
            errors[index] = (row, error)
    return done, errors


def _prompt_ranked(model: LoadedModel, row: Row) -> Ranked:
    """By a pass of its own: the shared one computes logits only where they are used. Raises RequestError."""
    if row.vision is not None:
        raise RequestError(f"{row.request.seq_key}: prompt_logprobs of a prompt with images aren't served; remove them")
    count = row.request.sampling.prompt_logprobs or 0
    with model.adapters.rows([_policy(row).lora]):
        return prompt_ranked(model, row.prompt, count, row.logprob_temperature)


def prefill_groups(rows: Sequence[Row], pasts: Pasts = _NO_PASTS) -> Iterator[list[Row]]:
    """Rows of similar length together, at most PREFILL_TOKENS padded tokens a group (or one row).

    Rows with images: those with the same context and images together. Rows with a past: those that have about as many
    tokens left.
    """
    texts = [row for row in rows if row.vision is None and id(row) not in pasts]
    for group in groups_by_length([len(row.context) for row in texts], PREFILL_TOKENS):
        yield [texts[index] for index in group]
    yield from _groups_with_a_past([row for row in rows if id(row) in pasts], pasts)
    images: dict[tuple[int, tuple[int, ...], float, str], list[Row]] = {}
    for row in rows:
        if row.vision is not None:
            its = (id(row.vision), tuple(row.tokens), row.logprob_temperature, row.request.adapter)
            images.setdefault(its, []).append(row)
    yield from images.values()


def _groups_with_a_past(rows: Sequence[Row], pasts: Pasts) -> Iterator[list[Row]]:
    """Every row of a group is prefilled from as many tokens before its end as the one with the most left."""
    left = [len(row.prompt) - pasts[id(row)][1] for row in rows]
    for group in groups_by_length(left, PREFILL_TOKENS):
        alike: list[int] = []
        for index in group:
            if alike and left[alike[0]] > max(_ALIKE_TOKENS, 2 * left[index]):
                yield [rows[each] for each in alike]
                alike = []
            alike.append(index)
        yield [rows[each] for each in alike]


def _pass_on(model: LoadedModel, rows: Sequence[Row], pasts: Pasts) -> Prefilled:
    """Prefill what follows the rows' pasts; no row has tokens to score.

    All rows have the same number of new columns, so each row's cache has no gap: a window counts columns.
    """
    unique: dict[tuple[tuple[int, ...], Policy], int] = {}
    pick = [unique.setdefault((tuple(row.prompt), _policy(row)), len(unique)) for row in rows]
    first = [rows[pick.index(number)] for number in range(len(unique))]
    columns = max(len(row.prompt) - pasts[id(row)][1] for row in first)
    lengths = [max(0, len(row.prompt) - columns) for row in first]
    for row, number in zip(rows, pick, strict=True):
        row.cached_tokens = lengths[number]
    before, cache = max(lengths), PrefillCache(model.module.config)
    cache.begin([pasts[id(row)][0].layers for row in first], lengths)
    inputs, shown, positions = left_padded(
        model, [row.prompt[length:] for row, length in zip(first, lengths, strict=True)], rows[0].pad_token_id
    )
    starts = torch.tensor(lengths, device=inputs.device).unsqueeze(1)
    known = torch.arange(before, device=inputs.device) >= before - starts
    with model.adapters.rows([policy.lora for _, policy in unique]):
        logits, _ = forward_scored(model, inputs, torch.cat([known, shown], dim=1), positions + starts, cache, None)
    return Prefilled(cache, logits, 0, pick)


def _pass(
    model: LoadedModel, rows: Sequence[Row], unscored: Sequence[list[int]]
) -> tuple[Prefilled, _Scores, list[int]]:
    """Text only: (result, scores per context, index in the scores of each row's token 0)."""
    unique: dict[tuple[tuple[int, ...], float, Policy], int] = {}
    pick = [unique.setdefault((tuple(row.context), row.logprob_temperature, _policy(row)), len(unique)) for row in rows]
    padded = left_padded(model, [context for context, *_ in unique], rows[0].pad_token_id)
    width, cache = padded[0].shape[1], PrefillCache(model.module.config)
    zeros = [width - len(row.tokens) for row in rows]  # column of token 0; contexts end at the last column
    first = min((zero + tokens[0] for zero, tokens in zip(zeros, unscored, strict=True) if tokens), default=None)
    with model.adapters.rows([policy.lora for *_, policy in unique]):
        logits, scores = forward_scored(model, *padded, cache, first, [temperature for _, temperature, _ in unique])
    return Prefilled(cache, logits, 0, pick), scores.tolist(), [zero - (first or 0) for zero in zeros]


def _image_pass(
    model: LoadedModel, rows: Sequence[Row], unscored: Sequence[list[int]]
) -> tuple[Prefilled, _Scores, list[int]]:
    vision, cache = rows[0].vision, PrefillCache(model.module.config)
    assert vision is not None
    first = min((tokens[0] for tokens in unscored if tokens), default=None)
    temperature = rows[0].logprob_temperature
    with model.adapters.rows([_policy(rows[0]).lora]):
        logits, scores, offset = prefill_image(model, vision, rows[0].tokens, cache, first, temperature)
    return Prefilled(cache, logits, offset, [0] * len(rows)), scores.tolist(), [-(first or 0)] * len(rows)


def _places(rows: Sequence[Row], logits: torch.Tensor, tokens: torch.Tensor) -> dict[int, Place]:
    """By index, of the rows that ask for it."""
    counts = {index: row.request.sampling.top_logprobs for index, row in enumerate(rows)}
    asked = {index: count for index, count in counts.items() if count is not None}
    if not asked:
        return {}
    at = list(asked)
    warmth = logits.new_tensor([rows[index].logprob_temperature for index in at]).unsqueeze(1)
    logprobs = torch.log_softmax(logits[at] / warmth, dim=-1)
    return dict(zip(at, places_of(logprobs, tokens[at].tolist(), list(asked.values())), strict=True))


def _policy(row: Row) -> Policy:
    assert row.policy is not None, "its prefill sets it"
    return row.policy
