"""The jobs of a round, the same for both sides.

- Ids name the round, so that no round meets the tombstones of another; seeds follow from the ids.
- Lengths vary from job to job (`max_new_tokens` 32 to 128); random weights seldom sample an end of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.bench.pipeline.plan import RUN
from sluice.pipeline.queue import job_id_for, seed_for
from sluice.pipeline.wire.messages import DecodeJob, Message, SamplingParams
from sluice.workers.engine.contracts import SequenceRequest

SHORTEST, LONGEST = 32, 128
_STRIDE = 37  # coprime to the span of lengths, so neighbours differ much


def num_new_tokens(index: int) -> int:
    """`max_new_tokens` of the job with this number."""
    return SHORTEST + index * _STRIDE % (LONGEST - SHORTEST + 1)


def jobs(name: str, count: int, *, digits: bool, longest: int = LONGEST) -> list[DecodeJob]:
    """`count` jobs of the round with this name; every round has the same prompts and lengths."""
    found = []
    for index, messages in enumerate(_prompts(count, digits)):
        sampling = SamplingParams(temperature=1.0, max_new_tokens=min(longest, num_new_tokens(index)))
        job_id = job_id_for(RUN, f"{name}:{index}", 0, sampling, 1)
        found.append(DecodeJob(run=RUN, job_id=job_id, messages=messages, sampling=sampling, task="exact_answer"))
    return found


def share(all_jobs: Sequence[DecodeJob], worker: int, workers: int) -> list[DecodeJob]:
    """The static split: every `workers`-th job."""
    return list(all_jobs[worker::workers])


def request_of(job: DecodeJob, prompt: Sequence[int], run_seed: int) -> SequenceRequest:
    """What a worker would ask its engine for the job's only sequence."""
    return SequenceRequest(
        seq_key=f"{job.job_id}:0",
        prompt_token_ids=tuple(prompt),
        sampling=job.sampling,
        seed=seed_for(run_seed, job.job_id, 0),
    )


def _prompts(count: int, digits: bool) -> list[list[Message]]:
    if not digits:
        text = "Problem {0}: a shop sells {0} apples and buys {1} more. How many are there? Explain step by step."
        return [[{"role": "user", "content": text.format(i, 7 * i % 100)}] for i in range(count)]
    from sluice.demo.digits.data import messages_of
    from sluice.demo.digits.scenes import scenes

    return [list(messages_of(scene)) for scene in scenes("train", count, 11)]
