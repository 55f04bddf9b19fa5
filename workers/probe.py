"""The probe of a weight version: a fixed prompt, and what the trainer measured."""

from __future__ import annotations

from pipeline.messages import WeightVersion
from workers.generation.contracts import WeightsProbe

_HALF_PRECISION = 10  # bf16 rounds at 2^-8: the demo model's probe differs by up to 0.17 nats from fp32


def probe_of(manifest: WeightVersion, dtype: str, tolerance: float) -> WeightsProbe | None:
    """What a model of this dtype must give, within `tolerance` nats a token in fp32; None if nothing was measured."""
    tokens = tuple(manifest.probe_token_ids)
    if manifest.probe_score is None or len(tokens) < 2:
        return None
    precision = 1 if dtype == "float32" else _HALF_PRECISION
    return WeightsProbe(tokens, manifest.probe_score, tolerance * precision * len(tokens))
