"""What the gateway knows of its pair's path: from the start where both layouts are known then, else as soon as the engines tell theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from regauge.errors import RegaugeError
from regauge.layout.spec import Layout
from regauge.observe import ERROR, get_logger
from regauge.plan import check
from regauge.serve import wire
from regauge.serve.workers import Worker, Workers

UNKNOWN: Final = "UNKNOWN"
"""Path of a pair whose layouts are not known."""
REFUSED: Final = "REFUSED"
_PERIOD_S: Final = 1.0


class Pairing:
    """The verdict of the gateway's pair."""

    def __init__(self, workers: Workers, verdict: wire.VerdictInfo, known: Mapping[str, Layout] | None = None) -> None:
        self.verdict = verdict
        self._workers = workers
        self._known = dict(known or {})

    @property
    def refused(self) -> bool:
        """Whether the pair's layouts cannot be carried over."""
        return self.verdict.path == REFUSED

    async def learn(self) -> None:
        """Ask until the verdict is known, or an engine does not tell its layout."""
        while self.verdict.path == UNKNOWN:
            layouts = [await self._layout(worker) for worker in self._workers.both()]
            prefill, decode = layouts
            if prefill is not None and decode is not None:
                found = check(prefill, decode)
                reasons = [str(r) for r in found.refusals] or list(found.reasons)
                self.verdict = wire.VerdictInfo(found.path, "; ".join(reasons))
                log = get_logger()
                (log.error if self.refused else log.info)("the pair is known", path=found.path, reasons=reasons)
                return
            await asyncio.sleep(_PERIOD_S)

    async def _layout(self, worker: Worker) -> Layout | None:
        name = worker.client.name
        if name not in self._known and worker.up:
            try:
                layout = await worker.client.layout()
            except RegaugeError as error:
                get_logger().debug("no layout yet", worker=name, **{ERROR: str(error)})
            else:
                if layout is not None:
                    self._known[name] = layout
        return self._known.get(name)
