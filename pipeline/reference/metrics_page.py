"""The training keys (pipeline/telemetry/training_metrics.py) and the names for Prometheus (families.py)."""

from __future__ import annotations

from pipeline.reference.words import table_of
from pipeline.telemetry.families import FAMILIES, Family
from pipeline.telemetry.training_metrics import METRICS, RECORDED_ONLY, Last, Max, Mean, Metric, Percentile, Ratio, Sum

_PAGES = {
    "role": "Every process, of itself",
    "gateway": "The gateway, besides",
    "rollout-server": "The rollout server, besides",
    "run": "The run, from the dashboard",
}


def body() -> str:
    """What Prometheus reads, by who serves it, and then the training keys."""
    return "\n\n".join([_prometheus(), _training()])


def _prometheus() -> str:
    parts: list[str] = []
    for page, title in _PAGES.items():
        rows = [_family(family) for family in FAMILIES.values() if family.page == page]
        head = ("name", "kind", "labels", "of", "meaning") if page == "role" else ("name", "kind", "labels", "meaning")
        parts.append(f"### {title}\n\n{table_of(head, rows)}")
    return "## Names for Prometheus\n\n" + "\n\n".join(parts)


def _family(family: Family) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    of = (", ".join(family.roles) or "every role",) if family.page == "role" else ()
    return (f"`{family.name}`", family.kind, labels, *of, family.doc)


def _training() -> str:
    rows = [(f"`{metric.name}`", metric.unit, _reduction(metric), metric.doc) for metric in METRICS.values()]
    recorded = [(f"`{name}`", text) for name, text in RECORDED_ONLY.items()]
    return (
        "## Keys of training\n\n"
        f"{table_of(('key', 'unit', 'over the samples of a step', 'meaning'), rows)}\n\n"
        "Samples record these beside them; they are the parts of ratios, and not published:\n\n"
        f"{table_of(('key', 'meaning'), recorded)}"
    )


def _reduction(metric: Metric) -> str:
    match metric.reduction:
        case Sum():
            return "sum"
        case Max():
            return "maximum"
        case Mean():
            return "mean"
        case Last():
            return "newest"
        case Percentile(percent=percent):
            return f"{percent:g}th percentile"
        case Ratio(numerators=above, denominators=below, scale=scale):
            times = "" if scale == 1 else f"{scale:g} × "
            return f"{times}{_total(above)} ÷ {_total(below)}"
        case other:
            return type(other).__name__


def _total(keys: tuple[str, ...]) -> str:
    words = " + ".join(f"`{key.removeprefix('rollout/')}`" for key in keys)
    return f"({words})" if len(keys) > 1 else words
