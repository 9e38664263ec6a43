"""What workers tell, into the metrics: their totals by what these have grown, their hosts' interfaces, and each transfer that was delivered."""

from __future__ import annotations

import msgspec

from regauge.move.state import Totals
from regauge.observe import NOTHING, Metrics
from regauge.serve import wire
from regauge.serve.connection import Connection


def count(metrics: Metrics, worker: Connection, health: wire.Health, before: wire.Health | None) -> None:
    """Take a worker's word after the one before; a restarted one begins anew."""
    name, role = worker.name, worker.role
    known = before is not None and before.pid == health.pid
    grown = health.transfers.since(before.transfers if known and before is not None else Totals())
    numbers = {field: n for field, n in msgspec.structs.asdict(grown).items() if isinstance(n, int)}
    metrics.worker_counted(name, role, numbers, grown.failed)
    if not metrics.counts_workers:
        return
    if known and before is not None and 0 < before.clock_s < health.clock_s:
        metrics.transfers.flowed(name, role, grown.landed, health.clock_s - before.clock_s)
    if health.host:
        metrics.planes.host(health.host, name, health.interfaces, health.clock_s)
        metrics.planes.off_plane.labels(name, role).set(health.off_plane_bytes)


def transferred(metrics: Metrics, event: wire.TransferEvent) -> None:
    """Record a transfer that was delivered."""
    metrics.transfer(
        path=event.path, mode=event.mode, wire_bytes=event.wire_bytes, seconds=event.seconds, spans=event.spans,
        stages=NOTHING if event.stages is None else msgspec.structs.asdict(event.stages),
    )  # fmt: skip
