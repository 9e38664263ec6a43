"""The doctor's checks of links, addresses and routes: everything that plain Linux says."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address
from itertools import combinations

from regauge.fabric.expected import Expected, Peer, Port, addresses, present
from regauge.fabric.finding import Finding
from regauge.fabric.host import Host, decoded, number, rows

MOST_ROUTES = 256
"""That are asked for: some milliseconds each."""


def address(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each port has its address, and no other interface has it."""
    config = expected.config if expected.guessed else None
    for plane, given in ({} if config is None else config.planes.declared()).items():
        if not expected.on(plane):
            yield Finding(
                "address", plane, f"planes.{plane}", f"this host has nothing that {given!r} means", "regauge does not start.",
                f"ip address add ADDRESS/BITS dev INTERFACE, or mend planes.{plane}",
            )  # fmt: skip
    own = addresses(host)
    for port in expected.ports:
        wanted, bits = str(port.address), port.network.prefixlen
        where = [each.interface for each in own if each.address == port.address]
        if port.interface in where:
            continue
        elsewhere = next(iter(where), "")
        what, mend = f"{port.interface} does not have {wanted}", f"ip address add {wanted}/{bits} dev {port.interface}"
        if not present(host, [port]):
            what, mend = (
                f"there is no interface {port.interface}",
                "udevadm control --reload; udevadm trigger -c add -s net",
            )
        elif elsewhere:
            what += f", {elsewhere} does"
            mend = f"ip address del {wanted}/{bits} dev {elsewhere}; {mend}"
        yield Finding(
            "address", port.plane, port.interface, what, "Peers send to this address, and by this port.", mend
        )


def overlap(host: Host, expected: Expected) -> Iterator[Finding]:
    """Planes share neither a network nor an interface."""
    for (one, first), (other, second) in combinations(expected.planes.items(), 2):
        if first.overlaps(second):
            yield Finding(
                "overlap", one, str(first), f"{one} and {other} ({second}) share addresses",
                "A route decides between them, so that KV may take the slow plane.", f"give {other} another network, and render the hosts' files anew",
            )  # fmt: skip
    own = addresses(host)
    for interface in dict.fromkeys(each.interface for each in own):
        here = [each.address for each in own if each.interface == interface]
        planes = {each: plane for each in here if (plane := _plane(each, expected))}
        if len(set(planes.values())) < 2:
            continue
        alien = [each for each, plane in planes.items() if plane != _owner(interface, expected)]
        yield Finding(
            "overlap", _owner(interface, expected) or min(planes.values()), interface,
            "it has addresses of several planes: " + ", ".join(f"{each} ({plane})" for each, plane in planes.items()),
            "What one plane carries waits for the other, and KV leaves where clients are.", f"ip address del {alien[-1]} dev {interface}",
        )  # fmt: skip


def _plane(address_: IPv4Address, expected: Expected) -> str:
    return next((plane for plane, network in expected.planes.items() if address_ in network), "")


def _owner(interface: str, expected: Expected) -> str:
    return next((port.plane for port in expected.ports if port.interface == interface), "")


