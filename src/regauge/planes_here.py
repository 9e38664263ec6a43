"""Which planes this host has: what the kernel says of links and addresses, and what the names in `[planes]` mean there.

Everything below `look` is a pure function of what it returned.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from regauge.config_planes import PlaneName, PlanesConfig
from regauge.errors import ConfigError
from regauge.move.rtnetlink import IpNetwork, Link, LocalAddress, links, local_addresses


@dataclass(frozen=True)
class Snapshot:
    """What the kernel says of this host's network."""

    links: Mapping[str, Link]
    addresses: Sequence[LocalAddress]
    devices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """RDMA devices, and the network interfaces of their ports."""

    def listed(self) -> str:
        """Return the addresses in words."""
        return ", ".join(f"{each.address} ({each.interface})" for each in self.addresses if each.usable) or "none"


@dataclass(frozen=True)
class Side:
    """One plane of this host."""

    name: PlaneName
    given: str
    """As it is declared."""
    addresses: tuple[LocalAddress, ...]
    """Of this host on it; the first is where it listens."""
    network: IpNetwork | None = None
    """That it was declared as."""

    @property
    def address(self) -> str:
        """Where it listens, numeric."""
        return str(self.addresses[0].address)

    @property
    def interfaces(self) -> frozenset[str]:
        """Where its traffic crosses."""
        return frozenset(each.interface for each in self.addresses)

    @property
    def networks(self) -> tuple[IpNetwork, ...]:
        """What lies on it."""
        own = () if self.network is None else (self.network,)
        return (*own, *(each.network for each in self.addresses))

    @property
    def is_loopback(self) -> bool:
        """Whether it is of this host alone."""
        return all(each.address.is_loopback for each in self.addresses)


def look(root: Path = Path("/")) -> Snapshot:
    """Ask the kernel; RDMA devices by sysfs below `root`. Raises ConfigError."""
    try:
        found = {link.name: link for link in links()}
    except OSError as error:
        raise ConfigError(f"planes: the kernel does not tell this host's links: {error.strerror}") from error
    devices = {
        device.name: frozenset(_netdevs(device)) for device in sorted(root.glob("sys/class/infiniband/*"))
    }  # fmt: skip
    return Snapshot(found, local_addresses(), devices)


def _netdevs(device: Path) -> Iterable[str]:
    yield from (each.name for each in device.glob("device/net/*"))
    for each in device.glob("ports/*/gid_attrs/ndevs/*"):
        try:
            yield each.read_text().strip()
        except OSError:  # an empty entry of the table is an error
            continue


def sides(planes: PlanesConfig, host: Snapshot) -> dict[PlaneName, Side]:
    """Return the declared planes as this host has them. Raises ConfigError that names the field."""
    return {name: _side(name, given, host) for name, given in planes.declared().items()}


def _side(name: PlaneName, given: str, host: Snapshot) -> Side:
    setting = f"planes.{name} {given!r}"
    network, found = find(setting, given, host)
    return Side(name, given, tuple(found), network)


def find(setting: str, given: str, host: Snapshot) -> tuple[IpNetwork | None, list[LocalAddress]]:
    """Return the network that a name of a plane is, and this host's addresses that it means, as `move.plane.resolve`. Raises ConfigError."""
    where, tied, interface = given.partition("%")
    network, found = _find(setting, where, host)
    if tied and not (found := [each for each in found if each.interface == interface]):
        raise ConfigError(
            f"{setting}: {interface} has no address there; this host has {host.listed()}: ip address add ADDRESS dev {interface}"
        )
    return network, found


def _find(setting: str, where: str, host: Snapshot) -> tuple[IpNetwork | None, list[LocalAddress]]:
    if where in host.links:
        found = [each for each in host.addresses if each.interface == where and each.usable]
        if not found:
            raise ConfigError(f"{setting}: the interface has no address: ip address add ADDRESS/BITS dev {where}")
        return None, sorted(found, key=lambda each: each.address.version)
    try:
        wanted = ipaddress.ip_network(where, strict=False)
    except ValueError as error:
        near = difflib.get_close_matches(where, host.links, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{setting}: is no address, network or interface of this host, which has {host.listed()}{hint}"
        ) from error
    if wanted.network_address.is_unspecified:
        raise ConfigError(f"{setting}: is a wildcard, which lies on every plane; name an address, network or interface")
    found = [each for each in host.addresses if each.address in wanted and each.usable]
    if "/" in where:
        if not found:
            raise ConfigError(
                f"{setting}: no address of this host lies in it, it has {host.listed()}; give an interface one: "
                f"ip address add ADDRESS/{wanted.prefixlen} dev INTERFACE"
            )
        return wanted, found
    address = ipaddress.ip_address(where)
    if not found and address.is_loopback:
        found = [LocalAddress("lo", address, ipaddress.ip_network("127.0.0.0/8"), usable=True)]
    if not found:
        raise ConfigError(
            f"{setting}: no interface of this host has this address, it has {host.listed()}; give it to one: "
            f"ip address add {address}/BITS dev INTERFACE"
        )
    return None, found
