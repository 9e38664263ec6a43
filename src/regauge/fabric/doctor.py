"""The doctor: every check, over one host. docs/doctor.md lists them.

A check is a generator of findings over what the host says (`host.py`) and what is expected of it (`expected.py`). Nothing here is changed on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from regauge.fabric import check_host, check_network, check_rdma
from regauge.fabric.expected import Expected
from regauge.fabric.finding import Finding, Severity
from regauge.fabric.host import Host

Check = Callable[[Host, Expected], Iterator[Finding]]
CHECKS: Final[Mapping[str, Check]] = {
    "address": check_network.address,
    "overlap": check_network.overlap,
    "link": check_network.link,
    "speed": check_network.speed,
    "mtu": check_network.mtu,
    "route": check_network.route,
    "rails": check_network.rails,
    "rdma-device": check_rdma.device,
    "rdma-port": check_rdma.port_state,
    "gid": check_rdma.gid,
    "pfc": check_rdma.pfc,
    "trust": check_rdma.trust,
    "ecn": check_rdma.ecn,
    "traffic-class": check_rdma.tclass,
    "pcie": check_rdma.pcie,
    "numa": check_rdma.numa,
    "peer-memory": check_rdma.peer_memory,
    "memlock": check_host.memlock,
    "hugepages": check_host.hugepages,
    "clock": check_host.clock,
    "firewall": check_host.firewall,
    "idle": check_host.idle,
    "devices": check_host.devices,
    "line-rate": check_host.line_rate,
}
"""In the order in which findings are told: what breaks the others comes first."""
_ORDER: Final[Mapping[Severity, int]] = {"error": 0, "warning": 1, "unknown": 2}


def examine(host: Host, expected: Expected, planes: Iterable[str] = ()) -> list[Finding]:
    """Return what is wrong with a host, of these planes and what belongs to none; of all planes if none is given."""
    wanted = {*planes, "host"}
    found = [finding for check in CHECKS.values() for finding in check(host, expected)]
    return [each for each in found if not planes or each.plane in wanted]


def green(findings: Iterable[Finding]) -> bool:
    """Return whether nothing is wrong, as far as could be seen."""
    return all(each.severity == "unknown" for each in findings)


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by plane, the worst first."""
    planes = {"compute": 0, "business": 1, "management": 2, "host": 3}
    return sorted(findings, key=lambda each: (planes.get(each.plane, 4), _ORDER[each.severity]))
