"""Network planes: which address and interface of this host a connection may use.

A plane is named by an address, a network or an interface of this host:

| named by | listens at | leaves through | peers |
|---|---|---|---|
| address | it | as routed, from that address | not in a network of another interface |
| network, as in 10.210.0.0/16 | this host's address in it | as routed, from that address | only in that network |
| interface | its first address | that interface only (SO_BINDTODEVICE, socket(7)) | not in a network of another interface |

Linux answers for an address on every interface, and picks the way out by the target alone: only an interface keeps strangers
of another plane out by itself. Local addresses come from the kernel (rtnetlink(7)), each time they are needed.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from regauge.errors import ConfigError, TransportError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_GET_ADDRESSES, _DUMP, _DONE, _NEW_ADDRESS, _ERROR = 22, 0x301, 3, 20, 2
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_LINK = 253


@dataclass(frozen=True)
class LocalAddress:
    """One address of this host."""

    interface: str
    address: IpAddress
    network: IpNetwork
    """What is reached directly through the interface."""
    usable: bool
    """Valid beyond the link; others need a scope with every use."""


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


def resolve(host: str) -> Plane:
    """Return the plane that an address, a network, an interface or a host name of this host means.

    Raises ConfigError when it means nothing here, or a wildcard.
    """
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


def local_addresses() -> list[LocalAddress]:
    """Return this host's addresses; empty where the kernel does not tell."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
            sock.settimeout(1.0)
            sock.bind((0, 0))
            request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            sock.send(_HEADER.pack(_HEADER.size + len(request), _GET_ADDRESSES, _DUMP, 1, 0) + request)
            return list(_answers(sock))
    except OSError:
        _log.warning("the kernel does not list this host's addresses", exc_info=True)
        return []


def _answers(sock: socket.socket) -> Iterator[LocalAddress]:
    while True:
        data = sock.recv(1 << 17)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            if kind in (_DONE, _ERROR) or length < _HEADER.size:
                return
            if kind == _NEW_ADDRESS and (found := _local(data[at + _HEADER.size : at + length])) is not None:
                yield found
            at += -(-length // 4) * 4


def _local(data: bytes) -> LocalAddress | None:
    family, prefix, _, scope, index = _ADDRESS.unpack_from(data)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    packed: dict[int, bytes] = {}
    at = _ADDRESS.size
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        packed[kind] = data[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4
    raw = packed.get(_IFA_LOCAL, packed.get(_IFA_ADDRESS))
    if raw is None:
        return None
    address = ipaddress.ip_address(raw)
    reach = ipaddress.ip_network((packed.get(_IFA_ADDRESS, raw), prefix), strict=False)
    try:
        interface = socket.if_indextoname(index)
    except OSError:  # it has gone meanwhile, as those of containers do: the others are there still
        return None
    return LocalAddress(interface, address, reach, scope < _SCOPE_LINK or address.is_loopback)


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
