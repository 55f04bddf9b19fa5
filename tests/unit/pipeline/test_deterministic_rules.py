"""What a deterministic run can't do is refused by name, with what to set."""

from __future__ import annotations

import pytest

from sluice.pipeline.config import load_config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue import StepRow, id_in_step, job_id_for, step_row_of
from sluice.pipeline.wire.keys import run_of
from sluice.pipeline.wire.messages import SamplingParams

ON = ["deterministic=true", "worker.max_batch=1", "worker.checkpoint_tokens=0", "model.device=cpu"]


def test_its_needs_are_few_and_all_named_at_once() -> None:
    load_config(None, ON, environ={})
    with pytest.raises(ConfigError) as caught:
        load_config(None, ON[:1], environ={})
    for key in ("worker.max_batch 32", "worker.checkpoint_tokens 256", "model.device auto"):
        assert f"{key} with deterministic" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("worker.backend=vllm", "worker.backend vllm with deterministic"),
        ("model.device=cuda", "set it to cpu"),
        ("model.device_map=auto", "model.device_map auto with deterministic"),
        ("consumer.count=2", "consumer.count 2 with deterministic"),
        ("data.on_malformed=skip", "data.on_malformed skip with deterministic"),
        ("trainer.external=true", "trainer.external true with deterministic"),
        ("trainer.ranks=2", "trainer.ranks 2 with deterministic"),
        ("trainer.publish_every=2", "trainer.publish_every 2 with deterministic"),
        ("trainer.optimizer=adamw_8bit", "trainer.optimizer adamw_8bit with deterministic"),
        ("trainer.torch_threads=0", "trainer.torch_threads 0 with deterministic"),
        ("worker.torch_threads=0", "worker.torch_threads 0 with deterministic"),
        ("rollout.url=http://127.0.0.1:9000", "rollout.url http://127.0.0.1:9000 with deterministic"),
        ("gateway.count=1", "gateway.count 1 with deterministic"),
        (
            "trainer.checkpoint_every=3",
            "weights.retention 4 must be >= producer.max_staleness + trainer.checkpoint_every",
        ),
        ("policy.enabled=true policy.advantage=reward", "scorer.pass_tokens 8192 with deterministic"),
        (
            "policy.enabled=true producer.group_size=2 policy.zero_variance=filter",
            "policy.zero_variance filter with deterministic",
        ),
    ],
)
def test_what_time_or_a_neighbour_would_decide_is_refused(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ON, *change.split()], environ={})
    assert words in str(caught.value)


def test_a_job_id_names_its_row_of_a_step_and_no_other_id_does() -> None:
    plain = job_id_for("text-1.2.3", "row", 0, SamplingParams(), 2)
    assert step_row_of(plain) is None
    place = StepRow(step=12, row=3, rows=8)
    job_id = id_in_step(plain, place)
    assert step_row_of(job_id) == place
    assert run_of(job_id) == "text-1.2.3"
    assert step_row_of(f"{job_id}:0") is None, "a sequence's id is not a job's"
