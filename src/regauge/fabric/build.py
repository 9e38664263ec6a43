"""From a bill of materials to a topology: names, addresses and ports, in the order of the file.

A server's number is its place in the file, counted over all groups. Its address on a plane is the network's first plus `first_host`
plus that number; with rails, in its rail's network, the rail-th subnet of the plane's. Ports are given out in the order
of the planes of a switch, then of the servers, then of their NICs; BMCs come after all NICs of the management plane, and switches last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError
from itertools import islice
from typing import TYPE_CHECKING

from regauge.errors import ConfigError
from regauge.fabric import bounds
from regauge.fabric.topology import (
    PLANES,
    Accelerator,
    Bmc,
    Cable,
    Link,
    Nic,
    Plane,
    PlaneName,
    Roce,
    Server,
    Serving,
    Switch,
    Topology,
)

if TYPE_CHECKING:
    from regauge.fabric.bill import Bill, NicBill, PlaneBill, ServersBill, SwitchBill


def build(bill: Bill) -> Topology:
    """Return the topology of a bill. Raises ConfigError that names the field and the remedy."""
    bounds.size(bill)
    bounds.switches(bill)
    planes: Mapping[str, Plane] = {
        name: _plane(name, getattr(bill.planes, name), _switch_of(bill, name), _rails(bill)) for name in PLANES
    }
    bounds.networks(planes)
    servers = tuple(_servers(bill, planes))
    switches = tuple(_switches(bill, planes))
    made = Topology(
        bill.site, bill.description, planes, switches, servers, tuple(_links(planes, switches, servers)), bill.gateway,
        Serving(**{name: getattr(bill.serving, name) for name in bill.serving.__struct_fields__}),
    )  # fmt: skip
    bounds.whole(made)
    return made


def speed(text: str) -> int:
    """Return the bits per second of a speed such as `400G`."""
    return round(float(text.removesuffix("G")) * 10**9)


# -- planes ------------------------------------------------------------------------------------------------------------


def _plane(name: PlaneName, said: PlaneBill, switch: str, rails: int) -> Plane:
    where = f"planes.{name}"
    network = _network(said.network, f"{where}.network")
    router = _address(said.router, f"{where}.router", network) if said.router else None
    if said.router and name == "compute":
        raise ConfigError(f"{where}.router: the compute plane has no way out, so that KV has none; leave it out")
    roce = Roce(**{field: getattr(said.roce, field) for field in said.roce.__struct_fields__}) if said.roce else None
    if roce is not None:
        bounds.roce(name, roce)
    return Plane(name, network, said.mtu, speed(said.speed), switch, said.vlan, router,
                 _subnets(where, network, said, rails if name == "compute" else 0), roce)  # fmt: skip


def _subnets(where: str, network: IPv4Network, said: PlaneBill, rails: int) -> Mapping[int, IPv4Network]:
    if said.rail_prefix is None:
        return {}
    if not rails:
        raise ConfigError(f"{where}.rail_prefix: only NICs of the compute plane with a rail use it; leave it out")
    if said.rail_prefix < network.prefixlen or rails > 1 << (said.rail_prefix - network.prefixlen):
        raise ConfigError(
            f"{where}.rail_prefix: {network} does not hold {rails} networks of /{said.rail_prefix}; "
            "give the plane a larger network, or a longer prefix"
        )
    return dict(enumerate(islice(network.subnets(new_prefix=said.rail_prefix), rails)))


def _rails(bill: Bill) -> int:
    return 1 + max((nic.rail for group in bill.servers for nic in group.nics if nic.rail is not None), default=-1)


def _network(text: str, where: str) -> IPv4Network:
    try:
        return IPv4Network(text)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise ConfigError(f"{where}: {text!r} is no IPv4 network as 10.210.0.0/16 is: {error}") from error


def _address(text: str, where: str, network: IPv4Network) -> IPv4Address:
    try:
        address = IPv4Address(text)
    except AddressValueError as error:
        raise ConfigError(f"{where}: {text!r} is no IPv4 address as 10.210.0.11 is") from error
    if address not in network or address in (network.network_address, network.broadcast_address):
        raise ConfigError(f"{where}: {address} is no host of {network}; take one from {network[1]} to {network[-2]}")
    return address


def _host(plane: PlaneName, network: IPv4Network, first: int, number: int, field: str) -> IPv4Address:
    """Return the address of the number-th of what `field` says where it begins."""
    if first + number > network.num_addresses - 2:
        raise ConfigError(
            f"planes.{plane}: {network} ends before number {number + 1} from {field} = {first} on; give a larger "
            f"network, or a smaller {field}"
        )
    return network[first + number]


# -- servers -----------------------------------------------------------------------------------------------------------


def _servers(bill: Bill, planes: Mapping[str, Plane]) -> Iterator[Server]:
    number = 0
    for index, group in enumerate(bill.servers):
        where = f"servers[{index}]"
        bounds.group(where, group)
        for each in range(group.count):
            nics = tuple(_nic(nic, f"{where}.nics[{i}]", planes, bill, number) for i, nic in enumerate(group.nics))
            yield Server(_named(group.name, group.first + each), group.role, group.model, tuple(_accelerators(group)),
                         nics, _bmc(bill, planes, number) if group.bmc else None)  # fmt: skip
            number += 1


def _named(pattern: str, number: int) -> str:
    found = re.search(r"\{n(?::0(\d))?\}", pattern)
    return pattern if found is None else pattern.replace(found[0], str(number).zfill(int(found[1] or 1)))


def _accelerators(group: ServersBill) -> Iterator[Accelerator]:
    cards = group.accelerators
    for index in range(cards.count if cards else 0):
        assert cards is not None  # noqa: S101  # for the type checker
        yield Accelerator(
            index, cards.model, cards.pci[index] if cards.pci else "", cards.numa[index] if cards.numa else None
        )


def _nic(said: NicBill, where: str, planes: Mapping[str, Plane], bill: Bill, number: int) -> Nic:
    plane = planes[said.plane]
    network = plane.rails.get(said.rail, plane.network) if said.rail is not None else plane.network
    if said.address:
        address = _address(said.address, f"{where}.address", network)
    else:
        first = getattr(bill.planes, said.plane).first_host
        address = _host(said.plane, network, first, number, "first_host")
    if said.speed is not None and speed(said.speed) != plane.speed:
        raise ConfigError(
            f"{where}.speed: {said.speed}, and planes.{said.plane}.speed is {getattr(bill.planes, said.plane).speed}; "
            "both ends of a cable run at one speed"
        )
    return Nic(said.plane, said.interface, address, network, plane.speed, said.rail, said.rdma, said.pci, said.numa)


def _bmc(bill: Bill, planes: Mapping[str, Plane], number: int) -> Bmc:
    plane = planes["management"]
    address = _host("management", plane.network, bill.planes.management.first_bmc, number, "first_bmc")
    return Bmc(address, plane.network, plane.speed)


# -- switches and cables -----------------------------------------------------------------------------------------------


def _switch_of(bill: Bill, plane: PlaneName) -> str:
    return next(name for name, switch in bill.switches.items() if plane in switch.planes)


def _switches(bill: Bill, planes: Mapping[str, Plane]) -> Iterator[Switch]:
    plane, managed = planes["management"], 0
    for name, said in bill.switches.items():
        address = None
        if said.managed:
            address = _host("management", plane.network, bill.planes.management.first_switch, managed, "first_switch")
            managed += 1
        yield _switch(name, said, address)


def _switch(name: str, said: SwitchBill, address: IPv4Address | None) -> Switch:
    port = speed(said.speed) // said.breakout
    cable = Cable(said.cable.kind, said.cable.length_m, speed(said.cable.speed) if said.cable.speed else port)
    return Switch(name, said.model, tuple(sorted(said.planes, key=PLANES.index)), said.ports, speed(said.speed),
                  said.breakout, said.lanes, said.alias, cable, address)  # fmt: skip


def _links(planes: Mapping[str, Plane], switches: tuple[Switch, ...], servers: tuple[Server, ...]) -> Iterator[Link]:
    for switch in switches:
        ends = [end for plane in switch.planes for end in _ends(planes[plane], switches, servers)]
        if len(ends) > switch.ports:
            raise ConfigError(
                f"switches.{switch.name}.ports: {len(ends)} cables need a port and it has {switch.ports}; take a switch "
                "with more ports, break them out, or connect less"
            )
        for port, (node, end, plane, rate) in enumerate(ends, 1):
            yield Link(switch.name, port, node, end, plane, rate, switch.cable)


def _ends(plane: Plane, switches: tuple[Switch, ...], servers: tuple[Server, ...]) -> Iterator[tuple[str, str, PlaneName, int]]:  # fmt: skip
    for server in servers:
        for nic in server.on(plane.name):
            yield server.name, nic.interface, plane.name, nic.speed
    if plane.name == "management":
        yield from ((server.name, "bmc", plane.name, plane.speed) for server in servers if server.bmc)
        for switch in switches:
            if switch.address is not None and switch.name != plane.switch:  # its own port leads out of it
                yield switch.name, "management", plane.name, plane.speed
