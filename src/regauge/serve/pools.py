"""The gateway's pools of workers follow what the sources of workers tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from regauge.config import ServeConfig
from regauge.config_planes import PlaneName
from regauge.errors import LayoutError
from regauge.observe import ERROR, WORKER, get_logger
from regauge.planes import astray
from regauge.planes_here import Side
from regauge.serve.discovery import Source, Static, merged
from regauge.serve.etcd import EtcdSource
from regauge.serve.fleet import Fleet
from regauge.serve.kubernetes import KubernetesSource
from regauge.serve.registry import Change, Drained, Entry, Joined, Left


def sources(config: ServeConfig) -> list[Source]:
    """Return the sources that a configuration names; registration over HTTP is another one (`registration.Desk`). Raises ConfigError."""
    rules, secure = config.discovery, config.transfer.tls is not None
    found: list[Source] = []
    if config.workers:
        found.append(Static(config.workers, secure=secure))
    if rules.etcd is not None:
        found.append(EtcdSource(rules.etcd, rules.max_workers))
    if rules.kubernetes is not None:
        found.append(KubernetesSource(rules.kubernetes, rules.max_workers, secure=secure))
    return found


Planes = Mapping[PlaneName, Side]
NOWHERE: Final[Planes] = MappingProxyType({})
"""No plane is declared."""


async def follow(fleet: Fleet, sources: Sequence[Source], taken: Iterable[str] = (), planes: Planes = NOWHERE) -> None:
    """Do what the sources tell until cancelled. Names that are `taken` are of the gateway's own workers; who is on the wrong one of `planes` is left out."""
    async for changes in merged(sources, taken):
        for change in changes:
            apply(fleet, change, planes)


def apply(fleet: Fleet, change: Change, planes: Planes = NOWHERE) -> None:
    """Do what one change says."""
    match change:
        case Joined(entry):
            known = fleet.workers.get(entry.name)
            if known is not None:  # another process, or another address
                fleet.leave(entry.name, "another worker has joined under its name")
            if wrong := misplaced(entry, planes):
                get_logger(**{WORKER: entry.name}).error("the worker is left out", **{ERROR: wrong})
                return
            try:
                layout = entry.read_layout()
            except LayoutError as error:
                layout = None
                get_logger(**{WORKER: entry.name}).error("its layout cannot be read", **{ERROR: str(error)})
            if layout is not None:
                fleet.pairs.learn(entry.name, layout)
            fleet.join(entry.address)
        case Drained(name, draining):
            fleet.drain(name, draining=draining)
        case Left(name, reason):
            fleet.leave(name, reason)


def misplaced(entry: Entry, planes: Planes) -> str:
    """Return which address of a worker is on the wrong plane of this host, in words; empty: none, as far as numbers tell."""
    address = entry.address
    places: list[tuple[PlaneName, str, str]] = [("business", "url", urlsplit(address.url).hostname or "")]
    places += [("compute", "ranks.control", rank.control[0]) for rank in address.ranks if rank.control is not None]
    for plane, what, host in places:
        if other := astray(planes, plane, host):
            return f"its {what} {host} is on planes.{other}, and belongs on planes.{plane}; set [planes] where it runs"
    return ""
