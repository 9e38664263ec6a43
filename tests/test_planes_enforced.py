"""What is bound to the planes of a host and what is refused, by a snapshot of its network. No kernel is asked, but in the last tests."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.config import EngineConfig, MooncakeConfig, ServeConfig, ServedConfig, ServerConfig, TransferConfig, decode
from regauge.config_discovery import DiscoveryConfig, WorkerConfig
from regauge.config_planes import PLANES, PlaneName, PlanesConfig
from regauge.errors import ConfigError
from regauge.move.rtnetlink import Link, LocalAddress, Way
from regauge.planes import astray, bound, down, enforced, listening, overlaps, peers, strays
from regauge.planes_here import Snapshot, sides


def local(interface: str, text: str) -> LocalAddress:
    both = ipaddress.ip_interface(text)
    return LocalAddress(interface, both.ip, both.network, usable=True)


NAMES = ("lo", "cmp0", "cmp1", "biz0", "mgm0", "bare")
HOST = Snapshot(
    {name: Link(name, up=True, carrier=True, loopback=name == "lo") for name in NAMES},
    [
        local("lo", "127.0.0.1/8"),
        local("lo", "10.219.0.1/32"),  # as routers give hosts
        local("cmp0", "10.210.0.11/24"),
        local("cmp1", "10.210.1.11/24"),
        local("biz0", "10.211.0.11/24"),
        local("biz0", "fd00:211::11/64"),
        local("mgm0", "10.212.0.11/24"),
    ],
    {"mlx5_0": frozenset({"cmp0"}), "mlx5_1": frozenset({"cmp1"}), "mlx5_2": frozenset({"biz0"})},
)
LAB = PlanesConfig("10.210.0.0/16", "biz0", "10.212.0.11")


def fitted(planes: PlanesConfig = LAB, **more: Any) -> ServeConfig:
    config = ServeConfig(planes=planes, **more)
    return bound(config, sides(planes, HOST), HOST)


def refused(config: ServeConfig, host: Snapshot = HOST, ways: dict[str, Way | None] | None = None) -> str:
    """All that is refused, or the first that cannot even be looked at."""
    try:
        found = sides(config.planes, host)
        new = bound(config, found, host)
    except ConfigError as error:
        return str(error)
    return "\n".join([*overlaps(found), *down(found, new, host), *strays(found, peers(config), ways or {})])


def test_what_is_not_given_comes_from_the_planes() -> None:
    found = fitted()
    assert found.transfer.host == "10.210.0.0/16%cmp0"
    assert (found.host, found.discovery.advertise) == ("10.211.0.11", "10.211.0.11")
    assert found.planes == LAB
    assert not refused(ServeConfig(planes=LAB))
    assert enforced(ServeConfig()) == ServeConfig()


@pytest.mark.parametrize(
    ("compute", "host", "tied"),
    [
        ("cmp0", "127.0.0.1", "cmp0"),
        ("10.210.0.11", "127.0.0.1", "10.210.0.11%cmp0"),
        ("10.210.0.0/16%cmp1", "127.0.0.1", "10.210.0.0/16%cmp1"),
        ("10.210.0.0/16", "cmp1", "cmp1"),
        ("10.210.0.0/16", "10.210.1.11", "10.210.1.11%cmp1"),
        ("10.219.0.1", "127.0.0.1", "10.219.0.1"),  # it leaves by whichever port
    ],
)
def test_kv_is_bound_to_an_interface_of_the_compute_plane(compute: str, host: str, tied: str) -> None:
    assert fitted(PlanesConfig(compute), transfer=TransferConfig(host=host)).transfer.host == tied


def test_what_is_given_holds_where_it_lies_on_its_plane() -> None:
    transfer = TransferConfig("tcp", control="10.210.0.0/24", nics=["cmp0", "10.210.1.0/24"])
    found = fitted(transfer=transfer, host="10.211.0.11", discovery=DiscoveryConfig(advertise="biz0"))
    assert found.transfer.nics == ["cmp0", "10.210.1.0/24%cmp1"]
    assert found.transfer.control == "10.210.0.0/24%cmp0"
    assert (found.host, found.discovery.advertise) == ("10.211.0.11", "10.211.0.11")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[planes]\ncompute = "10.210.0.0/16%biz0"', "planes.compute '10.210.0.0/16%biz0': biz0 has no address there"),
        ('[planes]\ncompute = "10.99.0.0/16"', "no address of this host lies in it"),
        ('[planes]\ncompute = "10.99.0.1"', "ip address add 10.99.0.1/BITS dev INTERFACE"),
        ('[planes]\nbusiness = "bare"', "the interface has no address: ip address add ADDRESS/BITS dev bare"),
        ('[planes]\nmanagement = "mgm9"', "did you mean 'mgm0'?"),
        ('[planes]\ncompute = "0.0.0.0"', "is a wildcard, which lies on every plane"),
        ('[transfer]\nhost = "10.211.0.11"', "transfer.host '10.211.0.11': 10.211.0.11 (biz0) is not on planes.compute"),
        ('[transfer]\nhost = "10.210.0.0/15"', "10.211.0.11 (biz0) is not on planes.compute"),
        ('[transfer]\ncontrol = "mgm0"', "transfer.control 'mgm0': 10.212.0.11 (mgm0) is not on planes.compute"),
        ('[transfer]\nnics = ["cmp0", "biz0"]', "transfer.nics[1] 'biz0'"),
        ('host = "10.210.0.11"', "host '10.210.0.11': 10.210.0.11 (cmp0) is not on planes.business 'biz0', where this host has"),
        ('host = "0.0.0.0"', "host '0.0.0.0': is a wildcard"),
        ('[discovery]\nadvertise = "10.212.0.11"', "leave discovery.advertise out, or name what is on that plane"),
        ('[transfer]\ntransport = "mooncake"\n[transfer.mooncake]\nprotocol = "rdma"\ndevices = ["mlx5_0", "mlx5_2"]',
         "transfer.mooncake.devices 'mlx5_2': its port is biz0, of another plane; of planes.compute '10.210.0.0/16' there are mlx5_0, mlx5_1"),
        ('[transfer]\ntransport = "nixl"\n[transfer.nixl]\ndevices = ["biz0"]', "transfer.nixl.devices 'biz0': its port is biz0"),
        ('[transfer]\ntransport = "nixl"\n[transfer.nixl]\ndevices = ["mlx5_9:1"]', "no RDMA device or interface of this host"),
    ],
)  # fmt: skip
def test_what_lies_on_another_plane_or_nowhere_is_refused(toml: str, message: str) -> None:
    config = decode(toml.encode())
    if not config.planes.declared():
        config = msgspec.structs.replace(config, planes=LAB)
    assert message in refused(config)


def test_devices_of_a_transport_that_is_not_used_are_nobodys_business() -> None:
    assert not refused(decode(b'[transfer.nixl]\ndevices = ["biz0"]\n[planes]\ncompute = "cmp0"'))


PLACES = {"cmp0": "cmp0", "10.210.1.11": "cmp1", "biz0": "biz0", "10.211.0.0/24": "biz0", "10.212.0.0/16": "mgm0"}


@given(st.permutations(sorted(PLACES)))
def test_planes_share_no_interface(names: list[str]) -> None:
    given_ = dict(zip(PLANES, names, strict=False))
    text = refused(ServeConfig(planes=PlanesConfig(**given_)))
    apart = len({PLACES[name] for name in given_.values()}) == len(given_)
    assert apart == (not text)
    assert apart or "are both on biz0: what one carries would wait for the other" in text


def test_planes_share_no_network() -> None:
    twin = Snapshot(HOST.links, [*HOST.addresses, local("bare", "10.210.0.99/24")])
    text = refused(ServeConfig(planes=PlanesConfig("cmp0", "bare")), twin)
    assert (
        "planes.compute 'cmp0' and planes.business 'bare' overlap: 10.210.0.0/24 on cmp0 and 10.210.0.0/24 on bare"
        in text
    )
    assert "ip address del 10.210.0.99/24 dev bare" in text
    assert "overlap" in refused(ServeConfig(planes=PlanesConfig("10.0.0.0/8%cmp0", "biz0")))


def test_a_lab_on_loopback_may_share_it_if_all_planes_are_there() -> None:
    assert not refused(ServeConfig(planes=PlanesConfig("127.0.0.1", "127.0.0.1", "127.0.0.3")))
    found = fitted(PlanesConfig("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    assert (found.transfer.host, found.host) == ("127.0.0.1", "127.0.0.2")
    assert "are both on lo" in refused(ServeConfig(planes=PlanesConfig("127.0.0.1", "biz0", "127.0.0.3")))


def faulty(name: str, **fault: bool) -> Snapshot:
    links = {**HOST.links, name: replace(HOST.links[name], **fault)}
    return Snapshot(links, HOST.addresses, HOST.devices)


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("cmp0", "up", "planes.compute '10.210.0.0/16': interface cmp0 is down: ip link set dev cmp0 up"),
        ("mgm0", "carrier", "planes.management '10.212.0.11': interface mgm0 has no carrier; look at its cable"),
    ],
)
def test_an_interface_that_carries_nothing_is_refused(name: str, fault: str, message: str) -> None:
    assert message in refused(ServeConfig(planes=LAB), faulty(name, **{fault: False}))


def test_an_interface_that_is_not_used_may_be_down() -> None:
    host = faulty("cmp1", up=False)
    assert not refused(ServeConfig(planes=LAB), host)
    assert "cmp1 is down" in refused(ServeConfig(planes=LAB, transfer=TransferConfig(nics=["cmp0", "cmp1"])), host)
    assert "cmp1 is down" in refused(ServeConfig(planes=LAB, transfer=TransferConfig(host="10.210.1.11")), host)
    rdma = TransferConfig("mooncake", mooncake=MooncakeConfig("rdma", ["mlx5_0", "mlx5_1"]))
    assert "cmp1 is down" in refused(ServeConfig(planes=LAB, transfer=rdma), host)


FAR = ServeConfig(
    planes=LAB,
    workers=[WorkerConfig("far", "decode", "http://10.211.0.13:9000", control="10.210.0.13:9001")],
    discovery=DiscoveryConfig(gateways=["http://10.211.0.13:8000", "http://gateway:8000"]),
    decode=EngineConfig(vllm=ServedConfig(server=ServerConfig("http://[fd00:211::13]:1", "v", control="10.218.0.1:2"))),
)


def test_peers_are_those_with_numeric_addresses() -> None:
    assert [(peer.plane, peer.where, peer.address) for peer in peers(FAR)] == [
        ("compute", "workers[0].control", "10.210.0.13"),
        ("business", "workers[0].url", "10.211.0.13"),
        ("compute", "decode.vllm.server.control", "10.218.0.1"),
        ("business", "decode.vllm.server.url", "fd00:211::13"),
        ("business", "discovery.gateways[0]", "10.211.0.13"),
    ]
    assert {peer.plane for peer in peers(msgspec.structs.replace(FAR, external=True))} == {"business"}


GOOD: dict[str, Way | None] = {
    "10.210.0.13": Way("cmp1"),  # any of the plane's
    "10.218.0.1": Way("cmp0", "10.210.0.1"),
    "10.211.0.13": Way("biz0"),
    "fd00:211::13": Way("bare"),  # clients and gateways may be anywhere that is no other plane
}


@pytest.mark.parametrize(
    ("peer", "way", "message"),
    [
        ("10.210.0.13", Way("biz0", "10.211.0.1"),
         "the route to it leaves by biz0, of planes.business, and not by planes.compute (cmp0): ip route replace 10.210.0.13/32 dev cmp0"),
        ("10.210.0.13", Way("bare"), "leaves by bare, of no plane"),
        ("10.210.0.13", None, "there is no route to it: ip route add 10.210.0.13/32 dev cmp0"),
        ("10.218.0.1", Way("mgm0"), "ip route replace 10.218.0.1/32 via ROUTER dev cmp0"),
        ("10.211.0.13", Way("cmp0"), "workers[0].url 10.211.0.13: the route to it leaves by cmp0, of planes.compute"),
        ("fd00:211::13", Way("cmp0"), "ip route replace fd00:211::13/128 dev biz0"),
    ],
)  # fmt: skip
def test_a_route_that_leads_over_another_plane_is_refused(peer: str, way: Way | None, message: str) -> None:
    assert not refused(FAR, ways=GOOD)
    assert message in refused(FAR, ways=GOOD | {peer: way})


def test_servers_are_bound_to_the_interface_of_their_address() -> None:
    assert listening("", "127.0.0.1") is None
    plane = listening("127.0.0.0/8", "127.0.0.1")
    assert plane is not None
    assert (plane.address, plane.interface) == ("127.0.0.1", "")  # loopback is no plane's wire


def test_the_kernels_own_answers_are_used() -> None:
    planes = PlanesConfig("127.0.0.1", "127.0.0.2", "127.0.0.3")
    far = DiscoveryConfig(gateways=["http://127.0.0.1:8000"])
    assert enforced(ServeConfig(planes=planes, discovery=far)).host == "127.0.0.2"
    with pytest.raises(ConfigError, match=r"planes.compute '192.0.2.77': no interface of this host has this address"):
        enforced(ServeConfig(planes=PlanesConfig("192.0.2.77")))


@pytest.mark.parametrize(
    ("plane", "host", "other"),
    [
        ("business", "10.211.0.77", None),
        ("business", "203.0.113.5", None),  # of no plane: clients and gateways may be anywhere
        ("business", "gateway.example", None),
        ("business", "10.210.3.4", "compute"),
        ("business", "[10.212.0.9]", "management"),
        ("compute", "10.211.0.13", "business"),
        ("compute", "10.210.200.1", None),
    ],
)
def test_an_address_in_the_network_of_another_plane_is_astray(plane: PlaneName, host: str, other: str | None) -> None:
    assert astray(sides(LAB, HOST), plane, host) == other
    assert astray({}, plane, host) is None
