"""Reward functions: what they are given, what they may return, and that their failures are their sequence's alone."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from structlog.testing import capture_logs

from sluice.consumers.groups import Group
from sluice.consumers.rewards import Refused, Reward, Rewards, is_async, row_of
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks.registry import check_options, load_task
from sluice.consumers.tasks.task import TaskContext
from sluice.pipeline.config.load import load_config
from sluice.pipeline.config.types import ConsumerConfig, PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.errors import ConfigError, EngineError
from sluice.pipeline.telemetry.training_metrics import reduce, reward_parts
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.messages import SequenceResult
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.deadlines import HANG_S, RUN_S
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec

CODEC = tiny_codec("bytes")
Ask = Callable[..., Awaitable[Reward | Refused]]


def result(text: str = "seven", index: int = 0, size: int = 1, **changes: Any) -> SequenceResult:
    ids = CODEC.encode(text)
    arrays = {
        "token_ids": TokenArray(ids),
        "logprobs": FloatArray([-0.5] * len(ids)),
        "versions": Runs.of([0] * len(ids)),
    }
    return sequence_result("g", index, size, **{**arrays, **changes})


@pytest_asyncio.fixture
async def ask(tmp_path: Path) -> AsyncIterator[Ask]:
    """Write a file with functions, and ask those that are named; they are closed at the end."""
    made: list[Rewards] = []

    async def call(code: str, reward: Any = None, asked: SequenceResult | None = None, **options: Any) -> Any:
        (tmp_path / f"own{len(made)}.py").write_text(code)
        here = f"{tmp_path}/own{len(made)}.py"
        terms = [{**term, "fn": f"{here}:{term['fn']}"} for term in reward or []]
        tree = {"reward": terms or f"{here}:score", **options}
        config = load_config(None, [f"rollout_matching={tree}", "producer.group_size=2"], {})
        made.append(Rewards(config.rollout_matching, CODEC))
        return await made[-1].of(asked or result())

    yield call
    for one in made:
        one.close()


async def test_a_function_gets_the_answer_the_truth_and_the_row(ask: Ask) -> None:
    code = (
        "def score(text, truth, row):\n    assert (text, truth) == ('seven', [7]), row\n    return row['num_tokens']\n"
    )
    eos = CODEC.eos_token_ids[0]
    ids = [*CODEC.encode("seven"), eos]
    ended = result(token_ids=TokenArray(ids), logprobs=FloatArray([0.0] * 6), versions=Runs.of([0] * 6), truth=[7])
    found = await ask(code, asked=ended)
    assert isinstance(found, Reward), found
    assert (found.total, found.parts) == (5.0, {})
    assert found.seconds > 0


def test_a_row_is_the_producers() -> None:
    messages = [{"role": "user", "content": "hi"}]
    metadata = {"row": '"a-1"', "epoch": 0, "level": 3}
    prompt = TokenArray(CODEC.encode("hi"))
    row = row_of(result(metadata=metadata, messages=messages, prompt_token_ids=prompt), CODEC)
    assert (row["id"], row["messages"], row["metadata"], row["prompt"]) == ("a-1", messages, {"level": 3}, "hi")
    assert (row["finish_reason"], row["seq_id"], row["images"]) == ("stop", "g:0", [])
    for name, wanted in (("7", 7), ('[{"role":"user"}]', None), (None, None), ('"a long one, cu', '"a long one, cu')):
        assert row_of(result(metadata={"row": name}), CODEC)["id"] == wanted


@pytest.mark.parametrize(
    ("returned", "total"),
    [("True", 1.0), ("3", 3.0), ("__import__('numpy').float32(0.5)", 0.5), ("__import__('torch').tensor(2)", 2.0)],
)
async def test_any_number_is_a_reward(ask: Ask, returned: str, total: float) -> None:
    assert np.float32(0.5) == float(torch.tensor(0.5))  # both are installed
    found = await ask(f"def score(text, truth, row): return {returned}")
    assert isinstance(found, Reward), found
    assert found.total == total


async def test_named_numbers_are_parts_of_their_sum(ask: Ask) -> None:
    found = await ask("async def score(text, truth, row): return {'right': 1, 'length': -0.25}")
    assert isinstance(found, Reward), found
    assert (found.total, found.parts) == (0.75, {"right": 1.0, "length": -0.25})
    assert reward_parts(found.metrics) == found.parts


async def test_several_functions_have_names_and_weights(ask: Ask) -> None:
    code = "def a(text, truth, row): return 1\nasync def b(text, truth, row): return {'x': 2, 'y': 3}\n"
    terms = [{"name": "right", "fn": "a"}, {"name": "style", "fn": "b", "weight": 0.1}]
    found = await ask(code, terms)
    assert isinstance(found, Reward), found
    assert found.total == pytest.approx(1.5)
    assert found.parts == {"right": 1.0, "style": 5.0, "style/x": 2.0, "style/y": 3.0}


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("None", "own0.py:score returned None; return a finite number"),
        ("'0.5'", "returned '0.5'; return a finite number"),
        ("float('nan')", "returned nan; return a finite number"),
        ("float('inf')", "returned inf"),
        ("10**400", "return a finite number"),
        ("{}", "returned an empty dict"),
        ("{'right': None}", "returned, for right, None"),
        ("{'ri ght': 1}", "returned a part named 'ri ght'"),
        ("{'a': 1e30, 'b': 1e30}", "the weighted total is 2e[+]30"),
        ("[1]", "return a finite number"),
    ],
)
async def test_what_is_no_number_is_refused_by_name(ask: Ask, returned: str, says: str) -> None:
    found = await ask(f"def score(text, truth, row): return {returned}")
    assert isinstance(found, Refused), found
    assert found.reason == "reward_failed"
    assert re.search(says, found.detail), found.detail


ODD = """
class Number:
    def __float__(self): raise KeyError("no")
