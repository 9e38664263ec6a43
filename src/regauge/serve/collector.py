"""Asks workers for receipts that did not come with their answers: of requests whose gateway was killed, or that ended otherwise."""

from __future__ import annotations

import asyncio
from typing import Final

from regauge.errors import RegaugeError
from regauge.observe import ERROR, WORKER, get_logger
from regauge.serve import wire
from regauge.serve.client import WorkerClient
from regauge.serve.fleet import Fleet
from regauge.serve.metering import Meter
from regauge.serve.workers import Worker

ASK_S: Final = 5.0


class Collector:
    """Goes round the workers. Which receipts are new the meter knows."""

    def __init__(self, fleet: Fleet, meter: Meter) -> None:
        self._fleet = fleet
        self._meter = meter
        self._seen: dict[str, int] = {}
        """Of each worker: the number of the latest receipt that was asked for."""

    async def run(self) -> None:
        """Go round until cancelled."""
        while True:
            await asyncio.gather(*(self.ask(worker) for worker in list(self._fleet.workers.values())))
            await asyncio.sleep(self._meter.config.collect_s)

    async def ask(self, worker: Worker) -> None:
        """Ask one worker for all that is new."""
        client, health = worker.client, worker.health
        if not isinstance(client, WorkerClient) or health is None or not worker.up:
            return
        since = self._seen.get(client.name, 0)
        while health.receipts != since:
            try:
                found = await client.receipts(since, asyncio.get_running_loop().time() + ASK_S)
            except RegaugeError as error:
                get_logger(**{WORKER: client.name}).debug("no receipts now", **{ERROR: str(error)})
                return
            self._meter.heard(found.lines)
            self._seen[client.name] = since = found.next
            if len(found.lines) < wire.MAX_RECEIPTS:
                break
        self._meter.asked(client.name)
