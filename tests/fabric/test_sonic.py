"""The switch's configuration, against what SONiC's YANG models allow.

Facts from sonic-net/sonic-buildimage, src/sonic-yang-models/yang-models (read 2026-12): sonic-port, -port-qos-map, -dscp-tc-map,
-tc-queue-map, -tc-priority-group-map, -pfc-priority-*-map, -scheduler, -wred-profile, -queue, -buffer-pg, -cable-length, -pfcwd, -vlan.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bill_cases import bills, changed, made
from hypothesis import given, settings

from regauge.fabric.bill import load
from regauge.fabric.sonic import alias, port_name, sonic
from regauge.fabric.topology import Topology

NAME = r"[a-zA-Z0-9][-a-zA-Z0-9_]{0,31}"
NUMBER, CLASS, BOOLEAN, PERCENT = r"\d+", r"[0-7]", "true|false", r"\d|[1-9]\d|100"
QUEUES = r"([0-7](,[0-7])*)?"
MILLISECONDS = r"\d{3,4}"
THRESHOLDS = {f"{colour}_{end}_threshold": NUMBER for colour in ("green", "yellow", "red") for end in ("min", "max")}
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "PORT": (r"Ethernet\d+", {"speed": NUMBER, "mtu": NUMBER, "alias": r".{1,128}", "admin_status": "up|down", "description": r".{0,255}"}),
    "CABLE_LENGTH": (NAME, {r"Ethernet\d+": r"\d+m"}),
    "VLAN": (r"Vlan\d+", {"vlanid": NUMBER}),
    "VLAN_MEMBER": (r"Vlan\d+\|Ethernet\d+", {"tagging_mode": "tagged|untagged"}),
    "DSCP_TO_TC_MAP": (NAME, {r"6[0-3]|[1-5][0-9]?|[0-9]": CLASS}),
    "TC_TO_QUEUE_MAP": (NAME, {CLASS: CLASS}),
    "TC_TO_PRIORITY_GROUP_MAP": (NAME, {CLASS: CLASS}),
    "MAP_PFC_PRIORITY_TO_QUEUE": (NAME, {CLASS: CLASS}),
    "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP": (NAME, {CLASS: CLASS}),
    "SCHEDULER": (r".+", {"type": "DWRR|WRR|STRICT", "weight": r"[1-9]\d?|100"}),
    "WRED_PROFILE": (NAME, THRESHOLDS | {"ecn": "ecn_(none|green|yellow|red|green_yellow|green_red|yellow_red|all)",
                                         r"wred_(green|yellow|red)_enable": BOOLEAN, r"(green|yellow|red)_drop_probability": PERCENT}),
    "QUEUE": (r"Ethernet\d+\|[0-7](-[0-7])?", {"scheduler": ".+", "wred_profile": NAME}),
    "BUFFER_PG": (r"Ethernet\d+\|[0-7](-[0-7])?", {"profile": "NULL"}),
    "PORT_QOS_MAP": (r"Ethernet\d+", {"dscp_to_tc_map": NAME, "tc_to_pg_map": NAME, "tc_to_queue_map": NAME, "pfc_to_queue_map": NAME,
                                      "pfc_to_pg_map": NAME, "pfc_enable": QUEUES, "pfcwd_sw_enable": QUEUES}),
    "PFC_WD": (r"GLOBAL|Ethernet\d+", {"POLL_INTERVAL": MILLISECONDS, "action": "drop|forward|alert", "detection_time": MILLISECONDS,
                                       "restoration_time": MILLISECONDS}),
}  # fmt: skip
REFERENCES = [
    ("PORT_QOS_MAP", "dscp_to_tc_map", "DSCP_TO_TC_MAP"), ("PORT_QOS_MAP", "tc_to_pg_map", "TC_TO_PRIORITY_GROUP_MAP"),
    ("PORT_QOS_MAP", "tc_to_queue_map", "TC_TO_QUEUE_MAP"), ("PORT_QOS_MAP", "pfc_to_queue_map", "MAP_PFC_PRIORITY_TO_QUEUE"),
    ("PORT_QOS_MAP", "pfc_to_pg_map", "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP"), ("QUEUE", "scheduler", "SCHEDULER"),
    ("QUEUE", "wred_profile", "WRED_PROFILE"),
]  # fmt: skip


def said(topology: Topology) -> dict[str, Any]:
    (text,) = sonic(topology).values()
    found: dict[str, Any] = json.loads(text)
    return found


def check(config: dict[str, Any]) -> None:
    """Every table, key, field and value is one that the models know; what names another entry names one that exists."""
    for table, entries in config.items():
        key_form, fields = TABLES[table]
        for key, entry in entries.items():
            assert re.fullmatch(key_form, key), (table, key)
            for field, value in entry.items():
                form = next((form for known, form in fields.items() if re.fullmatch(known, field)), None)
                assert form is not None, (table, field)
                assert re.fullmatch(form, value), (table, field, value)
    for table, field, other in REFERENCES:
        assert {entry[field] for entry in config[table].values() if field in entry} <= set(config[other])
    for table in ("QUEUE", "BUFFER_PG", "PORT_QOS_MAP", "PFC_WD", "VLAN_MEMBER"):
        for key in config.get(table, {}):
            port = next((part for part in key.split("|") if part.startswith("Ethernet")), None)
            assert port is None or port in config["PORT"]
    for port in config["PORT"].values():
        assert 68 <= int(port["mtu"]) <= 9216
        assert 1 <= int(port["speed"]) <= 1_600_000
    for entry in config["PFC_WD"].values():
        assert all(100 <= int(value) <= 1_000 for field, value in entry.items() if field != "action")
    for name, vlan in config.get("VLAN", {}).items():
        assert name == f"Vlan{vlan['vlanid']}"
        assert 2 <= int(vlan["vlanid"]) <= 4_094
    for profile in config["WRED_PROFILE"].values():
        for colour in ("green", "yellow", "red"):
            assert int(profile[f"{colour}_max_threshold"]) >= int(profile[f"{colour}_min_threshold"])


@settings(max_examples=30)
@given(bills())
def test_the_models_allow_it(bill: dict[str, Any]) -> None:
    topology = made(bill)
    config = said(topology)
    check(config)
    switch = topology.switch("fast")
    assert {(port_name(switch, link.port), f"{link.node} {link.end}") for link in topology.links_of("fast")} == {
        (name, port["description"]) for name, port in config["PORT"].items()
    }


def test_only_kv_is_lossless_and_marked_and_goes_where_its_dscp_says() -> None:
    config = said(load("prefill-12-decode-1"))
    assert len(config["PORT"]) == 104
    to_class = config["DSCP_TO_TC_MAP"]["REGAUGE"]
    assert len(to_class) == 64
    assert {dscp: tc for dscp, tc in to_class.items() if tc != "0"} == {"26": "3", "48": "6"}
    assert {entry["pfc_enable"] for entry in config["PORT_QOS_MAP"].values()} == {"3"}
    assert {key.split("|")[1] for key in config["BUFFER_PG"]} == {"3"}
    marked = {key.split("|")[1] for key, entry in config["QUEUE"].items() if "wred_profile" in entry}
    assert marked == {"3"}
    assert config["SCHEDULER"]["REGAUGE_CNP"] == {"type": "STRICT"}
    wred = config["WRED_PROFILE"]["REGAUGE_KV"]
    assert (wred["ecn"], wred["green_min_threshold"], wred["green_max_threshold"]) == ("ecn_all", "150000", "1500000")


@pytest.mark.parametrize(("breakout", "port", "name", "other"), [
    (1, 1, "Ethernet0", "etp1"), (1, 3, "Ethernet16", "etp3"), (2, 1, "Ethernet0", "etp1a"), (2, 4, "Ethernet12", "etp2b"),
    (8, 9, "Ethernet8", "etp2a"),
])  # fmt: skip
def test_ports_are_named_by_their_first_lane(breakout: int, port: int, name: str, other: str) -> None:
    bill = changed("switches.fast.lanes", 8)
    bill["switches"]["fast"] |= {"breakout": breakout, "speed": f"{400 * breakout}G", "alias": "etp{port}{sub}"}
    switch = made(bill).switch("fast")
    assert (port_name(switch, port), alias(switch, port)) == (name, other)


def test_a_port_keeps_its_alias_and_lanes_unless_the_bill_names_them() -> None:
    assert {"alias", "lanes"}.isdisjoint(field for port in said(load("lab-2"))["PORT"].values() for field in port)


def test_a_vlan_is_untagged_on_every_port() -> None:
    config = said(made(changed("planes.compute.vlan", 210)))
    assert config["VLAN"] == {"Vlan210": {"vlanid": "210"}}
    assert {entry["tagging_mode"] for entry in config["VLAN_MEMBER"].values()} == {"untagged"}
    assert len(config["VLAN_MEMBER"]) == len(config["PORT"]) == 6