class Silent:
    def __repr__(self): raise KeyError("no")
class Parts(dict):
    def items(self): raise KeyError("no")
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("returned", "says"),
    [("Number()", "return a finite number"), ("Silent()", "returned a Silent;"), ("{Silent(): 1}", "named a Silent;")],
)
async def test_an_object_that_raises_when_it_is_read_is_refused(ask: Ask, kind: str, returned: str, says: str) -> None:
    found = await ask(f"{ODD}\n{kind} score(text, truth, row): return {returned}")
    assert isinstance(found, Refused), found
    assert says in found.detail


async def test_a_dict_of_ones_own_is_read_as_a_dict(ask: Ask) -> None:
    found = await ask(f"{ODD}\ndef score(text, truth, row): return Parts(a=1)")
    assert isinstance(found, Reward), found
    assert found.parts == {"a": 1.0}


async def test_what_cannot_be_copied_or_read_is_its_sequences_failure(ask: Ask) -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    one = "def score(text, truth, row): return 1"
    found = await ask(one, asked=result(truth=deep))
    assert isinstance(found, Refused), found
    assert "nested too deeply" in found.detail
    found = await ask(one, asked=result(prompt_token_ids=TokenArray([-1])))
    assert isinstance(found, Refused), found
    assert "its text can't be read" in found.detail


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_exception_is_refused_with_the_users_own_frames(ask: Ask, kind: str) -> None:
    code = f"def helper(): return {{}}['gold']\n{kind} score(text, truth, row):\n    return helper()\n"
    found = await ask(code)
    assert isinstance(found, Refused), found
    assert found.reason == "reward_failed"
    assert "KeyError: 'gold'" in found.detail
    assert "in helper" in found.detail
    assert "thread_pool" not in found.detail
    assert "rewards.py" not in found.detail.replace("own0.py", "")


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_exit_is_a_failure_like_any_other(ask: Ask, kind: str) -> None:
    found = await ask(f"{kind} score(text, truth, row): raise SystemExit(3)")
    assert isinstance(found, Refused), found
    assert (found.reason, "SystemExit: 3" in found.detail) == ("reward_failed", True)


