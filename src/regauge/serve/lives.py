"""What a request's life (`route.request.Life`) says after a failure, carried out: waiting for workers, going on, giving up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from regauge.errors import RegaugeError
from regauge.observe import ERROR, REQUEST_ID, ROUTE, get_logger
from regauge.route.cluster import Cause
from regauge.route.request import Action, Life, Resume, Start, Stop, Wait
from regauge.route.router import BLAMELESS
from regauge.serve.failures import poisoned
from regauge.serve.fleet import Fleet


async def settled(step: Action, life: Life, fleet: Fleet, kind: Cause, error: RegaugeError) -> Start | Resume:
    """Return where a request goes on, once a worker for it is there. Raises the error where it does not, or what the client is told instead."""
    log = get_logger(**{REQUEST_ID: life.request.id, ERROR: str(error)})
    while isinstance(step, Wait) and kind not in BLAMELESS:
        log.warning("the request waits for another worker", role=step.role)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(step.until):
                await fleet.returned(step.role)
                # A worker that is there, and is not given the request, would be asked in a circle.
                await asyncio.sleep(step.earliest - fleet.now())
        step = life.again(fleet.now())
    if isinstance(step, Start | Resume):
        log.warning("the request goes on elsewhere", attempt=step.request.id, **{ROUTE: step.route.header})
        return step
    life.finished(fleet.now(), "failed")
    if isinstance(step, Stop):
        log.warning("the request is given up", why=step.message)
        if step.reason == "poison":
            raise poisoned(step.message) from error
    raise error
