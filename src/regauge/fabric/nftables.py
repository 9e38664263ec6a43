"""nftables rules that lock KV to the compute plane and metrics to management. They add a table of their own and touch no other.

What they do not see: RDMA. A NIC's queue pairs pass the kernel by, so that only the switch (VLAN, ACL) and the device that a
transport is given keep RDMA on its plane. The rules for its port, 4791, hold for RDMA in software alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network

from regauge.fabric.topology import Server, Topology

LIBRARY_PORTS = (15_000, 65_535)
"""Where transports listen: Mooncake's handshake (15000 to 17000), and ports that the kernel gives."""
WORKER_PORTS = 64
"""Ports from `serving.worker_port` on that are kept for a host's workers: two of a local one, two and two for each rank of an engine's."""
ROCE_PORT = 4_791


def nftables(topology: Topology) -> dict[str, str]:
    """Return the rules of each host that has a compute plane or the gateway: `nft -f FILE`."""
    return {
        f"hosts/{server.name}/nftables/regauge.nft": _rules(topology, server)
        for server in topology.servers
        if server.on("compute") or server.name == topology.gateway
    }


def worker_ports(topology: Topology) -> tuple[int, int]:
    """Return the first and the last port of a host's workers."""
    first = topology.serving.worker_port
    return first, min(first + WORKER_PORTS - 1, 65_535)


def _rules(topology: Topology, server: Server) -> str:
    compute = ", ".join(f'"{nic.interface}"' for nic in server.on("compute"))
    network = topology.planes["compute"].network
    workers, libraries = ("{}-{}".format(*ports) for ports in (worker_ports(topology), LIBRARY_PORTS))
    chains = [_input(topology, server, compute, workers, libraries)]
    if compute:
        chains += [_from_compute(network, workers, libraries), _output(network, compute), _forward(compute)]
    return _HEAD.format(site=topology.site) + "\n".join(chains) + "}\n"


_HEAD = """#!/usr/sbin/nft -f
# Made by `regauge topology render` from {site}: change the bill of materials, not this file.
# Done again, it replaces itself. It refuses, and lets nothing in that other rules refuse.
table inet regauge
delete table inet regauge
table inet regauge {{
"""


def _chain(name: str, rules: Iterable[str], hook: str = "") -> str:
    first = [f"type filter hook {hook} priority filter + 10; policy accept;"] if hook else []
    return f"    chain {name} {{\n" + "".join(f"        {rule}\n" for rule in (*first, *rules)) + "    }\n"


def _drop(match: str, why: str) -> str:
    return f'{match} counter drop comment "{why}"'.strip()


def _input(topology: Topology, server: Server, compute: str, workers: str, libraries: str) -> str:
    serving, network = topology.serving, topology.planes["compute"].network
    rules = ['iifname "lo" accept']
    if compute:
        rules.append(f"iifname {{ {compute} }} jump from_compute")
    rules += [_drop(f"ip daddr {network}", "an address of the compute plane, through another"), "ct state established,related accept"]  # fmt: skip
    if server.name == topology.gateway:
        management = ", ".join(f'"{nic.interface}"' for nic in server.on("management"))
        rules.append(_drop(f"iifname != {{ {management} }} tcp dport {serving.management_port}", "metrics, outside of management"))  # fmt: skip
        rules.append(f"tcp dport {{ {serving.port}, {serving.management_port} }} accept")
    if compute:
        gateway = topology.server(topology.gateway).on("business")[0].address
        rules += [f'iifname "{nic.interface}" ip saddr {gateway} tcp dport {workers} accept' for nic in server.on("business")]  # fmt: skip
        rules += [_drop(f"tcp dport {workers}", "workers, from elsewhere"),
                  _drop(f"tcp dport {libraries}", "transports, outside of the compute plane"),
                  _drop(f"udp dport {ROCE_PORT}", "RoCE, outside of the compute plane")]  # fmt: skip
    return _chain("input", rules, "input")


def _from_compute(network: IPv4Network, workers: str, libraries: str) -> str:
    return _chain("from_compute", [
        _drop(f"ip saddr != {network}", "a stranger on the compute plane"),
        _drop(f"ip daddr != {network}", "an address of another plane, through compute"),
        "ct state established,related accept", "meta l4proto icmp accept",
        f"tcp dport {{ {workers}, {libraries} }} accept", f"udp dport {ROCE_PORT} accept", _drop("", "no transport"),
    ])  # fmt: skip


def _output(network: IPv4Network, compute: str) -> str:
    leaves = f"ip daddr {network} oifname != {{ {compute} }} counter reject with icmp type net-unreachable"
    return _chain("output", [
        'oifname "lo" accept', f'{leaves} comment "KV would leave its plane"',
        _drop(f"meta nfproto ipv4 oifname {{ {compute} }} ip daddr != {network}", "no KV, on the compute plane"),
    ], "output")  # fmt: skip


def _forward(compute: str) -> str:
    return _chain("forward", [_drop(f"{way} {{ {compute} }}", "nothing is forwarded") for way in ("iifname", "oifname")], "forward")  # fmt: skip
