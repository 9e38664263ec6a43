"""The three planes of a host: what runs is bound to them, and what does not fit is refused before anything starts.

`enforced` does it all; all but it, `listening`, `interfaces` and `ask_ways` are pure functions of what the kernel said (`planes_here`). docs/planes.md has each refusal.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

import msgspec

from regauge.config import ServeConfig, TransferConfig
from regauge.config_planes import PlaneName, PlanesConfig
from regauge.errors import ConfigError
from regauge.move.plane import Plane, resolve
from regauge.move.rtnetlink import IpAddress, IpNetwork, LocalAddress, Way, local_addresses, way
from regauge.planes_here import Side, Snapshot, find, look, sides

_UNSET: Final = "127.0.0.1"
"""Default of `transfer.host` and `host`: there a declared plane takes its place."""
_MAIN: Final = 254
"""Number of the routing table `main`."""


@dataclass(frozen=True)
class Peer:
    """Somebody that the configuration names by a numeric address."""

    plane: PlaneName
    where: str
    """The setting."""
    address: str


def enforced(config: ServeConfig) -> ServeConfig:
    """Return the configuration with all that its planes decide filled in. Raises ConfigError with every refusal, one a line."""
    if not config.planes.declared():
        return config
    host = look()
    found = sides(config.planes, host)
    new = bound(config, found, host)
    known = peers(config)
    refused = [*overlaps(found), *down(found, new, host)]
    refused += strays(found, known, ask_ways(found, known))
    if refused:
        raise ConfigError("\n".join(refused))
    return new


def listening(plane: str, address: str) -> Plane | None:
    """Return where a server listens: at an address, for what comes in by its interface; None: no plane is declared. Raises ConfigError."""
    if not plane:
        return None
    found = replace(resolve(plane), address=address)
    owners = [each.interface for each in local_addresses() if str(each.address) == address]
    return found if found.interface or owners in ([], ["lo"]) else replace(found, interface=owners[0])


def management(planes: PlanesConfig) -> Plane | None:
    """Return where the management plane's listener is; None: that plane is not declared. Raises ConfigError."""
    return listening(planes.management, resolve(planes.management).address) if planes.management else None


def here(planes: PlanesConfig) -> dict[PlaneName, Side]:
    """Return the declared planes of this host; where none is, the kernel is not asked. Raises ConfigError."""
    return sides(planes, look()) if planes.declared() else {}


def interfaces(planes: PlanesConfig) -> dict[PlaneName, frozenset[str]]:
    """Return the interfaces of each declared plane of this host. Raises ConfigError."""
    return {name: side.interfaces for name, side in here(planes).items()}


def astray(found: Mapping[PlaneName, Side], plane: PlaneName, host: str) -> PlaneName | None:
    """Return the other declared plane whose network has a numeric address that should be on this one; None: nothing is wrong, or nobody knows."""
    address = _numeric(host)
    if plane not in found or address is None or _in(address, found[plane]):
        return None
    return next((name for name, side in found.items() if _in(address, side)), None)


def _in(address: IpAddress, side: Side) -> bool:
    return any(address in network for network in side.networks)


# -- what the kernel says ----------------------------------------------------------------------------------------------


def ask_ways(found: Mapping[PlaneName, Side], known: Iterable[Peer]) -> dict[str, Way | None]:
    """Return the way to each peer, from its plane's address here. Raises ConfigError where the kernel does not tell."""
    ways: dict[str, Way | None] = {}
    for peer in known:
        if (side := found.get(peer.plane)) is None:
            continue
        source = side.address if _version(side.address) == _version(peer.address) and not side.is_loopback else ""
        try:
            ways[peer.address] = way(peer.address, source)
        except OSError as error:
            raise ConfigError(f"{peer.where} {peer.address}: the kernel tells no route: {error.strerror}") from error
    return ways


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


# -- what is bound to them ---------------------------------------------------------------------------------------------


def bound(config: ServeConfig, found: Mapping[PlaneName, Side], host: Snapshot) -> ServeConfig:
    """Return the configuration with hosts filled in from the planes. Raises ConfigError for one that was given and lies on another plane."""
    transfer, http, discovery = config.transfer, config.host, config.discovery
    if compute := found.get("compute"):
        transfer = _transfer(transfer, compute, host)
    if business := found.get("business"):
        http = _http("host", "" if http == _UNSET else http, business, host)
        advertise = _http("discovery.advertise", discovery.advertise, business, host)
        discovery = msgspec.structs.replace(discovery, advertise=advertise)
    return msgspec.structs.replace(config, host=http, transfer=transfer, discovery=discovery)


