"""`sluice replay`: one finished sequence decoded again, from what the run stores of it.

    history ──▶ the sequence ──▶ versions on disk, or which are gone
                    ├─▶ an engine of the workers: decoded again from prompt and seed, the weights switching as then
                    └─▶ plain passes (recompute.py): the stored tokens under the stored versions, or under another one

- Decoded again: the engine gets nothing of the stored tokens, only at which positions its weights changed. Random
  numbers depend on seed and position alone, so the tokens are the stored ones, unless a number falls between the
  probabilities of two kernels (a batch of one rounds differently from a batch).
- Teacher-forced: each stored token's logprob given the stored tokens before it. Its difference shows whether the
  stored number is right, or with another version what the update changed.
- An agent's rollout is teacher-forced only: the seeds of its turns are those of jobs that the history doesn't hold.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from sluice.consumers.audit.recompute import Recomputed, pixels_of, recompute
from sluice.consumers.audit.report import listed
from sluice.consumers.audit.stored import Stored, stored_result
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceDetail
from sluice.consumers.history.waterfall import SequenceTrace, drawing, find_sequence, shown_s, step_values, trace_of
from sluice.consumers.run_files import HISTORY, METRICS, WEIGHTS
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError
from sluice.pipeline.queue import seed_for
from sluice.pipeline.terminal import Console
from sluice.pipeline.user_modules import installed
from sluice.pipeline.wire.messages import SequenceResult

_WIDE = 150
STEP_VALUES = (
    "train/loss",
    "policy/loss",
    "train/grad_norm",
    "train/learning_rate",
    "policy/approx_kl",
    "policy/reward_mean",
)


class ReplayedToken(msgspec.Struct, frozen=True, kw_only=True):
    """One token after the prompt; logprobs in nats, None where there is none or `not_finite`."""

    at: int  # from the first sampled token
    token_id: int
    text: str
    version: int  # -1: a tool, the template or a guard wrote it
    trained: bool | None = None  # whether its mask let the policy loss see it; None: there is no policy loss
    left_out: str = ""  # why not
    logprob: float | None = None  # as stored
    logprob_again: float | None = None  # of the same token
    not_finite: bool = False  # one of the two is NaN or infinite, of a token whose logprob was asked for
    proximal: float | None = None  # as the step used it
    decoded_id: int | None = None  # what was decoded at this position; None: nothing was
    decoded_text: str = ""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Printed by `sluice replay --json`."""

    schema_version: int = 1
    seq_id: str
    versions: list[int]  # that sampled it
    under: int | None  # the other version that was asked for
    is_same: bool | None  # the decoded tokens are the stored ones; None: it wasn't decoded
    first_difference: int | None = None
    max_difference: float | None = None  # nats, of the logprobs
    not_decoded: str = ""  # why
    engine: str = ""  # that decoded it now
    engine_then: str
    seed: int | None = None
    finish_reason: str  # as stored
    finish_reason_again: str = ""
    reward: float | None = None
    advantage: float | None = None
    step: int | None = None  # that trained it
    step_from: int | None = None  # version of the weights that the step changed
    step_values: dict[str, float] = {}  # loss, gradient norm, …
    load_s: float = 0.0
    replay_s: float = 0.0
    tokens: list[ReplayedToken] = []
    decoded: list[int] = []  # all token ids that were decoded
    trace: SequenceTrace

    def differs(self, tolerance: float) -> bool:
        """Whether other tokens were decoded, or a logprob is off by more than `tolerance` nats or not finite."""
        is_off = self.max_difference is not None and self.max_difference > tolerance
        return self.is_same is False or is_off or any(one.not_finite for one in self.tokens)


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """By an engine, from the prompt on."""

    token_ids: list[int]
    finish_reason: str
    engine: str
    load_s: float  # engine and versions
    decode_s: float


def replay_sequence(directory: Path, config: Config, named: str, under: int | None = None) -> Replay:
    """Decode it again, and compare.

    Raises DataError (no such sequence, or a version is gone), WeightsError, ModelError.
    """
    with closing(HistoryReader(directory / HISTORY)) as reader:
        detail = find_sequence(reader, named)
        if detail.result is None:
            raise DataError(
                f"{detail.row.seq_id} ended without tokens ({detail.row.reason}): there is nothing to replay"
            )
        trace = trace_of(directory, reader, detail, Path(config.model.path).name)
    result = detail.result
    parts = parts_of(result, under)
    _check_versions(directory / WEIGHTS, [version for version, _ in parts], config, under)
    stored, again, passes_s, forced_load_s = _teacher_forced(directory, config, result, under)
    seed, why_not = _seed_of(result, config)
    done: Decoded | None = None
    if seed is not None:
        decode = installed("sluice.engines", "replay")
        done = asyncio.run(
            _decoded(decode, config, result, seed, [(v, _folder(directory / WEIGHTS, v), n) for v, n in parts])
        )
    return _replay(
        directory, config, detail, trace, stored, again, done, under, seed, why_not, (forced_load_s, passes_s)
    )


