"""deploy/kubernetes against the APIs' schemas, our configuration and our keys; no cluster is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import kubernetes as manifests
from sluice.pipeline.config import load_config
from sluice.pipeline.wire.keys import Keys
from tests import gpu_locks
from tests.deadlines import HANG_S

BASE = manifests.MANIFESTS / "base"
OVERLAYS = {path.name: manifests.build(path) for path in manifests.overlays()}
COMPONENTS = manifests.MANIFESTS / "components"
RANKS = manifests.documents(COMPONENTS / "ranks/trainer.yaml")
PODS = {
    (overlay, doc["metadata"]["name"]): doc
    for overlay, docs in {**OVERLAYS, "ranks": RANKS}.items()
    for doc in docs
    if manifests.pod(doc) is not None
}
OURS = {key: doc for key, doc in PODS.items() if key[1] != "redis"}


def spec(doc: dict[str, Any]) -> dict[str, Any]:
    found = manifests.pod(doc)
    assert found is not None
    return found


def labels(doc: dict[str, Any]) -> dict[str, str]:
    if doc["kind"] == "JobSet":
        return doc["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["labels"]
    return doc["spec"]["template"]["metadata"]["labels"]


def test_the_overlays_have_every_role() -> None:
    assert set(OVERLAYS) == {"cpu", "gpu", "gpu-ranks", "agents", "observability", "kind"}
    always = {"redis", "producer", "worker", "scorer", "consumer", "evaluator", "trainer"}
    more = {"agents": {"gateway", "rollout-server"}, "observability": {"dashboard"}}
    more |= {overlay: {"dashboard"} for overlay in ("kind", "gpu-ranks")}
    for overlay in OVERLAYS:
        assert {name for where, name in PODS if where == overlay} == always | more.get(overlay, set())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_the_schemas(overlay: str) -> None:
    docs = [doc for doc in OVERLAYS[overlay] if not doc["apiVersion"].startswith("keda.sh/")]
    assert list(manifests.faults(docs)) == []


def test_kinds_of_others_fit_their_schemas() -> None:
    docs = [*RANKS, *manifests.documents(COMPONENTS / "scaling/worker.yaml")]
    docs += manifests.documents(COMPONENTS / "scaling-agents/gateway.yaml")
    try:
        assert list(manifests.faults(docs)) == []
    except manifests.Unchecked as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("Deployment", ("spec", "replica"), 1, "replica"),
        ("Deployment", ("spec", "replicas"), "two", "two"),
        ("NetworkPolicy", ("spec", "podSelectors"), {}, "podSelectors"),
        ("JobSet", ("spec", "failurePolicies"), {}, "failurePolicies"),
        ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "completion"), 2, "completion"),
    ],
)
def test_a_wrong_field_is_found(kind: str, path: tuple[str | int, ...], value: Any, said: str) -> None:
    doc = yaml.safe_load(yaml.safe_dump(next(d for d in [*OVERLAYS["agents"], *RANKS] if d["kind"] == kind)))
    at: Any = doc
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    assert said in "\n".join(manifests.faults([doc]))


@pytest.mark.parametrize(("field", "value"), [("minReplicaCounts", 0), ("maxReplicaCount", "many")])
def test_a_wrong_field_of_keda_is_found(field: str, value: Any) -> None:
    doc = next(d for d in manifests.documents(COMPONENTS / "scaling/worker.yaml") if d["kind"] == "ScaledObject")
    doc["spec"][field] = value
    try:
        assert field in "\n".join(manifests.faults([doc]))
    except manifests.Unchecked as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl isn't installed")
    command = ["kubectl", "kustomize", str(manifests.MANIFESTS / "overlays" / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True).stdout

    def by_name(docs: Any) -> dict[tuple[str, str], Any]:
        return {(doc["kind"], doc["metadata"]["name"]): doc for doc in docs}

    assert by_name(OVERLAYS[overlay]) == by_name(yaml.safe_load_all(built))


@pytest.mark.parametrize(("overlay", "name"), PODS)
def test_a_pod_is_watched_bounded_and_unprivileged(overlay: str, name: str) -> None:
    pod = spec(PODS[overlay, name])
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] >= 45
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    own = container["securityContext"]
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    if PODS[overlay, name]["kind"] != "JobSet":  # a rank that hangs is ended by the others
        assert {"startupProbe", "livenessProbe"} <= container.keys()
    mounted = {one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"] for one in pod.get("volumes", [])}
    assert mounted - {"data"} == volumes


@pytest.mark.parametrize(("overlay", "name"), OURS)
def test_secrets_are_referred_to_and_only_who_needs_the_broker_sees_it(overlay: str, name: str) -> None:
    doc = OURS[overlay, name]
    env = {one["name"]: one for one in spec(doc)["containers"][0]["env"]}
    for key, one in env.items():
        if re.search("KEY|PASSWORD", key):
            assert one["valueFrom"]["secretKeyRef"]["name"] == "sluice"
    sees_broker = labels(doc)["sluice.dev/broker"] == "yes"
    assert sees_broker == (name != "rollout-server")
    assert sees_broker == ("REDIS_URL" in env)
    assert sees_broker == ("runs" in {one["name"] for one in spec(doc)["volumes"]})
    if sees_broker:
        assert env["REDIS_URL"]["value"] == "redis://:$(REDIS_PASSWORD)@redis:6379/0"
        assert list(env).index("REDIS_PASSWORD") < list(env).index("REDIS_URL"), "it is filled in from what precedes it"


@pytest.mark.parametrize(("overlay", "name"), OURS)
def test_a_container_locks_no_gpu_that_the_cluster_handed_out(overlay: str, name: str) -> None:
    (container,) = spec(OURS[overlay, name])["containers"]
    environment = {one["name"]: one.get("value", "") for one in container["env"]}
    assert gpu_locks.lock_dir(container["command"], environment) is None, "its pod has no folder of locks"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_of_an_overlay_is_in_one_namespace(overlay: str) -> None:
    where = {doc["metadata"].get("namespace") for doc in OVERLAYS[overlay] if doc["kind"] != "Namespace"}
    assert where == {"sluice"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_budget_and_a_service_find_their_pods(overlay: str) -> None:
    pods = [labels(doc) for doc in OVERLAYS[overlay] if manifests.pod(doc) is not None]
    for doc in OVERLAYS[overlay]:
        wanted = {
            "Service": lambda doc: doc["spec"]["selector"],
            "PodDisruptionBudget": lambda doc: doc["spec"]["selector"]["matchLabels"],
            "NetworkPolicy": lambda doc: doc["spec"]["podSelector"].get("matchLabels", {}),
        }.get(doc["kind"])
        if wanted is not None:
            assert any(wanted(doc).items() <= found.items() for found in pods), doc["metadata"]["name"]


def test_the_configuration_is_valid_and_its_run_is_the_one_that_keda_counts() -> None:
    config = load_config(BASE / "config.yaml", environ={})
    keys = Keys(config.run)
    (worker,) = (d for d in OVERLAYS["gpu"] if d["kind"] == "ScaledObject")
    (gateway,) = manifests.documents(COMPONENTS / "scaling-agents/gateway.yaml")
    assert worker["spec"]["triggers"][0]["metadata"]["listName"] == keys.jobs
    assert gateway["spec"]["triggers"][0]["metadata"]["listName"] == keys.rollouts
    share = config.worker.max_batch // config.producer.group_size
    assert int(worker["spec"]["triggers"][0]["metadata"]["listLength"]) == share
    grace = spec(PODS["gpu", "worker"])["terminationGracePeriodSeconds"]
    assert grace >= config.worker.drain_s + 30, "what is left goes back after drain_s"


def test_the_ranks_replace_the_one_trainer(tmp_path: Path) -> None:
    found = [d["kind"] for d in with_components(tmp_path, "cpu", "ranks") if d["metadata"]["name"] == "trainer"]
    assert found == ["JobSet"]
    replicated = RANKS[0]["spec"]["replicatedJobs"][0]
    job = replicated["template"]["spec"]
    command = spec(RANKS[0])["containers"][0]["command"]
    assert f"--nnodes={job['parallelism']}" in command
    assert job["completions"] == job["parallelism"]
    host = f"{RANKS[0]['metadata']['name']}-{replicated['name']}-0-0.{RANKS[0]['metadata']['name']}"
    assert f"--master-addr={host}" in command, "JobSet names the first pod so"


def with_components(tmp_path: Path, overlay: str, *names: str) -> list[dict[str, Any]]:
    """An overlay with more components, before `pod`, as the page says."""
    kubernetes = tmp_path / "kubernetes"
    shutil.copytree(manifests.MANIFESTS, kubernetes)
    mine = kubernetes / f"overlays/{overlay}/kustomization.yaml"
    more = "".join(f"  - ../../components/{name}\n" for name in names)
    last = "  - ../../components/pod\n"
    mine.write_text(mine.read_text().replace(last, more + last))
    return manifests.build(mine.parent)


@pytest.mark.parametrize("overlay", ["observability", "gpu-ranks"])
def test_a_store_is_reached_by_who_sees_the_broker_and_by_nobody_else(tmp_path: Path, overlay: str) -> None:
    docs = with_components(tmp_path, overlay, "store")
    assert list(manifests.faults([doc for doc in docs if not doc["apiVersion"].startswith("keda.sh/")])) == []
    pods = {doc["metadata"]["name"]: doc for doc in docs if manifests.pod(doc) is not None}
    has = {name for name, doc in pods.items() if "envFrom" in manifests.containers(doc)[0]}
    assert has == {"producer", "worker", "scorer", "consumer", "evaluator", "trainer", "dashboard"}
    (policy,) = [doc for doc in docs if doc["metadata"]["name"] == "to-store"]
    reached = {
        name
        for name, doc in pods.items()
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels(doc).items()
    }
    assert reached == has


@pytest.mark.parametrize("overlay", ["observability", "gpu-ranks"])
def test_what_is_fetched_from_a_store_has_room(tmp_path: Path, overlay: str) -> None:
    """A pod that writes more than an emptyDir's limit is evicted."""
    most_gb = load_config(BASE / "config.yaml", environ={}).weights.cache_gb
    pods = {
        doc["metadata"]["name"]: spec(doc) for doc in with_components(tmp_path, overlay, "store") if manifests.pod(doc)
    }
    for name in ("worker", "scorer", "trainer"):
        (container,) = pods[name]["containers"]
        (cache,) = [one["value"] for one in container["env"] if one["name"] == "XDG_CACHE_HOME"]
        (mounted,) = [one["name"] for one in container["volumeMounts"] if one["mountPath"] == cache]
        (volume,) = [one for one in pods[name]["volumes"] if one["name"] == mounted]
        limit = re.fullmatch(r"(\d+)Gi", volume["emptyDir"]["sizeLimit"])
        assert limit
        assert int(limit[1]) > most_gb


