"""Eight classes of faults, each planted in a run that the pipeline stored: the audit finds eight of eight."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice.consumers.audit.audit import audit_run
from sluice.consumers.audit.report import FaultKind, Report
from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.config.types import Config, PolicyConfig
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.messages import TrainingBatch, TrainingSample, WeightVersion, decode, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.unit.consumers.audit.clean_run import STORY, Recipe, Versions, write_run
from tests.unit.consumers.audit.stored_run import PROMPT

TURNS = (*STORY, -1, -1, 2, 3)  # a tool's two tokens, then a second turn
Edit = Callable[[TrainingSample], TrainingSample]


def at(name: str, offset: int, value: Any) -> Edit:
    """One token's entry, counted from the end of the prompt; a function gets the entry, and the sample."""
    kinds = {"token_ids": TokenArray, "logprobs": FloatArray, "proximal_logprobs": FloatArray}

    def edit(sample: TrainingSample) -> TrainingSample:
        values = list(getattr(sample, name))
        place = PROMPT + offset
        values[place] = value(values[place], sample) if callable(value) else value
        return replace(sample, **{name: kinds.get(name, Runs.of)(values)})

    return edit


def together(*edits: Edit) -> Edit:
    def edit(sample: TrainingSample) -> TrainingSample:
        for each in edits:
            sample = each(sample)
        return sample

    return edit


def shifted(sample: TrainingSample) -> TrainingSample:
    logprobs = [*sample.logprobs[:PROMPT], 0.0, *sample.logprobs[PROMPT:-1]]
    return replace(sample, logprobs=FloatArray(logprobs))


def spoil(run: Path, edit: Edit, seq_id: str = "g:1") -> None:
    """Rewrite one stored sample."""
    for file in (run / "rollouts").glob("*.msgpack"):
        batch = decode(TrainingBatch, file.read_bytes())
        samples = [edit(one) if one.seq_id == seq_id else one for one in batch.samples]
        file.write_bytes(encode(replace(batch, samples=samples)))


def swap(run: Path, one: int, other: int) -> None:
    """Exchange the weights of two versions; names, manifests and digests fit."""
    weights, aside = run / "weights", run / "aside"
    shutil.copytree(weights.resolve(), aside)
    weights.unlink()
    for version in range(4):
        source = {one: other, other: one}.get(version, version)
        manifest = WeightVersion(version=version, path="", digest="")
        (aside / f"v{source:06d}" / "manifest.json").unlink()
        write_version(aside / f"v{source:06d}", weights, manifest)


FAULTS: dict[str, tuple[Callable[[Path], None], FaultKind]] = {
    "wrong version tag": (lambda run: spoil(run, at("versions", 2, 0)), "behaviour"),
    "a version that never was": (lambda run: spoil(run, at("versions", 5, 9)), "version"),
    "shifted logprobs": (lambda run: spoil(run, shifted), "behaviour"),
    "swapped weights": (lambda run: swap(run, 0, 1), "behaviour"),
    "wrong temperature": (lambda run: spoil(run, lambda one: replace(one, temperature=0.7)), "behaviour"),
    "no temperature": (lambda run: spoil(run, lambda one: replace(one, temperature=0.0)), "behaviour"),
    "changed id": (lambda run: spoil(run, at("token_ids", 3, lambda was, _: (was + 1) % 250)), "behaviour"),
    "changed id of the prompt": (lambda run: spoil(run, at("token_ids", -2, lambda was, _: was ^ 1)), "behaviour"),
    "flipped advantage": (
        lambda run: spoil(run, lambda one: replace(one, advantage=-(one.advantage or 0))),
        "advantage",
    ),
    "no advantage": (lambda run: spoil(run, lambda one: replace(one, advantage=None)), "advantage"),
    "changed reward": (lambda run: spoil(run, lambda one: replace(one, reward=2.0)), "advantage"),
    "a mask cleared": (lambda run: spoil(run, at("response_mask", 2, 0)), "mask"),
    "a mask cleared with its score": (
        lambda run: spoil(
            run,
            together(at("response_mask", 2, 0), at("proximal_logprobs", 2, 0.0), at("proximal_versions", 2, -1)),
        ),
        "mask",
    ),
    "a mask set on a tool's token": (lambda run: spoil(run, at("response_mask", 6, 1)), "version"),
    "a mask set on a stale token": (
        lambda run: spoil(
            run,
            together(
                at("response_mask", 0, 1),
                at("left_out", 0, 0),
                at("proximal_logprobs", 0, lambda _, sample: sample.logprobs[PROMPT]),
            ),
        ),
        "mask",
    ),
    "a false reason": (
        lambda run: spoil(run, together(at("response_mask", 4, 0), at("left_out", 4, int(LeftOut.stale)))),
        "mask",
    ),
    "garbage in a marked token": (lambda run: spoil(run, at("proximal_logprobs", 5, -7.5)), "marked"),
    "garbage in a prompt's token": (lambda run: spoil(run, at("proximal_logprobs", -3, -7.5)), "marked"),
    "garbage in a masked token": (lambda run: spoil(run, at("proximal_logprobs", 0, -7.5)), "marked"),
    "a marked token without a number": (
        lambda run: spoil(run, at("proximal_logprobs", 5, float("nan"))),
        "marked",
    ),
}