@pytest.mark.parametrize(
    "code",
    [
        f"import threading\ngate = threading.Event()\ndef score(text, truth, row): gate.wait({HANG_S})",
        f"import asyncio\nasync def score(text, truth, row): await asyncio.sleep({HANG_S})",
    ],
)
async def test_a_hung_function_ends_at_its_deadline(ask: Ask, tmp_path: Path, code: str) -> None:
    found = await ask(code, reward_timeout_s=0.03)
    if "gate" in code:
        load_object(f"{tmp_path}/own0.py:gate", "key").set()
    assert isinstance(found, Refused), found
    assert found.reason == "reward_timeout"
    assert "did not end within 0.03 s" in found.detail
    assert "rollout_matching.reward_timeout_s" in found.detail


async def test_calls_run_side_by_side_and_a_hung_one_stops_no_other(tmp_path: Path) -> None:
    code = (
        "import threading\nboth, gate = threading.Barrier(2), threading.Event()\n"
        f"def score(text, truth, row):\n    if text == 'hang': return gate.wait({HANG_S})\n"
        f"    both.wait({HANG_S})\n    return 1\n"
    )
    (tmp_path / "own.py").write_text(code)
    options = RolloutMatchingConfig(
        task="reward", reward=f"{tmp_path}/own.py:score", reward_timeout_s=RUN_S, reward_concurrency=3
    )
    rewards = Rewards(options, CODEC)
    hung, *others = (asyncio.ensure_future(rewards.of(result(text))) for text in ("hang", "a", "b"))
    found = await asyncio.gather(*others)
    assert [type(one) for one in found] == [Reward, Reward], found
    assert not hung.done()
    load_object(f"{tmp_path}/own.py:gate", "key").set()
    await hung
    rewards.close()


async def test_what_a_function_changes_is_its_own(ask: Ask) -> None:
    asked = result(truth={"gold": [1]}, metadata={"tags": ["x"]})
    code = "def score(text, truth, row): truth['gold'].clear(); row['metadata']['tags'].clear(); return 1"
    assert isinstance(await ask(code, asked=asked), Reward)
    assert (asked.truth, asked.metadata) == ({"gold": [1]}, {"tags": ["x"]})


