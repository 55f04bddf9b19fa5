"""Scorers on a real broker with a real tiny model and its published versions."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
import yaml
from msgspec.structs import replace

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, ImagesConfig, ModelConfig, PolicyConfig, ScorerConfig
from sluice.pipeline.images.processor import VisionProcessor
from sluice.pipeline.queue.scores import Scores
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import remove, write_version
from sluice.pipeline.wire.keys import SCORE_GROUP, Keys
from sluice.pipeline.wire.messages import ImageRef, ScoreJob, ScoreResult, WeightVersion
from sluice.pipeline.wire.tokens import Runs, TokenArray
from sluice.workers.model_files import load_tokenizer
from sluice.workers.scorer.model import VersionedModel
from sluice.workers.scorer.scorer import Scorer, serve_scores
from tests.contract.engine_fixtures import ragged_prompts, reference, reference_logprobs
from tests.contract.vlm_plain import PlainVlm
from tests.deadlines import HANG_S
from tests.e2e.processes import BIN, Process, environment, launch
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import CONTEXT, save_tiny_model
from tests.tiny_vision_models import FAMILIES, pictures
from tests.tiny_vlms import save_tiny_llava

EXACT = 1e-4  # batches of other sizes than the reference's
PROBE = list(b"a probe")
PROMPT, TOKENS = list(b"the prompt "), list(b"and an answer of some length")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"m{seed}", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def plain(sources: list[Path]) -> list[Any]:
    return [reference(source) for source in sources]


@pytest.fixture(scope="module")
def model(sources: list[Path]) -> Iterator[VersionedModel]:
    threads = torch.get_num_threads()
    yield VersionedModel(Config(model=ModelConfig(path=str(sources[0]), device="cpu")))
    torch.set_num_threads(threads)


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, sources: list[Path]) -> Config:
    sections = {"policy": PolicyConfig(enabled=True, advantage="reward"), "scorer": ScorerConfig(lease_s=10.0)}
    return run_config(broker_config, keys, run_dir, model={"path": str(sources[0]), "device": "cpu"}, **sections)


class Run:
    """A run's published versions, and its trainer's questions."""

    def __init__(self, client: Any, config: Config, sources: list[Path], plain: list[Any]) -> None:
        self.client, self.config, self.keys, self.plain = client, config, Keys(config.run), plain
        self.root = Path(config.run_dir) / config.run / "weights"
        self._sources = sources
        self._owner, self._registry = Ownership(client, self.keys, "trainer"), WeightsRegistry(client, self.keys)

    async def publish(self, version: int, *, retention: int = 4, score: float | None = None) -> WeightVersion:
        """Version v has the weights of source v."""
        if score is None:
            score = reference_logprobs(self.plain[version], PROBE[:1], PROBE[1:]).sum().item()
        manifest = WeightVersion(
            version=version, path="", digest="", probe_token_ids=TokenArray(PROBE), probe_score=score
        )
        full = write_version(self._sources[version], self.root, manifest)
        assert await self._owner.try_acquire()
        await self._registry.register(full, self._owner.key, self._owner.nonce, range(version - retention + 1))
        return full

    async def ask(self, *jobs: ScoreJob) -> dict[tuple[str, int], ScoreResult]:
        found = await Scores(self.client, self.keys, "t").ask(jobs, HANG_S)
        assert len(found) == len(jobs)
        assert await self.client.xlen(self.keys.score_jobs) == 0
        return {(one.seq_id, one.scored_version): one for one in found}

    def assert_right(self, answer: ScoreResult, job: ScoreJob) -> None:
        """The numbers of one plain forward pass of that version."""
        assert (answer.error, answer.scored_version, list(answer.positions)) == ("", job.version, list(job.positions))
        expected = reference_logprobs(self.plain[job.version], list(job.prompt_token_ids), list(job.token_ids))
        expected = expected[list(job.positions)]
        torch.testing.assert_close(torch.tensor(list(answer.logprobs)), expected, atol=EXACT, rtol=0)


@pytest.fixture
def run(client: Any, config: Config, sources: list[Path], plain: list[Any]) -> Run:
    return Run(client, config, sources, plain)


@contextlib.asynccontextmanager
async def scoring(config: Config, model: VersionedModel, name: str = "s") -> AsyncIterator[Any]:
    """A scorer that serves until the block ends; its model has served other runs before."""
    model.version = None
    async with role_of(config, "scorer", name) as role:
        running = asyncio.create_task(Scorer(role, model).run())
        yield role
        assert not running.done(), running.exception()
        role.stop.set()
        await running


def job(seq_id: str, version: int, **changes: Any) -> ScoreJob:
    fields: dict[str, Any] = {
        "run": "r",
        "seq_id": seq_id,
        "prompt_token_ids": TokenArray(PROMPT),
        "token_ids": TokenArray(TOKENS),
        "positions": TokenArray(range(len(TOKENS))),
        "version": version,
    }
    return ScoreJob(**{**fields, **changes})


async def test_scores_are_those_of_a_plain_pass_of_the_version_asked_for(
    run: Run, config: Config, model: VersionedModel
) -> None:
    for version in (0, 1, 2):
        await run.publish(version)
    jobs = [
        job(f"a:{number}", number % 3, prompt_token_ids=TokenArray([7, *prompt]), positions=TokenArray(positions))
        for number, prompt in enumerate(ragged_prompts(12))
        for positions in [([3, 1, 9], [0], range(20, 28))[number // 3 % 3]]
    ]
    async with scoring(config, model) as role:
        answers = await run.ask(*jobs)
        await eventually(lambda: _idle(role), "the scorer to wait")
        facts = role.status.row.facts
        assert (facts["version"], facts["scored"]) == (model.version, 12)
    for one in jobs:
        run.assert_right(answers[one.seq_id, one.version], one)


async def _idle(role: Any) -> bool:
    return "score jobs" in (role.status.row.waiting_for or "")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an empty prompt": ({"prompt_token_ids": TokenArray()}, "prompt"),
    "no positions": ({"positions": TokenArray()}, "positions"),
    "a position below 0": ({"positions": TokenArray([-1, 0])}, "outside 0..27"),
    "a position past the end": ({"positions": TokenArray([28])}, "outside 0..27"),
    "a token out of the vocabulary": ({"token_ids": TokenArray([5, 10**6]), "positions": TokenArray([0])}, "1000000"),
    "a negative token": ({"prompt_token_ids": TokenArray([-5])}, "-5"),
    "more than the context": ({"prompt_token_ids": TokenArray([5] * (CONTEXT - 27))}, f"context of {CONTEXT}"),
}


async def test_a_job_that_cannot_be_scored_is_answered_with_the_reason(
    run: Run, config: Config, model: VersionedModel
) -> None:
    await run.publish(1)
    good = job("good:0", 1, prompt_token_ids=TokenArray([5] * (CONTEXT - 28)))
    async with scoring(config, model):
        answers = await run.ask(good, *(job(name, 1, **changes) for name, (changes, _) in BAD.items()))
    run.assert_right(answers["good:0", 1], good)
    for name, (_, why) in BAD.items():
        assert why in answers[name, 1].error, name
        assert not answers[name, 1].logprobs


def test_a_prompt_with_an_image_is_not_scored_as_text(tmp_path: Path) -> None:
    source = save_tiny_llava(tmp_path)
    config = Config(model=ModelConfig(path=str(source), device="cpu"))
    model = VersionedModel(config)
    model.load(write_version(source, tmp_path / "weights", WeightVersion(version=1, path="", digest="")))
    image = load_tokenizer(str(source)).convert_tokens_to_ids("<image>")
    text, seen = model.score([job("text:0", 1), job("seen:0", 1, prompt_token_ids=TokenArray([5, image, image, 6]))])
    assert (text.error, len(text.logprobs)) == ("", len(TOKENS))
    assert seen.error == "the prompt has an image, and the score job names none"
    [blind] = VersionedModel(
        Config(model=ModelConfig(path=str(save_tiny_model(tmp_path / "text")), device="cpu"))
    ).score([job("seen:0", 1, images=[ImageRef(path="a.png")])])
    assert blind.error


@pytest.fixture
def pictures_root(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    root.mkdir()
    for number, image in enumerate(pictures(3)):
        image.save(root / f"{number}.png")
    return root


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
async def test_prompts_with_images_are_scored_like_text(
    broker_config: BrokerConfig,
    keys: Keys,
    run_dir: Path,
    client: Any,
    tmp_path: Path,
    pictures_root: Path,
    family: str,
) -> None:
    source = FAMILIES[family](tmp_path / "v1")
    run_with = run_config(
        broker_config,
        keys,
        run_dir,
        model={"path": str(source), "device": "cpu"},
        policy=PolicyConfig(enabled=True, advantage="reward"),
        images=ImagesConfig(roots=(str(pictures_root),)),
    )
    plain, vision = PlainVlm(source), VisionProcessor.load(run_with.model, transformers)
    image, tokens = vision.image_token_id, list(b"an answer")
    tokens[4] = image  # the policy may write anything
    asked = {
        "one": ([65, image, 66], ["0.png"]),
        "two": ([65, image, 66, image, 67], ["0.png", "1.png"]),
        "again": ([65, image, 66, image, 67], ["0.png", "1.png"]),
        "changed": ([65, image, 66], ["2.png"]),
        "gone": ([65, image, 66], ["9.png"]),
        "other": ([65, image, 66, image, 67], ["0.png"]),
        "text": ([65, 66], []),
    }
    jobs: list[ScoreJob] = []
    for name, (prompt, paths) in asked.items():
        shown = [pictures(3)[int(path[0])] for path in (paths if name not in ("gone", "other") else ["0.png", "1.png"])]
        expanded = vision.prepare(prompt, shown[: prompt.count(image)]).token_ids
        refs = [ImageRef(path=path, sha256="0" * 64 if name == "changed" else None) for path in paths]
        fields = {"prompt_token_ids": TokenArray(expanded), "images": refs, "positions": TokenArray(range(len(tokens)))}
        jobs.append(job(name, 1, token_ids=TokenArray(tokens), **fields))
    # Of a sequence of two versions, of which the other one wrote the first tokens.
    rest, sampled = TokenArray(range(5, len(tokens))), Runs.of([1] * len(tokens))
    jobs.append(replace(jobs[0], seq_id="rest", positions=rest, sampled=sampled))
    model = VersionedModel(run_with)
    assert model.features is not None
    at_start = model.features.computed
    published = Run(client, run_with, [source, source], [plain.model, plain.model])
    await published.publish(1)
    async with scoring(run_with, model):
        answers = {name: one for (name, _), one in (await published.ask(*jobs)).items()}
    for name in ("one", "two", "again", "text"):
        prompt, paths = asked[name]
        expected = plain.logprobs(prompt, [pictures(3)[int(path[0])] for path in paths], tokens)
        assert answers[name].error == ""
        torch.testing.assert_close(torch.tensor(list(answers[name].logprobs)), expected, atol=1e-4, rtol=0)
    assert answers["rest"].error == ""
    assert list(answers["rest"].logprobs) == pytest.approx(list(answers["one"].logprobs)[5:], abs=1e-4)
    assert "asks for 000000" in answers["changed"].error
    assert "9.png" in answers["gone"].error
    assert "left in the prompt after its 1 images" in answers["other"].error
    assert model.facts.supports_vlm
    assert model.features.computed - at_start == 2, "each picture once, whatever shows it"


@contextlib.asynccontextmanager
async def silent_site(config: Config, ends: asyncio.Event) -> AsyncIterator[tuple[Config, ImageRef]]:
    """A picture of a site that says nothing before `ends`, longer than anybody here waits for it."""

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        images = ImagesConfig(hosts=(host,), fetch_timeout_s=2 * HANG_S)
        try:
            yield replace(config, images=images), ImageRef(url=f"http://{host}/a.png")
        finally:
            ends.set()


async def test_a_slow_picture_holds_up_no_score_of_text(run: Run, config: Config, model: VersionedModel) -> None:
    await run.publish(1)
    ends = asyncio.Event()
    async with silent_site(config, ends) as (config, picture):
        asking = asyncio.create_task(run.ask(job("seen:0", 1, images=[picture]), job("text:0", 1)))
        await eventually(lambda: _is_long(run, 2), "both are asked")
        async with scoring(config, model):
            await eventually(lambda: _is_long(run, 1), "the text is answered")
            ends.set()
            answers = await asking
    run.assert_right(answers["text:0", 1], job("text:0", 1))
    assert answers["seen:0", 1].error


async def test_a_picture_that_does_not_come_is_waited_for_as_long_as_its_asker_waits(
    run: Run, config: Config, model: VersionedModel
) -> None:
    await run.publish(1)
    async with silent_site(config, asyncio.Event()) as (config, picture), scoring(config, model):
        asker = Scores(run.client, run.keys, "t")
        assert await asker.ask([job("seen:0", 1, images=[picture])], 1.0) == []
        answers = await run.ask(job("text:0", 1))
    run.assert_right(answers["text:0", 1], job("text:0", 1))


async def test_a_scorer_that_waits_for_a_picture_hears_a_stop(run: Run, config: Config, model: VersionedModel) -> None:
    await run.publish(1)
    async with silent_site(config, asyncio.Event()) as (config, picture):
        async with scoring(config, model) as role:
            asking = asyncio.create_task(
                Scores(run.client, run.keys, "t").ask([job("a:0", 1, images=[picture])], HANG_S)
            )

            async def waits() -> bool:
                return role.status.row.waiting_for is not None and "image" in role.status.row.waiting_for

            await eventually(waits, "the scorer to wait for the picture")
        assert await _is_long(run, 1), "the job is left to another scorer"
        asking.cancel()


async def _is_long(run: Run, length: int) -> bool:
    return await run.client.xlen(run.keys.score_jobs) == length


async def test_versions_that_cannot_be_had_end_no_scorer_and_are_never_mixed_up(
    run: Run, config: Config, model: VersionedModel, tmp_path: Path
) -> None:
    """Retired, unknown, damaged, of another model, not what the trainer measured: then a whole one again."""
    await run.publish(0)
    damaged = await run.publish(1)
    await run.publish(2, score=-1.0)
    file = Path(damaged.path) / "model.safetensors"
    content = file.read_bytes()
    file.unlink()  # a hard link to the source
    file.write_bytes(content[:-4] + b"\1\2\3\4")
    other = save_tiny_model(tmp_path / "other", groups=1)
    run._sources.append(other)
    await run.publish(3, score=0.0)
    run._sources.pop()
    reasons = {9: "not registered", 1: "digest", 2: "probe", 3: "shape"}
    async with scoring(config, model):
        for _ in range(2):
            answers = await run.ask(job("a:0", 0), *(job("b:0", version) for version in reasons))
            run.assert_right(answers["a:0", 0], job("a:0", 0))
            for version, why in reasons.items():
                assert why in answers["b:0", version].error
        remove(run.root, [0])
        later = await run.ask(job("c:0", 0), job("c:0", 1))
        run.assert_right(later["c:0", 0], job("c:0", 0))  # still loaded
        assert "not there" in later["c:0", 1].error or "digest" in later["c:0", 1].error


async def test_a_scorer_that_is_killed_with_a_job_in_hand_is_replaced(
    run: Run, config: Config, model: VersionedModel, tmp_path: Path
) -> None:
    config = replace(config, scorer=ScorerConfig(lease_s=1.0))  # the heir waits for its end
    await run.publish(0)
    file = Path((await run.publish(1)).path) / "more.safetensors"
    os.mkfifo(file)  # whoever verifies this version is stuck
    asking = asyncio.create_task(run.ask(job("a:0", 1)))
    victim = start_scorer(config, tmp_path, "victim")
    try:
        await eventually(lambda: _holds(run, victim), "the victim to hold the job")
    finally:
        victim.kill()
    file.unlink()
    async with scoring(config, model, "heir"):
        answers = await asking
    run.assert_right(answers["a:0", 1], job("a:0", 1))


def start_scorer(config: Config, directory: Path, name: str) -> Process:
    """A real process on this configuration."""
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(config)))
    own = environment(config.run, REDIS_URL=config.broker.url or "", SLUICE_PROCESS_NAME=name)
    command = [str(BIN / "sluice"), "score", "-c", str(file)]
    return launch(command, name=name, log=directory / "scorer.log", env=own, cwd=directory)


async def _holds(run: Run, victim: Process) -> bool:
    assert not victim.failed, victim.tail()
    if not await run.client.exists(run.keys.score_jobs):
        return False
    groups = await run.client.xinfo_groups(run.keys.score_jobs)
    rows = await run.client.xpending_range(run.keys.score_jobs, SCORE_GROUP, "-", "+", 1) if groups else []
    return [row["consumer"].decode() for row in rows] == [victim.name]


async def test_the_role_serves_until_it_is_asked_to_stop(run: Run, config: Config) -> None:
    await run.publish(2)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_scores(config, stop))
    answers = await run.ask(job("a:0", 2))
    stop.set()
    await serving
    run.assert_right(answers["a:0", 2], job("a:0", 2))
    assert not await run.client.hlen(run.keys.processes)


async def test_without_a_policy_loss_a_scorer_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await serve_scores(Config(broker=BrokerConfig(embedded_dir=str(tmp_path / "none"))))
    assert "policy.enabled is false" in capsys.readouterr().err
