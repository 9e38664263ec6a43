"""The part of a SONiC switch's `config_db.json` that a lossless compute plane needs. `config load FILE` lays it over the switch's own.

Tables, fields and their values are those of SONiC's YANG models (sonic-net/sonic-buildimage, src/sonic-yang-models, read 2026-12).
Ports of SONiC route unless they are in a VLAN, so that the plane needs one, or the switch's own files give it. What a switch gets from its platform is left to it: lanes of ports, buffer pools and their sizes. With the dynamic buffer model a
priority group whose profile is `NULL` is lossless, with headroom from the port's speed, MTU and `CABLE_LENGTH`.
"""

from __future__ import annotations

import json
from math import ceil
from typing import Any

from regauge.fabric.topology import Link, Roce, Switch, Topology

MAP = "REGAUGE"
SUB = "abcdefgh"
MTU_LEAST = 9_100
"""SONiC's default MTU of a port, in bytes."""
WATCHDOG_MS = 200
"""A queue that is paused for so long is drained: one sick NIC must not stand the plane still."""
KV_WEIGHT, OTHER_WEIGHT = 50, 50
"""Shares of the wire while both queues have packets, of NVIDIA's default for RoCE: half for RoCE, CNP before all (Cumulus Linux, RoCE)."""


def sonic(topology: Topology) -> dict[str, str]:
    """Return the part of `config_db.json` for the compute plane's switch; empty where RoCE is not asked for."""
    plane = topology.planes["compute"]
    if plane.roce is None:
        return {}
    switch = topology.switch(plane.switch)
    links = [link for link in topology.links_of(switch.name) if link.plane == "compute"]
    made = {**_ports(topology, switch, links), **_maps(plane.roce), **_queues(switch, links, plane.roce)}
    return {f"switches/{switch.name}/config_db.json": json.dumps(made, indent=2, sort_keys=True) + "\n"}


def port_name(switch: Switch, port: int) -> str:
    """Return SONiC's name of a port: `Ethernet` and the number of its first lane, counted from 0 over the switch."""
    cage, sub = divmod(port - 1, switch.breakout)
    return f"Ethernet{cage * switch.lanes + sub * (switch.lanes // switch.breakout)}"


def alias(switch: Switch, port: int) -> str:
    """Return a port's other name by the switch's pattern; empty: there is none."""
    cage, sub = divmod(port - 1, switch.breakout)
    return switch.alias.replace("{port}", str(cage + 1)).replace("{sub}", SUB[sub] if switch.breakout > 1 else "")


def _ports(topology: Topology, switch: Switch, links: list[Link]) -> dict[str, Any]:
    plane = topology.planes["compute"]
    ports: dict[str, Any] = {}
    for link in links:
        port = {"admin_status": "up", "description": f"{link.node} {link.end}", "mtu": str(max(plane.mtu, MTU_LEAST)),
                "speed": str(link.speed // 10**6)}  # fmt: skip
        if switch.alias:
            port["alias"] = alias(switch, link.port)
        ports[port_name(switch, link.port)] = port
    length = f"{ceil(switch.cable.length_m)}m"
    made: dict[str, Any] = {"PORT": ports, "CABLE_LENGTH": {"AZURE": dict.fromkeys(ports, length)}}
    if plane.vlan is not None:
        name = f"Vlan{plane.vlan}"
        made["VLAN"] = {name: {"vlanid": str(plane.vlan)}}
        made["VLAN_MEMBER"] = {f"{name}|{port}": {"tagging_mode": "untagged"} for port in ports}
    return made


def _maps(roce: Roce) -> dict[str, Any]:
    special = {roce.dscp: roce.priority, roce.cnp_dscp: roce.cnp_priority}
    same = {str(i): str(i) for i in range(8)}
    return {
        "DSCP_TO_TC_MAP": {MAP: {str(dscp): str(special.get(dscp, _other(roce))) for dscp in range(64)}},
        "TC_TO_PRIORITY_GROUP_MAP": {MAP: {str(tc): str(tc if tc == roce.priority else 0) for tc in range(8)}},
        "TC_TO_QUEUE_MAP": {MAP: same},
        "MAP_PFC_PRIORITY_TO_QUEUE": {MAP: same},
        "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP": {MAP: {str(roce.priority): str(roce.priority)}},
        "SCHEDULER": {
            f"{MAP}_KV": {"type": "DWRR", "weight": str(KV_WEIGHT)},
            f"{MAP}_OTHER": {"type": "DWRR", "weight": str(OTHER_WEIGHT)},
            f"{MAP}_CNP": {"type": "STRICT"},
        },
        "WRED_PROFILE": {f"{MAP}_KV": _wred(roce)},
    }


def _other(roce: Roce) -> int:
    """Return the traffic class of everything else: the lowest that neither RoCE nor CNP has."""
    return next(tc for tc in range(8) if tc not in (roce.priority, roce.cnp_priority))


def _wred(roce: Roce) -> dict[str, str]:
    said = {"ecn": "ecn_all"}
    for colour in ("green", "yellow", "red"):
        said |= {f"wred_{colour}_enable": "true", f"{colour}_min_threshold": str(roce.ecn_min_bytes),
                 f"{colour}_max_threshold": str(roce.ecn_max_bytes),
                 f"{colour}_drop_probability": str(roce.ecn_mark_percent)}  # fmt: skip
    return said


def _queues(switch: Switch, links: list[Link], roce: Roce) -> dict[str, Any]:
    kv, cnp, other = str(roce.priority), str(roce.cnp_priority), str(_other(roce))
    queues: dict[str, Any] = {}
    watched: dict[str, Any] = {"GLOBAL": {"POLL_INTERVAL": str(WATCHDOG_MS)}}
    groups, bound = {}, {}
    for link in links:
        port = port_name(switch, link.port)
        queues[f"{port}|{kv}"] = {"scheduler": f"{MAP}_KV", "wred_profile": f"{MAP}_KV"}
        queues[f"{port}|{cnp}"] = {"scheduler": f"{MAP}_CNP"}
        queues[f"{port}|{other}"] = {"scheduler": f"{MAP}_OTHER"}
        groups[f"{port}|{kv}"] = {"profile": "NULL"}
        bound[port] = {"dscp_to_tc_map": MAP, "tc_to_pg_map": MAP, "tc_to_queue_map": MAP, "pfc_to_queue_map": MAP,
                       "pfc_to_pg_map": MAP, "pfc_enable": kv, "pfcwd_sw_enable": kv}  # fmt: skip
        watched[port] = {"action": "drop", "detection_time": str(WATCHDOG_MS), "restoration_time": str(WATCHDOG_MS)}
    return {"QUEUE": queues, "BUFFER_PG": groups, "PORT_QOS_MAP": bound, "PFC_WD": watched}