@pytest.mark.parametrize("names", [1, 5])  # of an answer: the limit is met, or passed over
async def test_names_without_end_are_no_metrics_and_one_warning(tmp_path: Path, names: int) -> None:
    code = f"def score(text, truth, row): return {{f'{{text}}-{{at}}': 1.0 for at in range({names})}}"
    (tmp_path / "own.py").write_text(code)
    rewards = Rewards(RolloutMatchingConfig(task="reward", reward=f"{tmp_path}/own.py:score"), CODEC)
    with capture_logs() as logs:
        found = [await rewards.of(result(f"name{at}")) for at in range(40)]
    assert [one.total for one in found if isinstance(one, Reward)] == [names] * 40
    assert len({name for one in found if isinstance(one, Reward) for name in one.parts}) == 32
    assert [(entry["log_level"], entry["most"]) for entry in logs] == [("warning", 32)]
    rewards.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("score = 3", "is not a function"),
        ("def score(text): return 1", r"can't be called as score\(text, truth, row\)"),
    ],
)
async def test_what_cannot_be_called_is_an_error_at_the_start(ask: Ask, code: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await ask(code)


async def test_calls_that_never_end_end_the_consumer_at_last(tmp_path: Path) -> None:
    code = f"import threading\ngate = threading.Event()\ndef score(text, truth, row): gate.wait({HANG_S})\n"
    (tmp_path / "own.py").write_text(code)
    options = RolloutMatchingConfig(
        task="reward", reward=f"{tmp_path}/own.py:score", reward_timeout_s=0.02, reward_concurrency=64
    )
    rewards = Rewards(options, CODEC)
    await asyncio.gather(*(rewards.of(result()) for _ in range(64)))
    with pytest.raises(EngineError, match=r"own\.py:score: 64 earlier calls never ended; give .* a timeout"):
        await rewards.of(result())
    gate: threading.Event = load_object(f"{tmp_path}/own.py:gate", "key")
    gate.set()


def sampler(task: str = "reward", **options: Any) -> Sampler:
    config = RolloutMatchingConfig(task=task, reward="x.py:score", **options)
    context = TaskContext(CODEC, config, policy=PolicyConfig(enabled=True))
    made = load_task(config)
    check_options(made, context)
    return Sampler(made, context, ConsumerConfig(on_incomplete_group="train_partial"))


def group(*members: SequenceResult) -> Group:
    return Group("g", len(members), {(one.index, 0): one for one in members}, ["1-0"])


@pytest.mark.parametrize("task", ["reward", "exact_answer"])
def test_a_sample_is_what_was_sampled_with_the_functions_reward_and_no_truth(task: str) -> None:
    members = [result("seven", 0, 2), result("six", 1, 2, truth={"any": "thing"})]
    rewards = {"g:0": Reward(1.0, {"right": 1.0}, 0.5), "g:1": Reward(0.0, {"right": 0.0}, 0.1)}
    samples, letters = sampler(task).samples_of(group(*members), rewards)
    assert letters == []
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    assert [round(sample.advantage or 0) for sample in samples] == [1, -1]
    assert list(samples[0].token_ids) == [5, 6, *CODEC.encode("seven")]
    assert samples[0].response_mask.expand() == [0, 0, *[1] * 5]
    assert not any(samples[0].weights)
    published = reduce([sample.metrics for sample in samples])
    assert (published["rollout/reward_mean"], published["reward/right"]) == (0.5, 0.5)
    assert published["rollout/reward_s_mean"] == pytest.approx(0.3)


def test_a_refused_sequence_is_a_drop_with_its_reason_and_a_cut_one_is_not_asked() -> None:
    cut = result("six", 1, 2, finish_reason="deadline")
    made = sampler()
    assert [made.is_scored(one) for one in (result(), cut, result(reward=1.0))] == [True, False, False]
    samples, letters = made.samples_of(group(result(size=2), cut), {"g:0": Refused("reward_failed", "because")})
    assert (samples, [(one.reason, one.detail) for one in letters]) == (
        [], [("reward_failed", "because"), ("deadline", "decode ended with deadline")],
    )  # fmt: skip


def test_a_reward_from_the_agents_side_needs_no_function() -> None:
    [sample], letters = sampler().samples_of(group(result(reward=0.5)))
    assert (sample.reward, letters) == (0.5, [])
    _, [letter] = sampler().samples_of(group(result()))
    assert letter.reason == "invalid_truth"
    assert "rollout_matching.reward" in letter.detail


def test_detection_keeps_its_metrics_and_trains_what_was_sampled() -> None:
    made = sampler("detection")
    [sample], _ = made.samples_of(group(result("{}", truth=[])), {"g:0": Reward(0.25)})
    assert (sample.reward, sample.metrics["rollout/gt_objects"]) == (0.25, 0.0)
    assert list(sample.token_ids)[2:] == CODEC.encode("{}")


def test_a_misspelt_task_is_named_with_a_reward_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'exact_answer'"):
        load_task(RolloutMatchingConfig(task="exact_anwser", reward="x.py:score"))
    with pytest.raises(ConfigError, match=r"policy\.enabled"):
        check_options(load_task(RolloutMatchingConfig(task="reward")), TaskContext(CODEC, RolloutMatchingConfig()))
    own = RolloutMatchingConfig(task="reward", reward="x.py:score")  # the configuration's own rule says it of these
    check_options(load_task(own), TaskContext(CODEC, own))


def test_a_partial_of_a_coroutine_function_is_awaited() -> None:
    async def score(weight: float, text: str, truth: Any, row: Any) -> float:
        return weight

    assert is_async(functools.partial(score, 1.0))
    assert not is_async(len)
