"""What the interfaces of this host's planes have carried, by the kernel's counters, and which bytes of KV cannot have crossed the compute plane.

Counters are those of the network interface, and of the RDMA ports behind it, which it does not count: `port_xmit_data` and `port_rcv_data` are in
units of four bytes (Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from regauge.config_planes import PlaneName

WORD = 4
"""Bytes of a unit of an RDMA port's counters."""
MAX_INTERFACES = 64
"""Of a host: a bound for what a worker tells."""


class InterfaceBytes(msgspec.Struct, frozen=True):
    """One interface, since its driver was loaded."""

    plane: PlaneName
    interface: str
    received: int
    sent: int
    bytes_per_s: float
    """Its speed; 0: it tells none."""


def read(planes: Mapping[PlaneName, frozenset[str]], root: Path = Path("/")) -> list[InterfaceBytes]:
    """Return the counters of these interfaces; of one that has gone, none."""
    found = []
    for plane, interfaces in planes.items():
        for interface in sorted(interfaces)[:MAX_INTERFACES]:
            base = root / "sys/class/net" / interface
            received, sent = _number(base / "statistics/rx_bytes"), _number(base / "statistics/tx_bytes")
            if received is None or sent is None:
                continue
            for port in sorted(base.glob("device/infiniband/*/ports/*/counters")):
                received += WORD * (_number(port / "port_rcv_data") or 0)
                sent += WORD * (_number(port / "port_xmit_data") or 0)
            speed = _number(base / "speed") or 0
            found.append(InterfaceBytes(plane, interface, received, sent, max(0, speed) * 125_000.0))
    return found


def carried(found: list[InterfaceBytes], plane: PlaneName) -> tuple[int, int]:
    """Return the bytes that a plane's interfaces have received and sent."""
    own = [each for each in found if each.plane == plane]
    return sum(each.received for each in own), sum(each.sent for each in own)


class OffPlane:
    """The bytes of KV of one worker that its compute plane cannot have carried, since the worker began: a bound from below.

    KV that was delivered has crossed since, so that on its plane the interfaces have counted as much, and headers beside it. Of what they lack, all went
    another way. Once a counter has gone back (a driver was loaded anew) nothing can be said any more, and nothing is.
    """

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None
        self._last = (0, 0)
        self._known = True

    def bytes(self, received: int, sent: int, kv_received: int, kv_sent: int) -> int:
        """Return the bound. Counters of the interfaces, and the worker's own totals; the first call is before its first transfer."""
        if self._first is None:
            self._first = self._last = (received, sent)
        self._known &= received >= self._last[0] and sent >= self._last[1]
        self._last = (received, sent)
        if not self._known:
            return 0
        return max(0, kv_received - (received - self._first[0]), kv_sent - (sent - self._first[1]))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # an interface that is down has no speed
        return None
