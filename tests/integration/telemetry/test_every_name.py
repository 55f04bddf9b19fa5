"""What real processes serve is what the table of names says, in both directions."""

from __future__ import annotations

import re
import uuid

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.snapshot import Stall
from sluice.pipeline.telemetry.families import FAMILIES, of_role, run_page, targets
from sluice.pipeline.wire.keys import Keys
from tests.scraped import JOBS, Scraped, scraped_run
from tests.tiny_models import save_tiny_model

ROLES = ("producer", "worker", "consumer", "trainer", "scorer", "gateway", "rollout-server")
SERVERS = ("gateway", "rollout-server")


@pytest.fixture(scope="module")
def run(broker_config: BrokerConfig, tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    source = save_tiny_model(tmp_path_factory.mktemp("model"))
    keys = Keys(f"t-{uuid.uuid4().hex[:12]}")
    return scraped_run(broker_config, keys, tmp_path_factory.mktemp("runs"), source)


def kinds(page: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, flags=re.MULTILINE))


def values(page: str) -> dict[str, float]:
    """Sample name → value, of those with a role or no label."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if set(sample.labels) <= {"role"}}


def check_labels(page: str) -> None:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            known = FAMILIES.get(family.name) or FAMILIES[f"{family.name}_total"]
            allowed = {*known.labels, "le"} if known.kind == "histogram" else set(known.labels)
            assert set(sample.labels) <= allowed, sample
            assert family.documentation == known.doc or family.name.startswith("sluice_process_")  # the library's


@pytest.mark.parametrize("role", ROLES)
def test_a_process_serves_its_names_and_no_others(run: Scraped, role: str) -> None:
    page = run.pages[role]
    own = {f.name: f.kind for f in FAMILIES.values() if f.page == role}
    expected = own | {family.name: family.kind for family in of_role(role)}
    if role == "rollout-server":
        del expected["sluice_waiting_seconds"]  # it has no heartbeat
    assert kinds(page) == expected
    check_labels(page)


@pytest.mark.parametrize("role", SERVERS)
def test_a_server_has_one_page_at_both_of_its_addresses(run: Scraped, role: str) -> None:
    assert kinds(run.own[role]) == kinds(run.pages[role])


def test_the_run_has_its_names_and_no_others(run: Scraped) -> None:
    assert run.now
    page = run_page(run.now).decode()
    assert kinds(page) == {family.name: family.kind for family in FAMILIES.values() if family.page == "run"}
    check_labels(page)


def test_nothing_in_the_table_is_served_by_nobody(run: Scraped) -> None:
    assert run.now
    served = set(kinds(run_page(run.now).decode())).union(*(kinds(page) for page in run.pages.values()))
    assert served == set(FAMILIES)


def test_the_numbers_are_those_of_the_work(run: Scraped) -> None:
    worker, consumer, trainer = (values(run.pages[role]) for role in ("worker", "consumer", "trainer"))
    assert worker["sluice_decoded_sequences_total"] == JOBS
    assert worker["sluice_queue_seconds_count"] == worker["sluice_decode_seconds_count"] == JOBS
    assert worker["sluice_decoded_tokens_total"] > 0
    assert worker["sluice_process_resident_memory_bytes"] > 10_000_000
    assert worker["sluice_waiting_seconds"] >= 0
    assert consumer["sluice_handed_on_samples_total"] == consumer["sluice_hand_off_samples_sum"] == JOBS
    assert (consumer["sluice_pending_samples"], consumer["sluice_open_groups"]) == (0, 0)
    assert trainer["sluice_train_step_seconds_count"] == trainer["sluice_train_steps_total"] == 1
    assert (trainer["sluice_trained_samples_total"], trainer["sluice_weight_version"]) == (JOBS, 1)


def test_the_runs_numbers_are_those_of_the_snapshot(run: Scraped) -> None:
    assert run.now
    stall = Stall(kind="no_trainer")
    passing = Stall(kind="credit_exhausted", blocks=False)
    now = replace(run.now, stalls=[stall, passing], metrics={"rollout/f1": 0.25}, total=9)
    page = run_page(now).decode()
    assert f'sluice_run_sequences_total{{state="committed"}} {JOBS}.0' in page
    assert 'sluice_run_stalls{kind="no_trainer"} 1.0' in page
    assert 'sluice_run_stalls{kind="no_worker"} 0.0' in page
    assert 'sluice_run_stalls{kind="credit_exhausted"} 0.0' in page  # an alert of it would page in healthy runs
    assert 'sluice_train_metric{key="rollout/f1"} 0.25' in page
    assert 'sluice_run_processes{role="worker",state="alive"} 1.0' in page
    assert 'sluice_run_stream_entries{stream="results:0"}' in page
    assert values(page)["sluice_run_expected_sequences"] == 9
    assert values(page)["sluice_run_broker_used_bytes"] > 0


def test_targets_are_the_live_processes(run: Scraped) -> None:
    assert run.now
    (row,) = run.now.processes
    labels = {"run": run.now.run, "instance": "w"}
    assert targets(run.now) == [{"targets": [row.facts["metrics"]], "labels": labels}]
    silent = replace(run.now, processes=[replace(row, age_s=60.0)])
    assert targets(silent) == []