def parts_of(result: SequenceResult, under: int | None = None) -> list[tuple[int, int]]:
    """(version, tokens) in order: how many were sampled under which; all of them under another one, if there is one."""
    parts: list[tuple[int, int]] = []
    for version, count in result.versions.runs:
        if version < 0:
            continue
        if parts and parts[-1][0] == version:
            parts[-1] = (version, parts[-1][1] + count)
        else:
            parts.append((version, count))
    if not parts:
        raise DataError(f"{result.seq_id}: no token of it was sampled by the policy")
    return parts if under is None else [(under, sum(count for _, count in parts))]


def _folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def _check_versions(root: Path, versions: list[int], config: Config, under: int | None) -> None:
    gone = sorted({version for version in versions if not _folder(root, version).is_dir()})
    if gone:
        what = f"version {gone[0]} is" if len(gone) == 1 else f"versions {listed(gone)} are"
        why = "" if under is not None else ", and sampled this sequence"
        raise DataError(
            f"{root}: {what} gone{why}; weights.retention ({config.weights.retention}) is how many a run keeps: with "
            "weights.retention=1000 a later run keeps what a replay reads"
        )


def _seed_of(result: SequenceResult, config: Config) -> tuple[int | None, str]:
    if result.rollout_id is not None:
        return None, "an agent's rollout: its turns have seeds of their own jobs, which the history doesn't hold"
    if any(version < 0 for version, _ in result.versions.runs[:-1]):
        return None, "some of its tokens were not sampled, and come from elsewhere"
    seed = config.seed if result.sampling.seed is None else result.sampling.seed
    return seed_for(seed, result.group_id, result.index), ""


def _teacher_forced(
    directory: Path, config: Config, result: SequenceResult, under: int | None
) -> tuple[Stored, NDArray[np.float32], float, float]:
    """The sequence, its tokens' logprobs again, and seconds: of it all, of it the part that isn't loading."""
    stored = stored_result(result, under)
    again, began = Recomputed.empty(len(stored.token_ids)), time.monotonic()
    with pixels_of(config, [stored]) as pixels:
        if stored.name in pixels.gone:
            raise DataError(f"{result.seq_id}: an image of it is gone, changed or can't be read here")
        timed: list[float] = []
        recompute(directory / WEIGHTS, config.model, [(stored, again)], sorted(stored.needed()), pixels, timed)
        if stored.name in pixels.gone:
            raise DataError(f"{result.seq_id}: an image of it is gone, changed or can't be read here")
    passes_s = sum(timed)
    return stored, again.behaviour, passes_s, time.monotonic() - began - passes_s


async def _decoded(
    decode: Any, config: Config, result: SequenceResult, seed: int, parts: list[tuple[int, Path, int]]
) -> Decoded:
    opened = cast("AbstractAsyncContextManager[Any]", decode(config))
    async with opened as engine:
        return msgspec.convert(await engine(result, seed, parts), Decoded)


def _replay(
    directory: Path,
    config: Config,
    detail: SequenceDetail,
    trace: SequenceTrace,
    stored: Stored,
    again: NDArray[np.float32],
    done: Decoded | None,
    under: int | None,
    seed: int | None,
    why_not: str,
    forced_s: tuple[float, float],
) -> Replay:
    result = cast(SequenceResult, detail.result)
    start, ids = len(result.prompt_token_ids), list(result.token_ids)
    codec = HFTextCodec(Path(config.model.path))
    decoded = [] if done is None else done.token_ids
    trained = detail.trained if detail.trained and detail.trained.state == "trained" else None
    masks = _masks(detail, start, len(ids))
    proximal = [] if trained is None else list(trained.proximal_logprobs)
    same_shape = detail.sample is not None and list(detail.sample.token_ids[start : start + len(ids)]) == ids
    tokens: list[ReplayedToken] = []
    for at, (token, version) in enumerate(zip(ids, result.versions.expand(), strict=True)):
        now = decoded[at] if at < len(decoded) else None
        is_trained, why = masks[at]
        was, computed = float(stored.logprobs[start + at]), float(again[start + at])
        # Of a result without logprobs some turns may have them: NaN stands where nobody asked.
        is_due = version >= 0 and (result.has_logprobs or not math.isnan(was))
        tokens.append(
            ReplayedToken(
                at=at,
                token_id=token,
                text=codec.decode([token]),
                version=version,
                trained=is_trained,
                left_out=why,
                logprob=_number(was) if version >= 0 else None,
                logprob_again=_number(computed),
                not_finite=is_due and not (math.isfinite(was) and math.isfinite(computed)),
                proximal=_number(proximal[start + at]) if same_shape and len(proximal) > start + at else None,
                decoded_id=now,
                decoded_text="" if now is None else codec.decode([now]),
            )
        )
    gaps = [
        abs(one.logprob - one.logprob_again)
        for one in tokens
        if one.logprob is not None and one.logprob_again is not None
    ]
    differs = next((at for at, pair in enumerate(zip(ids, decoded, strict=False)) if pair[0] != pair[1]), None)
    if done is not None and differs is None and len(decoded) != len(ids):
        differs = min(len(decoded), len(ids))
    values = {} if trained is None else step_values(directory / METRICS, trained.step)
    return Replay(
        seq_id=result.seq_id,
        versions=sorted({version for version, _ in result.versions.runs if version >= 0}),
        under=under,
        is_same=None if done is None else differs is None,
        first_difference=differs,
        max_difference=max(gaps, default=None),
        not_decoded=why_not,
        engine="" if done is None else done.engine,
        engine_then=f"{result.backend} {result.engine_version}".strip(),
        seed=seed,
        finish_reason=result.finish_reason,
        finish_reason_again="" if done is None else done.finish_reason,
        reward=detail.row.reward,
        advantage=None if detail.sample is None else detail.sample.advantage,
        step=None if trained is None else trained.step,
        step_from=None if trained is None else trained.version,
        step_values={key: float(values[key]) for key in STEP_VALUES if isinstance(values.get(key), int | float)},
        load_s=round(forced_s[0] + (0.0 if done is None else done.load_s), 3),
        replay_s=round(forced_s[1] + (0.0 if done is None else done.decode_s), 3),
        tokens=tokens,
        decoded=decoded,
        trace=trace,
    )


