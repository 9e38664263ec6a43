"""What `GET /debug/transfers` and `GET /debug/live` answer, of a worker and of the gateway that asks all workers: bounded, and without secrets.

Durations are seconds, sizes bytes. `regauge top` shows it; `docs/operations.md` explains each state.
"""

from __future__ import annotations

import ipaddress
from datetime import datetime

import msgspec

from regauge.config import Role
from regauge.move.state import WorkerState


class WorkerView(msgspec.Struct, frozen=True):
    """What the gateway knows of a worker; `state` is None, and `reason` says why, where it did not answer."""

    name: str
    role: Role
    up: bool
    since: datetime
    reason: str
    state: WorkerState | None
    host: str = ""
    """Name of its machine; empty: not told."""


class Overview(msgspec.Struct, frozen=True):
    """The gateway and its workers."""

    version: str
    model: str
    path: str
    """Of the pair of layouts."""
    requests: int
    """In the house, of all gateway processes."""
    unix_s: float
    workers: list[WorkerView]
    silent: list[str]
    """Gateway processes that do not answer, and why."""


class Series(msgspec.Struct, frozen=True):
    """One line of a scrape; a histogram's buckets have the label `le`, and are cumulative."""

    labels: dict[str, str]
    value: float


class Live(Overview, frozen=True):
    """The gateway and its workers, with the metrics."""

    metrics: dict[str, list[Series]]
    """By the name that a line of `/metrics` begins with."""


def is_loopback(host: str) -> bool:
    """Whether a client's address is of this machine alone; not so for what is no address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
