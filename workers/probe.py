"""The probe of a weight version: a fixed prompt, and what the trainer measured."""

from __future__ import annotations

from pipeline.wire.messages import WeightVersion
from workers.generation.contracts import WeightsProbe

_HALF_PRECISION = 10  # bf16 rounds at 2^-8: the demo model's probe differs by up to 0.17 nats from fp32
_CHANGE = 2e-5  # nats a token in fp32: what is left of rounding in the difference of two scores


def probe_of(manifest: WeightVersion, dtype: str, tolerance: float, loaded: int | None = None) -> WeightsProbe | None:
    """What a model of this dtype must give, within `tolerance` nats a token in fp32; None if nothing was measured.

    `loaded`: the version that the model has now; None if that is not known.
    """
    tokens = tuple(manifest.probe_token_ids)
    if manifest.probe_score is None or len(tokens) < 2:
        return None
    exact = dtype == "float32"
    change = None
    if exact and loaded is not None and loaded == manifest.previous and manifest.previous_score is not None:
        change = manifest.probe_score - manifest.previous_score
    within = tolerance * len(tokens) * (1 if exact else _HALF_PRECISION)
    return WeightsProbe(tokens, manifest.probe_score, within, change, _CHANGE * len(tokens))
