"""Which answers belong to an ask, whatever comes and in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.queue.scores import OpenJobs, refusal
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult
from sluice.pipeline.wire.tokens import FloatArray, TokenArray

SEQUENCES, VERSIONS = st.sampled_from(["a:0", "a:1", "b:0"]), st.integers(0, 2)
POSITIONS = st.sampled_from([(0,), (0, 1), (3,)])
TRIPLES = st.tuples(SEQUENCES, VERSIONS, POSITIONS)


def job(seq_id: str, version: int, positions: tuple[int, ...]) -> ScoreJob:
    return ScoreJob(
        run="r",
        seq_id=seq_id,
        prompt_token_ids=TokenArray([1]),
        token_ids=TokenArray([1, 2, 3, 4]),
        positions=TokenArray(positions),
        version=version,
    )


def answer(seq_id: str, version: int, positions: tuple[int, ...], failed: bool) -> ScoreResult:
    if failed:
        return refusal(seq_id, version, "retired")
    logprobs = FloatArray([-1.0] * len(positions))
    return ScoreResult(seq_id=seq_id, scored_version=version, positions=TokenArray(positions), logprobs=logprobs)


@given(jobs=st.lists(TRIPLES), answers=st.lists(st.tuples(TRIPLES, st.booleans()), max_size=30))
def test_each_job_takes_one_answer_of_its_own_and_nothing_else_is_taken(
    jobs: list[tuple[str, int, tuple[int, ...]]], answers: list[tuple[tuple[str, int, tuple[int, ...]], bool]]
) -> None:
    waiting = OpenJobs([job(*triple) for triple in jobs])
    left = set(jobs)
    for triple, failed in answers:
        same = {one for one in left if one[:2] == triple[:2]} if failed else left & {triple}
        before = {(one.seq_id, one.version, tuple(one.positions)) for one in waiting.jobs()}
        assert waiting.close(answer(*triple, failed)) == bool(same)
        gone = before - {(one.seq_id, one.version, tuple(one.positions)) for one in waiting.jobs()}
        assert gone <= same
        assert len(gone) == bool(same)
        left -= gone
        assert len(waiting) == len(left)


@given(st.lists(TRIPLES))
def test_jobs_are_put_out_once_each_and_by_version(jobs: list[tuple[str, int, tuple[int, ...]]]) -> None:
    put = OpenJobs([job(*triple) for triple in jobs]).jobs()
    assert sorted((one.seq_id, one.version, tuple(one.positions)) for one in put) == sorted(set(jobs))
    assert [one.version for one in put] == sorted(one.version for one in put)
