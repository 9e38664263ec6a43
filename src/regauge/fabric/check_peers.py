"""The way to peers: which port it leaves by, what `peers.measure` measures of it, and what of that is wrong (`judge`, pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from regauge.fabric.check_host import SKEW_S
from regauge.fabric.expected import Expected, present
from regauge.fabric.finding import Finding
from regauge.fabric.host import Host, number
from regauge.fabric.peers import PORT, Between, measure

_MTU: Final = 1_500
"""Of a port that is not known."""
_FLOOR_BITS: Final = 2e9
"""One stream of TCP reaches this on any server; what is slower is not the wire's doing."""
NAMES: Final = ("reach", "path-mtu", "bandwidth", "skew")
"""Of these checks, in docs/doctor.md."""


def look(
    host: Host, expected: Expected, address: str, port: int, key: bytes | None, seconds: float
) -> Iterator[Finding]:
    """Measure the way to a peer, from this host's port of its plane and rail where it is known, and yield what is wrong."""
    peer = next((each for each in expected.peers if each.address == address), None)
    ports = [each for each in expected.ports if peer and each.plane == peer.plane and each.rail == peer.rail]
    ours = next(iter(present(host, ports)), None)
    mtu = (ours and number(host.read(f"/sys/class/net/{ours.interface}/mtu"))) or _MTU
    most, source = (max(mtu, ours.mtu or 0), str(ours.address)) if ours else (mtu, "")
    yield from judge(measure(address, port, key, most, source=source, seconds=seconds), expected, mtu)


def judge(seen: Between, expected: Expected, mtu: int = 0) -> Iterator[Finding]:
    """Yield what is wrong on the way to a peer. `mtu`: of the interface here, where the port that is expected says none."""
    port = next((each for each in expected.ports if str(each.address) == seen.source), None)
    plane = port.plane if port else "host"
    own = port.interface if port else seen.source or "?"
    where = f"{own} to {seen.peer}"
    yield from _reach(seen, plane, where)
    if seen.reach in ("silent", "stranger"):
        return
    wanted = (port and port.mtu) or mtu
    yield from _path_mtu(seen, plane, where, wanted)
    yield from _skew(seen, where)
    line = (port and port.speed) or 0
    least = min(line, _FLOOR_BITS) / 2
    for word, bits in (("to the peer", seen.sent_bits), ("from the peer", seen.received_bits)):
        if bits is not None and bits < least:
            yield Finding("bandwidth", plane, where, f"{bits / 1e9:.2f} Gbit/s {word}, over a line of {line / 1e9:g}", "the wire, a NIC or a switch's port is slower than it says, or something else fills it",
                          f"ethtool {own}; ethtool -S {own} | grep -E 'err|drop|discard'")  # fmt: skip


def _reach(seen: Between, plane: str, where: str) -> Iterator[Finding]:
    listen = f"there: regauge doctor --listen {seen.peer} --key FILE (port {PORT})"
    if seen.reach == "silent":
        yield Finding("reach", plane, where, f"no answer: {seen.error}", "KV, or the request, cannot get there", f"ip route get {seen.peer}; ping {seen.peer}; look at the switch's VLAN and at firewall rules: nft list ruleset")  # fmt: skip
    elif seen.reach == "stranger":
        yield Finding("reach", plane, where, f"is no peer of this deployment: {seen.error}", "the address is somebody else's, or has another key", "give both hosts the same transfer.key_file")  # fmt: skip
    elif seen.reach == "refused":
        yield Finding("reach", plane, where, "the host answers, and nobody listens: bandwidth and clock are not measured", "what crosses whole and how fast is not known", listen, "unknown")  # fmt: skip
    elif seen.error:
        yield Finding("reach", plane, where, f"the connection broke: {seen.error}", "bulk is lost where small packets pass: often an MTU", f"ping -M do -s 8972 {seen.peer}")  # fmt: skip


def _path_mtu(seen: Between, plane: str, where: str, wanted: int) -> Iterator[Finding]:
    why = "the switch, or the peer, drops larger packets without a word: hand-shakes pass, KV stalls"
    if seen.path_mtu is None and not seen.error:
        yield Finding("path-mtu", plane, where, "not known: no answer to probes", why, f"ping -M do -s {max(wanted - 28, 0)} {seen.peer}", "unknown")  # fmt: skip
    elif seen.path_mtu is not None and seen.path_mtu < wanted:
        yield Finding("path-mtu", plane, where, f"packets of up to {seen.path_mtu} bytes cross whole, and the MTU here is {wanted}", why,
                      f"set the MTU of the switch's ports and of the peer's interface to {wanted} (there: ip link set dev INTERFACE mtu {wanted})")  # fmt: skip


def _skew(seen: Between, where: str) -> Iterator[Finding]:
    if seen.offset_s is None or seen.uncertainty_s is None:
        return
    if abs(seen.offset_s) - seen.uncertainty_s > SKEW_S:
        yield Finding("skew", "host", where, f"the peer's clock is {seen.offset_s * 1e3:+.1f} ms off (known to {seen.uncertainty_s * 1e3:.1f} ms)", "deadlines, receipts and time lines of two hosts do not fit together",
                      "chronyc tracking; chronyc makestep, on both")  # fmt: skip
    elif seen.uncertainty_s > SKEW_S:
        yield Finding("skew", "host", where, f"the peer's clock is not known better than to {seen.uncertainty_s * 1e3:.0f} ms", "the way there takes that long", f"ping {seen.peer}", "unknown")  # fmt: skip
