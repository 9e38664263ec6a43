"""What the interfaces of this host's planes have carried, by the kernel's counters. Which bytes of KV they cannot have carried: `astray.py`.

Counters are those of the network interface, and of the RDMA ports behind it, which it does not count: `port_xmit_data` and `port_rcv_data` are in
units of four bytes (Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from regauge.astray import Carried

WORD = 4
"""Bytes of a unit of an RDMA port's counters."""
MAX_INTERFACES = 64
"""Of a host: a bound for what a worker tells."""


class InterfaceBytes(msgspec.Struct, frozen=True):
    """One interface, since its driver was loaded."""

    plane: str
    interface: str
    received: int
    sent: int
    bytes_per_s: float
    """Its speed; 0: it tells none."""


def read(planes: Mapping[Any, frozenset[str]], root: Path = Path("/")) -> list[InterfaceBytes]:
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


def carried(found: list[InterfaceBytes], plane: str) -> Carried | None:
    """Return what a plane's interfaces have carried, all together; None: none of them is there."""
    own = [each for each in found if each.plane == plane]
    if not own:
        return None
    life = tuple(each.interface for each in own)
    return Carried(life, sum(each.sent for each in own), sum(each.received for each in own))


def counts_rdma(planes: Mapping[Any, frozenset[str]], plane: str, root: Path = Path("/")) -> bool:
    """Whether the RDMA ports behind a plane's interfaces are counted: each has one at least."""
    ports = [
        list((root / "sys/class/net" / name).glob("device/infiniband/*/ports/*/counters/port_xmit_data"))
        for name in planes.get(plane, ())
    ]
    return bool(ports) and all(ports)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # an interface that is down has no speed
        return None