def _http(setting: str, given: str, side: Side, host: Snapshot) -> str:
    """Return the numeric address at which a server listens."""
    return str(_on(setting, given, side, host).address) if given else side.address


def _on(setting: str, given: str, side: Side, host: Snapshot) -> LocalAddress:
    """Return the address at which what a setting names listens. Raises ConfigError unless it is on a plane."""
    _, meant = find(f"{setting} {given!r}", given, host)
    own = {each.address for each in side.addresses}
    if alien := [each for each in meant if each.address not in own]:
        raise ConfigError(
            f"{setting} {given!r}: {alien[0].address} ({alien[0].interface}) is not on planes.{side.name} {side.given!r}, where this host has "
            f"{', '.join(sorted(map(str, own)))}; leave {setting} out, or name what is on that plane"
        )
    return meant[0]


def _transfer(transfer: TransferConfig, compute: Side, host: Snapshot) -> TransferConfig:
    """Return the settings with all that connects bound to interfaces of the compute plane, so that no route takes it elsewhere. Raises ConfigError."""
    _check_devices(transfer, compute, host)

    def tied(setting: str, given: str) -> str:
        interface = _on(setting, given, compute, host).interface
        return given if "%" in given or given == interface or interface == "lo" else f"{given}%{interface}"

    return msgspec.structs.replace(
        transfer,
        host=tied("transfer.host", compute.given if transfer.host == _UNSET else transfer.host),
        control=transfer.control and tied("transfer.control", transfer.control),
        nics=[tied(f"transfer.nics[{i}]", nic) for i, nic in enumerate(transfer.nics)],
    )


def _check_devices(transfer: TransferConfig, compute: Side, host: Snapshot) -> None:
    for setting, device in _devices(transfer):
        known = _ports(device, host)
        fitting = [each for each, own in host.devices.items() if own & compute.interfaces] or sorted(compute.interfaces)
        instead = f"of planes.compute {compute.given!r} there are {', '.join(fitting)}"
        if known is None:
            raise ConfigError(
                f"{setting} {device!r}: no RDMA device or interface of this host; {instead}: rdma link show"
            )
        if known - compute.interfaces:
            raise ConfigError(
                f"{setting} {device!r}: its port is {', '.join(sorted(known))}, of another plane; {instead}"
            )


def _ports(device: str, host: Snapshot) -> frozenset[str] | None:
    """Return the interfaces of a device's ports; None: there is no such device."""
    name = device.partition(":")[0]
    return frozenset({name}) if name in host.links else host.devices.get(name)


def _devices(transfer: TransferConfig) -> list[tuple[str, str]]:
    """Return the devices of the transport that is used, by setting."""
    used = {"mooncake": transfer.mooncake.devices, "nixl": transfer.nixl.devices}.get(transfer.transport, [])
    return [(f"transfer.{transfer.transport}.devices", device) for device in used]


# -- what is refused ---------------------------------------------------------------------------------------------------


def overlaps(found: Mapping[PlaneName, Side]) -> list[str]:
    """Return where two planes share an interface or a network. On loopback they may, if all of them are there: a lab on one host."""
    all_, refused = [*found.values()], []
    if all(side.is_loopback for side in all_):
        return []
    for i, one in enumerate(all_):
        for other in all_[i + 1 :]:
            if shared := sorted(one.interfaces & other.interfaces):
                wide = next((side for side in (one, other) if len(side.interfaces) > 1), None)
                moved = _first(wide or other, shared[0])
                command = f"ip address del {moved} dev {shared[0]}"
                refused.append(
                    f"planes.{one.name} {one.given!r} and planes.{other.name} {other.given!r} are both on {', '.join(shared)}: what one carries would "
                    f"wait for the other; give each its own: {command if wide else f'{command} && ip address add {moved} dev INTERFACE'}"
                )
            elif pair := next(((a, b) for a in one.networks for b in other.networks if _meet(a, b)), None):
                refused.append(
                    f"planes.{one.name} {one.given!r} and planes.{other.name} {other.given!r} overlap: {pair[0]} on {', '.join(sorted(one.interfaces))} "
                    f"and {pair[1]} on {', '.join(sorted(other.interfaces))}, so that a route decides between them; give {_first(other)} "
                    f"another network: ip address del {_first(other)} dev {other.addresses[0].interface}"
                )
    return refused


