"""The doctor's checks of RDMA: devices, GIDs, what makes RoCE lossless, and where NICs and accelerators sit.

Paths are those of Linux's documentation (Documentation/ABI/stable/sysfs-class-infiniband, Documentation/PCI) and, for congestion control, of the
mlx5 driver. What a driver does not offer is told as unknown.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from regauge.fabric.expected import Expected, Port, present
from regauge.fabric.finding import Finding
from regauge.fabric.host import Host, decoded, number
from regauge.fabric.nic_qos import traffic_class
from regauge.fabric.topology import Roce

ROCE_V2 = "RoCE v2"
PEER_MEMORY = {"nvidia": "nvidia_peermem", "mtgpu": "mt_peermem"}
"""Module by which NICs reach an accelerator's memory, by the accelerator's driver."""


def device(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each RDMA device is there, and is the port's."""
    for port in _rdma(expected):
        if port.rdma not in (host.names("/sys/class/infiniband") or []):
            yield Finding(
                "rdma-device", port.plane, port.rdma, f"there is no RDMA device {port.rdma}", "KV over RDMA cannot cross this rail.",
                "modprobe mlx5_ib (or the vendor's module); rdma link show",
            )  # fmt: skip
            continue
        own = _netdevs(host, port.rdma)
        if own and port.interface not in own:
            yield Finding(
                "rdma-device", port.plane, port.rdma, f"its port is {', '.join(own)}, not {port.interface}", "KV leaves by another port than the routes say: another rail, or another plane.",
                f"mend rdma = of {port.interface} in the bill of materials: rdma link show",
            )  # fmt: skip


