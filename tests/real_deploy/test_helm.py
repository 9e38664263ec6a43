"""The chart by Helm's engine: what it renders, whether Kubernetes and regauge would take it, and what it refuses."""

import json
import re
from typing import Any

import pytest
import yaml
from chart import FOLDER, check, kinds, render
from helm_python.chart import lint
from helm_python.errors import HelmError

from regauge import config

NICS = {
    "compute": [
        {"name": "c0", "config": {"type": "host-device", "device": "ens1"}, "resource": "rdma/hca_0", "mtu": 4200},
        {"name": "c1", "existing": "fabric/c1", "resource": "rdma/hca_1"},
    ]
}
SGLANG = {"engine": "sglang", "image": "sglang:x", "command": ["python3", "-m", "sglang.launch_server"], "ranks": 8}
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "two NICs": {"planes": NICS},
    "a management plane": {"planes": {**NICS, "management": {"name": "m", "config": {"type": "macvlan"}}}},
    "SGLang on decode, two hosts": {"planes": NICS, "decode": {**SGLANG, "size": 2, "replicas": 3}},
    "engines on both sides": {"prefill": SGLANG, "decode": {**SGLANG, "engine": "vllm"}, "gateway": {"replicas": 2}},
    "everything else": {
        "tlsSecret": "pem", "imagePullSecrets": [{"name": "pull"}], "podMonitor": {"enabled": True},
        "transfer": {"transport": "mooncake", "extra": {"mooncake": {"protocol": "rdma", "devices": ["mlx5_0"]}}},
        "gateway": {"tenantsSecret": "tenants", "config": {"route": {"ttft_s": 20.0}}, "processes": 4, "tolerations": [{"operator": "Exists"}]},
        "prefill": {
            "replicas": 12, "layout": "fp8_e4m3,page=64,hnd", "config": {"max_context": 8192}, "runtimeClassName": "mthreads",
            "resources": {"limits": {"mthreads.com/gpu": 8}}, "nodeSelector": {"role": "prefill"}, "env": [{"name": "A", "value": "b"}],
            "volumes": [{"name": "models", "hostPath": {"path": "/models"}}], "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}},
        },
    },
}  # fmt: skip


def told(documents: list[dict[str, Any]], name: str, file: str) -> config.ServeConfig:
    return config.decode(kinds(documents, "ConfigMap")[name]["data"][file].encode())


def test_helm_finds_nothing_to_complain_of() -> None:
    found = lint(FOLDER, strict=True)
    assert not found["errors"]
    assert {each["error"] for each in found["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_kubernetes_would_take_each_document(values: dict[str, Any]) -> None:
    documents = render(**values)
    for document in documents:
        check(document)
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents)
    assert {*kinds(documents, "LeaderWorkerSet")} == {"kv-prefill", "kv-decode"}


def test_the_check_sees_a_wrong_field() -> None:
    documents = render()
    pools, gateway = kinds(documents, "LeaderWorkerSet"), kinds(documents, "Deployment")["kv-gateway"]
    pod = pools["kv-decode"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    for fields, name in (
        (pod["spec"], "hostname_"),
        (gateway["spec"], "replica"),
        (pools["kv-prefill"]["spec"], "groups"),
    ):
        fields[name] = "x"
    for document in (pools["kv-decode"], gateway, pools["kv-prefill"]):
        with pytest.raises(Exception, match=r"[Aa]dditional properties"):
            check(document)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_regauge_takes_the_configurations(values: dict[str, Any]) -> None:
    documents = render(**values)
    for name, each in kinds(documents, "ConfigMap").items():
        for text in each["data"].values():
            assert config.decode(text.encode()).transfer.key_file == "/etc/regauge/key/key", name
    gateway = told(documents, "kv-gateway", "gateway.toml")
    assert gateway.external
    assert gateway.discovery.register


def test_each_compute_network_is_a_nic_of_every_worker_and_a_device_of_its_pod() -> None:
    documents = render(planes=NICS, decode=SGLANG)
    worker = told(documents, "kv-prefill", "worker.toml")
    assert (worker.transfer.nics, worker.transfer.control) == (["net1", "net2"], "eth0")
    networks = kinds(documents, "NetworkAttachmentDefinition")
    assert json.loads(networks["kv-c0"]["spec"]["config"])["mtu"] == 4200
    for pool in kinds(documents, "LeaderWorkerSet").values():
        for template in ("leaderTemplate", "workerTemplate"):
            pod = pool["spec"]["leaderWorkerTemplate"][template]
            assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "serving/kv-c0,fabric/c1"
            [container] = pod["spec"]["containers"]
            assert container["resources"]["limits"] == {"rdma/hca_0": "1", "rdma/hca_1": "1"}


def test_kubernetes_tells_the_gateway_of_engines_leaders_alone() -> None:
    documents = render(decode={**SGLANG, "size": 2})
    services = kinds(documents, "Service")
    assert "selector" not in services["kv-prefill"]["spec"]
    assert services["kv-decode"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    rules = told(documents, "kv-gateway", "gateway.toml").discovery.kubernetes
    assert rules is not None
    assert (rules.prefill, rules.decode, rules.decode_engine, rules.prefill_engine) == (
        "kv-prefill",
        "kv-decode",
        "sglang",
        "local",
    )
    ports = {each["name"] for each in services["kv-decode"]["spec"]["ports"]}
    assert ports >= {rules.http_port, rules.control_port, rules.status_port}
    assert told(render(), "kv-gateway", "gateway.toml").discovery.kubernetes is None


def test_workers_of_the_embedded_engine_find_the_gateway_by_its_service() -> None:
    documents = render()
    [gateway] = told(documents, "kv-prefill", "worker.toml").discovery.gateways
    assert gateway == "http://kv:8000"
    assert "kv" in kinds(documents, "Service")


def test_a_pod_is_made_anew_when_its_configuration_changes() -> None:
    def sums(**values: Any) -> set[str]:
        return set(re.findall(r"checksum/config: '?([0-9a-f]{64})", yaml.safe_dump_all(render(**values))))

    assert sums() == sums()
    assert not sums() & sums(model="other")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefil": {}}, "prefil"),
        ({"gateway": {"port": 0}}, "port"),
        ({"transfer": {"transport": "shm"}}, "transport"),
        ({"prefill": {"size": 2}}, "prefill.size: the embedded engine runs on one host"),
        ({"decode": {"engine": "vllm", "image": "x"}}, "decode.command: say how vllm is started"),
        ({"decode": {"engine": "vllm", "command": ["x"]}}, "decode.image: name an image that has vllm and regauge"),
        ({"decode": {"command": ["x"]}}, "decode.command: is an engine's"),
        ({"planes": {"compute": [{"name": "c"}]}}, r"planes.compute\[0\] \(c\): give existing, or config"),
        (
            {"podMonitor": {"enabled": True}, "planes": {"management": {"name": "m", "existing": "a/b"}}},
            "podMonitor.enabled: with planes.management metrics answer on that network alone",
        ),
        ({"gateway": {"replicas": 2}}, "gateway.replicas: workers of the embedded engine register at one gateway"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError, match=said):
        render(**values)
