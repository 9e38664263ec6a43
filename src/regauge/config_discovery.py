"""Settings of where the gateway learns of workers beside its own: `[[workers]]` and `[discovery]`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from regauge.config_bounds import MAX_S, bound

Ranks = Annotated[int, msgspec.Meta(ge=1, le=1_024)]
SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts a pod's token and its API's authority: `automountServiceAccountToken`."""


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that somebody else started."""

    name: str
    """As its adapter's `name`, or its spec's."""
    role: Literal["prefill", "decode"]
    url: str
    """Of its API, as `http://10.0.0.2:8000`."""
    engine: Literal["local", "vllm", "sglang"] = "local"
    control: str = ""
    """Decode: host of its ranks' control addresses, and port of rank 0, as `10.0.0.2:9100`."""
    status: str = ""
    """Likewise, of the status that an engine's adapter gives (`status_port`)."""
    ranks: Ranks = 1
    token_file: str = ""
    """File with the bearer token that it wants; empty: that of the gateway's own workers."""
    layout: str = ""
    """File of its KV cache's layout, where it does not tell it itself; empty: the path of its pairs stays unknown."""


class EtcdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """etcd, version 3.4 or later, by its JSON gateway."""

    urls: Annotated[list[str], msgspec.Meta(min_length=1, max_length=16)]
    """Of its members, as `http://10.0.0.9:2379`; the first that answers is asked."""
    prefix: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] = "/regauge/workers/"
    """Keys that begin like this are workers: the rest is the name, the value an entry (docs/pools.md)."""
    user: str = ""
    password_file: str = ""
    authority: str = ""
    """PEM file of the certificates that sign etcd's."""
    certificate: str = ""
    """PEM files for etcd's mutual TLS."""
    key: str = ""


class KubernetesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two services of a namespace, whose EndpointSlices name the workers: each ready pod is one, under its own name."""

    namespace: str
    prefill: str
    """Service of the prefill workers."""
    decode: str
    url: str = "https://kubernetes.default.svc"
    prefill_engine: Literal["local", "vllm", "sglang"] = "local"
    decode_engine: Literal["local", "vllm", "sglang"] = "local"
    ranks: Ranks = 1
    """Of each worker."""
    http_port: str = "http"
    """Name of the service's port at which workers answer the gateway."""
    control_port: str = "control"
    """Name of the port at which rank 0 of a decode worker takes control connections."""
    status_port: str = "status"
    """Name of the port at which rank 0 of an engine tells its status, if it does."""
    token_file: str = f"{SERVICE_ACCOUNT}/token"
    authority: str = f"{SERVICE_ACCOUNT}/ca.crt"


class DiscoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the gateway learns of workers."""

    register: bool = False
    """Whether workers may register at `POST /internal/workers` of the gateway, signed with the transfer key."""
    gateways: Annotated[list[str], msgspec.Meta(max_length=64)] = []
    """URLs of gateways at which a local worker registers, as `http://10.0.0.1:8000`."""
    authority: str = ""
    """PEM file of the certificates that sign these gateways', where they have TLS; empty: the system's."""
    advertise: str = ""
    """Address of this machine at which the gateways reach its workers that register; empty: loopback."""
    lease_s: float = 15.0
    """A worker that has registered and is not heard of for so long has left; it renews its lease three times in that time."""
    max_workers: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000
    """Most workers of each source; more are left out."""
    etcd: EtcdConfig | None = None
    kubernetes: KubernetesConfig | None = None

    @property
    def finds(self) -> bool:
        """Whether a gateway learns of workers so."""
        return self.register or self.etcd is not None or self.kubernetes is not None

    def __post_init__(self) -> None:
        bound(self, "discovery", ("lease_s",), least=1.0, most=MAX_S)
