"""What `GET /debug/live` answers: all that `/metrics` has at this moment, as JSON, and how each worker stands. The live page and `regauge top` are made of it.

The figures are those of the registry that `/metrics` is written from: both say the same. Bounded as both are: labels are, and of each worker the newest
`limit` things of a kind.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from regauge import __version__
from regauge.observe import Metrics
from regauge.serve.debug import Live, Series, WorkerView
from regauge.serve.fleet import Fleet
from regauge.serve.workers import view

PATH: Final = "/debug/live"


def series(metrics: Metrics) -> dict[str, list[Series]]:
    """Return every line of `/metrics`; times of creation, which nobody reads, are left out."""
    found: dict[str, list[Series]] = {}
    for family in metrics.source().collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, []).append(Series(dict(sample.labels), float(sample.value)))
    return found


async def look(fleet: Fleet, metrics: Metrics, model: str, requests: int, limit: int) -> Live:
    """Ask every worker how it stands, then read the metrics."""
    views: list[WorkerView] = await asyncio.gather(*(view(worker, limit) for worker in fleet.ordered()))
    fleet.count()
    return Live(__version__, model, fleet.verdict.path, requests, time.time(), views, series(metrics))
