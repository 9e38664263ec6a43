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
_PERIOD_S: Final = 0.1


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
        """Ask until the verdict is known, or an engine has no way to tell its layout."""
        while self.verdict.path == UNKNOWN:
            for worker in self._workers.both():
                if worker.client.name not in self._known and worker.up and not await self._ask(worker):
                    return
            prefill, decode = (self._known.get(worker.client.name) for worker in self._workers.both())
            if prefill is not None and decode is not None:
                found = check(prefill, decode)
                reasons = [str(r) for r in found.refusals] or list(found.reasons)
                self.verdict = wire.VerdictInfo(found.path, "; ".join(reasons))
                log = get_logger()
                (log.error if self.refused else log.info)("the pair is known", path=found.path, reasons=reasons)
                return
            await asyncio.sleep(_PERIOD_S)

    async def _ask(self, worker: Worker) -> bool:
        """Return whether it has told its layout, or may yet."""
        try:
            layout = await worker.client.layout()
        except RegaugeError as error:
            get_logger().debug("no layout yet", worker=worker.client.name, **{ERROR: str(error)})
            return True
        if layout is not None:
            self._known[worker.client.name] = layout
        return layout is not None
