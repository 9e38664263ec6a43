"""Commands that set up a host's compute NICs for lossless RoCE, and what the transfer libraries must be told in the environment.

The generic part is `dcb` (iproute2, dcb-dcbx(8), dcb-app(8), dcb-pfc(8)): with a DSCP entry mlx5's driver trusts DSCP. Where a driver offers more
in sysfs or configfs (congestion control per priority, traffic class of connections), it is set there; where it does not, the script says so.
"""

from __future__ import annotations

from regauge.fabric.topology import Nic, Roce, Server, Topology

ECT = 0b10
"""Bits of ECN in the traffic class that say: this transport takes marks (RFC 3168)."""


def qos(topology: Topology) -> dict[str, str]:
    """Return a shell script, and an environment file, for each host with RDMA on the compute plane; empty without RoCE."""
    roce = topology.planes["compute"].roce
    if roce is None:
        return {}
    found = {}
    for server in topology.servers:
        nics = [nic for nic in server.on("compute") if nic.rdma]
        if nics:
            found[f"hosts/{server.name}/qos/roce.sh"] = _script(topology, nics, roce)
            found[f"hosts/{server.name}/qos/roce.env"] = _environment(topology, server, roce)
    return found


def traffic_class(roce: Roce) -> int:
    """Return the IP traffic class of RDMA packets: DSCP, and that they can be marked."""
    return roce.dscp << 2 | ECT


def _script(topology: Topology, nics: list[Nic], roce: Roce) -> str:
    return _HEAD.format(site=topology.site) + "".join(_nic(nic, roce) for nic in nics) + 'exit "$left"\n'


_HEAD = """#!/bin/sh
# Made by `regauge topology render` from {site}: change the bill of materials, not this file.
# Run as root after each start. Exit code 1: something could not be set, and is named.
left=0
missing() {{ echo "$1: not set: $2" >&2; left=1; }}
set_file() {{ # file, value
  if [ -w "$1" ]; then echo "$2" > "$1"; else missing "$1" "the driver does not offer it"; fi
}}
"""


def _nic(nic: Nic, roce: Roce) -> str:
    name, sysfs = nic.interface, f"/sys/class/net/{nic.interface}"
    pfc = " ".join(f"{priority}:{'on' if priority == roce.priority else 'off'}" for priority in range(8))
    cm = f"/sys/kernel/config/rdma_cm/{nic.rdma}"
    return f"""
# rail {nic.rail or 0}: {name}, {nic.rdma}
dcb dcbx set dev {name} host ieee || missing {name} "that the host decides, not the NIC's firmware"
dcb app replace dev {name} dscp-prio {roce.dscp}:{roce.priority} {roce.cnp_dscp}:{roce.cnp_priority} || missing {name} "priorities by DSCP"
dcb pfc set dev {name} prio-pfc {pfc} || missing {name} "PFC"
ethtool -A {name} rx off tx off 2>/dev/null || true # global pause frames would stop every priority
set_file {sysfs}/ecn/roce_np/enable/{roce.priority} 1
set_file {sysfs}/ecn/roce_rp/enable/{roce.priority} 1
set_file {sysfs}/ecn/roce_np/cnp_dscp {roce.cnp_dscp}
set_file /sys/class/infiniband/{nic.rdma}/tc/1/traffic_class {traffic_class(roce)}
mkdir -p {cm} 2>/dev/null
set_file {cm}/ports/1/default_roce_tos {traffic_class(roce)}
"""


def _environment(topology: Topology, server: Server, roce: Roce) -> str:
    devices = ",".join(f"{nic.rdma}:1" for nic in server.on("compute") if nic.rdma)
    said = {
        "MC_GID_INDEX": roce.gid_index, "MC_IB_TC": traffic_class(roce),
        "UCX_IB_GID_INDEX": roce.gid_index, "UCX_IB_TRAFFIC_CLASS": traffic_class(roce), "UCX_NET_DEVICES": devices,
    }  # fmt: skip
    head = f"# Made by `regauge topology render` from {topology.site}. For workers: EnvironmentFile= of systemd, or `set -a; . FILE`.\n"
    return head + "".join(f"{key}={value}\n" for key, value in said.items())
