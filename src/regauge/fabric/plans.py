"""What people lay cables and give addresses by: port maps, cabling and addresses, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address

from regauge.fabric.sonic import alias, port_name
from regauge.fabric.topology import Cable, CableKind, Topology

Rows = Sequence[Sequence[str]]

_KINDS: dict[CableKind, str] = {
    "dac": "passive copper (DAC)", "aec": "active copper (AEC)", "aoc": "active optical (AOC)", "fibre": "transceivers and fibre",
    "twisted-pair": "twisted pair",
}  # fmt: skip


def gbit(speed: int) -> str:
    """Return a speed as `400G`."""
    return f"{speed / 10**9:g}G"


def cable(said: Cable) -> str:
    """Return what a cable is."""
    return f"{_KINDS[said.kind]}, {said.length_m:g} m"


def ports(topology: Topology) -> dict[str, str]:
    """Return the port map of each switch, free ports too."""
    found: dict[str, str] = {}
    for switch in topology.switches:
        taken = {link.port: link for link in topology.links_of(switch.name)}
        rows = []
        for port in range(1, switch.ports + 1):
            cage, sub = divmod(port - 1, switch.breakout)
            link = taken.get(port)
            other = (
                [link.plane, link.node, link.end, gbit(link.speed)] if link else ["", "", "", gbit(switch.port_speed)]
            )
            where = f"{cage + 1}.{sub + 1}" if switch.breakout > 1 else str(cage + 1)
            rows.append([str(port), where, port_name(switch, port), alias(switch, port), *other])
        names = ["port", "cage", "SONiC name", "alias", "plane", "node", "end", "speed"]
        title = f"{switch.name}: {len(taken)} of {switch.ports} ports"
        found |= _both(f"switches/{switch.name}/ports", title, names, rows)
    return found


def cabling(topology: Topology) -> dict[str, str]:
    """Return every cable with both ends."""
    rows = []
    for number, link in enumerate(topology.links, 1):
        rows.append([str(number), link.switch, str(link.port), link.node, link.end, link.plane, gbit(link.speed),
                     cable(link.cable)])  # fmt: skip
    names = ["cable", "switch", "port", "node", "end", "plane", "speed", "kind"]
    return _both("cabling", f"{topology.site}: {len(rows)} cables", names, rows)


def addresses(topology: Topology) -> dict[str, str]:
    """Return every address with whose it is, by address."""
    rows = [[str(address), *rest] for address, rest in sorted(_owners(topology))]
    names = ["address", "plane", "node", "end", "network", "rail"]
    return _both("addresses", f"{topology.site}: {len(rows)} addresses", names, rows)


def _owners(topology: Topology) -> Iterator[tuple[IPv4Address, list[str]]]:
    for plane in topology.planes.values():
        if plane.router:
            yield plane.router, [plane.name, "router", "", str(plane.network), ""]
    for server in topology.servers:
        for nic in server.nics:
            rail = "" if nic.rail is None else str(nic.rail)
            yield nic.address, [nic.plane, server.name, nic.interface, str(nic.network), rail]
        if server.bmc:
            yield server.bmc.address, ["management", server.name, "bmc", str(server.bmc.network), ""]
    network = str(topology.planes["management"].network)
    for switch in topology.switches:
        if switch.address:
            yield switch.address, ["management", switch.name, "management", network, ""]


def _both(path: str, title: str, names: Sequence[str], rows: Rows) -> dict[str, str]:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([names, *rows])
    table = [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]
    return {f"{path}.csv": out.getvalue(), f"{path}.md": "\n".join([f"# {title}", "", *table, ""])}
