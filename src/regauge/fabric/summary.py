"""A topology at a glance: what `regauge topology show` prints."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from regauge.fabric.plans import cable, gbit
from regauge.fabric.topology import Nic, Server, Topology


def plain(topology: Topology) -> dict[str, Any]:
    """Return it as JSON takes it. Speeds are in bits per second."""
    return {
        "site": topology.site,
        "description": topology.description,
        "gateway": topology.gateway,
        "planes": {
            plane.name: {
                "network": str(plane.network), "mtu": plane.mtu, "speed": plane.speed, "switch": plane.switch,
                "vlan": plane.vlan, "router": str(plane.router) if plane.router else None,
                "rails": {str(rail): str(network) for rail, network in plane.rails.items()},
            }
            for plane in topology.planes.values()
        },
        "switches": {
            switch.name: {
                "planes": list(switch.planes), "ports": switch.ports, "used": len(topology.links_of(switch.name)),
                "speed": switch.port_speed, "cable": cable(switch.cable),
                "address": str(switch.address) if switch.address else None,
            }
            for switch in topology.switches
        },
        "bandwidth": bandwidth(topology),
        "servers": {server.name: _server(server) for server in topology.servers},
    }  # fmt: skip


def bandwidth(topology: Topology) -> dict[str, int]:
    """Return the bits per second that all NICs of a role have together on the compute plane."""
    return {
        role: sum(nic.speed for server in topology.of_role(role) for nic in server.on("compute"))
        for role in ("prefill", "decode")
    }


def _server(server: Server) -> dict[str, Any]:
    return {
        "role": server.role,
        "model": server.model,
        "accelerators": [each.model for each in server.accelerators],
        "nics": [_nic(nic) for nic in server.nics],
        "bmc": str(server.bmc.address) if server.bmc else None,
    }


def _nic(nic: Nic) -> dict[str, Any]:
    return {"plane": nic.plane, "interface": nic.interface, "address": f"{nic.address}/{nic.network.prefixlen}",
            "speed": nic.speed, "rail": nic.rail, "rdma": nic.rdma, "pci": nic.pci, "numa": nic.numa}  # fmt: skip


def text(topology: Topology) -> str:
    """Return it as people read it."""
    lines = [f"{topology.site}: {topology.description}", "", "planes"]
    for plane in topology.planes.values():
        more = [f"{len(plane.rails)} rails"] if plane.rails else []
        more += [f"VLAN {plane.vlan}"] if plane.vlan is not None else []
        more += [f"router {plane.router}"] if plane.router else []
        if plane.roce:
            more.append(f"RoCE: DSCP {plane.roce.dscp}, priority {plane.roce.priority}")
        lines.append(
            f"  {plane.name:10}  {plane.network!s:16}  {gbit(plane.speed):>4}  MTU {plane.mtu:<5} {', '.join(more)}".rstrip()
        )
    lines += ["", "switches"]
    for switch in topology.switches:
        used = len(topology.links_of(switch.name))
        where = f"management at {switch.address}" if switch.address else "not managed"
        lines.append(f"  {switch.name:12}  {used} of {switch.ports} ports of {gbit(switch.port_speed)}, {switch.ports - used} free; "
                     f"{', '.join(switch.planes)}; {cable(switch.cable)}; {where}")  # fmt: skip
    lines += ["", "compute bandwidth"]
    lines += [f"  {role:8}  {gbit(rate)}bit/s, {rate / 8e9:g} GB/s" for role, rate in bandwidth(topology).items()]
    lines += ["", "servers"]
    for _, alike in groupby(topology.servers, key=_kind):
        lines += _group(topology, list(alike))
    return "\n".join(lines)


def _kind(server: Server) -> tuple[Any, ...]:
    return (
        server.role,
        server.model,
        server.accelerators,
        tuple((n.plane, n.interface, n.rdma, n.pci) for n in server.nics),
    )


def _group(topology: Topology, servers: list[Server]) -> list[str]:
    first, last = servers[0], servers[-1]
    names = first.name if len(servers) == 1 else f"{first.name} to {last.name} ({len(servers)})"
    cards = f", {len(first.accelerators)} x {first.accelerators[0].model}" if first.accelerators else ""
    gateway = ", gateway" if topology.gateway in {each.name for each in servers} and first.role != "gateway" else ""
    lines = [f"  {names}: {first.role}{gateway}{cards}"]
    for one, other in zip(first.nics, last.nics, strict=True):
        span = str(one.address) if len(servers) == 1 else f"{one.address} to {other.address}"
        rail = f"rail {one.rail}" if one.rail is not None else ""
        lines.append(
            f"    {one.plane:10}  {one.interface:8}  {gbit(one.speed):>4}  {span:28}  {rail:7}  {one.rdma}".rstrip()
        )
    if first.bmc and last.bmc:
        span = str(first.bmc.address) if len(servers) == 1 else f"{first.bmc.address} to {last.bmc.address}"
        lines.append(f"    {'management':10}  {'BMC':8}  {gbit(first.bmc.speed):>4}  {span}")
    return lines
