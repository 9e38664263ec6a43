"""The model of a deployment: servers, switches, the cables between them, and every address. Made by `bill.load`; immutable.

Speeds are in bits per second, lengths in metres. Names of planes are `compute`, `business` and `management`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Literal

from regauge.config_planes import PLANES as PLANES  # noqa: PLC0414  # re-exported
from regauge.config_planes import PlaneName as PlaneName  # noqa: PLC0414  # re-exported
from regauge.errors import ConfigError

Role = Literal["prefill", "decode", "gateway"]
EngineName = Literal["local", "vllm", "sglang"]
TransportName = Literal["tcp", "mooncake", "nixl"]
CableKind = Literal["dac", "aec", "aoc", "fibre", "twisted-pair"]


@dataclass(frozen=True)
class Roce:
    """What lossless RoCEv2 needs of NICs and switch."""

    dscp: int
    """Of RDMA packets."""
    priority: int
    """Traffic class, queue and PFC priority of RDMA packets."""
    cnp_dscp: int
    """Of congestion notification packets."""
    cnp_priority: int
    ecn_min_bytes: int
    """Length of the queue from which packets are marked."""
    ecn_max_bytes: int
    """Length of the queue above which every packet is marked."""
    ecn_mark_percent: int
    """Of the packets that are marked as the queue reaches `ecn_max_bytes`."""
    gid_index: int
    """Of the GID that is RoCE v2 over IPv4."""


@dataclass(frozen=True)
class Plane:
    """One of the three networks."""

    name: PlaneName
    network: IPv4Network
    mtu: int
    speed: int
    """Of each of its cables."""
    switch: str
    vlan: int | None
    """Of the switch's ports, where hosts send and get untagged frames."""
    router: IPv4Address | None
    """The way out of the plane; None: there is none."""
    rails: Mapping[int, IPv4Network]
    """Network of each rail; empty: all of its NICs are in `network`."""
    roce: Roce | None


@dataclass(frozen=True)
class Switch:
    """One switch."""

    name: str
    model: str
    planes: tuple[PlaneName, ...]
    cages: int
    """What a transceiver or cable is put into; each gives `breakout` ports."""
    speed: int
    """Of a cage."""
    breakout: int
    lanes: int
    """Electrical lanes of a cage."""
    alias: str
    """Pattern of the ports' other names, `{port}` and `{sub}` replaced; empty: they keep their own."""
    cable: Cable
    address: IPv4Address | None
    """Of its own management port."""

    @property
    def ports(self) -> int:
        """How many cables it takes."""
        return self.cages * self.breakout

    @property
    def port_speed(self) -> int:
        """Of a port."""
        return self.speed // self.breakout


@dataclass(frozen=True)
class Cable:
    """What a switch's ports are cabled with."""

    kind: CableKind
    length_m: float
    speed: int


@dataclass(frozen=True)
class Accelerator:
    """One card of a server."""

    index: int
    model: str
    pci: str
    """As `0000:1a:00.0`; empty: not said."""
    numa: int | None


@dataclass(frozen=True)
class Nic:
    """One network port of a server."""

    plane: PlaneName
    interface: str
    address: IPv4Address
    network: IPv4Network
    """What is reached directly through it: its rail's, or its plane's."""
    speed: int
    rail: int | None
    """Its number among the NICs that carry KV."""
    rdma: str
    """Name of its RDMA device; empty: none."""
    pci: str
    numa: int | None


@dataclass(frozen=True)
class Bmc:
    """A server's board controller, on the management plane."""

    address: IPv4Address
    network: IPv4Network
    speed: int

    @property
    def url(self) -> str:
        """Where Redfish answers."""
        return f"https://{self.address}"


@dataclass(frozen=True)
class Server:
    """One machine."""

    name: str
    role: Role
    model: str
    accelerators: tuple[Accelerator, ...]
    nics: tuple[Nic, ...]
    bmc: Bmc | None

    def on(self, plane: str) -> tuple[Nic, ...]:
        """Return its NICs of a plane, those of the compute plane by rail."""
        found = [nic for nic in self.nics if nic.plane == plane]
        return tuple(sorted(found, key=lambda nic: -1 if nic.rail is None else nic.rail))


@dataclass(frozen=True)
class Link:
    """A cable, from a port of a switch to a server's interface, a BMC, or another switch's management port."""

    switch: str
    port: int
    """From 1 on, counted over the cages and, within one, over its parts."""
    node: str
    """Server or switch at the other end."""
    end: str
    """Interface there; `bmc`, or `management` of a switch."""
    plane: PlaneName
    speed: int
    cable: Cable


@dataclass(frozen=True)
class Serving:
    """What runs on it."""

    model: str
    transport: TransportName
    port: int
    """Of the gateway, on the business plane."""
    worker_port: int
    """First of those at which workers answer the gateway, on the business plane."""
    management_port: int
    prefill_layout: str
    decode_layout: str
    prefill_engine: EngineName
    decode_engine: EngineName
    key_file: str


@dataclass(frozen=True)
class Topology:
    """A deployment."""

    site: str
    description: str
    planes: Mapping[str, Plane]
    switches: tuple[Switch, ...]
    servers: tuple[Server, ...]
    links: tuple[Link, ...]
    gateway: str
    """Server that the gateway runs on."""
    serving: Serving

    def server(self, name: str) -> Server:
        """Return a server by name. Raises ConfigError that suggests a near one."""
        for each in self.servers:
            if each.name == name:
                return each
        raise ConfigError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """Return the words for a server that does not exist, with the one that may have been meant."""
        names = [each.name for each in self.servers]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        return f"no server {name!r} in {self.site}; {hint}"

    def switch(self, name: str) -> Switch:
        """Return a switch by name. Raises KeyError."""
        return {each.name: each for each in self.switches}[name]

    def links_of(self, switch: str) -> tuple[Link, ...]:
        """Return a switch's cables by port."""
        return tuple(link for link in self.links if link.switch == switch)

    def of_role(self, *roles: str) -> tuple[Server, ...]:
        """Return the servers of some roles."""
        return tuple(each for each in self.servers if each.role in roles)
