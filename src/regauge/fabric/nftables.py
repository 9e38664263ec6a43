"""nftables rules that lock KV to the compute plane and metrics to management. They add a table of their own and touch no other.

What they do not see: RDMA. A NIC's queue pairs pass the kernel by, so that only the switch (VLAN, ACL) and the device that a
transport is given keep RDMA on its plane. The rules for its port, 4791, hold for RDMA in software alone.
"""

from __future__ import annotations

from regauge.fabric.topology import Server, Topology

LIBRARY_PORTS = (15_000, 65_535)
"""Where transports listen: Mooncake's handshake (15000 to 17000), and ports that the kernel gives."""
WORKER_PORTS = 64
"""Ports from `serving.worker_port` on that are kept for a host's workers: two of a local one, two and two for each rank of an engine's."""
ROCE_PORT = 4_791


def nftables(topology: Topology) -> dict[str, str]:
    """Return the rules of each host that has a compute plane: `nft -f FILE`."""
    return {
        f"hosts/{server.name}/nftables/regauge.nft": _rules(topology, server)
        for server in topology.servers
        if server.on("compute")
    }


def worker_ports(topology: Topology) -> tuple[int, int]:
    """Return the first and the last port of a host's workers."""
    first = topology.serving.worker_port
    return first, first + WORKER_PORTS - 1


def _rules(topology: Topology, server: Server) -> str:
    compute = ", ".join(f'"{nic.interface}"' for nic in server.on("compute"))
    network = topology.planes["compute"].network
    workers = "{}-{}".format(*worker_ports(topology))
    libraries = "{}-{}".format(*LIBRARY_PORTS)
    return f"""#!/usr/sbin/nft -f
# Made by `regauge topology render` from {topology.site}: change the bill of materials, not this file.
# Done again, it replaces itself. Where other rules let something in that is refused here, it stays refused.
table inet regauge
delete table inet regauge
table inet regauge {{
    chain input {{
        type filter hook input priority filter + 10; policy accept;
        iifname "lo" accept
        iifname {{ {compute} }} jump from_compute
        ip daddr {network} counter drop comment "an address of the compute plane, through another"
        ct state established,related accept
{_other_planes(topology, server, workers)}
        tcp dport {workers} counter drop comment "workers, from elsewhere"
        tcp dport {libraries} counter drop comment "transports, outside of the compute plane"
        udp dport {ROCE_PORT} counter drop comment "RoCE, outside of the compute plane"
    }}
    chain from_compute {{
        ip saddr != {network} counter drop comment "a stranger on the compute plane"
        ip daddr != {network} counter drop comment "an address of another plane, through compute"
        ct state established,related accept
        meta l4proto icmp accept
        tcp dport {{ {workers}, {libraries} }} accept
        udp dport {ROCE_PORT} accept
        counter drop comment "no transport"
    }}
    chain output {{
        type filter hook output priority filter + 10; policy accept;
        oifname "lo" accept
        ip daddr {network} oifname != {{ {compute} }} counter reject with icmp type net-unreachable comment "KV would leave its plane"
        meta nfproto ipv4 oifname {{ {compute} }} ip daddr != {network} counter drop comment "no KV, on the compute plane"
    }}
    chain forward {{
        type filter hook forward priority filter + 10; policy accept;
        iifname {{ {compute} }} counter drop
        oifname {{ {compute} }} counter drop
    }}
}}
"""


def _other_planes(topology: Topology, server: Server, workers: str) -> str:
    serving = topology.serving
    gateway = topology.server(topology.gateway).on("business")[0].address
    lines = [
        f'iifname "{nic.interface}" ip saddr {gateway} tcp dport {workers} accept' for nic in server.on("business")
    ]
    if server.name == topology.gateway:
        management = ", ".join(f'"{nic.interface}"' for nic in server.on("management"))
        lines.append(f"iifname != {{ {management} }} tcp dport {serving.management_port} counter drop "
                     'comment "metrics, outside of the management plane"')  # fmt: skip
        lines.append(f"tcp dport {{ {serving.port}, {serving.management_port} }} accept")
    return "\n".join(f"        {line}" for line in lines)
