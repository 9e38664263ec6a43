"""Bills of materials for tests: a small one, changes of it, and random ones that are valid."""

from __future__ import annotations

import copy
from typing import Any

import tomli_w
from hypothesis import strategies as st

from regauge.fabric.bill import decode
from regauge.fabric.topology import Topology


def small() -> dict[str, Any]:
    """Two prefill servers and one of decode, two rails each."""
    return {
        "site": "small",
        "gateway": "d0",
        "planes": {
            "compute": {"network": "10.210.0.0/16", "rail_prefix": 24, "speed": "400G", "mtu": 9000, "roce": {}},
            "business": {"network": "10.211.0.0/24", "speed": "25G", "router": "10.211.0.1"},
            "management": {"network": "10.212.0.0/24", "speed": "1G"},
        },
        "switches": {
            "fast": {"planes": ["compute"], "ports": 8, "speed": "400G", "lanes": 4, "cable": {"kind": "aoc", "length_m": 10}},
            "biz": {"planes": ["business"], "ports": 8, "speed": "25G", "cable": {"kind": "dac", "length_m": 3}},
            "mgm": {"planes": ["management"], "ports": 12, "speed": "1G", "cable": {"kind": "twisted-pair", "length_m": 3}},
        },
        "servers": [
            {"name": "p{n}", "count": 2, "role": "prefill", "nics": nics(), "accelerators": cards()},
            {"name": "d{n}", "role": "decode", "nics": nics(), "accelerators": cards()},
        ],
    }  # fmt: skip


def nics(rails: int = 2) -> list[dict[str, Any]]:
    compute = [
        {"plane": "compute", "interface": f"cmp{r}", "rail": r, "rdma": f"mlx5_{r}", "numa": r % 2,
         "pci": f"0000:{0x10 + r:02x}:00.0"} for r in range(rails)
    ]  # fmt: skip
    return [*compute, {"plane": "business", "interface": "biz0"}, {"plane": "management", "interface": "mgm0"}]


def cards() -> dict[str, Any]:
    return {"model": "MTT S5000", "count": 2, "numa": [0, 1]}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The small bill with a field set, as `servers.0.nics.1.rail`; None takes it out."""
    bill = small()
    at: Any = bill
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return bill


def made(bill: dict[str, Any] | None = None) -> Topology:
    return decode(tomli_w.dumps(bill or small()).encode(), "bill.toml")


@st.composite
def bills(draw: st.DrawFn) -> dict[str, Any]:
    """A valid bill: any number of servers, rails and ports, planes with or without routers, VLANs and broken-out cages."""
    bill = copy.deepcopy(small())
    rails, prefill, decode_servers = draw(st.integers(1, 8)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    flat = rails == 1 and draw(st.booleans())
    for group, count in zip(bill["servers"], (prefill, decode_servers), strict=True):
        group |= {"count": count, "nics": nics(rails), "first": draw(st.integers(0, 90)), "bmc": draw(st.booleans())}
    if draw(st.booleans()):
        bill["servers"].append({"name": "front", "role": "gateway", "nics": nics(0)})
        bill["gateway"] = "front"
    else:
        bill["gateway"] = f"d{bill['servers'][1]['first']}"
    planes = bill["planes"]
    if flat:
        del planes["compute"]["rail_prefix"]
    else:
        planes["compute"]["rail_prefix"] = draw(st.integers(22, 25))
    planes["business"] |= {"vlan": 11} if draw(st.booleans()) else {}
    planes["management"] |= {"vlan": 12, "router": "10.212.0.1"} if draw(st.booleans()) else {}
    planes["compute"] |= {"vlan": draw(st.integers(2, 4_094))} if draw(st.booleans()) else {}
    breakout = draw(st.sampled_from([1, 2, 4]))
    needed = rails * (prefill + decode_servers)
    fast = {"speed": f"{400 * breakout}G", "breakout": breakout, "lanes": 8}
    bill["switches"]["fast"] |= fast | {
        "ports": -(-needed // breakout) + draw(st.integers(0, 5)),
        "alias": "etp{port}{sub}",
    }
    bill["switches"]["biz"]["ports"] = 48
    bill["switches"]["mgm"]["ports"] = 64
    bill["serving"] = {"transport": draw(st.sampled_from(["tcp", "mooncake", "nixl"]))}
    return bill
