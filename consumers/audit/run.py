"""One audit, from the run's directory to the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from consumers.audit.advantages import Groups
from consumers.audit.handed_on import HandedOn, changed_tokens, is_rewarded_alike
from consumers.audit.judge import Evidence, Recomputed, Tally
from consumers.audit.masks import check_mask
from consumers.audit.meter import Meter
from consumers.audit.recompute import logprobs_of, open_version
from consumers.audit.report import Advantages, Report, listed
from consumers.audit.run_files import HISTORY, ROLLOUTS, WEIGHTS, trained_versions
from consumers.audit.stored import Stored, choose, read_sequences
from pipeline.config.types import Config, ModelConfig
from pipeline.errors import DataError, WeightsError
from pipeline.weights.versions import newest_number

Pairs = list[tuple[Stored, Recomputed]]


def audit_run(
    directory: Path,
    config: Config,
    *,
    tolerance: float,
    steps: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Report:
    """Recompute and judge; raises DataError, WeightsError or ModelError."""
    if config.trainer.torch_threads:
        torch.set_num_threads(config.trainer.torch_threads)
    folder = directory / ROLLOUTS
    groups = Groups(config)
    sequences, stored = choose(groups.noting(read_sequences(folder, steps)), limit, seed)
    pairs = [(sequence, Recomputed.empty(len(sequence.token_ids))) for sequence in sequences]
    needed = sorted(set().union(*(sequence.needed() for sequence in sequences)))
    if not needed and not any(sequence.has_images for sequence in sequences):
        raise DataError(f"{folder}: none of its {stored} sequences has a token that the policy sampled")
    missing = _recompute(directory / WEIGHTS, config.model, pairs, needed)
    trained_at = trained_versions(directory)
    # The step after which a version is published is written down before the version is.
    newest = max(newest_number(directory / WEIGHTS), max(trained_at.values()) + 1) if trained_at else None
    tally = Tally(tolerance, frozenset(missing), newest)
    with HandedOn(directory / HISTORY) as history:
        for sequence, again in pairs:
            if sequence.has_images:
                tally.refuse(sequence, "images")
            else:
                tally.judge(sequence, again, _evidence(sequence, config, groups, trained_at, history))
    return Report(
        run=directory.resolve().name,
        tokens=tally.tokens,
        right=tally.right,
        marked=tally.marked,
        wrong=tally.wrong,
        unchecked=tally.unchecked,
        told_apart=tally.told_apart,
        max_error=max(tally.behaviour_error, tally.proximal_error),
        max_behaviour_error=tally.behaviour_error,
        max_proximal_error=tally.proximal_error,
        compared=tally.compared,
        tolerance=tolerance,
        steps=sorted({sequence.step for sequence in sequences}),
        sequences=len(sequences),
        stored_sequences=stored,
        versions=[version for version in needed if version not in missing],
        missing_versions=sorted(missing),
        versions_per_sequence=dict(sorted(tally.versions_per_sequence.items())),
        faults=dict(tally.faults),
        worst=tally.worst,
        advantages=Advantages(**{word: tally.advantages[word] for word in ("right", "wrong", "unchecked")}),
        not_checked=tally.summary(),
    )


def _evidence(
    stored: Stored, config: Config, groups: Groups, trained_at: Mapping[int, int], history: HandedOn
) -> Evidence:
    before = history.sample(stored)
    return Evidence(
        mask=check_mask(stored, config, trained_at.get(stored.step)),
        advantage=groups.compare(stored),
        handed_on=None if before is None else changed_tokens(stored, before),
        is_rewarded_alike=before is None or is_rewarded_alike(before, stored.sample),
    )


def _recompute(root: Path, config: ModelConfig, pairs: Pairs, needed: list[int]) -> set[int]:
    """Fill in every version that is there, one load each; returns those that are not."""
    work: dict[int, Pairs] = {version: [] for version in needed}
    for pair in pairs:
        for version in pair[0].needed():
            work[version].append(pair)
    missing: set[int] = set()
    with Meter(sum(map(len, work.values()))) as meter:
        for version, its_pairs in work.items():
            meter.doing(f"version {version}")
            if not _recompute_version(root, version, config, its_pairs, meter):
                missing.add(version)
    if needed and len(missing) == len(needed):
        raise WeightsError(
            f"{root}: none of the versions that these rollouts need is there ({listed(needed)}); keep more of them "
            "(weights.retention), or audit newer steps (--steps)"
        )
    return missing


def _recompute_version(root: Path, version: int, config: ModelConfig, pairs: Pairs, meter: Meter) -> bool:
    model = open_version(root, version, config)
    if model is None:
        meter.advance(len(pairs))
        return False
    for stored, again in pairs:
        own = stored.versions == version
        next_one = stored.scored & (stored.proximal_versions == version)
        found = np.full(len(stored.token_ids), np.nan, dtype=np.float32)
        positions = np.flatnonzero(own | next_one)
        found[positions] = logprobs_of(model, stored, positions)
        again.behaviour[own] = found[own]
        again.proximal[next_one] = found[next_one]
        meter.advance()
    return True
