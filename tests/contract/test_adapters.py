"""Adapters beside the engine's weights, over both engines: every number against peft's own, unmerged model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.consumers.training import lora
from sluice.consumers.training.model import probe_score, write_model
from sluice.pipeline.config.types import LoraConfig
from sluice.pipeline.errors import RequestError, WeightsError
from sluice.pipeline.wire.messages import Progress
from sluice.workers.engine.adapters import AdapterRoom, Policy
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest, WeightsProbe
from sluice.workers.engine.vllm import VllmBackend
from sluice.workers.engine.vllm.sequences import Entries
from tests.contract.engine_fixtures import decode_all, reference, reference_logprobs, repeated, request, run, started
from tests.contract.test_midflight import endless
from tests.contract.versions import TOLERANCE, Versions, assert_right, decode_amid, random_prompt
from tests.contract.vllm_fixtures import started_vllm
from tests.deadlines import HANG_S
from tests.tiny_models import save_tiny_model

PROMPT = list(b"the abc of it")
ROOM = AdapterRoom(count=8, rank=12)


@dataclass(frozen=True)
class Made:
    """Adapters of one tiny model by name, as files and as peft's model; "" is the model itself."""

    directories: Mapping[str, Path]
    models: Mapping[str, Any]


def make(base: Path, target: Path, seed: int, **options: Any) -> Any:
    """Write an adapter with random numbers; returns the model with it."""
    model = reference(base)
    torch.manual_seed(seed)
    lora.add(model, LoraConfig(**{"rank": 3, "alpha": 6.0, **options}), text_only=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    target.mkdir()
    write_model(model, base, target)
    return model.eval()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Made:
    """Adapters of other ranks, scales and layers."""
    root = tmp_path_factory.mktemp("beside")
    options: dict[str, dict[str, Any]] = {
        "poetry": {},
        "prose": {"rank": 9, "alpha": 3.0},
        "few": {"target_modules": ("k_proj", "up_proj")},
        "v1": {},
        "v2": {},
        "v3": {},
    }
    models = {name: make(model_dir, root / name, seed, **its) for seed, (name, its) in enumerate(options.items(), 1)}
    return Made({name: root / name for name in models}, {**models, "": reference(model_dir)})


@pytest.fixture(scope="session", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Backend]:
    """With room for adapters."""
    start = started if request.param == "hf" else started_vllm
    with start(model_dir, max_batch=6, room=ROOM) as running:
        yield running


@pytest.fixture(autouse=True)
def base_again(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[None]:
    used = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield
    if used is not None:
        asyncio.run(used.load_weights(model_dir, 0))


def load(engine: Backend, made: Made, *names: str) -> None:
    for name in names:
        asyncio.run(engine.load_adapter(name, made.directories[name]))


def under(adapter: str, prompt: Sequence[int], seed: int = 0, **sampling: Any) -> SequenceRequest:
    return replace(request(prompt, seed, **sampling), adapter=adapter, seq_key=f"{adapter}-{seed}")


def assert_is(output: SequenceOutput, model: Any) -> None:
    wanted = reference_logprobs(model, output.prompt_token_ids, output.token_ids).tolist()
    assert output.logprobs == pytest.approx(wanted, abs=TOLERANCE), output.seq_key


def test_adapters_in_one_batch_are_each_its_own_model(engine: Backend, made: Made) -> None:
    load(engine, made, "poetry", "prose", "few")
    # One prompt several times: neither a prefill nor a cached prefix may be shared between adapters.
    names = ["", "poetry", "prose", "poetry", "few", "", "prose", ""]
    prompts = [PROMPT, PROMPT, PROMPT, random_prompt(1), PROMPT, random_prompt(2), random_prompt(3), PROMPT]
    pairs = list(zip(names, prompts, strict=True))
    requests = [under(name, prompt, seed, temperature=1.0) for seed, (name, prompt) in enumerate(pairs)]
    for name, output in zip(names, run(engine, *requests), strict=True):
        assert_is(output, made.models[name])
        assert set(output.versions) == {0}
    assert engine.versions == {"": 0, "poetry": 0, "prose": 0, "few": 0}


def test_beside_the_weights_equals_merged(engine: Backend, made: Made, model_dir: Path) -> None:
    load(engine, made, "poetry")
    merged = lora.merge(reference(model_dir), made.directories["poetry"])
    score = asyncio.run(engine.score(PROMPT, "poetry"))
    assert score == pytest.approx(probe_score(merged, PROMPT), abs=1e-3)
    assert asyncio.run(engine.score(PROMPT)) == pytest.approx(probe_score(made.models[""], PROMPT), abs=1e-3)
    assert_is(run(engine, under("poetry", PROMPT))[0], merged)


def test_the_policys_own_versions_switch_between_two_tokens(engine: Backend, made: Made, model_dir: Path) -> None:
    versions = Versions(
        {0: model_dir, **{number: made.directories[f"v{number}"] for number in (1, 2, 3)}},
        {0: made.models[""], **{number: made.models[f"v{number}"] for number in (1, 2, 3)}},
    )
    requests = [endless(PROMPT, 200), *(endless(random_prompt(seed), 40, seed) for seed in range(1, 6))]
    outputs = decode_amid(engine, versions, [(4, 1), (12, 2), (20, 3)], requests)
    assert set(outputs[0].versions) == {0, 1, 2, 3}
    for output in outputs:
        assert_right(output, versions)


def test_a_new_version_of_one_adapter_leaves_the_others_alone(engine: Backend, made: Made) -> None:
    load(engine, made, "prose")
    own = Versions({}, {7: made.models["v1"], 8: made.models["v2"]})
    leader = replace(under("poetry", PROMPT, max_new_tokens=200, temperature=1.0), report_every=1)
    others = [under(name, random_prompt(seed), seed, max_new_tokens=60) for seed, name in enumerate(("prose", "", ""))]

    async def whole() -> list[SequenceOutput]:
        await engine.load_adapter("poetry", made.directories["v1"], 7)
        loop, loads = asyncio.get_running_loop(), list[asyncio.Task[None]]()

        async def swap() -> None:
            loads.append(asyncio.ensure_future(engine.load_adapter("poetry", made.directories["v2"], 8)))
            await asyncio.sleep(0)

        def report(so_far: Progress) -> None:
            if so_far.offset + len(so_far.token_ids) >= 4 and not loads:
                asyncio.run_coroutine_threadsafe(swap(), loop).result(HANG_S)

        async with asyncio.timeout(HANG_S):
            found = await decode_all(engine, [replace(leader, report=report), *others])
            await asyncio.gather(*loads)
        return found

    first, *rest = asyncio.run(repeated(whole, until=lambda found: len(set(found[0].versions)) > 1))
    assert set(first.versions) == {7, 8}
    assert_right(first, own)
    for output, name in zip(rest, ("prose", "", ""), strict=True):
        assert set(output.versions) == {0}
        assert not any(version >= 0 for version in output.sampled.proximal_versions)
        assert_is(output, made.models[name])
    assert engine.versions["poetry"] == 8
    assert engine.version == 0


def test_an_unknown_adapter_is_refused_with_the_nearest_name(engine: Backend, made: Made) -> None:
    load(engine, made, "poetry")
    with pytest.raises(RequestError, match="no adapter 'poetri'; did you mean 'poetry'"):
        run(engine, under("poetri", PROMPT))
    with pytest.raises(RequestError, match="no adapter 'x'; there are"):
        asyncio.run(engine.score(PROMPT, "x"))


def test_what_does_not_score_as_measured_changes_nothing(engine: Backend, made: Made) -> None:
    def probe(name: str, off: float = 0.0) -> WeightsProbe:
        return WeightsProbe(tuple(PROMPT), probe_score(made.models[name], PROMPT) + off, tolerance=1e-3)

    asyncio.run(engine.load_adapter("poetry", made.directories["v1"], 1, probe("v1")))
    with pytest.raises(WeightsError, match="the probe scores"):
        asyncio.run(engine.load_adapter("poetry", made.directories["v2"], 2, probe("v2", off=1.0)))
    with pytest.raises(WeightsError, match="the probe scores"):
        asyncio.run(engine.load_weights(made.directories["v2"], 2, probe("v2", off=1.0)))
    assert (engine.versions["poetry"], engine.version) == (1, 0)
    assert_is(run(engine, under("poetry", PROMPT))[0], made.models["v1"])
    assert_is(run(engine, under("", PROMPT))[0], made.models[""])


def copied(source: Path, target: Path, **settings: Any) -> Path:
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    (target / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    return target


def test_adapters_that_the_engine_cannot_keep_are_refused_by_name(
    engine: Backend, made: Made, model_dir: Path, tmp_path: Path
) -> None:
    before = dict(engine.versions)
    make(model_dir, tmp_path / "deep", 1, rank=13)
    refusals = {
        "rank 13, and this engine started with room for rank 12": tmp_path / "deep",
        "use_dora True: only plain LoRA": copied(made.directories["poetry"], tmp_path / "dora", use_dora=True),
        "no adapter_config.json": model_dir,
    }
    other = save_tiny_model(tmp_path / "other", seed=5)
    make(other, tmp_path / "foreign", 1)
    refusals["an adapter of the weights .* give the model that it was trained on"] = tmp_path / "foreign"
    torn = copied(made.directories["poetry"], tmp_path / "torn")
    tensors = load_file(str(torn / "adapter_model.safetensors"))
    renamed = {name.replace("layers.0.", "layers.7."): tensor for name, tensor in tensors.items()}
    save_file(renamed, str(torn / "adapter_model.safetensors"))
    refusals["layers.7.*no such layer"] = torn
    for why, directory in refusals.items():
        with pytest.raises(WeightsError, match=why):
            asyncio.run(engine.load_adapter("bad", directory))
    with pytest.raises(WeightsError, match="whole weights, and other ones than"):
        asyncio.run(engine.load_weights(other, 1))
    assert engine.versions == before
    assert_is(run(engine, under("", PROMPT))[0], made.models[""])


def test_an_adapter_of_the_output_layer(engine: Backend, made: Made, model_dir: Path, tmp_path: Path) -> None:
    """vLLM would leave it out, or fail at the first logprob of a prompt."""
    model = make(model_dir, tmp_path / "head", 4, target_modules=("lm_head", "k_proj"))
    if engine.facts.name == "vllm":
        with pytest.raises(WeightsError, match="vLLM keeps no adapter beside lm_head"):
            asyncio.run(engine.load_adapter("head", tmp_path / "head"))
        return
    asyncio.run(engine.load_adapter("head", tmp_path / "head"))
    for output, name in zip(run(engine, under("head", PROMPT), under("", PROMPT)), ("head", ""), strict=True):
        assert_is(output, model if name else made.models[""])


def test_files_of_other_tools_name_no_base(engine: Backend, made: Made, tmp_path: Path) -> None:
    plain = copied(made.directories["poetry"], tmp_path / "plain")
    save_file(load_file(str(plain / "adapter_model.safetensors")), str(plain / "adapter_model.safetensors"))
    asyncio.run(engine.load_adapter("plain", plain))
    assert_is(run(engine, under("plain", PROMPT))[0], made.models["poetry"])


@pytest.mark.vllm
def test_vllm_with_all_its_places_taken(made: Made, model_dir: Path) -> None:
    """On CPUs, vLLM gives a sequence without an adapter what is in the last place, so that one must stay empty."""
    with started_vllm(model_dir, room=AdapterRoom(count=2, rank=12)) as full:
        load(full, made, "poetry", "prose", "poetry", "prose")
        names = ["", "poetry", "prose", "", "poetry"]
        requests = [under(name, random_prompt(seed), seed) for seed, name in enumerate(names)]
        for name, output in zip(names, run(full, *requests), strict=True):
            assert_is(output, made.models[name])


@pytest.mark.vllm
def test_a_load_that_is_cancelled_after_its_switch_is_still_done(
    made: Made, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sampled, what is said to be served, and what the core keeps are one version."""
    began, go, leave = threading.Event(), threading.Event(), Entries.leave

    async def leave_late(self: Entries, policy: Policy) -> None:
        began.set()
        while not go.is_set():  # noqa: ASYNC110 - it is set in another thread
            await asyncio.sleep(0.01)
        await leave(self, policy)

    async def cancel_amid(engine: VllmBackend) -> set[int]:
        loading = asyncio.create_task(engine.load_adapter("poetry", made.directories["v2"], 2))
        await asyncio.to_thread(began.wait)
        loading.cancel()
        await asyncio.wait([loading])
        go.set()
        await engine.load_adapter("prose", made.directories["prose"])  # after the one under way
        return await engine._do(lambda running: running.sequences._llm.list_loras())

    monkeypatch.setattr(Entries, "leave", leave_late)
    with started_vllm(model_dir, room=AdapterRoom(count=2, rank=12)) as engine:
        asyncio.run(engine.load_adapter("poetry", made.directories["v1"], 1))
        kept = asyncio.run(cancel_amid(engine))
        assert engine.versions == {"": 0, "poetry": 2, "prose": 0}
        assert len(kept) == 2
        assert_right(run(engine, under("poetry", PROMPT))[0], Versions({}, {2: made.models["v2"]}))


def test_an_engine_takes_as_many_adapters_as_it_was_started_for(made: Made, model_dir: Path) -> None:
    with started(model_dir, room=AdapterRoom(count=1, rank=12)) as engine:
        load(engine, made, "poetry", "poetry")
        with pytest.raises(WeightsError, match="adapter 'prose': this engine started with room for 1"):
            load(engine, made, "prose")
        assert engine.versions == {"": 0, "poetry": 0}


def test_an_engine_without_room_merges_and_keeps_none(backend: Backend, made: Made, model_dir: Path) -> None:
    with pytest.raises(WeightsError, match="keeps no adapters beside its weights; set worker"):
        asyncio.run(backend.load_adapter("poetry", made.directories["poetry"]))
    with pytest.raises(RequestError, match="this worker serves none"):
        run(backend, under("poetry", PROMPT))
    assert backend.versions.keys() == {""}
