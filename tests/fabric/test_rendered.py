"""Rendered files say the same facts as the topology: each is read again with a reader of its own kind."""

from __future__ import annotations

import csv
import io
import json
from ipaddress import ip_interface
from typing import Any

import pytest
import yaml
from bill_cases import bills, changed, made
from hypothesis import given, settings

from regauge import config
from regauge.errors import ConfigError
from regauge.fabric.bill import load, shipped
from regauge.fabric.hostnet import wire
from regauge.fabric.render import KINDS, render
from regauge.fabric.topology import Topology

Sections = list[tuple[str, dict[str, str]]]


def sections(text: str) -> Sections:
    """An ini file whose sections come more than once, as systemd's do."""
    found: Sections = []
    for line in text.splitlines():
        if line.startswith("["):
            found.append((line.strip("[]"), {}))
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[-1][1][key] = value
    return found


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@settings(max_examples=30)
@given(bills())
def test_cabling_and_port_maps_say_the_links(bill: dict[str, Any]) -> None:
    topology, files = made(bill), render(made(bill), ["cabling", "ports", "addresses"])
    said = {
        (row["switch"], int(row["port"]), row["node"], row["end"], row["plane"]) for row in rows(files["cabling.csv"])
    }
    assert said == {(each.switch, each.port, each.node, each.end, each.plane) for each in topology.links}
    for switch in topology.switches:
        ports = rows(files[f"switches/{switch.name}/ports.csv"])
        assert [int(row["port"]) for row in ports] == list(range(1, switch.ports + 1))
        assert {(row["node"], row["end"]) for row in ports if row["node"]} == {(each.node, each.end) for each in topology.links_of(switch.name)}  # fmt: skip
        assert len({row["SONiC name"] for row in ports}) == switch.ports
    listed = rows(files["addresses.csv"])
    assert len({row["address"] for row in listed}) == len(listed)
    assert {(row["node"], row["end"], row["address"]) for row in listed} >= {
        (server.name, nic.interface, str(nic.address)) for server in topology.servers for nic in server.nics
    }


@settings(max_examples=30)
@given(bills())
def test_networkd_and_netplan_say_the_same_and_what_was_meant(bill: dict[str, Any]) -> None:
    topology = made(bill)
    files = render(topology, ["networkd", "netplan"])
    for server in topology.servers:
        plan = yaml.load(files[f"hosts/{server.name}/netplan/60-regauge.yaml"], yaml.CSafeLoader)["network"]
        assert (plan["version"], plan["renderer"]) == (2, "networkd")
        assert set(plan["ethernets"]) == {nic.interface for nic in server.nics}
        for wired in wire(topology, server):
            nic, ours = wired.nic, plan["ethernets"][wired.nic.interface]
            said = sections(files[f"hosts/{server.name}/networkd/10-{nic.interface}.network"])
            facts = {name: values for name, values in said if name != "Route"}
            assert facts["Match"]["Name"] == nic.interface
            assert ip_interface(facts["Network"]["Address"]) == ip_interface(ours["addresses"][0])
            assert ip_interface(facts["Network"]["Address"]).network == nic.network
            assert int(facts["Link"]["MTUBytes"]) == ours["mtu"] == topology.planes[nic.plane].mtu
            routes = [from_networkd(values) for name, values in said if name == "Route"]
            assert routes == [from_netplan(each) for each in ours.get("routes", [])]
            if nic.plane == "compute":
                assert all(route["to"] != "default" for route in routes)
            rule = facts.get("RoutingPolicyRule")
            assert (rule is not None) == (wired.table > 0) == ("routing-policy" in ours)
            if rule:
                assert rule["From"] == ours["routing-policy"][0]["from"] == f"{nic.address}/32"
                assert int(rule["Table"]) == ours["routing-policy"][0]["table"] == wired.table


def from_networkd(said: dict[str, str]) -> dict[str, Any]:
    return {"to": said.get("Destination", "default"), "via": said.get("Gateway"), "kind": said.get("Type") or said.get("Scope"),
            "table": int(said.get("Table", 0)), "metric": int(said.get("Metric", 0)), "source": said.get("PreferredSource")}  # fmt: skip


def from_netplan(said: dict[str, Any]) -> dict[str, Any]:
    return {"to": said["to"], "via": said.get("via"), "kind": said.get("type") or said.get("scope"),
            "table": said.get("table", 0), "metric": said.get("metric", 0), "source": said.get("from")}  # fmt: skip


def test_a_name_that_yaml_takes_for_a_truth_value_stays_a_name() -> None:
    text = render(made(changed("servers.1.nics.2.interface", "no")), ["netplan"])["hosts/d0/netplan/60-regauge.yaml"]
    assert "no" in yaml.safe_load(text)["network"]["ethernets"]


