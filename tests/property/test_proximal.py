"""Whatever versions, masks and scores a sample comes with: each token is right, or marked, or not trained."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from sluice.consumers.training.policy.proximal import Filled, fill, plan, score_jobs, scores_by_place
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import training_sample

NEWEST = 7


def truth(version: int, at: int) -> float:
    """The logprob of the token at `at` under a version; no two are alike."""
    return float(np.float32(-0.01 * (version * 64 + at + 1)))


options_of = st.builds(
    PolicyConfig,
    enabled=st.just(True),
    max_token_staleness=st.integers(0, 5),
    on_stale=st.sampled_from(["mask", "drop"]),
    on_missing_proximal=st.sampled_from(["mask", "behaviour", "drop"]),
)
# Of a run that went back now and then: the versions it kept.
lines = st.sets(st.integers(1, NEWEST)).map(lambda kept: Line([0, *sorted(kept)]))
# Per token: sampled?, version, proximal version relative to it (1 is right, if that version is live).
token = st.tuples(st.booleans(), st.integers(0, NEWEST), st.sampled_from([None, None, 1, 1, 0, 2, -3]))


@st.composite
def samples(draw: st.DrawFn) -> TrainingSample:
    prompt, tokens = draw(st.integers(1, 4)), draw(st.lists(token, min_size=1, max_size=12))
    mask = [0] * prompt + [int(is_sampled) for is_sampled, _, _ in tokens]
    versions = [-1] * prompt + [version if is_sampled else -1 for is_sampled, version, _ in tokens]
    claims = [None] * prompt + [claim if is_sampled else None for is_sampled, _, claim in tokens]
    claimed = [-1 if claim is None else versions[at] + claim for at, claim in enumerate(claims)]
    length = len(mask)
    behaviour = [truth(versions[at], at) if mask[at] else 0.0 for at in range(length)]
    proximal = [truth(claimed[at], at) if claimed[at] >= 0 else behaviour[at] for at in range(length)]
    stamped = draw(st.booleans()) or any(claim is not None for claim in claims)
    return training_sample(
        "s:0",
        length,
        token_ids=TokenArray(range(length)),
        prompt_len=prompt,
        logprobs=FloatArray(behaviour),
        versions=Runs.of(versions),
        response_mask=Runs.of(mask),
        proximal_logprobs=FloatArray(proximal if stamped else []),
        proximal_versions=Runs.of(claimed if stamped else []),
        advantage=1.0,
    )


def answer(job: ScoreJob) -> ScoreResult:
    """A scorer's, from the job alone: a forward pass over prompt and tokens."""
    start = len(job.prompt_token_ids)
    places = [start + position for position in job.positions]
    assert [(*job.prompt_token_ids, *job.token_ids)[at] for at in places] == places  # a token's id is its place
    logprobs = FloatArray([truth(job.version, at) for at in places])
    return ScoreResult(seq_id=job.seq_id, scored_version=job.version, positions=job.positions, logprobs=logprobs)


def run(sample: TrainingSample, line: Line, options: PolicyConfig, reached: set[int], is_own: bool = True) -> Filled:
    """Scorers reach the versions of `reached`; `is_own`: the trainer's weights are the newest version's."""
    v = line.newest
    made = plan(sample, line, options, own_version=v if is_own else None)
    results: list[ScoreResult] = []
    for job in score_jobs(made, "r"):
        assert job.version in line.numbers
        assert 0 < job.version < v or (job.version == v and not is_own)
        if job.version in reached:
            results.append(answer(job))
        else:
            error = {"positions": TokenArray(), "logprobs": FloatArray(), "error": "retired"}
            results.append(ScoreResult(seq_id=job.seq_id, scored_version=job.version, **error))
    own = [0.0] + [truth(v, at) for at in range(1, len(sample.token_ids))]
    return fill(made, own, scores_by_place(made, results), options)


