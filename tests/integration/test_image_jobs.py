"""Jobs with an image on the queue: fetched once by each worker, and what is wrong with an image fails its job alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sluice.pipeline.config.types import BrokerConfig, Config, ImagesConfig, ModelConfig
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, DecodeJob, ImageRef, SamplingParams, SequenceResult, decode
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers import decode_worker
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.hf import HfBackend
from sluice.workers.engine.prompts import Prompts
from sluice.workers.job_prompts import JobPrompts
from tests.contract.engine_fixtures import started
from tests.contract.vlm_plain import PlainVlm
from tests.image_site import Site, site
from tests.pictures import huge_png
from tests.roles import eventually, role_of, run_config
from tests.tiny_models import save_tiny_model
from tests.tiny_vlms import LLAVA_IMAGE_TOKENS, picture, save_tiny_llava

__all__ = ["site"]
PLENTY = Credit(10_000, 10_000, 1)
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture(scope="module")
def text_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HfBackend]:
    with started(save_tiny_model(tmp_path_factory.mktemp("text")), max_batch=4) as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "scans"
    root.mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        picture(40, 30, seed).save(root / name)
    (root / "bomb.png").write_bytes(huge_png())
    (root / "cut.png").write_bytes((root / "a.png").read_bytes()[:-60])
    (tmp_path / "outside.png").write_bytes((root / "a.png").read_bytes())
    return root


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reaches no images looks for them again soon."""
    monkeypatch.setattr(decode_worker, "_LOOK_FOR_IMAGES_S", 0.2)


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, root: Path) -> Config:
    return run_config(
        broker_config,
        keys,
        run_dir,
        worker={"poll_s": 0.01, "max_batch": 4, "drain_s": 0.0},
        model={"path": str(source)},
        images=ImagesConfig(roots=(str(root),)),
    )


@contextlib.asynccontextmanager
async def working(config: Config, backend: HfBackend) -> AsyncIterator[JobPrompts]:
    async with role_of(config, "worker", "w") as role:
        prompts = JobPrompts(config.model, config.images)
        running = asyncio.create_task(DecodeWorker(role, backend, prompts).run())
        try:
            yield prompts
        finally:
            role.stop.set()
            await running
            await prompts.close()


def image_job(keys: Keys, name: str, *images: ImageRef, n: int = 1, **options: Any) -> DecodeJob:
    prompt = {"messages": MESSAGES, **options}
    return DecodeJob(run=keys.run, job_id=f"{keys.run}:{name}", n=n, images=list(images), sampling=GREEDY, **prompt)


async def endings(client: Any, keys: Keys, count: int) -> tuple[dict[str, SequenceResult], dict[str, DeadLetter]]:
    """(results, dead letters) by job name, once there are `count` of them."""
    done: dict[str, SequenceResult] = {}
    dead: dict[str, DeadLetter] = {}

    async def all_ended() -> bool:
        for _, fields in await client.xrange(keys.results + "0"):
            if b"r" not in fields:
                continue  # the notice of a job that died
            result = decode(SequenceResult, fields[b"r"])
            done[result.seq_id.removeprefix(f"{keys.run}:")] = result
        for _, fields in await client.xrange(keys.dead):
            letter = decode(DeadLetter, fields[b"d"])
            dead[letter.seq_id.removeprefix(f"{keys.run}:")] = letter
        return len(done) + len(dead) >= count

    await eventually(all_ended, f"{count} endings")
    return done, dead


async def test_an_image_is_fetched_once_and_decides_what_is_decoded(
    config: Config, backend: HfBackend, client: Any, keys: Keys, source: Path, root: Path
) -> None:
    digest = sha256((root / "b.png").read_bytes()).hexdigest()
    (root / digest).write_bytes((root / "b.png").read_bytes())
    jobs = [
        image_job(keys, "group", ImageRef(path="a.png"), n=3),
        image_job(keys, "again", ImageRef(path="a.png")),
        image_job(keys, "absolute", ImageRef(path=str(root / "b.png"))),
        image_job(keys, "digest", ImageRef(sha256=digest)),
    ]
    processed = backend.images_processed
    async with working(config, backend) as prompts:
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, 6)
        assert prompts.images_fetched == 3

        async def reported() -> bool:
            [row] = (await snapshot(client, keys)).alive("worker")
            return [row.facts.get(name) for name in ("images_fetched", "images_processed")] == [3, processed + 2]

        await eventually(reported, "the worker to report its images")
    assert not dead
    assert backend.images_processed == processed + 2, "once for each picture, and not for each sequence"
    assert done["digest:0"].images == [ImageRef(sha256=digest)]
    assert done["absolute:0"].images == [ImageRef(path=str(root / "b.png"), sha256=digest)]
    assert done["group:2"].images[0].sha256 == sha256((root / "a.png").read_bytes()).hexdigest()
    plain, placeholder = PlainVlm(source), Prompts(config.model).vlm(MESSAGES)
    for seed, names in enumerate((("group:0", "group:1", "group:2", "again:0"), ("absolute:0", "digest:0"))):
        prompt, tokens = plain.greedy(placeholder, picture(40, 30, seed), 10)
        for name in names:
            assert list(done[name].token_ids) == tokens[: len(done[name].token_ids)]
            assert list(done[name].prompt_token_ids) == prompt
    assert len(prompt) == len(placeholder) - 1 + LLAVA_IMAGE_TOKENS


