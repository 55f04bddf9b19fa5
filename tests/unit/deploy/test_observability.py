"""The shipped dashboard, alerts and scrape jobs: every name, label and value in them exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from sluice.pipeline.roles import PARTICIPANTS
from sluice.pipeline.status.snapshot import StallKind
from sluice.pipeline.telemetry.families import FAMILIES, JOB_STATES, PROCESS_STATES, SEQUENCE_STATES, Family, series
from tests.promql import Selector, read

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/sluice.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"] for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(f"{p['title']}/{t['refId']}", t["expr"], t["legendFormat"]) for p in PANELS for t in p["targets"]]
ALERTS = [(rule["alert"], rule["expr"], json.dumps(rule["annotations"])) for rule in RULES]
BY_SERIES: dict[str, Family] = {name: family for family in FAMILIES.values() for name in series(family)}
OURS = {"instance", "job", "service"}  # Prometheus' own, and the scrape job's
FUNCTIONS = {"sum", "max", "rate", "increase", "changes", "histogram_quantile", "absent", "time"}
VALUES = {
    ("sluice_run_sequences_total", "state"): set(SEQUENCE_STATES),
    ("sluice_run_jobs", "state"): set(JOB_STATES),
    ("sluice_run_processes", "state"): set(PROCESS_STATES),
    ("sluice_run_processes", "role"): set(PARTICIPANTS),
    ("sluice_weight_version", "role"): set(PARTICIPANTS),
    ("sluice_run_stalls", "kind"): set(get_args(StallKind)),
}


def labels_of(selector: Selector) -> set[str]:
    family = BY_SERIES[selector.name]
    return {*family.labels, *OURS} | ({"le"} if family.kind == "histogram" else set())


@pytest.mark.parametrize(("where", "expression", "shown"), QUERIES + ALERTS, ids=[q[0] for q in QUERIES + ALERTS])
def test_a_query_reads_what_exists(where: str, expression: str, shown: str) -> None:
    query = read(expression)
    assert query.functions <= FUNCTIONS
    known: set[str] = set()
    for selector in query.selectors:
        if selector.name == "up":
            assert {label for label, _, _ in selector.matchers} <= OURS
            known |= OURS
            continue
        assert selector.name in BY_SERIES, f"{where}: {selector.name} is not in pipeline/telemetry/families.py"
        known |= labels_of(selector)
        for label, operator, value in selector.matchers:
            assert label in labels_of(selector), f"{where}: {selector.name} has no label {label}"
            values = VALUES.get((selector.name, label))
            if values and operator in ("=", "=~") and "*" not in value:
                assert set(value.split("|")) <= values, where
    assert query.grouped_by <= known, where
    used = set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", shown))
    assert used <= known, f"{where}: no such labels: {used - known}"
    if "sum" in query.functions and query.grouped_by:
        assert used <= query.grouped_by, f"{where}: the sum does not keep {used}"


@pytest.mark.parametrize(("where", "expression", "_"), QUERIES + ALERTS, ids=[q[0] for q in QUERIES + ALERTS])
def test_a_function_fits_the_kind(where: str, expression: str, _: str) -> None:
    for name in re.findall(r"(?:rate|increase)\(\s*(\w+)", expression):
        assert BY_SERIES[name].kind in ("counter", "histogram"), f"{where}: a rate of a gauge"
    for name in re.findall(r"changes\(\s*(\w+)", expression):
        assert BY_SERIES[name].kind == "gauge", where
    if "histogram_quantile" in expression:
        assert "by (le)" in expression, where


@pytest.mark.parametrize("wrong", ["sum(", "rate(x[5x])", "a{b=}", "a}b", "", "sum by le (x)", "x # y"])
def test_what_is_no_query_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(wrong)


def test_alerts_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 20


def test_every_run_family_and_histogram_is_on_the_dashboard_or_in_an_alert() -> None:
    """A number that nobody looks at is a number that nobody needs."""
    read_there = {BY_SERIES[s.name].name for _, e, _ in QUERIES + ALERTS for s in read(e).selectors if s.name != "up"}
    unseen = {f.name for f in FAMILIES.values() if f.page == "run" or (f.page == "role" and f.buckets)} - read_there
    assert unseen <= {
        "sluice_run_info",
        "sluice_run_tokens_total",
        "sluice_run_expected_sequences",
        "sluice_run_malformed_rows_total",
        "sluice_run_open_rollouts",
        "sluice_run_stream_entries",
        "sluice_hand_off_samples",
    }


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["description"] and panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


def test_the_scrape_jobs_find_every_role_of_the_compose_file() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (found,) = jobs["sluice"]["dns_sd_configs"]
    services = COMPOSE["services"]
    roles = {name for name, s in services.items() if s["command"][:1] == ["sluice"]} - {"dashboard"}
    assert set(found["names"]) == roles
    for name in roles:
        assert services[name]["environment"]["SLUICE_METRICS_PORT"] == str(found["port"])
        assert services[name]["environment"]["SLUICE_METRICS_HOST"] == "0.0.0.0"
        assert "metrics" in services[name]["networks"]
        shared = set(services[name]["networks"]) & set(services["prometheus"]["networks"])
        assert shared == {"metrics"}, "an address in each network that they share would be scraped twice"
    assert jobs["sluice-run"]["static_configs"] == [{"targets": ["dashboard:8090"]}]
    key = jobs["sluice-run"]["authorization"]["credentials_file"]
    assert f"> {key})" in " ".join(services["prometheus"]["entrypoint"]), "who writes it"
    one_host = yaml.safe_load((DEPLOY / "prometheus/one-host.yml").read_text())
    assert {job["job_name"] for job in one_host["scrape_configs"]} == set(jobs)


def test_what_the_services_mount_is_there() -> None:
    for name in ("prometheus", "grafana"):
        mounts = [v for v in COMPOSE["services"][name]["volumes"] if v.startswith("./")]
        assert mounts
        assert all((ROOT / mount.split(":")[0]).exists() and mount.endswith(":ro") for mount in mounts)
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/sluice.yml").read_text())["providers"][0]
    assert f":{provider['options']['path']}:ro" in " ".join(COMPOSE["services"]["grafana"]["volumes"])