def _first(side: Side, interface: str = "") -> str:
    each = next(each for each in side.addresses if interface in ("", each.interface))
    return f"{each.address}/{each.network.prefixlen}"


def _meet(one: IpNetwork, other: IpNetwork) -> bool:
    return one.version == other.version and one.overlaps(other)


def down(found: Mapping[PlaneName, Side], config: ServeConfig, host: Snapshot) -> list[str]:
    """Return which interfaces that are used carry nothing."""
    refused = []
    for name, side in found.items():
        used = {side.addresses[0].interface} if name != "compute" else _kv_interfaces(config.transfer, side, host)
        for interface in sorted(used):
            link = host.links.get(interface)
            if link is None or not link.up:
                refused.append(
                    f"planes.{name} {side.given!r}: interface {interface} is down: ip link set dev {interface} up"
                )
            elif not link.carrier:
                refused.append(
                    f"planes.{name} {side.given!r}: interface {interface} has no carrier; look at its cable and the switch's port: ethtool {interface}"
                )
    return refused


def _kv_interfaces(transfer: TransferConfig, compute: Side, host: Snapshot) -> set[str]:
    """Return the interfaces that carry KV, and its control connections."""
    named = transfer.nics or ([compute.given] if transfer.host == _UNSET else [transfer.host])
    found = {find(f"transfer {each!r}", each, host)[1][0].interface for each in named}
    return found.union(*(_ports(device, host) or () for _, device in _devices(transfer)))


def peers(config: ServeConfig) -> list[Peer]:
    """Return who is named by a numeric address: receivers of KV on compute, workers and gateways on business."""
    named: list[tuple[PlaneName, str, str]] = []
    for i, worker in enumerate(config.workers):
        named.append(("compute", f"workers[{i}].control", worker.control.rpartition(":")[0]))
        named.append(("business", f"workers[{i}].url", _host(worker.url)))
    for role in (config.prefill, config.decode):
        if role.served is not None and role.served.server is not None:
            where = f"{'prefill' if role is config.prefill else 'decode'}.{role.name}.server"
            named.append(("compute", f"{where}.control", role.served.server.control.rpartition(":")[0]))
            named.append(("business", f"{where}.url", _host(role.served.server.url)))
    named += [("business", f"discovery.gateways[{i}]", _host(url)) for i, url in enumerate(config.discovery.gateways)]
    return [
        Peer(plane, where, str(address))
        for plane, where, host in named
        if not (plane == "compute" and config.external) and (address := _numeric(host)) is not None
    ]


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # that it is no URL is said elsewhere
        return ""


def _numeric(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def strays(found: Mapping[PlaneName, Side], known: Iterable[Peer], ways: Mapping[str, Way | None]) -> list[str]:
    """Return to which peers the routes lead over another plane, or KV by an interface that is of none."""
    refused = []
    for peer in known:
        side = found.get(peer.plane)
        if side is None or peer.address not in ways:
            continue
        path, interface = ways[peer.address], side.addresses[0].interface
        if path is None:
            refused.append(
                f"{peer.where} {peer.address}: there is no route to it: ip route add {_route(peer, side)} dev {interface}"
            )
        elif not path.local and (taken := _elsewhere(path.interface, side, found)):
            refused.append(
                f"{peer.where} {peer.address}: the route to it leaves by {path.interface}, {taken}, and not by planes.{side.name} ({interface}): "
                f"ip route replace {_route(peer, side)} dev {interface}{'' if path.table == _MAIN else f' table {path.table}'}"
            )
    return refused


def _elsewhere(interface: str, side: Side, found: Mapping[PlaneName, Side]) -> str:
    """Return what an interface is, in words, if it is not the plane's; empty: it may carry it."""
    if interface in side.interfaces:
        return ""
    if other := next((each.name for each in found.values() if interface in each.interfaces), None):
        return f"of planes.{other}"
    # Where routers hand hosts single addresses, those lie on lo and leave by any port: no other plane's, and that is enough.
    return "" if side.name != "compute" or "lo" in side.interfaces else "of no plane"


def _route(peer: Peer, side: Side) -> str:
    bits = 32 if _version(peer.address) == 4 else 128
    direct = any(ipaddress.ip_address(peer.address) in each.network for each in side.addresses)
    return f"{peer.address}/{bits}" + ("" if direct else " via ROUTER")