async def test_several_images_of_a_prompt_keep_their_order_and_get_their_digests(
    config: Config, backend: HfBackend, client: Any, keys: Keys, source: Path, root: Path
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, *MESSAGES]
    there, back = ("a.png", "b.png"), ("b.png", "a.png")
    jobs = [
        image_job(keys, "there", *map(ImageRef.of, there), n=2, messages=messages),
        image_job(keys, "back", *map(ImageRef.of, back), messages=messages),
    ]
    async with working(config, backend) as prompts:
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, 3)
        assert prompts.images_fetched == 2
    assert not dead
    plain, placeholders = PlainVlm(source), Prompts(config.model).vlm(messages, 2)
    for name, paths in (("there:0", there), ("there:1", there), ("back:0", back)):
        shown = [picture(40, 30, there.index(path)) for path in paths]
        prompt, tokens = plain.greedy(placeholders, shown, 10)
        assert list(done[name].prompt_token_ids) == prompt
        assert list(done[name].token_ids) == tokens[: len(done[name].token_ids)]
        digests = [sha256((root / path).read_bytes()).hexdigest() for path in paths]
        assert done[name].images == [ImageRef(path=path, sha256=one) for path, one in zip(paths, digests, strict=True)]


async def test_an_image_of_a_listed_host_is_fetched_once(
    config: Config, backend: HfBackend, client: Any, keys: Keys, root: Path, site: Site
) -> None:
    site.routes["/a.png"] = (root / "a.png").read_bytes()
    config = msgspec.structs.replace(config, images=ImagesConfig(hosts=(f"127.0.0.1:{site.port}",)))
    digest = sha256((root / "a.png").read_bytes()).hexdigest()
    jobs = [
        image_job(keys, "url", ImageRef(url=site.url("/a.png")), n=2),
        image_job(keys, "checked", ImageRef(url=site.url("/a.png"), sha256=digest)),
        image_job(keys, "wrong", ImageRef(url=site.url("/a.png"), sha256="0" * 64)),
        image_job(keys, "gone", ImageRef(url=site.url("/b.png"))),
    ]
    async with working(config, backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, 5)
    assert set(done) == {"url:0", "url:1", "checked:0"}
    assert "404" in dead["gone:0"].detail
    assert digest in dead["wrong:0"].detail
    assert site.asked["/a.png"] == 3, "once for the group, once for each claim of a digest"


async def test_a_bad_image_fails_its_own_job_with_a_reason(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "no image"}]}]
    bad = {
        "missing": ([ImageRef(path="none.png")], "none.png"),
        "corrupt": ([ImageRef(path="cut.png")], "cut.png"),
        "bomb": ([ImageRef(path="bomb.png")], "60000"),
        "outside": ([ImageRef(path="../outside.png")], "outside the configured roots"),
        "digest": ([ImageRef(path="a.png", sha256="0" * 64)], "sha256"),
        "host": ([ImageRef(url="http://images.example/a.png")], "images.hosts"),
        "nothing": ([ImageRef()], "image"),
        "two": ([ImageRef(path="a.png")] * 2, "1 image parts, and 2 images came with them"),
        "many": ([ImageRef(url="http://none.invalid/")] * 17, "17 images, and images.max_per_prompt allows 16"),
        "one of": ([ImageRef(path="a.png"), ImageRef(path="none.png")], "1 image parts"),
    }
    jobs = [image_job(keys, name, *images) for name, (images, _) in bad.items()]
    jobs.append(image_job(keys, "no part", ImageRef(path="a.png"), messages=text))
    jobs.insert(3, image_job(keys, "good", ImageRef(path="a.png")))
    jobs.insert(5, image_job(keys, "text", messages=text))
    async with working(config, backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, len(jobs))
    assert set(done) == {"good:0", "text:0"}
    assert {letter.reason for letter in dead.values()} == {"invalid_request"}
    for name, (_, says) in bad.items():
        assert says in dead[f"{name}:0"].detail, name
    assert "0 image parts" in dead["no part:0"].detail