def after(line: Line, version: int) -> int | None:
    """The live version that was published from it."""
    later = [number for number in line.numbers if number > version]
    return later[0] if version in line.numbers and later else None


def naive(
    sample: TrainingSample, line: Line, options: PolicyConfig, reached: set[int], is_own: bool = True
) -> dict[str, Any]:
    """Token by token, written down from the contract."""
    v = line.newest
    reached = reached | ({v} if is_own else set())
    versions, claims = sample.versions.expand(), sample.proximal_versions.expand()
    rows: list[tuple[str, int, float] | None] = []
    for at, is_sampled in enumerate(sample.response_mask.expand()):
        version, behaviour = versions[at], sample.logprobs[at]
        claim = claims[at] if claims else -1
        if not is_sampled:
            rows.append(None)
        elif sum(number > version for number in line.numbers) > options.max_token_staleness:
            rows.append(("stale", -1, behaviour))
        elif version == v:
            rows.append(("trained", -1, behaviour))
        elif (scorer := after(line, version)) is not None and (claim == scorer or scorer in reached):
            rows.append(("trained", scorer, truth(scorer, at)))
        else:
            rows.append(("missing", -1, behaviour))
    found = [row[0] for row in rows if row]
    reason = None
    if options.on_stale == "drop" and "stale" in found:
        reason = "stale"
    elif options.on_missing_proximal == "drop" and "missing" in found:
        reason = "missing_proximal"
    return {"rows": rows, "reason": reason, "stale": found.count("stale"), "missing": found.count("missing")}


@given(samples(), lines, options_of, st.sets(st.integers(1, NEWEST)), st.booleans())
def test_each_token_is_right_or_marked(
    sample: TrainingSample, line: Line, options: PolicyConfig, reached: set[int], is_own: bool
) -> None:
    done, expected = run(sample, line, options, reached, is_own), naive(sample, line, options, reached, is_own)
    assert done.reason == expected["reason"]
    assert done.counts.stale == expected["stale"]
    event(f"ends as {done.reason or 'trained'}")
    if done.reason != "stale":
        assert done.counts.missing == expected["missing"]
    if done.sample is None:
        assert done.counts.dropped == 1
        return
    mask = done.sample.response_mask.expand()
    for at, row in enumerate(expected["rows"]):
        if row is None:
            assert (mask[at], done.sample.proximal_versions.expand()[at]) == (0, -1)
            continue
        fate, version, logprob = row
        keeps_missing = options.on_missing_proximal == "behaviour"
        assert mask[at] == int(fate == "trained" or (fate == "missing" and keeps_missing))
        if mask[at]:
            assert (done.sample.proximal_versions.expand()[at], done.sample.proximal_logprobs[at]) == (version, logprob)


@given(samples(), lines, options_of, st.sets(st.integers(1, NEWEST)))
def test_the_invariant_by_itself(sample: TrainingSample, line: Line, options: PolicyConfig, reached: set[int]) -> None:
    """No table needed: what claims a version has its number, what claims none has the behaviour's."""
    done, v = run(sample, line, options, reached).sample, line.newest
    if done is None:
        return
    columns = (done.versions, done.proximal_versions, done.proximal_logprobs, done.logprobs, done.response_mask)
    for at, (version, claimed, proximal, behaviour, is_trained) in enumerate(zip(*columns, strict=True)):
        assert claimed in (-1, after(line, version))
        if not is_trained:
            assert (claimed, proximal) == (-1, 0)
        else:
            assert proximal == (behaviour if claimed == -1 else truth(claimed, at))
            assert sum(number > version for number in line.numbers) <= options.max_token_staleness
            assert claimed != -1 or version == v or options.on_missing_proximal == "behaviour"


@given(samples(), lines, options_of)
def test_what_was_filled_needs_nothing_more(sample: TrainingSample, line: Line, options: PolicyConfig) -> None:
    first = run(sample, line, options, set(range(NEWEST + 1))).sample
    if first is None:
        return
    again = run(first, line, options, set()).sample
    assert again == first
