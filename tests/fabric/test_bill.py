"""From a bill of materials to names, addresses and ports; and what is refused, with which words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bill_cases import bills, cards, changed, made, nics, small
from hypothesis import given, settings

from regauge.errors import ConfigError
from regauge.fabric.bill import load, shipped


def test_the_article_s_deployment_takes_104_of_128_ports() -> None:
    topology = load("prefill-12-decode-1")
    switch = topology.switch("roce-400g")
    assert (len(topology.links_of(switch.name)), switch.ports) == (104, 128)
    assert [len(topology.of_role(role)) for role in ("prefill", "decode")] == [12, 1]
    assert {len(server.accelerators) for server in topology.servers} == {8}
    assert {link.speed for link in topology.links_of(switch.name)} == {400 * 10**9}
    assert len(topology.links_of("mgm-1g")) == 13 + 13 + 2  # NICs, BMCs, and the two other switches


def test_addresses_follow_from_place_and_rail() -> None:
    decode = load("prefill-12-decode-1").server("decode-0")
    assert [str(nic.address) for nic in decode.on("compute")] == [f"10.210.{rail}.23" for rail in range(8)]
    assert str(decode.on("business")[0].address) == "10.211.0.23"
    assert decode.bmc is not None
    assert decode.bmc.url == "https://10.212.0.123"


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_bill_is_found_by_name_whatever_lies_in_the_working_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert load(name).site == name


def test_names_are_padded_as_the_pattern_says() -> None:
    bill = changed("servers.0.name", "node-{n:03}")
    bill["servers"][0]["first"] = 9
    assert [server.name for server in made(bill).of_role("prefill")] == ["node-009", "node-010"]


def test_a_given_address_is_taken() -> None:
    assert str(made(changed("servers.1.nics.2.address", "10.211.0.77")).server("d0").on("business")[0].address) == "10.211.0.77"  # fmt: skip


@settings(max_examples=60)
@given(bills())
def test_no_address_port_or_end_of_a_cable_is_there_twice(bill: dict[str, Any]) -> None:
    topology = made(bill)
    addresses = [nic.address for server in topology.servers for nic in server.nics]
    addresses += [server.bmc.address for server in topology.servers if server.bmc]
    addresses += [each.address for each in topology.switches if each.address]
    addresses += [plane.router for plane in topology.planes.values() if plane.router]
    assert max(Counter(addresses).values()) == 1
    assert max(Counter((link.switch, link.port) for link in topology.links).values()) == 1
    assert max(Counter((link.node, link.end) for link in topology.links).values()) == 1


@settings(max_examples=60)
@given(bills())
def test_both_ends_of_every_cable_agree(bill: dict[str, Any]) -> None:
    topology = made(bill)
    ends = {(server.name, nic.interface): nic for server in topology.servers for nic in server.nics}
    for link in topology.links:
        switch = topology.switch(link.switch)
        assert 1 <= link.port <= switch.ports
        assert link.speed == switch.port_speed == link.cable.speed == topology.planes[link.plane].speed
        if (nic := ends.pop((link.node, link.end), None)) is not None:
            assert (nic.plane, nic.speed) == (link.plane, link.speed)
            assert nic.address in nic.network
            assert nic.network.subnet_of(topology.planes[nic.plane].network)
    assert not ends  # every NIC has a cable


@settings(max_examples=20)
@given(bills())
def test_the_same_bill_gives_the_same_topology(bill: dict[str, Any]) -> None:
    assert made(bill) == made(bill)


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    ("planes.compute.mtuu", 9000, "unknown field `mtuu` - at `$.planes.compute`; did you mean 'mtu'?"),
    ("servers.0.nics.0.rial", 0, "unknown field `rial` - at `$.servers[0].nics[0]`; did you mean 'rail'?"),
    ("switches.fast.cable.colour", "red", "known are kind, length_m, speed"),
    ("planes.compute.roce.dscp", 64, "$.planes.compute.roce.dscp"),
    ("planes.compute.network", "10.210.0.1/16", "planes.compute.network: '10.210.0.1/16' is no IPv4 network"),
    ("planes.compute.router", "10.210.0.1", "planes.compute.router: the compute plane has no way out"),
    ("planes.business.router", "10.9.0.1", "planes.business.router: 10.9.0.1 is no host of 10.211.0.0/24; take one from 10.211.0.1"),
    ("planes.business.router", "ten", "planes.business.router: 'ten' is no IPv4 address"),
    ("planes.management.network", "10.210.1.0/24", "planes.management.network: 10.210.1.0/24 overlaps 10.210.0.0/16 of compute"),
    ("planes.business.roce", {}, "planes.business.roce: RDMA is of the compute plane alone"),
    ("planes.business.rail_prefix", 28, "planes.business.rail_prefix: only NICs of the compute plane"),
    ("planes.compute.rail_prefix", 16, "planes.compute.rail_prefix: 10.210.0.0/16 does not hold 2 networks of /16"),
    ("planes.compute.rail_prefix", 30, "planes.compute: 10.210.0.0/30 ends before number 1 from first_host = 11 on"),
    ("planes.management.first_bmc", 253, "planes.management: 10.212.0.0/24 ends before number 3 from first_bmc = 253 on"),
    ("planes.management.first_bmc", 12, "10.212.0.12 is of both the BMC of p0 and p1 mgm0; change first_host, first_bmc"),
    ("planes.business.first_host", 1, "10.211.0.1 is of both planes.business.router and p0 biz0"),
    ("planes.compute.roce.cnp_dscp", 26, "planes.compute.roce.cnp_dscp: 26 is that of the data"),
    ("planes.compute.roce.cnp_priority", 3, "planes.compute.roce.cnp_priority: 3 is that of the data"),
    ("planes.compute.roce.ecn_min_bytes", 2_000_000, "planes.compute.roce.ecn_max_bytes: 1500000 is not above ecn_min_bytes"),
    ("planes.business.speed", "10G", "switches.biz.speed: its ports run at 25G and planes.business.speed is 10G"),
    ("switches.fast.ports", 5, "switches.fast.ports: 6 cables need a port and it has 5; take a switch with more ports"),
    ("switches.fast.breakout", 8, "switches.fast.breakout: 4 lanes do not split into 8 ports"),
    ("switches.fast.breakout", 2, "switches.fast.speed: its ports run at 200G and planes.compute.speed is 400G"),
    ("switches.fast.cable.speed", "100G", "switches.fast.cable.speed: 100G, and the ports run at 400G"),
    ("switches.fast.cable.kind", "dac", "switches.fast.cable.length_m: dac reaches 2 m at 400G, not 10; take aoc or fibre"),
    ("switches.fast.planes", ["compute", "business"], "switches.biz.planes: business is on fast already"),
    ("switches.fast.planes", ["compute", "compute"], "switches.fast.planes: names a plane twice"),
    ("switches.biz", None, "switches: none has the business plane; add 'business' to the planes of one"),
    ("servers.0.name", "prefill", "servers[0].name: 2 servers would be called 'prefill'; put {n} in it"),
    ("servers.0.name", "d{n}", "servers: 'd0' is the name of two"),
    ("servers.0.name", "biz", "servers[0].name: 2 servers"),
    ("servers.0.nics.0.address", "10.210.0.9", "servers[0].nics[0].address: 2 servers would have it"),
    ("servers.1.nics.0.address", "10.210.1.9", "servers[1].nics[0].address: 10.210.1.9 is no host of 10.210.0.0/24"),
    ("servers.1.nics.0.address", "10.210.0.11", "10.210.0.11 is of both p0 cmp0 and d0 cmp0"),
    ("servers.0.nics.0.speed", "200G", "servers[0].nics[0].speed: 200G, and planes.compute.speed is 400G"),
    ("servers.0.nics.0.rail", None, "servers[0].nics: 2 are on the compute plane; give each its rail"),
    ("servers.0.nics.0.rail", 1, "servers[0].nics: rail 1 is there twice"),
    ("servers.0.nics.2.rail", 0, "servers[0].nics[2].rail: rails are of the compute plane"),
    ("servers.0.nics.1.interface", "cmp0", "servers[0].nics: interface 'cmp0' is there twice"),
    ("servers.0.nics.1.rdma", "mlx5_0", "servers[0].nics: rdma 'mlx5_0' is there twice"),
    ("servers.0.nics.1.pci", "0000:10:00.0", "servers[0].nics: pci '0000:10:00.0' is there twice"),
    ("servers.0.nics.1.numa", 3, "servers[0].nics[1].numa: no accelerator is on node 3, so that its KV would cross the socket"),
    ("servers.0.nics", nics()[:3], "servers[0].nics: a prefill server needs one on the management plane"),
    ("servers.0.nics", [*nics(), {"plane": "business", "interface": "biz1"}], "servers[0].nics: 2 are on the business plane; bond them"),
    ("servers.0.accelerators", cards() | {"numa": [0]}, "servers[0].accelerators.numa: says 1 of 2 accelerators"),
    ("servers.0.accelerators", cards() | {"pci": ["0000:10:00.0", ""]}, "servers[0].accelerators.pci: 0000:10:00.0 is there twice"),
    ("servers", small()["servers"][1:], "servers: none is for prefill"),
    ("gateway", "d1", "gateway: no server 'd1' in small; it has p0, p1, d0"),
    ("gateway", "do0", "gateway: no server 'do0' in small; did you mean 'd0'?"),
    ("site", "Two Words", "$.site"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"), REFUSED, ids=[f"{path}={value}"[:60] for path, value, _ in REFUSED]
)
def test_a_wrong_bill_is_refused_with_file_field_and_remedy(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(changed(path, value))
    assert str(caught.value).startswith("bill.toml: ")
    assert message in str(caught.value)


def test_planes_on_one_switch_need_vlans() -> None:
    bill = changed("switches.biz", None)
    bill["switches"]["mgm"] |= {"planes": ["business", "management"], "ports": 24}
    bill["planes"]["business"]["speed"] = "1G"
    with pytest.raises(
        ConfigError, match=r"switches.mgm.planes: business, management share it; give each plane a VLAN of its own"
    ):
        made(bill)
    bill["planes"]["business"]["vlan"], bill["planes"]["management"]["vlan"] = 11, 12
    assert len(made(bill).links_of("mgm")) == 3 + 3 + 3 + 1


def test_a_slip_of_the_keyboard_is_not_built() -> None:
    bill = changed("servers.0.count", 1_024)
    bill["servers"] *= 5
    with pytest.raises(ConfigError, match=r"servers: 5125 of them, and 4096 are the most; lower a count"):
        made(bill)


def test_rdma_needs_devices() -> None:
    bill = changed("servers.1.nics.1.rdma", None)
    bill["serving"] = {"transport": "mooncake"}
    with pytest.raises(
        ConfigError, match=r"servers: d0 cmp1 has no rdma device, which serving.transport = 'mooncake' writes with"
    ):
        made(bill)


@pytest.mark.parametrize(("name", "message"), [
    ("lab2", "no topology 'lab2': name a .toml file or a shipped one; did you mean 'lab-2'?"),
    ("no.toml", "no.toml: no such file"),
])  # fmt: skip
def test_what_is_not_there_is_said(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert message in str(caught.value)


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("site = ")
    with pytest.raises(ConfigError, match=r"broken.toml: "):
        load(path)
