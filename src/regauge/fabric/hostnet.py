"""A host's network files: systemd-networkd, netplan, and the kernel's settings. Both kinds are made of the same facts (`wire`).

compute     its network only. No default route. With several NICs each rail answers from its own: a rule for its address, and a
            table in which the whole plane is behind its NIC, so that it reaches other rails, too (one broadcast domain)
business    the default route, if the plane has a router. Beside it, an unreachable route to the compute plane: when its NICs are
            down, KV must not go after the default route
management  no default route; what its address sends leaves by it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from regauge.fabric.topology import Nic, Server, Topology

RAIL_TABLE = 100
"""Routing table of rail 0; that of rail r is so many later."""
MANAGEMENT_TABLE = 200
RULE_PRIORITY = 1_000
PLANE_METRIC = 1_024
"""Of the compute plane as a whole, in the main table."""
LAST_METRIC = 65_535
"""Of the unreachable route: behind every other."""
_HEADER = "# Made by `regauge topology render` from {site}: change the bill of materials, not this file.\n"


@dataclass(frozen=True)
class Route:
    """One route of an interface."""

    to: str
    """A network; `default`."""
    via: str = ""
    table: int = 0
    """0: the main one."""
    metric: int = 0
    source: str = ""
    kind: str = ""
    """`link`: reached without a router; `unreachable`: refused; empty: through `via`."""


@dataclass(frozen=True)
class Wired:
    """What an interface is given."""

    nic: Nic
    mtu: int
    routes: tuple[Route, ...]
    table: int
    """Table of what its address sends; 0: no rule."""


def wire(topology: Topology, server: Server) -> tuple[Wired, ...]:
    """Return what each interface of a server is given, in the order of the bill."""
    return tuple(_wired(topology, server, nic) for nic in server.nics)


def _wired(topology: Topology, server: Server, nic: Nic) -> Wired:
    plane = topology.planes[nic.plane]
    if nic.plane == "compute":
        several = len(server.on("compute")) > 1
        table = RAIL_TABLE + (nic.rail or 0) if several else 0
        routes = []
        if nic.network != plane.network:
            whole = str(plane.network)
            if nic is server.on("compute")[0]:
                routes.append(Route(whole, metric=PLANE_METRIC, source=str(nic.address), kind="link"))
            if several:
                routes.append(Route(whole, table=table, source=str(nic.address), kind="link"))
        elif several:
            routes.append(Route(str(plane.network), table=table, source=str(nic.address), kind="link"))
        return Wired(nic, plane.mtu, tuple(routes), table)
    via = str(plane.router) if plane.router else ""
    if nic.plane == "business":
        routes = [Route("default", via=via)] if via else []
        if server.on("compute"):
            routes.append(Route(str(topology.planes["compute"].network), metric=LAST_METRIC, kind="unreachable"))
        return Wired(nic, plane.mtu, tuple(routes), 0)
    if not via:
        return Wired(nic, plane.mtu, (), 0)
    table = MANAGEMENT_TABLE
    local = Route(str(plane.network), table=table, source=str(nic.address), kind="link")
    return Wired(nic, plane.mtu, (local, Route("default", via=via, table=table)), table)


# -- systemd-networkd --------------------------------------------------------------------------------------------------


def networkd(topology: Topology) -> dict[str, str]:
    """Return `.link` files, which name and size interfaces whose PCI address is known, and `.network` files (systemd.network(5))."""
    found = {}
    for server in topology.servers:
        for wired in wire(topology, server):
            base = f"hosts/{server.name}/networkd/10-{wired.nic.interface}"
            if wired.nic.pci:
                found[f"{base}.link"] = _head(topology) + _link(wired)
            found[f"{base}.network"] = _head(topology) + _network(wired)
    return found


def _head(topology: Topology) -> str:
    return _HEADER.format(site=topology.site)


def _link(wired: Wired) -> str:
    match = {"Path": f"pci-{wired.nic.pci}"}
    return _section("Match", match) + "\n" + _section("Link", {"Name": wired.nic.interface, "MTUBytes": wired.mtu})


def _network(wired: Wired) -> str:
    nic = wired.nic
    sections = [
        _section("Match", {"Name": nic.interface}),
        _section("Link", {"MTUBytes": wired.mtu}),
        _section("Network", {"Address": f"{nic.address}/{nic.network.prefixlen}", "DHCP": "no",
                             "LinkLocalAddressing": "no", "IPv6AcceptRA": "no", "LLDP": "yes", "EmitLLDP": "yes"}),
    ]  # fmt: skip
    sections += [_section("Route", _networkd_route(route)) for route in wired.routes]
    if wired.table:
        rule = {"From": f"{nic.address}/32", "Table": wired.table, "Priority": RULE_PRIORITY}
        sections.append(_section("RoutingPolicyRule", rule))
    return "\n".join(sections)


def _networkd_route(route: Route) -> dict[str, object]:
    said: dict[str, object] = {"Gateway": route.via} if route.to == "default" else {"Destination": route.to}
    if route.kind == "link":
        said["Scope"] = "link"
    elif route.kind:
        said["Type"] = route.kind
    more = {"PreferredSource": route.source, "Table": route.table, "Metric": route.metric}
    return said | {key: value for key, value in more.items() if value}


def _section(name: str, values: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in values.items())


# -- netplan -----------------------------------------------------------------------------------------------------------


def netplan(topology: Topology) -> dict[str, str]:
    """Return a netplan file for each host. It gives interfaces no names: the `.link` files of networkd do."""
    return {f"hosts/{server.name}/netplan/60-regauge.yaml": _netplan(topology, server) for server in topology.servers}


def _netplan(topology: Topology, server: Server) -> str:
    lines = ["network:", "  version: 2", "  renderer: networkd", "  ethernets:"]
    for wired in wire(topology, server):
        nic = wired.nic
        lines += [f'    "{nic.interface}":', f"      addresses: [{nic.address}/{nic.network.prefixlen}]", f"      mtu: {wired.mtu}",
                  "      dhcp4: false", "      dhcp6: false", "      accept-ra: false", "      link-local: []"]  # fmt: skip
        if wired.routes:
            lines += ["      routes:", *(f"        - {{{_netplan_route(route)}}}" for route in wired.routes)]
        if wired.table:
            rule = f"from: {nic.address}/32, table: {wired.table}, priority: {RULE_PRIORITY}"
            lines += ["      routing-policy:", f"        - {{{rule}}}"]
    return _head(topology) + "\n".join(lines) + "\n"


def _netplan_route(route: Route) -> str:
    said: dict[str, object] = {"to": route.to}
    if route.via:
        said["via"] = route.via
    if route.kind == "link":
        said["scope"] = "link"
    elif route.kind:
        said["type"] = route.kind
    more = {"from": route.source, "table": route.table, "metric": route.metric}
    said |= {key: value for key, value in more.items() if value}
    return ", ".join(f"{key}: {value}" for key, value in said.items())


# -- the kernel --------------------------------------------------------------------------------------------------------


def sysctl(topology: Topology) -> dict[str, str]:
    """Return kernel settings: each compute NIC speaks for its own addresses only, and nothing is forwarded between planes.

    Linux answers ARP for every address of the host on every interface; with NICs in one broadcast domain a rail would then be
    reached through another (`arp_ignore`, `arp_announce`: kernel documentation, ip-sysctl).
    """
    found = {}
    for server in topology.servers:
        lines = [_head(topology).rstrip(), "net.ipv4.ip_forward = 0"]
        for nic in server.nics:
            at = f"net.ipv4.conf.{nic.interface.replace('.', '/')}"
            lines += [f"{at}.arp_ignore = 1", f"{at}.arp_announce = 2", f"{at}.rp_filter = 1",
                      f"{at}.accept_redirects = 0", f"{at}.send_redirects = 0"]  # fmt: skip
        found[f"hosts/{server.name}/sysctl/70-regauge.conf"] = "\n".join(lines) + "\n"
    return found
