"""What the doctor expects of a host: from a topology, from regauge's configuration, or from both."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network

from regauge.config import ServeConfig
from regauge.errors import ConfigError
from regauge.fabric.host import Host, decoded, rows
from regauge.fabric.topology import Roce, Server, Topology


@dataclass(frozen=True)
class Port:
    """A network port of the host. What is None is not known, and not looked at."""

    plane: str
    interface: str
    address: IPv4Address
    network: IPv4Network
    mtu: int | None = None
    speed: int | None = None
    """Bits per second."""
    rdma: str = ""
    pci: str = ""
    numa: int | None = None
    rail: int | None = None


@dataclass(frozen=True)
class Peer:
    """A port of another host."""

    name: str
    plane: str
    address: str
    rail: int | None = None


@dataclass(frozen=True)
class Expected:
    """One host."""

    name: str
    ports: tuple[Port, ...] = ()
    planes: Mapping[str, IPv4Network] = field(default_factory=dict)
    """Network of each plane."""
    peers: tuple[Peer, ...] = ()
    accelerators: Mapping[str, int | None] = field(default_factory=dict)
    """PCI address and NUMA node of each whose address is known."""
    accelerates: bool = False
    """Whether it has accelerators at all."""
    roce: Roce | None = None
    transport: str = ""
    bmc: str = ""
    """URL of its board controller; empty: it has none."""
    config: ServeConfig | None = None
    guessed: bool = False
    """Made of what the host itself says: only contradictions can be found."""

    def on(self, plane: str) -> tuple[Port, ...]:
        """Return the ports of a plane."""
        return tuple(port for port in self.ports if port.plane == plane)

    @property
    def rdma(self) -> bool:
        """Whether KV crosses by RDMA."""
        config = self.config
        if config is None:
            return self.transport != "tcp" and any(port.rdma for port in self.ports)
        used = config.transfer
        return (used.transport == "mooncake" and used.mooncake.protocol == "rdma") or (
            used.transport == "nixl" and used.nixl.transports != "tcp"
        )


def from_topology(topology: Topology, name: str, config: ServeConfig | None = None) -> Expected:
    """Return what a topology says of a server. Raises ConfigError for a name that it has not."""
    server = topology.server(name)
    # First those that it exchanges KV with: of very many peers not all routes are asked for.
    others = sorted((each for each in topology.servers if each.name != name), key=lambda each: each.role == server.role)
    accelerators = {each.pci: each.numa for each in server.accelerators if each.pci}
    return Expected(
        name, _ports(topology, server), {plane: each.network for plane, each in topology.planes.items()}, _peers(others), accelerators,
        accelerates=bool(server.accelerators), roce=topology.planes["compute"].roce, transport=topology.serving.transport,
        bmc=server.bmc.url if server.bmc else "", config=config,
    )  # fmt: skip


def _ports(topology: Topology, server: Server) -> tuple[Port, ...]:
    return tuple(
        Port(
            nic.plane, nic.interface, nic.address, nic.network, topology.planes[nic.plane].mtu, nic.speed, nic.rdma, nic.pci,
            nic.numa, nic.rail,
        )
        for nic in server.nics
    )  # fmt: skip


def _peers(servers: list[Server]) -> tuple[Peer, ...]:
    return tuple(Peer(each.name, nic.plane, str(nic.address), nic.rail) for each in servers for nic in each.nics)


def from_host(host: Host, config: ServeConfig | None) -> Expected:
    """Return what a host says of itself, and a configuration of its planes; what a plane's name means nothing of is left to the check `address`."""
    found = [Port("", each.interface, each.address, each.network) for each in addresses(host) if each.interface != "lo"]
    ports: list[Port] = []
    planes: dict[str, IPv4Network] = {}
    for plane, given in ({} if config is None else config.planes.declared()).items():
        meant = [each for each in found if _means(given.partition("%")[0], each)]
        if meant:
            planes[plane] = meant[0].network
        ports += [replace(each, plane=plane, rdma=_device(host, each.interface)) for each in meant]
    return Expected("", tuple(ports), planes, config=config, guessed=True)


def _means(given: str, port: Port) -> bool:
    try:
        return port.interface == given or port.address in ipaddress.ip_network(given, strict=False)
    except ValueError:
        return False


def _device(host: Host, interface: str) -> str:
    names = host.names(f"/sys/class/net/{interface}/device/infiniband") or [""]
    return names[0]


@dataclass(frozen=True)
class Own:
    """One address of the host."""

    interface: str
    address: IPv4Address
    network: IPv4Network


def addresses(host: Host) -> list[Own]:
    """Return the host's addresses, IPv4. Raises ConfigError where `ip` does not say."""
    said = decoded(host.run("ip", "-j", "address", "show"))
    if not isinstance(said, list):
        raise ConfigError("`ip -j address show` says nothing: the doctor needs iproute2: apt-get install iproute2")
    found = []
    for link in rows(said):
        for each in rows(link.get("addr_info")):
            try:
                one = ipaddress.IPv4Interface(f"{each.get('local')}/{each.get('prefixlen')}")
            except ValueError:  # IPv6
                continue
            found.append(Own(str(link.get("ifname")), one.ip, one.network))
    return found


def present(host: Host, ports: Iterable[Port]) -> list[Port]:
    """Return the ports whose interfaces are there; the check `address` tells of the others."""
    return [port for port in ports if host.read(f"/sys/class/net/{port.interface}/mtu") is not None]