def link(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each port is up, and has a partner."""
    for port in present(host, expected.ports):
        state = host.read(f"/sys/class/net/{port.interface}/operstate") or "unknown"
        flags = number(host.read(f"/sys/class/net/{port.interface}/flags"))
        if flags is not None and not flags & 1:
            yield Finding(
                "link", port.plane, port.interface, "the interface is set down", "Nothing crosses it.", f"ip link set dev {port.interface} up",
            )  # fmt: skip
        elif state not in ("up", "unknown") or host.read(f"/sys/class/net/{port.interface}/carrier") == "0":
            yield Finding(
                "link", port.plane, port.interface, f"the port has no partner (operstate {state})", "Nothing crosses it.",
                f"look at cable, transceiver and the switch's port: ethtool {port.interface}; ethtool -m {port.interface}",
            )  # fmt: skip


def speed(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each port runs at its speed, in both directions at once."""
    for port in present(host, expected.ports):
        base = f"/sys/class/net/{port.interface}"
        found = number(host.read(f"{base}/speed"))
        if port.speed is not None and found is not None and 0 < found * 10**6 < port.speed:
            yield Finding(
                "speed", port.plane, port.interface, f"it runs at {_bits(found * 10**6)}, and should at {_bits(port.speed)}",
                "Every transfer over it takes as much longer.",
                f"ethtool -s {port.interface} autoneg on; if it stays: ethtool -m {port.interface} (transceiver), and the switch's port",
            )  # fmt: skip
        if host.read(f"{base}/duplex") == "half":
            yield Finding(
                "speed", port.plane, port.interface, "half duplex", "Credit and acknowledgements wait for the data.", f"ethtool -s {port.interface} duplex full autoneg on",
            )  # fmt: skip


def _bits(speed_: int) -> str:
    return f"{speed_ / 1e9:g} Gbit/s"


def mtu(host: Host, expected: Expected) -> Iterator[Finding]:
    """Each port has its plane's MTU."""
    for port in present(host, expected.ports):
        found = number(host.read(f"/sys/class/net/{port.interface}/mtu"))
        if port.mtu is not None and found is not None and found != port.mtu:
            yield Finding(
                "mtu", port.plane, port.interface, f"MTU {found}, and the plane has {port.mtu}",
                "Larger packets of peers are dropped without a word: connections stand, and transfers hang." if found < port.mtu
                else "Peers drop what it sends: connections stand, and transfers hang.",
                f"ip link set dev {port.interface} mtu {port.mtu}",
            )  # fmt: skip


def route(host: Host, expected: Expected) -> Iterator[Finding]:
    """What goes to a peer leaves by the plane's port, and from its address; there is no default route on the compute plane."""
    own = {(each.interface, each.address) for each in addresses(host)}
    for port, peer in _pairs(expected):
        if (port.interface, port.address) not in own or not _is_up(host, port):
            continue  # which `address` and `link` tell
        found = rows(decoded(host.run("ip", "-j", "route", "get", peer.address, "from", str(port.address))))
        interface = str(found[0].get("dev", "")) if found else ""
        allowed = {each.interface for each in expected.on(port.plane)} if port.rail != peer.rail else {port.interface}
        if not found:
            yield Finding(
                "route", port.plane, port.interface, f"no route to {peer.name} ({peer.address})", "Nothing reaches it.",
                f"ip route add {port.network} dev {port.interface} src {port.address}",
            )  # fmt: skip
        elif interface not in allowed:
            plane = _owner(interface, expected)
            taken = f"{interface} ({plane})" if plane else interface
            yield Finding(
                "route", port.plane, port.interface, f"what goes to {peer.name} ({peer.address}) leaves by {taken}",
                "KV takes a plane that is not its own: slow, and where clients are." if port.plane == "compute" and plane != "compute" else "Its own port stays idle.",
                f"ip route replace {peer.address}/32 dev {port.interface}{_table(found[0])}",
            )  # fmt: skip
    for each in rows(decoded(host.run("ip", "-j", "route", "show", "default"))):
        if _owner(str(each.get("dev")), expected) == "compute":
            yield Finding(
                "route", "compute", str(each.get("dev")), "the default route leaves by the compute plane", "All that goes elsewhere competes with KV, or is lost there.",
                f"ip route del default dev {each.get('dev')}",
            )  # fmt: skip


def _is_up(host: Host, port: Port) -> bool:
    flags = number(host.read(f"/sys/class/net/{port.interface}/flags"))
    return (flags is None or bool(flags & 1)) and host.read(f"/sys/class/net/{port.interface}/carrier") != "0"


def _table(found: dict[str, object]) -> str:
    return f" table {found['table']}" if found.get("table") not in (None, "main", 254) else ""


def _pairs(expected: Expected) -> list[tuple[Port, Peer]]:
    """Return whose routes are asked for: of each plane its first port, or those of a peer's rail."""
    found = []
    for peer in expected.peers:
        ports = expected.on(peer.plane)
        same = [port for port in ports if port.rail == peer.rail] or list(ports)
        found += [(port, peer) for port in same[:1]]
    return found[:MOST_ROUTES]


def rails(host: Host, expected: Expected) -> Iterator[Finding]:
    """With several ports on one plane each answers for itself alone (arp_ignore, arp_announce), and answers that come by another are taken (rp_filter)."""
    ports = present(host, expected.on("compute"))
    if len(ports) < 2:
        return
    ruled = {str(each.get("src")) for each in rows(decoded(host.run("ip", "-j", "rule", "show")))}
    for port in ports:
        for name, good, value, why in (
            ("arp_ignore", (1, 2, 3), 1, "Any port answers for any address: peers send to the wrong rail."),
            (
                "arp_announce",
                (2,),
                2,
                "Peers learn another port's address from its requests, and send to the wrong rail.",
            ),
            ("rp_filter", (0, 2), 2, "Packets that come by another rail than the route back are dropped."),
        ):
            found = _setting(host, port.interface, name)
            if name == "rp_filter" and str(port.address) in ruled:
                continue  # the way back from its address is its own, so that a strict look finds it
            if found is not None and found not in good:
                yield Finding(
                    "rails", "compute", port.interface, f"net.ipv4.conf.{port.interface}.{name} is {found}", why,
                    f"sysctl -w net.ipv4.conf.{port.interface}.{name}={value} net.ipv4.conf.all.{name}={value}",
                )  # fmt: skip


def _setting(host: Host, interface: str, name: str) -> int | None:
    """Return what holds: of `all` and the interface's the larger (Linux's ip-sysctl documentation)."""
    found = [number(host.read(f"/proc/sys/net/ipv4/conf/{each}/{name}")) for each in ("all", interface)]
    known = [each for each in found if each is not None]
    return max(known) if known else None
