"""What the kernel says of this host's network, by rtnetlink(7): links, addresses, and which way a packet would go."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ROUTE = struct.Struct(
    "=BBBBBBBBI"
)  # rtmsg: family, bits of target, of source, tos, table, protocol, scope, type, flags
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_INDEX = struct.Struct("=I")
_REQUEST, _DUMP = 0x1, 0x301
_ERROR, _DONE = 2, 3
_NEW_LINK, _GET_LINKS = 16, 18
_NEW_ADDRESS, _GET_ADDRESSES = 20, 22
_NEW_ROUTE, _GET_ROUTE = 24, 26
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFLA_NAME = 3
_RTA_TARGET, _RTA_SOURCE, _RTA_INTERFACE, _RTA_GATEWAY = 1, 2, 4, 5
_RTA_TABLE = 15
_LOOKUP_TABLE = 0x1000  # say by which table a route is
_RTN_UNICAST = 1
_RTN_LOCAL = 2
_SCOPE_LINK = 253
_IFF_UP, _IFF_LOOPBACK, _IFF_LOWER_UP = 0x1, 0x8, 0x10000
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class Link:
    """One interface."""

    name: str
    up: bool
    """Set up by whoever runs the host."""
    carrier: bool
    """Its port has a partner."""
    loopback: bool = False


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
class Way:
    """Where packets to an address leave."""

    interface: str
    gateway: str = ""
    """The router that they go by; empty: the address is reached directly."""
    local: bool = False
    """The address is this host's own."""
    table: int = 254
    """Number of the routing table that says so; 254 is `main`."""


def links() -> list[Link]:
    """Return this host's interfaces. Raises OSError."""
    return [
        found
        for kind, body in _ask(_GET_LINKS, _DUMP, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        if kind == _NEW_LINK and (found := _link(body)) is not None
    ]


def local_addresses() -> list[LocalAddress]:
    """Return this host's addresses; empty where the kernel does not tell."""
    try:
        return [
            found
            for kind, body in _ask(_GET_ADDRESSES, _DUMP, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
            if kind == _NEW_ADDRESS and (found := _local(body)) is not None
        ]
    except OSError:
        _log.warning("the kernel does not list this host's addresses", exc_info=True)
        return []


def way(target: str, source: str = "") -> Way | None:
    """Return the way to a numeric address, from an address of this host if one is given; None: there is none.

    Raises OSError where the kernel does not tell, as from loopback to another host.
    """
    to = ipaddress.ip_address(target)
    family, bits = (socket.AF_INET, 32) if to.version == 4 else (socket.AF_INET6, 128)
    parts = [_attribute(_RTA_TARGET, to.packed)]
    if source:
        parts.append(_attribute(_RTA_SOURCE, ipaddress.ip_address(source).packed))
    head = _ROUTE.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, _LOOKUP_TABLE)
    try:
        for kind, body in _ask(_GET_ROUTE, _REQUEST, head + b"".join(parts)):
            if kind == _NEW_ROUTE:
                return _way(body)
    except OSError as error:
        if error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES):
            raise
    return None


def _ask(kind: int, flags: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the messages of an answer, by kind. Raises OSError, also the kernel's."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(_PATIENCE_S)
        sock.bind((0, 0))
        sock.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)
        while True:
            data, at = sock.recv(1 << 17), 0
            while at + _HEADER.size <= len(data):
                length, answer, *_ = _HEADER.unpack_from(data, at)
                if answer == _DONE or length < _HEADER.size:
                    return
                if answer == _ERROR:
                    number = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                    raise OSError(number, os.strerror(number))
                yield answer, data[at + _HEADER.size : at + length]
                at += -(-length // 4) * 4
            if flags == _REQUEST:
                return


def _attribute(kind: int, data: bytes) -> bytes:
    padding = -len(data) % 4
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(data), kind) + data + bytes(padding)


def _attributes(data: bytes, at: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = data[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4
    return found


def _link(data: bytes) -> Link | None:
    _, _, _, flags, _ = _LINK.unpack_from(data)
    name = _attributes(data, _LINK.size).get(_IFLA_NAME)
    if name is None:
        return None
    return Link(
        name.rstrip(b"\0").decode("utf-8", "replace"),
        bool(flags & _IFF_UP),
        bool(flags & _IFF_LOWER_UP),
        bool(flags & _IFF_LOOPBACK),
    )


def _local(data: bytes) -> LocalAddress | None:
    family, prefix, _, scope, index = _ADDRESS.unpack_from(data)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    packed = _attributes(data, _ADDRESS.size)
    raw = packed.get(_IFA_LOCAL, packed.get(_IFA_ADDRESS))
    if raw is None:
        return None
    address = ipaddress.ip_address(raw)
    reach = ipaddress.ip_network((packed.get(_IFA_ADDRESS, raw), prefix), strict=False)
    interface = _named(index)
    if interface is None:
        return None
    return LocalAddress(interface, address, reach, scope < _SCOPE_LINK or address.is_loopback)


def _way(data: bytes) -> Way | None:
    *_, kind, _ = _ROUTE.unpack_from(data)
    found = _attributes(data, _ROUTE.size)
    if kind not in (_RTN_UNICAST, _RTN_LOCAL) or _RTA_INTERFACE not in found:
        return None
    interface = _named(_INDEX.unpack(found[_RTA_INTERFACE])[0])
    if interface is None:
        return None
    gateway = str(ipaddress.ip_address(found[_RTA_GATEWAY])) if _RTA_GATEWAY in found else ""
    local = kind == _RTN_LOCAL
    if local or _RTA_TABLE not in found:
        return Way(interface, gateway, local)
    return Way(interface, gateway, table=_INDEX.unpack(found[_RTA_TABLE])[0])


def _named(index: int) -> str | None:
    try:
        return socket.if_indextoname(index)
    except OSError:  # it has gone meanwhile, as those of containers do: the others are there still
        return None
