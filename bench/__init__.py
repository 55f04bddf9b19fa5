"""`sluice bench NAME`: what the parts of Sluice cost, each next to a baseline.

cli ─▶ NAME.Plan ─▶ NAME.measure ─▶ broker, processes, engines, models, http ─▶ harness: numbers, one JSON object

pipeline, engine, queue, guard, proximal, rollout, images, operate, scale, truth: a benchmark each, on the harness.
"""

if not __name__.startswith("sluice."):
    raise ImportError(f"import {__name__} as sluice.{__name__}")
