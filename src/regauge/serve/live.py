"""What `GET /debug/live` answers: all that `/metrics` has at this moment, as JSON, and how each worker stands. The live page and `regauge top` are made of it;
without the metrics it is what `GET /debug/transfers` answers.

The figures are those of the registry that `/metrics` is written from: both say the same. Bounded as both are: labels are, and of each worker the newest
`limit` things of a kind.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from regauge import __version__
from regauge.observe import Metrics
from regauge.serve.debug import Live, Overview, Series
from regauge.serve.fleet import Fleet
from regauge.serve.siblings import Siblings
from regauge.serve.workers import view

PATH: Final = "/debug/live"
HOUSE: Final = "regauge_requests_in_flight"


def series(metrics: Metrics) -> dict[str, list[Series]]:
    """Return every line of `/metrics`; times of creation, which nobody reads, are left out."""
    found: dict[str, list[Series]] = {}
    for family in metrics.source().collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, []).append(Series(dict(sample.labels), float(sample.value)))
    return found


async def look(fleet: Fleet, metrics: Metrics, model: str, siblings: Siblings, limit: int) -> Live:
    """Ask every worker how it stands, and every sibling whether it is there, all at once; then read the metrics.

    Requests in the house are those of the metrics, which all processes share: those of one that stands still count.
    """
    asked = asyncio.gather(*(view(worker, limit) for worker in fleet.ordered()))
    views, silent = await asyncio.gather(asked, siblings.silent())
    fleet.count()
    found = series(metrics)
    house = int(sum(one.value for one in found.get(HOUSE, [])))
    return Live(__version__, model, fleet.verdict.path, house, time.time(), views, silent, found)


def overview(look: Live) -> Overview:
    """Return it without the metrics."""
    return Overview(**{name: getattr(look, name) for name in Overview.__struct_fields__})