async def test_a_prompt_that_speaks_of_an_image_and_has_none_is_refused(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    placeholder = int(Prompts(config.model).tokenizer.convert_tokens_to_ids("<image>"))
    spelled = [{"role": "user", "content": [{"type": "text", "text": "see <image>"}]}]
    ids: dict[str, Any] = {"messages": [], "prompt_token_ids": TokenArray([65, placeholder])}
    jobs = [
        image_job(keys, "part"),
        image_job(keys, "spelled", messages=spelled),
        image_job(keys, "ids", **ids),
        image_job(keys, "sampled", **ids, rollout_id="r", turn=1),
        image_job(keys, "good", ImageRef(path="a.png")),
    ]
    async with working(config, backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, len(jobs))
    assert set(done) == {"good:0", "sampled:0"}
    assert {letter.reason for letter in dead.values()} == {"invalid_request"}
    assert "messages[0].content[0] is a part of type 'image', but no image was sent" in dead["part:0"].detail
    for name in ("spelled:0", "ids:0"):
        assert "has 1 image placeholders (<image>), but no image was sent" in dead[name].detail


async def test_a_text_model_refuses_images_and_goes_on(
    config: Config, text_backend: HfBackend, client: Any, keys: Keys
) -> None:
    config = msgspec.structs.replace(config, model=ModelConfig(path=text_backend.facts.model))
    text = [{"role": "user", "content": "no image"}]
    jobs = [
        image_job(keys, "image", ImageRef(path="a.png")),
        image_job(keys, "ids", ImageRef(path="a.png"), messages=[], prompt_token_ids=TokenArray([1, 2])),
        image_job(keys, "blind"),
        DecodeJob(run=keys.run, job_id=f"{keys.run}:text", messages=text, sampling=GREEDY),
    ]
    async with working(config, text_backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, 4)
    assert set(done) == {"text:0"}
    assert {letter.reason for letter in dead.values()} == {"invalid_request"}
    assert "image" in dead["ids:0"].detail
    assert "no image was sent" in dead["blind:0"].detail


@pytest.mark.usefixtures("often")
async def test_a_job_whose_images_are_away_waits_for_them(
    config: Config, backend: HfBackend, client: Any, keys: Keys, root: Path
) -> None:
    """A mount that comes back costs no job anything, and its absence costs others no time."""
    away = root.rename(root.parent / "away")
    text = [{"role": "user", "content": [{"type": "text", "text": "no image"}]}]
    jobs = [image_job(keys, "group", ImageRef(path="a.png"), n=3), image_job(keys, "text", messages=text)]

    async def tried() -> bool:
        return int(await client.hget(f"{keys.job_state}{keys.run}:group", "attempt") or 0) > 2

    async with working(config, backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        await eventually(tried, "two tries")
        done, dead = await endings(client, keys, 1)
        assert (set(done), dead) == ({"text:0"}, {})
        away.rename(root)
        done, dead = await endings(client, keys, 4)
    assert not dead
    assert {f"group:{index}" for index in range(3)} < set(done)


@pytest.mark.usefixtures("often")
async def test_a_worker_that_reaches_no_images_leaves_the_queue_to_others(
    config: Config, backend: HfBackend, client: Any, keys: Keys, root: Path
) -> None:
    """A host that lost its mount would fail a whole queue faster than its neighbours decode."""
    away = root.rename(root.parent / "away")
    jobs = [image_job(keys, str(at), ImageRef(path="a.png")) for at in range(64)]

    async def tries() -> list[int]:
        states = [await client.hget(f"{keys.job_state}{job.job_id}", "attempt") for job in jobs]
        return [int(state or 0) for state in states]

    async def tried_again() -> bool:
        return sum(await tries()) >= 8  # a first batch of four or five, and some after it

    async with working(config, backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        await eventually(tried_again, "tries of some jobs")
        assert (await tries()).count(0) > len(jobs) // 2
        away.rename(root)
        done, dead = await endings(client, keys, len(jobs))
    assert (len(done), dead) == (len(jobs), {})


async def test_a_job_whose_images_stay_away_is_dead_after_its_tries(
    config: Config, backend: HfBackend, client: Any, keys: Keys, root: Path, site: Site
) -> None:
    async def busy(_request: web.BaseRequest) -> web.Response:
        return web.Response(status=503)

    site.routes |= {"/a.png": busy, "/b.png": (root / "b.png").read_bytes()}
    config = msgspec.structs.replace(config, images=ImagesConfig(hosts=(f"127.0.0.1:{site.port}",), tries=2))
    jobs = [image_job(keys, name, ImageRef(url=site.url(f"/{name}.png")), n=2) for name in ("a", "b")]
    async with working(config, backend):
        await JobQueue(client, keys).enqueue(jobs, PLENTY)
        done, dead = await endings(client, keys, 4)
    assert set(done) == {"b:0", "b:1"}
    assert {name: (letter.reason, letter.attempts) for name, letter in dead.items()} == {
        "a:0": ("images_unavailable", 2),
        "a:1": ("images_unavailable", 2),
    }
    assert "the server answered 503, 3 times; check the server (tried 2 times, images.tries)" in dead["a:0"].detail
    assert site.asked["/a.png"] == 6
