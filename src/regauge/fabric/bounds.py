"""What a bill of materials must fulfil beyond the types of its fields. Each refusal names the field and the remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeVar

from regauge.errors import ConfigError
from regauge.fabric.topology import PLANES, CableKind, Plane, Roce, Server, Topology

if TYPE_CHECKING:
    from regauge.fabric.bill import Bill, ServersBill

T = TypeVar("T")

MOST_SERVERS: Final = 4_096
"""Of a deployment: more are a slip of the keyboard, or want a network with more than one switch on a plane."""

REACH_M: Final[Mapping[CableKind, tuple[tuple[int, float], ...]]] = {
    "dac": ((400 * 10**9, 2.0), (200 * 10**9, 3.0), (0, 5.0)),
    "twisted-pair": ((0, 100.0),),
}
"""Longest cable from a speed on, in bits per second and metres: of IEEE 802.3 the clauses 162 (400GBASE-CR4, 2 m), 136
(200GBASE-CR4, 3 m), 92 and 110 (100GBASE-CR4 and 25GBASE-CR, 5 m), 40 and 55 (1000BASE-T, 10GBASE-T, 100 m)."""


def size(bill: Bill) -> None:
    """Check how many servers there are, before any is made."""
    if (count := sum(group.count for group in bill.servers)) > MOST_SERVERS:
        raise ConfigError(
            f"servers: {count} of them, and {MOST_SERVERS} are the most; lower a count, or split the site"
        )


def switches(bill: Bill) -> None:
    """Check that each plane has one switch, that planes on one switch are apart, and how cages split."""
    for plane in PLANES:
        having = [name for name, switch in bill.switches.items() if plane in switch.planes]
        if not having:
            raise ConfigError(f"switches: none has the {plane} plane; add {plane!r} to the planes of one")
        if len(having) > 1:
            raise ConfigError(
                f"switches.{having[1]}.planes: {plane} is on {having[0]} already; a plane has one switch here, so leave it out"
            )
    for name, switch in bill.switches.items():
        if _twice(switch.planes):
            raise ConfigError(f"switches.{name}.planes: names a plane twice; name it once")
        vlans = {plane: getattr(bill.planes, plane).vlan for plane in switch.planes}
        if len(vlans) > 1 and (None in vlans.values() or len(set(vlans.values())) < len(vlans)):
            raise ConfigError(
                f"switches.{name}.planes: {', '.join(vlans)} share it; give each plane a VLAN of its own (planes.NAME.vlan)"
            )
        if switch.lanes % switch.breakout:
            raise ConfigError(
                f"switches.{name}.breakout: {switch.lanes} lanes do not split into {switch.breakout} ports; set lanes to "
                "those of a cage, or breakout to a divisor of them"
            )


def networks(planes: Mapping[str, Plane]) -> None:
    """Check that no network overlaps another."""
    for one, other in combinations(planes.values(), 2):
        if one.network.overlaps(other.network):
            raise ConfigError(
                f"planes.{other.name}.network: {other.network} overlaps {one.network} of {one.name}; packets for one would "
                "leave by the other, so take networks apart"
            )


def roce(plane: str, said: Roce) -> None:
    """Check what RoCE is told."""
    where = f"planes.{plane}.roce"
    if plane != "compute":
        raise ConfigError(f"{where}: RDMA is of the compute plane alone; leave it out")
    if said.dscp == said.cnp_dscp:
        raise ConfigError(f"{where}.cnp_dscp: {said.cnp_dscp} is that of the data; take another, such as 48")
    if said.priority == said.cnp_priority:
        raise ConfigError(
            f"{where}.cnp_priority: {said.cnp_priority} is that of the data, so that notifications would wait behind what they "
            "are about; take another, such as 6"
        )
    if said.ecn_min_bytes >= said.ecn_max_bytes:
        raise ConfigError(
            f"{where}.ecn_max_bytes: {said.ecn_max_bytes} is not above ecn_min_bytes, {said.ecn_min_bytes}; raise it"
        )


def group(where: str, said: ServersBill) -> None:
    """Check what can be said of a group of servers by itself."""
    if said.count > 1 and "{n" not in said.name:
        raise ConfigError(f"{where}.name: {said.count} servers would be called {said.name!r}; put {{n}} in it")
    for index, nic in enumerate(said.nics):
        if nic.address and said.count > 1:
            raise ConfigError(f"{where}.nics[{index}].address: {said.count} servers would have it; leave it out")
        if nic.rail is not None and nic.plane != "compute":
            raise ConfigError(f"{where}.nics[{index}].rail: rails are of the compute plane; leave it out")
    for plane in PLANES:
        mine = [nic for nic in said.nics if nic.plane == plane]
        if len(mine) > 1 and (plane != "compute" or any(nic.rail is None for nic in mine)):
            what = "give each its rail" if plane == "compute" else "bond them outside of this file, and name the bond"
            raise ConfigError(f"{where}.nics: {len(mine)} are on the {plane} plane; {what}")
    for field in ("interface", "rdma", "pci", "rail"):
        if again := _twice(v for nic in said.nics if (v := getattr(nic, field)) not in ("", None)):
            raise ConfigError(f"{where}.nics: {field} {again!r} is there twice; each NIC has one of its own")
    _needed(where, said)
    _cards(where, said)


def _needed(where: str, said: ServersBill) -> None:
    needed = ("business", "management") if said.role == "gateway" else PLANES
    there = {nic.plane for nic in said.nics}
    if missing := [plane for plane in needed if plane not in there]:
        raise ConfigError(f"{where}.nics: a {said.role} server needs one on the {missing[0]} plane; add it")


def _cards(where: str, said: ServersBill) -> None:
    cards = said.accelerators
    if cards is None:
        return
    for field in ("numa", "pci"):
        given = getattr(cards, field)
        if given and len(given) != cards.count:
            raise ConfigError(
                f"{where}.accelerators.{field}: says {len(given)} of {cards.count} accelerators; name all, or none"
            )
    pci = [each for each in (*cards.pci, *(nic.pci for nic in said.nics)) if each]
    if again := _twice(pci):
        raise ConfigError(f"{where}.accelerators.pci: {again} is there twice; each device has an address of its own")
    if cards.numa:
        for index, nic in enumerate(said.nics):
            if nic.plane == "compute" and nic.numa is not None and nic.numa not in cards.numa:
                raise ConfigError(
                    f"{where}.nics[{index}].numa: no accelerator is on node {nic.numa}, so that its KV would cross the "
                    f"socket; accelerators are on {', '.join(map(str, sorted(set(cards.numa))))}"
                )


def whole(made: Topology) -> None:
    """Check what needs all of it: names, addresses, speeds and reach of cables, the gateway, and the transport."""
    if again := _twice([*(each.name for each in made.servers), *(each.name for each in made.switches)]):
        raise ConfigError(f"servers: {again!r} is the name of two; change a pattern, or `first`")
    _addresses(made)
    for switch in made.switches:
        _cables(made, switch.name)
    if made.gateway not in {each.name for each in made.servers}:
        raise ConfigError(f"gateway: {made.unknown(made.gateway)}")
    for role in ("prefill", "decode"):
        if not made.of_role(role):
            raise ConfigError(f"servers: none is for {role}; add a group with role = {role!r}")
    _transport(made)


def _addresses(made: Topology) -> None:
    taken: dict[object, str] = {}
    for what, address in _owners(made):
        if address in taken:
            raise ConfigError(
                f"servers: {address} is of both {taken[address]} and {what}; change first_host, first_bmc or first_switch of "
                "the plane, or the address that is given"
            )
        taken[address] = what


def _owners(made: Topology) -> Iterable[tuple[str, object]]:
    yield from ((f"planes.{each.name}.router", each.router) for each in made.planes.values() if each.router)
    for server in made.servers:
        yield from ((f"{server.name} {nic.interface}", nic.address) for nic in server.nics)
        if server.bmc:
            yield f"the BMC of {server.name}", server.bmc.address
    yield from ((f"switch {each.name}", each.address) for each in made.switches if each.address)


def _cables(made: Topology, name: str) -> None:
    switch = made.switch(name)
    for plane in switch.planes:
        if made.planes[plane].speed != switch.port_speed:
            raise ConfigError(
                f"switches.{name}.speed: its ports run at {_text(switch.port_speed)} and planes.{plane}.speed is "
                f"{_text(made.planes[plane].speed)}; make them alike, by breakout if need be"
            )
    cable = switch.cable
    if cable.speed != switch.port_speed:
        raise ConfigError(
            f"switches.{name}.cable.speed: {_text(cable.speed)}, and the ports run at {_text(switch.port_speed)}; take cables "
            "for that speed"
        )
    reach = next((m for least, m in REACH_M.get(cable.kind, ()) if cable.speed >= least), None)
    if reach is not None and cable.length_m > reach:
        raise ConfigError(
            f"switches.{name}.cable.length_m: {cable.kind} reaches {reach:g} m at {_text(cable.speed)}, not "
            f"{cable.length_m:g}; take aoc or fibre, or move the switch"
        )


def _transport(made: Topology) -> None:
    transport = made.serving.transport
    if transport == "tcp":
        return
    for server in made.of_role("prefill", "decode"):
        lacking = _lacking(server)
        if lacking:
            raise ConfigError(
                f"servers: {server.name} {lacking} has no rdma device, which serving.transport = {transport!r} writes with; "
                "name it (`rdma link`), or take tcp"
            )


def _lacking(server: Server) -> str:
    return next((nic.interface for nic in server.on("compute") if not nic.rdma), "")


def _twice(values: Iterable[T]) -> T | None:
    return next((value for value, times in Counter(values).items() if times > 1), None)


def _text(rate: int) -> str:
    return f"{rate / 10**9:g}G"
