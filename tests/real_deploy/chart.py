"""The chart, rendered by Helm's own engine, and each document checked against Kubernetes' schemas.

Of the two kinds that Kubernetes has no schema for, `SHAPES` has the fields of their version 1: LeaderWorkerSet
(lws.sigs.k8s.io, "API reference") and NetworkAttachmentDefinition (the Network Plumbing Working Group's specification,
version 1.3). Pod templates within are checked as a Deployment's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python.chart import Chart
from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "regauge"
KUBERNETES = "1.33"
Document = dict[str, Any]

_COUNT = {"type": "integer", "minimum": 0}
_SOME = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


SHAPES: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _closed(
        replicas=_COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=_closed(
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_closed(partition=_COUNT, maxUnavailable=_SOME, maxSurge=_SOME),
        ),
        networkConfig=_closed(subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        leaderWorkerTemplate=_closed(
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
            subGroupPolicy={"type": "object"},
        ),
    ),
    ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition"): _closed(config={"type": "string"}),
    ("monitoring.coreos.com/v1", "PodMonitor"): {"type": "object", "required": ["selector", "podMetricsEndpoints"]},
}


def render(**values: Any) -> list[Document]:
    """Return the documents of a release called "kv" in the namespace "serving"."""
    texts = Chart.load(FOLDER).render(values, name="kv", namespace="serving")
    found = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    return [each for each in found if each is not None]


def kinds(documents: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def check(document: Document) -> None:
    """Raise where a document is none that Kubernetes would take."""
    shape = SHAPES.get((document["apiVersion"], document["kind"]))
    if shape is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    Draft202012Validator(shape).validate(document["spec"])
    template = document["spec"].get("leaderWorkerTemplate", {})
    for name in ("leaderTemplate", "workerTemplate"):
        if name in template:
            kubernetes_validate.validate(deployment(template[name]), KUBERNETES, strict=True)


def deployment(template: Document) -> Document:
    labels = template["metadata"]["labels"]
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pod"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }  # fmt: skip
