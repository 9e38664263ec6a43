"""Network planes: which address and interface of this host a connection may use.

A plane is named by an address, a network or an interface of this host, or one of the first two on the last:

| named by | listens at | leaves through | peers |
|---|---|---|---|
| address | it | as routed, from that address | not in a network of another interface |
| network, as in 10.210.0.0/16 | this host's address in it | as routed, from that address | only in that network |
| interface | its first address | that interface only (SO_BINDTODEVICE, socket(7)) | not in a network of another interface |
| address%interface | it | that interface only | not in a network of another interface |
| network%interface | the interface's address in it | that interface only | only in that network |

Linux answers for an address on every interface, and picks the way out by the target alone: only an interface keeps strangers
of another plane out by itself. Local addresses come from the kernel (rtnetlink(7)), each time they are needed.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass

from regauge.errors import ConfigError, TransportError
from regauge.move.rtnetlink import IpAddress as IpAddress  # noqa: PLC0414  # re-exported
from regauge.move.rtnetlink import IpNetwork
from regauge.move.rtnetlink import LocalAddress as LocalAddress  # noqa: PLC0414  # re-exported
from regauge.move.rtnetlink import local_addresses as local_addresses  # noqa: PLC0414  # re-exported

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plane:
    """Where connections start and end; see the module."""

    address: str
    """Numeric."""
    interface: str = ""
    """The interface that they are bound to; empty: none."""
    network: IpNetwork | None = None
    """Where peers must be; None: anywhere that is not another plane."""

    @property
    def family(self) -> socket.AddressFamily:
        """Address family of the plane's sockets."""
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    def claim(self, sock: socket.socket, port: int = 0) -> None:
        """Bind a fresh socket to the plane. Raises OSError where the address cannot be bound."""
        if self.interface:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.interface.encode() + b"\0")
            except PermissionError:  # before Linux 5.7 it takes CAP_NET_RAW
                _log.warning("may not bind to interface %s: only the address is bound", self.interface)
        sock.bind((self.address, port))

    def check(self, peer: str) -> None:
        """Raise TransportError where a peer's numeric address is not on this plane."""
        try:
            address = ipaddress.ip_address(peer)
        except ValueError as error:
            raise TransportError(f"the peer's address {peer!r} is not an IP address") from error
        if address.version != ipaddress.ip_address(self.address).version:
            raise TransportError(f"the peer's address {peer} and this side's, {self.address}, are of unlike families")
        if self.network is not None:
            if address not in self.network:
                raise TransportError(f"the peer's address {peer} lies outside this plane's network {self.network}")
            return
        local = local_addresses()
        mine = self.interface or next((each.interface for each in local if str(each.address) == self.address), "")
        attached = [each for each in local if address in each.network]
        if mine and attached:
            nearest = max(attached, key=lambda each: (each.network.prefixlen, each.interface == mine))
            if nearest.interface != mine:
                raise TransportError(
                    f"the peer's address {peer} lies in the network of interface {nearest.interface}, another plane than "
                    f"{self.address} on {mine}; set the peer's transfer.host to its address on this plane"
                )


def own(address: str) -> bool:
    """Whether a numeric address is this host's own: nothing that goes there leaves by a wire."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    found = mapped or found
    return found.is_loopback or any(each.address == found for each in local_addresses())


def resolve(host: str) -> Plane:
    """Return the plane that an address, a network, an interface or a host name of this host means.

    Raises ConfigError when it means nothing here, or a wildcard.
    """
    where, tied, interface = host.partition("%")
    if tied:
        return _tied(where, interface)
    try:
        if "/" in host:
            return _in_network(ipaddress.ip_network(host, strict=False))
        plane = Plane(str(ipaddress.ip_address(host)))
    except ValueError as error:
        if "/" in host:
            raise ConfigError(f"{host!r} is not a network: {error}") from error
        plane = _of_interface(host) or _named(host)
    if ipaddress.ip_address(plane.address).is_unspecified:
        raise ConfigError(f"{host} is a wildcard, which lies on every plane; name an address, network or interface")
    return plane


def _tied(where: str, interface: str) -> Plane:
    """Return a plane of an address or a network, bound to an interface that has it."""
    own = [each for each in local_addresses() if each.interface == interface]
    try:
        network = ipaddress.ip_network(where, strict=False)
    except ValueError as error:
        raise ConfigError(f"{where}%{interface}: {where!r} is no address or network: {error}") from error
    found = [each for each in own if each.address in network and (each.usable or "/" not in where)]
    if not found:
        has = ", ".join(str(each.address) for each in own) or "no address"
        raise ConfigError(f"{where}%{interface}: {interface} has none there, it has {has}; this host has {_listed()}")
    return Plane(str(found[0].address), interface, network if "/" in where else None)


def _in_network(network: IpNetwork) -> Plane:
    found = [each for each in local_addresses() if each.address in network and each.usable]
    if not found:
        raise ConfigError(f"no address of this host lies in {network}; it has {_listed()}")
    return Plane(str(found[0].address), network=network)


def _of_interface(name: str) -> Plane | None:
    found = [each for each in local_addresses() if each.interface == name and each.usable]
    if found:
        first = min(found, key=lambda each: each.address.version)  # IPv4 where there is both
        return Plane(str(first.address), interface=name)
    if name in {each for _, each in socket.if_nameindex()}:
        raise ConfigError(f"interface {name} has no address; give it one, or name another")
    return None


def _named(host: str) -> Plane:
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host!r} is no address, network, interface or name of this host ({error}); it has {_listed()}"
        ) from error
    return Plane(str(answers[0][4][0]))


def _listed() -> str:
    return ", ".join(f"{each.address} ({each.interface})" for each in local_addresses()) or "no known address"
