"""A worker of a gateway, and what is known of its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from regauge.errors import ProtocolError, RegaugeError
from regauge.observe import ERROR, ROLE, WORKER, Metrics, get_logger
from regauge.serve import told, wire
from regauge.serve.connection import Connection, RequestTimeout, WorkerError, WorkerLost
from regauge.serve.debug import WorkerView

DEBUG_S: Final = 2.0


@dataclass(frozen=True)
class HealthPolicy:
    """A worker is dead after a refused connection, or `misses` polls in a row without an answer in `limit_s`."""

    period_s: float = 0.5
    limit_s: float = 2.0
    misses: int = 3


class Worker:
    """One worker and what is known of its health: `up`, since when, and why not."""

    def __init__(
        self,
        client: Connection,
        metrics: Metrics,
        policy: HealthPolicy,
        told: Callable[[Worker, wire.Health | None], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`told` is called after each poll, with what the worker has answered; `clock` is of `asked`."""
        self.client = client
        self.up = False
        self.since = datetime.now(UTC)
        self.reason = "it was not asked yet"
        self.draining = False
        self.retired = False
        """Whether it is to get no new requests, whatever it says itself."""
        self.health: wire.Health | None = None
        """The latest that it has told."""
        self._metrics = metrics
        self._policy = policy
        self._missed = 0
        self._counted: wire.Health | None = None
        """The latest whose totals are in the metrics."""
        self._doubt = asyncio.Event()
        self._told = told
        self.begun = 0
        """Polls so far."""
        self.asked = clock()
        """When the latest of them began, in seconds: what it answers is of no later time."""
        self._clock = clock
        self.answered = 0
        """The latest of them that was answered."""
        metrics.worker_down(client.name, client.role)

    @property
    def usable(self) -> bool:
        """Whether it takes requests."""
        return self.up and not self.draining and not self.retired

    @property
    def computes(self) -> bool:
        """Whether it can decode a prompt that it has to compute itself."""
        return self.client.computes or (self.health is not None and self.health.computes)

    def doubt(self) -> None:
        """Ask at once: a request has just lost this worker."""
        self._doubt.set()

    async def watch(self) -> None:
        """Poll the worker until cancelled."""
        while True:
            self._doubt.clear()  # a doubt that comes while it is asked is of a later time: it is asked again
            await self.poll()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._policy.period_s):
                    await self._doubt.wait()

    async def poll(self) -> None:
        """Ask once, and note the outcome."""
        self.begun += 1
        self.asked = self._clock()
        self._told(self, await self._poll(self.begun))

    async def _poll(self, number: int) -> wire.Health | None:
        try:
            health = await self.client.health(self._policy.limit_s)
        except RequestTimeout as error:
            self._missed += 1
            if self._missed >= self._policy.misses or not self.up:
                self._note(False, f"{error}, {self._missed} times in a row")
        except WorkerLost as error:
            self._note(False, error.reason)
        except (WorkerError, ProtocolError) as error:
            self._note(False, str(error))
        else:
            self._missed, self.answered, self.health = 0, number, health
            self.draining = health.status == "draining"
            self._note(True, "")
            self._metrics.worker_up.labels(self.client.name, self.client.role).set(1)
            if health.pages:
                self._metrics.worker_state(
                    self.client.name,
                    self.client.role,
                    running=health.running,
                    waiting=health.waiting,
                    free_pages=health.free_pages,
                    pages=health.pages,
                    quarantined_pages=health.quarantined_pages,
                )
            told.count(self._metrics, self.client, health, self._counted)
            self._counted = health
            return health
        return None

    def _note(self, up: bool, reason: str) -> None:
        if up != self.up:
            self.up, self.since = up, datetime.now(UTC)
            fields = {WORKER: self.client.name, ROLE: self.client.role}
            if up:
                get_logger(**fields).info("worker is up")
            else:
                get_logger(**fields).error("worker is lost", **{ERROR: reason})
        self.reason = reason
        if not up:
            self._metrics.worker_down(self.client.name, self.client.role)
            self.client.give_up(reason)


async def view(worker: Worker, limit: int) -> WorkerView:
    """Ask a worker how its transfers stand; what keeps it from answering within DEBUG_S is said in its place."""
    state, reason = None, worker.reason
    try:
        state = await worker.client.debug(limit, asyncio.get_running_loop().time() + DEBUG_S)
    except RegaugeError as error:
        reason = str(error)
    host = worker.health.host if worker.health is not None else ""
    return WorkerView(worker.client.name, worker.client.role, worker.up, worker.since, reason, state, host)
