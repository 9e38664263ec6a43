"""What `GET /debug/transfers` answers, of a worker and of the gateway that asks all workers: bounded, and without secrets.

Durations are seconds, sizes bytes. `regauge top` shows it; `docs/operations.md` explains each state.
"""

from __future__ import annotations

import ipaddress
from datetime import datetime
from typing import Final

import msgspec

from regauge.config import Role
from regauge.errors import ProtocolError
from regauge.move.flow_types import LinkState as NicState
from regauge.move.protocol import TransferState
from regauge.move.state import LinkState, PoolState, SessionState, Totals

SHOWN: Final = 100
"""Things of each kind that are shown unless the query's `limit` says otherwise."""
MAX_SHOWN: Final = 1_000
MAX_LEGS: Final = 64
MAX_REASON: Final = 500
"""Characters of a reason; longer ones are cut."""


class Hidden(msgspec.Struct, frozen=True):
    """How many things of each kind are there and not shown, since an answer is bounded."""

    transfers: int = 0
    links: int = 0
    sessions: int = 0


class WorkerState(msgspec.Struct, frozen=True):
    """One worker."""

    name: str
    role: Role
    pid: int
    clock_s: float
    """`time.monotonic()` of the worker: rates are differences of two answers by this clock."""
    transfers: list[TransferState]
    links: list[LinkState]
    pools: list[PoolState]
    sessions: list[SessionState]
    """Incoming data connections."""
    totals: Totals
    nics: list[NicState] = []
    """Of the decode side: what flow control knows of each NIC (line rate: `transfer.flow.nic_bytes_per_s`)."""
    hidden: Hidden = Hidden()


class WorkerView(msgspec.Struct, frozen=True):
    """What the gateway knows of a worker; `state` is None, and `reason` says why, where it did not answer."""

    name: str
    role: Role
    up: bool
    since: datetime
    reason: str
    state: WorkerState | None


class Overview(msgspec.Struct, frozen=True):
    """The gateway and its workers."""

    version: str
    model: str
    path: str
    """Of the pair of layouts."""
    requests: int
    """In the house."""
    unix_s: float
    workers: list[WorkerView]


def bounded(state: WorkerState, limit: int) -> WorkerState:
    """Return the `limit` newest transfers, links and data connections of a worker, and of reasons and legs what can be read."""
    transfers = sorted(state.transfers, key=lambda t: t.age_s)[:limit]
    links = sorted(state.links, key=lambda link: link.up_s)[:limit]
    sessions = state.sessions[-limit:]
    hidden = Hidden(
        len(state.transfers) - len(transfers), len(state.links) - len(links), len(state.sessions) - len(sessions)
    )
    short = [msgspec.structs.replace(t, reason=t.reason[:MAX_REASON], legs=t.legs[:MAX_LEGS]) for t in transfers]
    return msgspec.structs.replace(state, transfers=short, links=links, sessions=sessions, hidden=hidden)


def shown(limit: str | None) -> int:
    """Read the query's `limit`. Raises ProtocolError unless it is a whole number from 1 to MAX_SHOWN."""
    if limit is None:
        return SHOWN
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_SHOWN)) and 1 <= int(limit) <= MAX_SHOWN):
        raise ProtocolError(f"limit must be a whole number from 1 to {MAX_SHOWN}")
    return int(limit)


def is_loopback(host: str) -> bool:
    """Whether a client's address is of this machine alone; not so for what is no address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