def test_each_rail_answers_from_its_own_nic() -> None:
    topology = load("prefill-12-decode-1")
    wired = {each.nic.interface: each for each in wire(topology, topology.server("decode-0"))}
    assert [wired[f"cmp{rail}"].table for rail in range(8)] == [100 + rail for rail in range(8)]
    for rail in range(8):
        own = [route for route in wired[f"cmp{rail}"].routes if route.table]
        assert [(route.to, route.source) for route in own] == [("10.210.0.0/16", f"10.210.{rail}.23")]
    assert [route.kind for route in wired["biz0"].routes] == ["", "unreachable"]


def test_interfaces_are_named_by_where_they_sit() -> None:
    files = render(load("prefill-12-decode-1"), ["networkd"], "decode-0")
    assert dict(sections(files["hosts/decode-0/networkd/10-cmp1.link"])) == {
        "Match": {"Path": "pci-0000:40:00.0"}, "Link": {"Name": "cmp1", "MTUBytes": "9000"},
    }  # fmt: skip


@settings(max_examples=20)
@given(bills())
def test_regauge_takes_its_own_files(bill: dict[str, Any]) -> None:
    topology = made(bill)
    serving = topology.serving
    for path, text in render(topology, ["regauge"]).items():
        said = config.decode(text.encode())
        server = topology.server(path.split("/")[1])
        assert said.host == str(server.on("business")[0].address)
        assert (said.planes.business, said.planes.management) == ("biz0", "mgm0")
        assert said.transfer.transport == serving.transport
        if path.endswith("gateway.toml"):
            assert said.external
            assert said.discovery.register
            continue
        gateway = topology.server(topology.gateway).on("business")[0].address
        assert said.discovery.gateways == [f"http://{gateway}:{serving.port}"]
        rate = said.transfer.flow.nic_bytes_per_s
        if serving.transport == "tcp":
            assert rate == 50e9
            assert (said.transfer.nics or [said.transfer.host]) == [nic.interface for nic in server.on("compute")]
        else:
            devices = said.transfer.mooncake.devices or [each.removesuffix(":1") for each in said.transfer.nixl.devices]
            assert devices == [nic.rdma for nic in server.on("compute")]
            assert rate == 50e9 * len(devices)  # one transport has them all


def test_engines_get_a_rank_for_each_card() -> None:
    bill = changed("servers.0.accelerators.count", 2) | {"serving": {"prefill_engine": "sglang"}}
    files = render(made(bill), ["regauge"])
    prefill, decode = (config.decode(files[f"hosts/{host}/regauge/worker.toml"].encode()) for host in ("p0", "d0"))
    assert prefill.prefill.sglang is not None
    assert prefill.prefill.sglang.ranks == 2
    assert decode.decode.name == "local"


@pytest.mark.parametrize("name", shipped())
def test_prometheus_finds_the_gateway_and_every_host_on_management(name: str) -> None:
    topology, files = load(name), render(load(name), ["prometheus"])
    (gateway,) = json.loads(files["prometheus/regauge.json"])
    management = topology.server(topology.gateway).on("management")[0].address
    assert gateway["targets"] == [f"{management}:{topology.serving.management_port}"]
    hosts = json.loads(files["prometheus/hosts.json"])
    assert [each["labels"]["host"] for each in hosts] == [server.name for server in topology.servers]


@pytest.mark.parametrize("name", shipped())
def test_rendering_is_deterministic_and_by_kind(name: str) -> None:
    whole = render(load(name))
    assert whole == render(load(name))
    by_kind = [render(load(name), [kind]) for kind in KINDS]
    assert sum(map(len, by_kind)) == len(whole)  # no two kinds write one file
    assert all(set(each.items()) <= set(whole.items()) for each in by_kind)
    assert all(text.endswith("\n") for text in whole.values())


def test_one_host_s_files_are_its_own() -> None:
    found = render(load("lab-2"), host="lab-prefill")
    assert {path.split("/")[1] for path in found} == {"lab-prefill"}
    assert {path.split("/")[2] for path in found} == {"networkd", "netplan", "sysctl", "nftables", "qos", "regauge"}


@pytest.mark.parametrize(("kinds", "host", "message"), [
    (["qss"], "", "no kind 'qss' of file; there are ports, cabling"),
    ([], "lab-prefil", "no server 'lab-prefil' in lab-2; did you mean 'lab-prefill'?"),
    (["sonic"], "lab-prefill", "lab-2 has nothing of sonic for lab-prefill"),
])  # fmt: skip
def test_what_cannot_be_rendered_is_said(kinds: list[str], host: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(load("lab-2"), kinds, host)
    assert message in str(caught.value)


def without_roce() -> Topology:
    return made(changed("planes.compute.roce", None))


@pytest.mark.parametrize("kind", ["sonic", "qos"])
def test_without_roce_nobody_is_told_of_it(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"small has nothing of {kind}"):
        render(without_roce(), [kind])
