"""A small cluster for tests of routing: prefill workers p0.., decode workers d0.., all linked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.config import RouteConfig
from regauge.route.cluster import Link, Request, Route, Worker
from regauge.route.router import Router

NIC = 1e9
PER_TOKEN = 1e5


def cluster(prefills: int = 2, decodes: int = 2, *, seed: int = 0, slots: int = 8, **config: Any) -> Router:
    router = Router(RouteConfig(**config), seed)
    for i in range(prefills):
        router.join(Worker(f"p{i}", prefill=True, prior_tokens_per_s=1000.0), 0.0)
    for i in range(decodes):
        router.join(Worker(f"d{i}", decode=True, slots=slots), 0.0)
    for i in range(prefills):
        for j in range(decodes):
            router.link(link(i, j), 0.0)
    return router


def link(prefill: int, decode: int, **changes: Any) -> Link:
    return replace(Link(f"p{prefill}", f"d{decode}", "DIRECT", PER_TOKEN, NIC), **changes)


def placed(router: Router, request: Request, now: float) -> Route:
    decided = router.route(request, now)
    assert isinstance(decided, Route), decided
    return decided


def idle(router: Router) -> bool:
    """Whether nothing is booked anywhere."""
    return not router.booked and all(
        not each.queue and not each.queue_s and not each.seats and not each.pages_used and not len(each.nic)
        for each in router.workers.values()
    )