def port_state(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each RDMA port is active."""
    for port in _there(host, expected):
        state = host.read(f"/sys/class/infiniband/{port.rdma}/ports/1/state")
        if state is not None and "ACTIVE" not in state:
            yield Finding(
                "rdma-port", port.plane, port.rdma, f"port 1 is {state}", "Queue pairs on it fail.", f"ip link set dev {port.interface} up; rdma link show {port.rdma}/1",
            )  # fmt: skip


def gid(host: Host, expected: Expected) -> Iterator[Finding]:
    """The GID at the index that is used is RoCE v2 and the port's own address."""
    if expected.roce is None:
        return
    index = expected.roce.gid_index
    for port in _there(host, expected):
        base = f"/sys/class/infiniband/{port.rdma}/ports/1"
        kind, value = host.read(f"{base}/gid_attrs/types/{index}"), host.read(f"{base}/gids/{index}")
        right = next((i for i in range(16) if _is(host, base, i, port)), None)
        if kind == ROCE_V2 and _mapped(value) == port.address:
            continue
        found = f"GID {index} is {_gid(value)} ({kind or 'empty'}), not RoCE v2 of {port.address}"
        mend = (
            f"ip address add {port.address}/{port.network.prefixlen} dev {port.interface}; rdma link show" if right is None
            else f"set roce.gid_index = {right} in the bill of materials, and MC_GID_INDEX and UCX_IB_GID_INDEX to {right}"
        )  # fmt: skip
        yield Finding(
            "gid", port.plane, port.rdma, found,
            "Connections fail, or go by RoCE v1 or another network; engines have answered wrongly for it (sgl-project/sglang#30737).", mend,
        )  # fmt: skip


def _is(host: Host, base: str, index: int, port: Port) -> bool:
    kind = host.read(f"{base}/gid_attrs/types/{index}")
    return kind == ROCE_V2 and _mapped(host.read(f"{base}/gids/{index}")) == port.address


def _mapped(gid_: str | None) -> ipaddress.IPv4Address | None:
    try:
        return None if gid_ is None else ipaddress.IPv6Address(gid_).ipv4_mapped
    except ValueError:
        return None


def _gid(value: str | None) -> str:
    return str(_mapped(value) or value or "empty")


def pfc(host: Host, expected: Expected) -> Iterator[Finding]:
    """Priority flow control holds for the one priority of KV (dcb-pfc(8))."""
    for port, roce in _lossless(host, expected):
        said = decoded(host.run("dcb", "-j", "pfc", "show", "dev", port.interface))
        found = _enabled(said)
        if found is None:
            yield _unknown(
                "pfc",
                port,
                "dcb does not say which priorities have flow control",
                f"dcb pfc show dev {port.interface}; or the vendor's tool",
            )
        elif found != {roce.priority}:
            yield Finding(
                "pfc", port.plane, port.interface, f"flow control holds for priorities {sorted(found) or 'none'}, and should for {roce.priority} alone",
                "RDMA packets are dropped when a queue fills, and each drop stops a connection for milliseconds." if roce.priority not in found
                else "What is not KV stops KV.",
                f"dcb pfc set dev {port.interface} prio-pfc all:off {roce.priority}:on",
            )  # fmt: skip


def _enabled(said: object) -> set[int] | None:
    listed = said.get("prio_pfc") if isinstance(said, dict) else None
    if not isinstance(listed, list):
        return None
    return {i for i, each in enumerate(listed) if each in (True, "on")}


def trust(host: Host, expected: Expected) -> Iterator[Finding]:
    """Packets get their priority by DSCP (dcb-app(8))."""
    for port, roce in _lossless(host, expected):
        said = decoded(host.run("dcb", "-j", "app", "show", "dev", port.interface))
        listed = said.get("dscp_prio") if isinstance(said, dict) else None
        if not isinstance(said, dict):
            yield _unknown(
                "trust", port, "dcb does not say how packets get their priority", f"dcb app show dev {port.interface}"
            )
        elif [roce.dscp, roce.priority] not in (listed or []):
            yield Finding(
                "trust", port.plane, port.interface, f"DSCP {roce.dscp} does not mean priority {roce.priority}",
                "KV arrives in the queue that drops.", f"dcb app replace dev {port.interface} dscp-prio {roce.dscp}:{roce.priority} {roce.cnp_dscp}:{roce.cnp_priority}",
            )  # fmt: skip


def ecn(host: Host, expected: Expected) -> Iterator[Finding]:
    """Congestion is notified and heeded for KV's priority."""
    for port, roce in _lossless(host, expected):
        for side, what in (
            ("roce_np", "notifies senders of congestion"),
            ("roce_rp", "slows down when it is told of congestion"),
        ):
            path = f"/sys/class/net/{port.interface}/ecn/{side}/enable/{roce.priority}"
            found = host.read(path)
            if found is None:
                yield _unknown("ecn", port, f"the driver does not say whether the NIC {what}", "the vendor's tool")
            elif found != "1":
                yield Finding(
                    "ecn", port.plane, path, f"the NIC does not: it {what} only if this is 1",
                    "When twelve prefill servers send to one, pause frames spread over the fabric instead.", f"echo 1 > {path}",
                )  # fmt: skip


def tclass(host: Host, expected: Expected) -> Iterator[Finding]:
    """RDMA packets carry KV's DSCP."""
    for port, roce in _lossless(host, expected):
        wanted = traffic_class(roce)
        said = host.read(f"/sys/class/infiniband/{port.rdma}/tc/1/traffic_class")
        given = number(said) if said is None or "=" not in said else number(said.rpartition("=")[2].strip())
        if given is None:
            given = number(host.read(f"/sys/kernel/config/rdma_cm/{port.rdma}/ports/1/default_roce_tos"))
        mend = f"echo {wanted} > /sys/class/infiniband/{port.rdma}/tc/1/traffic_class; and MC_IB_TC, UCX_IB_TRAFFIC_CLASS = {wanted}"
        if given is None:
            yield _unknown(
                "traffic-class", port, "the driver does not say with which traffic class RDMA packets leave", mend
            )
        elif given >> 2 != roce.dscp:
            yield Finding(
                "traffic-class", port.plane, port.rdma, f"RDMA packets leave with traffic class {given} (DSCP {given >> 2}), and should with {wanted} (DSCP {roce.dscp})",
                "The switch puts them where packets are dropped.", mend,
            )  # fmt: skip


def pcie(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each NIC's slot gives what the NIC can do."""
    for port in expected.ports:
        base = f"/sys/class/net/{port.interface}/device"
        for what, unit in (("speed", ""), ("width", " lanes")):
            now, most = host.read(f"{base}/current_link_{what}"), host.read(f"{base}/max_link_{what}")
            if now is not None and most is not None and 0 < _leading(now) < _leading(most):
                yield Finding(
                    "pcie", port.plane, port.interface, f"its PCIe link runs at {now}{unit} of {most}{unit}", "The slot, and not the network, bounds transfers.",
                    f"seat the card anew, or look at the slot: lspci -vv -s {host.target(base) or port.pci}", "warning",
                )  # fmt: skip


def _leading(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else 0.0


def numa(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each compute NIC sits where it should, beside an accelerator."""
    beside = {
        node for pci, declared in expected.accelerators.items()
        if (node := number(host.read(f"/sys/bus/pci/devices/{pci}/numa_node"))) is not None or (node := declared) is not None
    }  # fmt: skip
    for port in expected.on("compute"):
        found = number(host.read(f"/sys/class/net/{port.interface}/device/numa_node"))
        if found is None or found < 0:
            continue
        if port.numa is not None and found != port.numa:
            what = f"it sits at NUMA node {found}, and should at {port.numa}"
        elif beside and found not in beside:
            what = f"it sits at NUMA node {found}; accelerators sit at {', '.join(map(str, sorted(beside)))}"
        else:
            continue
        yield Finding(
            "numa", port.plane, port.interface, what,
            "KV crosses the link between the sockets: slow, and engines have waited 300 s for it (sgl-project/sglang#39584).",
            f"put the card into a slot of node {port.numa if port.numa is not None else min(beside)}, or give its rail to an accelerator of node {found}: nvidia-smi topo -m, or the vendor's",
        )  # fmt: skip


def peer_memory(host: Host, expected: Expected) -> Iterator[Finding]:
    """NICs reach the accelerators' memory: by a module, or by dma-buf."""
    if not (expected.rdma and expected.accelerates):
        return
    modules = {line.split(" ", 1)[0] for line in (host.read("/proc/modules") or "").splitlines()}
    if modules & set(PEER_MEMORY.values()) or "Open Kernel Module" in (host.read("/proc/driver/nvidia/version") or ""):
        return
    module = next((own for driver, own in PEER_MEMORY.items() if driver in modules), "")
    yield Finding(
        "peer-memory", "compute", "/proc/modules",
        f"{module or 'no module for peer memory'} is {'not ' if module else ''}loaded, and the driver is not known to give dma-buf",
        "Registering the accelerator's memory fails, or each transfer goes by way of the host's.",
        f"modprobe {module}; echo {module} > /etc/modules-load.d/peermem.conf" if module else "install the accelerators' driver, with its module for peer memory",
    )  # fmt: skip


def _rdma(expected: Expected) -> Iterator[Port]:
    return (port for port in expected.on("compute") if port.rdma and expected.rdma)


def _there(host: Host, expected: Expected) -> Iterator[Port]:
    known = host.names("/sys/class/infiniband") or []
    return (port for port in _rdma(expected) if port.rdma in known)


def _lossless(host: Host, expected: Expected) -> Iterator[tuple[Port, Roce]]:
    if expected.roce is not None:
        for port in present(host, _there(host, expected)):
            yield port, expected.roce


def _netdevs(host: Host, device_: str) -> list[str]:
    base = f"/sys/class/infiniband/{device_}"
    return host.names(f"{base}/device/net") or []


def _unknown(check: str, port: Port, what: str, mend: str) -> Finding:
    return Finding(check, port.plane, port.interface, what, "It was not looked at.", mend, "unknown")