@pytest.fixture(params=[True, False], ids=["history", "no history"])
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, four_versions: Path, versions: Versions
) -> tuple[Path, Config]:
    recipe = Recipe(
        story=TURNS, policy=PolicyConfig(enabled=True, max_token_staleness=2), history=request.param, scored=(0, 1, 2)
    )
    return tmp_path / "run", write_run(tmp_path / "run", four_versions, versions, recipe)


def look(stored: tuple[Path, Config]) -> Report:
    return audit_run(*stored, tolerance=1e-4)


def test_the_clean_run_is_clean(stored: tuple[Path, Config]) -> None:
    found = look(stored)
    assert (found.wrong, found.unchecked, found.advantages.wrong) == (0, 0, 0)
    assert (found.marked, found.told_apart) == (4 * 8, found.right), "two stale and two on-policy tokens a sequence"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(stored: tuple[Path, Config], fault: str) -> None:
    plant, kind = FAULTS[fault]
    plant(stored[0])
    found = look(stored)
    assert found.wrong > 0
    assert found.faults[kind] > 0
    assert kind in {each.kind for each in found.worst}
    if fault != "swapped weights":
        of_others = {"g:0", "g:2", "g:3"} if fault == "changed reward" else set()
        assert {each.seq_id for each in found.worst} <= {"g:1", *of_others}


def test_what_no_number_depends_on_is_compared_with_what_was_handed_on(
    tmp_path: Path, four_versions: Path, versions: Versions
) -> None:
    """The id of a forced end: nothing follows it. A turn that was made a tool's: it is never recomputed."""
    forced: Any = {"story": (0, 1, 2, -1), "changes": {"finish_reason": "repeat_terminated"}}
    config = write_run(tmp_path / "run", four_versions, versions, Recipe(**forced))
    spoil(tmp_path / "run", at("token_ids", 3, 17))
    last = together(
        at("versions", 2, -1), at("response_mask", 2, 0), at("logprobs", 2, 0.0), at("proximal_logprobs", 2, 0.0),
        at("proximal_versions", 2, -1),
    )  # fmt: skip
    spoil(tmp_path / "run", last, "h:0")
    found = look((tmp_path / "run", config))
    assert found.faults["handed_on"] == found.wrong == 2
    assert [(each.seq_id, each.position) for each in found.worst] == [("g:1", PROMPT + 3), ("h:0", PROMPT + 2)]
    shutil.rmtree(tmp_path / "run" / "history")
    blind = look((tmp_path / "run", config))
    assert blind.wrong == 0
    assert [(each.what, each.sequences) for each in blind.not_checked] == [("handed_on", 8)]
