"""A host for the doctor's tests: the first prefill server of the shipped deployment, as Linux and an mlx5 driver would show it, with nothing wrong.

Made up by the formats of Linux's documentation and of iproute2, since no such server is at hand; faults are patches over it.
"""

from __future__ import annotations

import json
from typing import Any

from regauge.fabric import bill
from regauge.fabric.expected import Expected, from_topology
from regauge.fabric.host import Record
from regauge.fabric.nic_qos import traffic_class
from regauge.fabric.topology import Nic, Topology

DEPLOYMENT = bill.load("prefill-12-decode-1")
NAME = "prefill-0"
ROCE = DEPLOYMENT.planes["compute"].roce
assert ROCE is not None


def expected(**changes: Any) -> Expected:
    return from_topology(DEPLOYMENT, NAME, **changes)


def green() -> Record:
    """Return the host without a fault."""
    server = DEPLOYMENT.server(NAME)
    record = Record()
    for nic in server.nics:
        _ethernet(record, DEPLOYMENT, nic)
        if nic.rdma:
            _rdma(record, nic)
    _routes(record, DEPLOYMENT)
    set_addresses(record, {nic.interface: [f"{nic.address}/{nic.network.prefixlen}"] for nic in server.nics})
    record.folders["/sys/class/infiniband"] = sorted(nic.rdma for nic in server.nics if nic.rdma)
    record.files |= {
        "/proc/modules": "mtgpu 9437184 0 - Live 0x0\nmt_peermem 16384 0 - Live 0x0\nmlx5_ib 401408 0 - Live 0x0",
        "/proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         unlimited            unlimited            bytes",
        "/proc/meminfo": "MemTotal: 2113415712 kB\nHugePages_Total:       0",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    record.commands |= {
        "chronyc -c tracking": "C0A80001,10.212.0.1,3,1796083760.1,0.000012,0.000004,0.00002,-3.1,0.001,0.02,0.0005,0.0001,64.2,Normal",
        "nft -j list tables": json.dumps(
            {"nftables": [{"metainfo": {}}, {"table": {"family": "inet", "name": "regauge"}}]}
        ),
        "ip -j route show default": json.dumps([{"dst": "default", "gateway": "10.211.0.1", "dev": "biz0"}]),
    }
    return record


def set_addresses(record: Record, own: dict[str, list[str]]) -> None:
    links = [
        {
            "ifname": name,
            "addr_info": [
                {"family": "inet", "local": each.split("/")[0], "prefixlen": int(each.split("/")[1])} for each in all_
            ],
        }
        for name, all_ in own.items()
    ]
    record.commands["ip -j address show"] = json.dumps(links)


def addresses_of(record: Record) -> dict[str, list[str]]:
    said = json.loads(record.commands["ip -j address show"] or "[]")
    return {link["ifname"]: [f"{a['local']}/{a['prefixlen']}" for a in link["addr_info"]] for link in said}


def set_pfc(record: Record, interface: str, *on: int) -> None:
    said = {"pfc_cap": 8, "macsec_bypass": False, "delay": 0, "prio_pfc": [priority in on for priority in range(8)]}
    record.commands[f"dcb -j pfc show dev {interface}"] = json.dumps(said)


def set_app(record: Record, interface: str, *pairs: tuple[int, int]) -> None:
    record.commands[f"dcb -j app show dev {interface}"] = json.dumps({"dscp_prio": [list(pair) for pair in pairs]})


def _ethernet(record: Record, topology: Topology, nic: Nic) -> None:
    base, conf = f"/sys/class/net/{nic.interface}", f"/proc/sys/net/ipv4/conf/{nic.interface}"
    record.files |= {
        f"{base}/mtu": str(topology.planes[nic.plane].mtu), f"{base}/operstate": "up", f"{base}/carrier": "1", f"{base}/flags": "0x1003",
        f"{base}/speed": str(nic.speed // 10**6), f"{base}/duplex": "full", f"{conf}/arp_ignore": "1", f"{conf}/arp_announce": "2", f"{conf}/rp_filter": "2",
        f"{base}/device/current_link_speed": "32.0 GT/s PCIe", f"{base}/device/max_link_speed": "32.0 GT/s PCIe",
        f"{base}/device/current_link_width": "16", f"{base}/device/max_link_width": "16",
        f"{base}/device/numa_node": str(nic.numa if nic.numa is not None else 0),
    }  # fmt: skip
    record.links[f"{base}/device"] = nic.pci


def _rdma(record: Record, nic: Nic) -> None:
    assert ROCE is not None
    ib, net = f"/sys/class/infiniband/{nic.rdma}", f"/sys/class/net/{nic.interface}"
    record.folders |= {f"{ib}/device/net": [nic.interface], f"{net}/device/infiniband": [nic.rdma]}
    record.files |= {
        f"{ib}/ports/1/state": "4: ACTIVE",
        f"{ib}/tc/1/traffic_class": f"Global tclass={traffic_class(ROCE)}",
    }
    words = f"{int(nic.address):08x}"
    local, mapped = "fe80:0000:0000:0000:0a00:27ff:fe4e:66a1", f"0000:0000:0000:0000:0000:ffff:{words[:4]}:{words[4:]}"
    for index, (kind, gid) in enumerate(
        (("IB/RoCE v1", local), ("RoCE v2", local), ("IB/RoCE v1", mapped), ("RoCE v2", mapped))
    ):
        record.files |= {f"{ib}/ports/1/gid_attrs/types/{index}": kind, f"{ib}/ports/1/gids/{index}": gid}
    for side in ("roce_np", "roce_rp"):
        record.files[f"{net}/ecn/{side}/enable/{ROCE.priority}"] = "1"
    set_pfc(record, nic.interface, ROCE.priority)
    set_app(record, nic.interface, (ROCE.dscp, ROCE.priority), (ROCE.cnp_dscp, ROCE.cnp_priority))


def set_route(record: Record, target: str, source: str, interface: str | None) -> None:
    said = [] if interface is None else [{"dst": target, "dev": interface, "prefsrc": source, "flags": []}]
    record.commands[f"ip -j route get {target} from {source}"] = json.dumps(said)


def _routes(record: Record, topology: Topology) -> None:
    mine = topology.server(NAME)
    for other in topology.servers:
        for nic in other.nics:
            for own in mine.on(nic.plane):
                if own.rail == nic.rail:
                    set_route(record, str(nic.address), str(own.address), own.interface)