def _masks(detail: SequenceDetail, start: int, count: int) -> list[tuple[bool | None, str]]:
    """Of each token: whether the policy loss saw it, and why not."""
    sample = detail.as_trained
    if sample is None or not len(sample.response_mask) or sample.advantage is None:
        return [(None, "")] * count
    mask, codes = sample.response_mask.expand(), sample.left_out.expand() if len(sample.left_out) else []
    found: list[tuple[bool | None, str]] = []
    for at in range(start, start + count):
        code = codes[at] if at < len(codes) else 0
        why = LeftOut(code).name.replace("_", " ") if code else ""
        found.append((bool(mask[at]) if at < len(mask) else None, why))
    return found


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def print_replay(found: Replay, most: int) -> None:
    """What it was, its trace, and the tokens side by side; at most `most` of them."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    console.print(drawing(found.trace))
    say(f"\n{_about(found)}")
    if found.step is not None:
        values = ", ".join(f"{key} {value:.6g}" for key, value in found.step_values.items())
        say(f"gradient step {found.step}, from version {found.step_from}: {values}")
    say(f"\n{_verdict(found)}")
    console.print(_table(found, most))
    if len(found.tokens) > most:
        say(f"… {len(found.tokens) - most} more; --tokens shows more of them, --json all")
    say(f"loaded in {shown_s(found.load_s)}, replayed in {shown_s(found.replay_s)}")


def _about(found: Replay) -> str:
    versions = ", ".join(f"v{version}" for version in found.versions)
    reward = "" if found.reward is None else f", reward {found.reward:g}"
    advantage = "" if found.advantage is None else f", advantage {found.advantage:.4g}"
    masked = sum(one.trained is False for one in found.tokens)
    left = f", {masked} of them masked" if masked else ""
    return (
        f"{len(found.tokens)} tokens of {versions} by {found.engine_then or 'an engine'}{left}; "
        f"{found.finish_reason}{reward}{advantage}"
    )


def _verdict(found: Replay) -> str:
    gap = "" if found.max_difference is None else f"; logprobs differ by at most {found.max_difference:.1e} nats"
    if count := sum(one.not_finite for one in found.tokens):
        gap += f"; {count} {'has' if count == 1 else 'have'} a logprob that is NaN or infinite"
    where = "the recorded versions" if found.under is None else f"version {found.under}"
    if found.is_same is None:
        return f"not decoded again ({found.not_decoded}); teacher-forced under {where}{gap}"
    if found.is_same:
        return f"decoded again by {found.engine} under {where}: the very tokens{gap}"
    return (
        f"decoded again by {found.engine} under {where}: the first difference is at token {found.first_difference}, "
        f"{found.finish_reason_again} after {len(found.decoded)} tokens{gap}"
    )


def _table(found: Replay, most: int) -> Table:
    again = "again" if found.under is None else f"v{found.under}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("at", "token", "text", "version", "mask", "logprob", again, "difference", "decoded"):
        right = name in ("at", "token", "version", "logprob", again, "difference")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for one in found.tokens[:most]:
        gap = None if one.logprob is None or one.logprob_again is None else one.logprob_again - one.logprob
        is_same = one.decoded_id == one.token_id
        mask = "" if one.trained is None else "1" if one.trained else f"0 {one.left_out}".strip()
        now = "" if one.decoded_id is None else "=" if is_same else f"{one.decoded_id} {one.decoded_text!r}"
        cells = (
            str(one.at), str(one.token_id), repr(one.text), "-" if one.version < 0 else f"v{one.version}", mask,
            _nats(one.logprob), _nats(one.logprob_again),
            "not finite" if one.not_finite else "" if gap is None else f"{gap:+.1e}", now,
        )  # fmt: skip
        style = "yellow" if one.not_finite or not (one.decoded_id is None or is_same) else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
