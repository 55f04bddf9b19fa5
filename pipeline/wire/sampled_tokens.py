"""`SampledTokens`: the tokens after a prompt, and what is known about each of them.

    column              example              what it says of a token
    token_ids            7    9    4    2
    logprobs          -0.1 -0.7    0 -0.2    nats under `versions`; 0 where nobody sampled the token. Empty: not asked
                                             for; NaN beside tokens that have them
    versions             3    3   -1    4    weights that sampled it; -1: nobody did
    response_mask        1    1    0    1    1: sampled by the policy; an empty column: all are
    proximal_logprobs -0.2 -0.6    0 -0.2    under `proximal_versions`; where there is none, that of `logprobs`
    proximal_versions    4    4   -1   -1    the live version after `versions`; -1: not scored. Both columns are empty
                                             where no token is

Columns are plain lists, so that a decoding loop appends at the cost of a list. The messages hold the same columns under
the same names as compact arrays: `columns()` gives them as fields, a message's `sampled` gives the lists back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray, check_lengths


class Place(NamedTuple):
    """Where a token stands in the vocabulary, by raw logprobs, and the likeliest tokens there."""

    rank: int  # 1: none is likelier
    token_ids: tuple[int, ...] = ()  # the likeliest first
    logprobs: tuple[float, ...] = ()  # nats, of these


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """The places of tokens, each with as many of the likeliest tokens. [W]"""

    ranks: TokenArray  # from 1
    top_token_ids: TokenArray  # those of the first token, then of the next
    top_logprobs: FloatArray  # nats, of these
    logprobs: FloatArray = msgspec.field(default_factory=FloatArray)  # of the tokens, where the message has no others

    def __post_init__(self) -> None:
        count = len(self.ranks)
        check_lengths("ranked", count, optional=True, logprobs=self.logprobs)
        check_lengths("ranked", len(self.top_token_ids), top_logprobs=self.top_logprobs)
        if len(self.top_token_ids) % count if count else len(self.top_token_ids):
            raise MessageError(f"ranked: {len(self.top_token_ids)} alternatives for {count} tokens")

    @classmethod
    def of(cls, places: Sequence[Place], logprobs: Sequence[float] = ()) -> Ranked:
        """Raises MessageError unless all have as many alternatives."""
        return cls(
            ranks=TokenArray(place.rank for place in places),
            top_token_ids=TokenArray(token for place in places for token in place.token_ids),
            top_logprobs=FloatArray(logprob for place in places for logprob in place.logprobs),
            logprobs=FloatArray(logprobs),
        )

    def places(self) -> list[Place]:
        """One for each token."""
        count = len(self.top_token_ids) // max(1, len(self.ranks))
        ids, logprobs = list(self.top_token_ids), list(self.top_logprobs)
        starts = range(0, max(1, count) * len(self.ranks), max(1, count))
        return [
            Place(rank, tuple(ids[at : at + count]), tuple(logprobs[at : at + count]))
            for rank, at in zip(self.ranks, starts, strict=True)
        ]


@dataclass(slots=True)
class SampledTokens:
    """Raises MessageError for columns of different lengths."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    response_mask: list[int] = field(default_factory=list[int])
    proximal_logprobs: list[float] = field(default_factory=list[float])
    proximal_versions: list[int] = field(default_factory=list[int])
    ranked: list[Place] = field(default_factory=list[Place])  # empty: not asked for

    def __post_init__(self) -> None:
        check_columns("sampled tokens", self, scored=False)
        if self.ranked and len(self.ranked) != len(self):
            raise MessageError(f"sampled tokens: {len(self.ranked)} places for {len(self)} tokens")

    @classmethod
    def context(cls, token_ids: Sequence[int]) -> SampledTokens:
        """Tokens that nobody sampled: of a prompt, a tool or a user."""
        count = len(token_ids)
        return cls(list(token_ids), [0.0] * count, [-1] * count, [0] * count)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> SampledTokens:
        """A copy of these tokens."""
        return SampledTokens(
            self.token_ids[part],
            self.logprobs[part],
            self.versions[part],
            self.response_mask[part],
            self.proximal_logprobs[part],
            self.proximal_versions[part],
            self.ranked[part],
        )

    def __add__(self, other: SampledTokens) -> SampledTokens:
        whole = self[:]
        whole += other
        return whole

    def __iadd__(self, other: SampledTokens) -> SampledTokens:
        whole = (self.ranked or not len(self)) and (other.ranked or not len(other))
        self.ranked = [*self.ranked, *other.ranked] if whole else []  # of all tokens, or of none
        if self.response_mask or other.response_mask:
            self._state_mask()
            self.response_mask += other.mask
        if self.proximal_versions or other.proximal_versions:
            self._state_proximal()
            self.proximal_logprobs += other.proximal_logprobs or other.logprobs or other._unknown()
            self.proximal_versions += other.proximal_versions or [-1] * len(other)
        if self.logprobs or other.logprobs:
            self.logprobs = self.logprobs or self._unknown()
            self.logprobs += other.logprobs or other._unknown()
        self.token_ids += other.token_ids
        self.versions += other.versions
        return self

    def append(
        self, token: int, logprob: float | None, version: int, mask: int = 1, place: Place | None = None
    ) -> None:
        """The next token. Its logprob is left out where earlier tokens have none, or None for the first."""
        if len(self.ranked) < len(self):  # earlier ones have none
            self.ranked = []
        elif place is not None:
            self.ranked.append(place)
        elif self.ranked:  # nobody sampled it
            self.ranked.append(Place(0, *[(0,) * len(self.ranked[0].token_ids)] * 2))
        if mask != 1 or self.response_mask:
            self._state_mask()
            self.response_mask.append(mask)
        if len(self.logprobs) == len(self) and (self.logprobs or logprob is not None):
            self.logprobs.append(math.nan if logprob is None else logprob)
        if self.proximal_versions:
            self.proximal_logprobs.append(self.logprobs[-1])
            self.proximal_versions.append(-1)
        self.token_ids.append(token)
        self.versions.append(version)

    def unscored(self, version: int, parent: int | None = None) -> list[int]:
        """Positions whose proximal logprob is the one under `version`, and that have none yet; rising. None without
        logprobs.

        `parent`: the version that `version` was published from; None: the number before.
        """
        before, scored = version - 1 if parent is None else parent, self.proximal_versions
        if before < 0 or not self.logprobs:
            return []
        return [at for at, one in enumerate(self.versions) if one == before and not (scored and scored[at] == version)]

    def score(self, at: int, logprob: float, version: int) -> None:
        """The proximal logprob of one token."""
        self._state_proximal()
        self.proximal_logprobs[at] = logprob
        self.proximal_versions[at] = version

    @property
    def mask(self) -> list[int]:
        """`response_mask` written out: one value per token."""
        return self.response_mask or [1] * len(self)

    @property
    def was_sampled(self) -> list[bool]:
        """Of each token: one with a version was sampled, whatever cleared its mask since."""
        return [bool(mask) or version >= 0 for mask, version in zip(self.mask, self.versions, strict=True)]

    def with_mask(self) -> SampledTokens:
        """The same with `response_mask` written out, where an empty one would say that no token was sampled."""
        self._state_mask()
        return self

    def as_ranked(self) -> Ranked | None:
        """The places as a message has them."""
        return Ranked.of(self.ranked) if self.ranked else None

    def columns(self) -> dict[str, Any]:
        """As fields of a `SequenceResult` or `TrainingSample`."""
        return {
            "token_ids": TokenArray(self.token_ids),
            "logprobs": FloatArray(self.logprobs),
            "versions": Runs.of(self.versions),
            "response_mask": Runs.of(self.response_mask),
            "proximal_logprobs": FloatArray(self.proximal_logprobs),
            "proximal_versions": Runs.of(self.proximal_versions),
        }

    def _state_mask(self) -> None:
        if not self.response_mask:
            self.response_mask = [1] * len(self)

    def _unknown(self) -> list[float]:
        """Logprobs of tokens that have none, beside tokens that have some."""
        return [math.nan] * len(self)

    def _state_proximal(self) -> None:
        if not self.proximal_versions:
            self.proximal_logprobs = list(self.logprobs) or self._unknown()
            self.proximal_versions = [-1] * len(self)


def check_ranked(where: str, ranked: Ranked | None, count: int) -> None:
    """Raise MessageError unless there are none, or one for each token."""
    if ranked is not None and len(ranked.ranks) != count:
        raise MessageError(f"{where}: {len(ranked.ranks)} ranks for {count} tokens")


def check_columns(where: str, columns: Any, *, stamped: bool = True, scored: bool = True) -> None:
    """Raise MessageError unless the columns of the message or `SampledTokens` have one length.

    Only a sample's `logprobs` and `versions` may be left out (`stamped=False`), and `logprobs` where nobody asked for
    them (`scored=False`).
    """
    count = len(columns.token_ids)
    check_lengths(where, count, optional=not (stamped and scored), logprobs=columns.logprobs)
    check_lengths(where, count, optional=not stamped, versions=columns.versions)
    check_lengths(
        where,
        count,
        optional=True,
        response_mask=columns.response_mask,
        proximal_logprobs=columns.proximal_logprobs,
        proximal_versions=columns.proximal_versions,
    )
