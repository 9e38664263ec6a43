"""Everything that is made of a topology, by kind. Pure: a renderer takes the model and returns texts by path; the same model gives the same texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from regauge.errors import ConfigError
from regauge.fabric.configs import configs, targets
from regauge.fabric.drawing import drawing
from regauge.fabric.hostnet import netplan, networkd, sysctl
from regauge.fabric.nftables import nftables
from regauge.fabric.nic_qos import qos
from regauge.fabric.plans import addresses, cabling, ports
from regauge.fabric.sonic import sonic
from regauge.fabric.topology import Topology

KINDS: Mapping[str, Callable[[Topology], dict[str, str]]] = {
    "ports": ports,
    "cabling": cabling,
    "addresses": addresses,
    "networkd": networkd,
    "netplan": netplan,
    "sysctl": sysctl,
    "nftables": nftables,
    "qos": qos,
    "sonic": sonic,
    "regauge": configs,
    "prometheus": targets,
    "drawing": drawing,
}


def render(topology: Topology, kinds: Sequence[str] = (), host: str = "") -> dict[str, str]:
    """Return texts by relative path, sorted; `kinds` empty: all. `host`: that server's alone.

    Raises ConfigError for a kind or server that does not exist, and where nothing is left.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"no kind {kind!r} of file; there are {', '.join(KINDS)}")
    found: dict[str, str] = {}
    for kind in kinds or KINDS:
        found |= KINDS[kind](topology)
    if host:
        folder = f"hosts/{topology.server(host).name}/"
        found = {path: text for path, text in found.items() if path.startswith(folder)}
    if not found:
        raise ConfigError(f"{topology.site} has nothing of {', '.join(kinds)}" + (f" for {host}" if host else ""))
    return dict(sorted(found.items()))