def test_one_node_of_a_laptop_has_room_for_all_of_kind() -> None:
    docs = OVERLAYS["kind"]
    claims = [doc["spec"] for doc in docs if doc["kind"] == "PersistentVolumeClaim"]
    claims += [claim["spec"] for doc in docs for claim in doc.get("spec", {}).get("volumeClaimTemplates", ())]
    assert [claim["accessModes"] for claim in claims] == [["ReadWriteOnce"]] * 3
    asked = [one["resources"]["requests"] for doc in docs for one in manifests.containers(doc)]
    assert sum(int(request["cpu"].removesuffix("m")) for request in asked) <= 1000
    memory = {"Gi": 1024, "Mi": 1}
    assert sum(int(request["memory"][:-2]) * memory[request["memory"][-2:]] for request in asked) <= 9 * 1024


def test_every_gpu_of_the_ranks_is_one_of_a_process() -> None:
    (ranks,) = [doc for doc in OVERLAYS["gpu-ranks"] if doc["kind"] == "JobSet"]
    (container,) = manifests.containers(ranks)
    (count,) = [one["value"] for one in container["env"] if one["name"] == "RANKS_PER_NODE"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == count


def test_the_scrape_job_finds_the_service_of_the_processes() -> None:
    processes, _ = scrape_jobs()
    service = named("Service", "metrics")
    (found,) = processes["dns_sd_configs"]
    assert found["names"] == [f"metrics.{service['metadata']['namespace']}.svc"]
    assert found["port"] == service["spec"]["ports"][0]["port"]


def test_the_scrape_job_of_the_run_reaches_the_dashboard_and_has_its_key() -> None:
    _, run = scrape_jobs()
    service, dashboard = named("Service", "dashboard"), named("Deployment", "dashboard")
    port = service["spec"]["ports"][0]["port"]
    assert port == load_config(BASE / "config.yaml", environ={}).dashboard.port
    assert run["static_configs"] == [{"targets": [f"dashboard.{service['metadata']['namespace']}.svc:{port}"]}]
    policy = named("NetworkPolicy", "run-metrics")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels(dashboard).items()
    assert policy["ingress"][0]["ports"] == [{"port": port}]
    assert policy["ingress"][0]["from"] == named("NetworkPolicy", "metrics")["spec"]["ingress"][0]["from"], "Prometheus"
    (key,) = [one for one in spec(dashboard)["containers"][0]["env"] if one["name"] == "SLUICE_DASHBOARD_KEY"]
    file = Path(run["authorization"]["credentials_file"])
    assert file.name == key["valueFrom"]["secretKeyRef"]["key"]
    page = (manifests.ROOT / "docs/kubernetes.md").read_text()
    assert f"server.extraSecretMounts[0].mountPath={file.parent}," in page
    assert f"-n monitoring create secret generic sluice \\\n  --from-literal={file.name}=" in page


def test_both_ways_to_run_prometheus_have_the_same_jobs() -> None:
    compose = yaml.safe_load((manifests.ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in scrape_jobs()] == [job["job_name"] for job in compose]


def scrape_jobs() -> list[dict[str, Any]]:
    return yaml.safe_load((manifests.ROOT / "deploy/prometheus/kubernetes.yml").read_text())


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [doc for doc in OVERLAYS["observability"] if (doc["kind"], doc["metadata"]["name"]) == (kind, name)]
    return found
